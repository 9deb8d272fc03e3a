"""The processes of a node: the verbs of `bootseer agent`, which looks after cache and mounts and reports its state, and
`bootseer snapshotter`, a containerd proxy snapshotter for lazy images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from bootseer import logs
from bootseer.agent.agent import STATUS, AgentSettings, request, run_agent
from bootseer.artifact.places import STORE, cache_root, runtime_root
from bootseer.cli.image_options import SOURCE, parse_workload, signatures
from bootseer.cli.options import parse_size
from bootseer.cli.output import Output, table
from bootseer.cli.verb_parts import Number, json_option, listen_address, stop_event, with_options
from bootseer.errors import UsageError
from bootseer.trace.spools import default_root
from bootseer.units import format_bytes, format_seconds, plural


@click.command("run")
@click.option(
    "--cache", type=click.Path(path_type=Path), metavar="DIR", help="Folder of the cache (default: this node's)."
)
@click.option(
    "--cache-limit", metavar="SIZE", help="Cache size limit, such as 500g (default: by how full the disk is)."
)
@click.option("--every", "every_s", type=Number(1.0, 86400.0), default=60.0, show_default=True, metavar="S",
              help="Seconds between two rounds of checks.")  # fmt: skip
@click.option("--idle", "idle_s", type=Number(0.0), default=7 * 86_400.0, metavar="S",
              help="Remove layers and images that no start used for this long (default: a week).")  # fmt: skip
@click.option("--peers-for", "peers_s", type=Number(0.0), default=3600.0, show_default=True, metavar="S",
              help="Serve blocks of ended jobs to their --peers LIST for this many seconds.")  # fmt: skip
@click.option("--listen", metavar="HOST:PORT", help="Serve /metrics and /healthz here, besides the Unix socket.")
@click.option("--ship-to", default="", metavar="URL", help="Send this node's spools to this service.")
@click.option("--spool", "spool_roots", multiple=True, metavar="DIR",
              help="Root of these spools; may be repeated (default: this user's).")  # fmt: skip
def run_command(
    cache: Path | None,
    cache_limit: str | None,
    listen: str | None,
    ship_to: str,
    spool_roots: tuple[str, ...],
    **times_s: float,
) -> None:
    """Run the agent until a signal ends it. systemd units are in contrib/systemd."""
    logs.set_up({"BOOTSEER_LOG": "warning", **os.environ})  # why the cache is not cleaned up belongs in the journal
    if spool_roots and not ship_to:
        raise UsageError("--spool needs --ship-to", hint="give --ship-to URL too")
    settings = AgentSettings(
        cache=(cache or cache_root()).absolute(),
        runtime=runtime_root(),
        max_bytes=parse_size(cache_limit, "--cache-limit") if cache_limit is not None else None,
        service=ship_to,
        spools=spool_roots or ((default_root(os.environ),) if ship_to else ()),
        **times_s,
    )
    run_agent(settings, stop_event(), listen=listen_address(listen, 9464) if listen else None)


@click.command("status")
@json_option("bootseer.agent/1")
def status_command(output: Output) -> None:
    """Show the state of this node's agent. The exit code is 1 if the agent reports a problem."""
    status = request(runtime_root(), STATUS)
    cache = status["cache"]
    rows = table(
        "mount", "what", "state", "restarts", "fetched", "from peers", right=("restarts", "fetched", "from peers")
    )
    for mount in status["mounts"]:
        rows.add_row(
            mount["target"],
            mount["what"],
            mount["health"],
            str(mount.get("restarts", "-")),
            *(format_bytes(mount[name]) if name in mount else "-" for name in ("fetched_bytes", "peer_bytes")),
        )
    limit = f" of {format_bytes(cache['max_bytes'])}" if cache["max_bytes"] else ""
    output(
        status,
        rows,
        f"agent {status['pid']}, up {format_seconds(status['uptime_s'])}: {plural(cache['files'], 'file')}, "
        f"{format_bytes(cache['disk_bytes'])}{limit} in {cache['folder']}, {format_bytes(status['freed_bytes'])} freed",
        *(
            f"{plural(held['files'], 'file')} of ended jobs served at {', '.join(held['addresses'])} for another "
            f"{format_seconds(held['left_s'])}: {format_bytes(held['sent_bytes'])} sent"
            for held in status["peers"]
        ),
        *([_shipped(status["service"])] if "service" in status else []),
        *([status["problem"]] if status["problem"] else []),
        failed=bool(status["problem"]),
    )


def _shipped(service: dict[str, Any]) -> str:
    reason = f"; the last one failed: {service['problem']}" if service["problem"] else ""
    return f"{plural(service['batches'], 'batch')} of events sent to the service{reason}"


@click.command("snapshotter")
@click.option("--socket", type=click.Path(path_type=Path), metavar="PATH",
              help="Socket for containerd (default: snapshotter.sock in the runtime folder).")  # fmt: skip
@click.option("--root", type=click.Path(path_type=Path), default=Path("/var/lib/bootseer/snapshotter"),
              show_default=True, metavar="DIR", help="Folder of snapshots; not on overlayfs.")  # fmt: skip
@click.option("--workload", default="pod", show_default=True, metavar="NAME",
              help="Name of the hot set to prefetch and to record for each image.")  # fmt: skip
@click.option("--record", "record_s", type=Number(1.0, 86_400.0), default=60.0, show_default=True,
              metavar="S", help="Seconds to record the hot set after an image's first container.")  # fmt: skip
@click.option("--credential-provider-config", "providers", metavar="PATH",
              help="Credential provider plugins, like kubelet's --image-credential-provider-config.")  # fmt: skip
@click.option("--credential-provider-bin-dir", "programs", metavar="DIR", help="Folder of these plugins.")
@with_options([option for option in SOURCE if option.name not in ("fallback", "layer_limits")])
def snapshotter_command(
    socket: Path | None,
    root: Path,
    workload: str,
    record_s: float,
    providers: str | None,
    programs: str | None,
    store: str | None,
    **values: Any,
) -> None:
    """Serve snapshots to containerd: converted images load lazily, others as with its overlayfs snapshotter.

    It is a proxy plugin, whose socket must be in containerd's configuration (docs/kubernetes.md, deploy). Stopping or
    killing it does not affect running containers.

    \b
    bootseer snapshotter
    bootseer snapshotter --store s3://images/train --socket /run/bootseer/snapshotter.sock
    """
    from bootseer.snapshotter.lazy import Settings
    from bootseer.snapshotter.service import SOCKET, run_snapshotter
    from bootseer.store import credential_providers

    if os.geteuid() != 0:
        raise UsageError("the snapshotter needs root", hint="run it as root, or from its systemd unit")
    logs.set_up({"BOOTSEER_LOG": "warning", **os.environ})  # warnings of a service belong in the journal
    # Set in the environment because the processes that mount images inherit it.
    for variable, path in ((credential_providers.CONFIG, providers), (credential_providers.PROGRAMS, programs)):
        if path:
            os.environ[variable] = str(Path(path).absolute())
    credential_providers.check_providers(os.environ)
    runtime = runtime_root()
    settings = Settings(
        cache=str(cache_root()),
        runtime=str(runtime),
        store=store or os.environ.get(STORE, ""),
        plain_http=values["plain_http"],
        loading=values["loading"],
        workload=parse_workload(workload),
        trusted_keys=signatures(values).trusted,
        record_s=record_s,
    )
    run_snapshotter(root.absolute(), (socket or runtime / SOCKET).absolute(), settings, stop_event())

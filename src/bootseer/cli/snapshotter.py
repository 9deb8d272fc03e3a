"""`bootseer snapshotter`: a containerd proxy snapshotter for lazy images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from bootseer import logs
from bootseer.artifact.places import STORE, cache_root, runtime_root
from bootseer.cli.image_options import SOURCE, parse_workload, signatures
from bootseer.cli.verb_parts import Number, stop_event, with_options
from bootseer.errors import UsageError

_OPTIONS = tuple(option for option in SOURCE if option.name not in ("fallback", "layer_limits"))


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
@with_options(_OPTIONS)
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

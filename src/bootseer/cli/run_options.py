"""The options of `bootseer run`, and the step from their values to the run.

The table is imported by every `bootseer run`, so anything that only some runs need is imported inside the functions.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bootseer.cli import env_options, image_options
from bootseer.cli.env_options import ENVIRONMENT, SETUP
from bootseer.cli.image_options import IMAGE
from bootseer.cli.options import COUNT, FLAG, Option, Values, parse_size, split
from bootseer.errors import UsageError
from bootseer.trace.event import KINDS
from bootseer.trace.identity import without_outer_job

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from bootseer.artifact.progress import ProgressCallback, Unit
    from bootseer.launch.checkpoint import CheckpointOptions
    from bootseer.launch.peers import PeersOptions

PEERS_VARIABLE = "BOOTSEER_PEERS"
CHECKPOINT = (
    Option(
        "--checkpoint",
        "Folder of checkpoints for the command; unless it is on a local disk, it is mounted and prefetched.",
        metavar="URI",
    ),
    Option(
        "--checkpoint-dir",
        "Folder where the command finds it (default: one whose path is in $BOOTSEER_CHECKPOINT).",
        metavar="DIR",
    ),
    Option("--checkpoint-memory", "Memory for read-ahead, such as 512m (default: 256m).", metavar="SIZE"),
    Option(
        "--checkpoint-cache --no-checkpoint-cache",
        "Cache what was read on this node's disk (default: yes).",
        FLAG,
        default=True,
    ),
    Option(
        "--checkpoint-read",
        "Read it through a mount, or plainly from its folder (default: auto, by the kind of storage).",
        choices=("auto", "mount", "plain"),
        default="auto",
    ),
)
"""Options of `run` about the checkpoint."""

PEERS = (
    Option(
        "--peers",
        "Also fetch blocks from the job's other nodes, which find each other through this FOLDER or store, or from a"
        " list: HOST[:PORT],..., @FILE, slurm, dns:NAME[:PORT]. auto: through the store. (Default: $BOOTSEER_PEERS,"
        " else off.)",
        metavar="auto|off|FOLDER|LIST",
    ),
    Option(
        "--peers-secret",
        "File (mode 0600) with the secret that the job's nodes share; not needed with a FOLDER.",
        metavar="FILE",
    ),
    Option(
        "--peers-interface",
        "Serve peers on this network interface (default: the fastest ones).",
        metavar="NAME",
        many=True,
    ),
    Option(
        "--peers-limit",
        "Bytes per second that this node sends to peers until training begins (default: 1g).",
        metavar="SIZE|none",
    ),
    Option(
        "--peers-after-training",
        "The same from then on (default: a twentieth of the links' speed, at most --peers-limit; off: send nothing).",
        metavar="SIZE|off",
    ),
    Option("--peers-tls", "Encrypt traffic between nodes, for 3 to 4 times the CPU time.", FLAG, default=False),
    Option(
        "--wait-for-nodes",
        "Start the command when image, environment and checkpoint are ready on all nodes, or after this many seconds"
        " (default: 0, do not wait).",
        COUNT,
        most=86_400,
        default=0,
    ),
    Option("--min-nodes", "Fail if fewer nodes are ready by then (default: start with any number).", COUNT, default=0),
)
"""Options of `run` about peers."""

_GENERAL = (
    Option("--job", "Name of the job (default: the scheduler's, else the script's)."),
    Option("--attempt", "Number of this start of the job.", COUNT),
    Option("--kind", "Kind of startup (default: full).", choices=KINDS),
    Option("--node", "Name of this node, unique within the job."),
    Option("--num-nodes", "Number of nodes, to detect those that report nothing.", COUNT, least=1),
    Option("--gpus", "Number of this node's GPUs that the job uses.", COUNT),
    Option("--spool", "Folder for event files; nodes may share one.", metavar="DIR"),
    Option(
        "--trace-to",
        "Where events go: spool (default), stderr (the job's own log), otlp or otlp=URL, service or service=URL.",
        metavar="SINK",
        many=True,
        default=("spool",),
        dest="sinks",
    ),
    Option("--hook --no-hook", "Mark stages of torch and JAX in Python processes (default: yes).", FLAG, default=True),
    Option(
        "--began-pattern",
        "Output line that marks the end of the first step, for programs without torch and JAX.",
        metavar="REGEX",
    ),
    Option(
        "--warm",
        "Fork the ranks of torchrun, accelerate or DeepSpeed from a process that has already imported the modules of"
        " earlier starts; on also prints why a start was not warm (default: off; see docs/process.md).",
        choices=("auto", "on", "off"),
        default="off",
    ),
    Option(
        "--process-snapshot --no-process-snapshot",
        "Restore the process of --warm from memory, and dump it after a run for later starts, on all nodes; needs"
        " CRIU. Implies --warm auto and --restarts 0 (default: no; see docs/process.md).",
        FLAG,
        default=False,
    ),
    Option(
        "--restarts",
        "Restart the command in place up to N times after a transient failure, and whenever `bootseer restart` asks for"
        " it; 0: only then (default: not at all; see docs/restarts.md).",
        COUNT,
    ),
    Option("--restart-delay", "Seconds to wait before a restart.", COUNT, most=86_400, default=0),
    Option("--quiet -q", "Print no summary at the end.", FLAG, default=False),
)

SECTIONS = {
    "Options": _GENERAL,
    "Setup before the command, and its snapshots (docs/environments.md)": (*SETUP, *ENVIRONMENT),
    "Container image (docs/images.md)": IMAGE,
    "Checkpoint (docs/checkpoints.md)": CHECKPOINT,
    "Peers (docs/peers.md)": PEERS,
}
"""The options by subject, as the help shows them."""

OPTIONS = tuple(option for options in SECTIONS.values() for option in options)

# Passed on as BOOTSEER_* variables, which `trace.identity` reads before those of any launcher.
_IDENTITY = ("job", "attempt", "kind", "node", "num_nodes", "gpus")


def start(values: Values, command: Sequence[str]) -> int:
    """Run the command with these options and return its exit code. Raises `UsageError`."""
    # Imports create hardly any garbage, and collections would go through all that was imported before, again and again:
    # this process collects once the command runs, and its children what they create themselves.
    gc.disable()
    os.register_at_fork(before=gc.freeze, after_in_child=gc.enable)
    from bootseer.launch.command import Options
    from bootseer.launch.run import run

    has_setup = bool(values["setup"] or values["requirements"])
    # Also `off`: a site's wrapper may set the other options.
    has_peers = values["peers"] is not None or bool(os.environ.get(PEERS_VARIABLE))
    values, image = split(
        values,
        IMAGE,
        given=values["image"] is not None,
        allowed=image_options.SHARED if has_setup else ("store",) if has_peers else (),
        about="a container",
        hint="give --image REF too",
    )
    values, environment = split(
        values,
        ENVIRONMENT,
        given=has_setup,
        allowed=("env_mode",),  # a site's wrapper may pass it to every job
        about="an environment setup",
        hint="give --setup SCRIPT or --requirements FILE too",
    )
    given = values["checkpoint"] is not None
    values, checkpoint = split(values, CHECKPOINT, given=given, about="a checkpoint", hint="give --checkpoint URI too")
    values, peers = split(values, PEERS, given=has_peers, about="peers", hint="give --peers too")
    identity = {f"BOOTSEER_{name.upper()}": str(values[name]) for name in _IDENTITY if values[name] is not None}
    settings = {name: value for name, value in values.items() if name not in _IDENTITY}
    if settings["began_pattern"] is not None:
        from bootseer.cli.pattern import compiled

        settings["began_pattern"] = compiled(settings["began_pattern"])
    _check_sinks(settings["sinks"])
    if settings["restart_delay"] and not settings["restarts"]:
        raise UsageError("--restart-delay needs --restarts", hint="give --restarts N too, above 0")
    if settings["process_snapshot"]:
        settings["restarts"] = settings["restarts"] or 0
        settings["warm"] = "auto" if settings["warm"] == "off" else settings["warm"]
    if image["image"] is not None:
        settings["image"] = image_options.wanted(image["image"], image, image["container_gpus"])
    if checkpoint["checkpoint"] is not None:
        settings["checkpoint"] = checkpoint_wanted(checkpoint)
    if (peered := peers_wanted(peers, image["store"])) is not None:
        settings["peers"] = peered
    if has_setup:
        settings["environment"] = env_options.wanted(environment, image)
    if not settings["quiet"]:
        settings["show"] = _shown
    return run(command, Options(**settings), {**without_outer_job(os.environ), **identity})


def peers_wanted(values: Mapping[str, Any], store: str | None) -> PeersOptions | None:
    """The peer settings; None without peers. `store`: where peers find each other with `auto`. Raises `UsageError`."""
    source = values["peers"] or os.environ.get(PEERS_VARIABLE) or "off"
    if source in ("off", "0") or os.environ.get(PEERS_VARIABLE) == "0":
        return None
    from pathlib import Path

    from bootseer.artifact.places import runtime_root
    from bootseer.launch.peers import PeersOptions

    if values["min_nodes"] and not values["wait_for_nodes"]:
        raise UsageError("--min-nodes needs --wait-for-nodes", hint="give --wait-for-nodes SECONDS too")
    limit, after, secret = values["peers_limit"], values["peers_after_training"], values["peers_secret"]
    before = parse_size(limit, "--peers-limit") if limit and limit != "none" else None
    if before == 0:
        raise UsageError("--peers-limit 0: the other nodes would wait for this one", hint="none is no limit")
    return PeersOptions(
        source=source,
        secret=Path(secret) if secret else None,
        interfaces=tuple(values["peers_interface"]),
        before=before if limit else 1 << 30,
        after=0 if after == "off" else parse_size(after, "--peers-after-training") if after else None,
        runtime=runtime_root(),
        tls=bool(values["peers_tls"]),
        wait_s=values["wait_for_nodes"],
        min_nodes=values["min_nodes"],
        store=store or os.environ.get("BOOTSEER_STORE", ""),
    )


def _shown(label: str, unit: Unit) -> AbstractContextManager[ProgressCallback]:
    from bootseer.cli.output import shown  # imported late: few starts wait for anything

    return shown(label, unit)


def _check_sinks(words: Sequence[str]) -> None:
    for word in words:
        if word not in ("spool", "stderr") and word.partition("=")[0] not in ("otlp", "service"):
            known = "choose from spool, stderr, otlp, otlp=URL, service, service=URL"
            raise UsageError(f"--trace-to {word!r}: no such sink", hint=known)


def checkpoint_wanted(values: Mapping[str, Any]) -> CheckpointOptions:
    """The checkpoint settings. Raises `UsageError`."""
    from pathlib import Path

    from bootseer.artifact.places import cache_root, runtime_root
    from bootseer.launch.checkpoint import CheckpointOptions

    memory, folder = values["checkpoint_memory"], values["checkpoint_dir"]
    return CheckpointOptions(
        uri=values["checkpoint"],
        target=Path(folder).absolute() if folder else None,
        memory_bytes=parse_size(memory, "--checkpoint-memory") if memory else None,
        cache=cache_root() if values["checkpoint_cache"] else None,
        runtime=runtime_root(),
        way=values["checkpoint_read"],
    )

"""Options of `run` for the checkpoint that a command resumes from, and the step from their values to what
`launch.checkpoint_stage` wants.

The table is read in front of every `bootseer run`, so that what only checkpoints need is imported in the functions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bootseer.cli.options import FLAG, Option
from bootseer.errors import UsageError

if TYPE_CHECKING:
    from bootseer.launch.checkpoint import CheckpointWanted

CHECKPOINT = (
    Option(
        "checkpoint",
        ("--checkpoint",),
        "Give the command this folder of checkpoints, mounted and fetched ahead unless it is on a local disk.",
        metavar="URI",
    ),
    Option(
        "checkpoint_dir",
        ("--checkpoint-dir",),
        "Where the command finds it (default: see $BOOTSEER_CHECKPOINT).",
        metavar="DIR",
    ),
    Option(
        "checkpoint_memory",
        ("--checkpoint-memory",),
        "What reading ahead may take, as 512m (default: 256m).",
        metavar="SIZE",
    ),
    Option(
        "checkpoint_cache",
        ("--checkpoint-cache", "--no-checkpoint-cache"),
        "Keep what was read on this node's disk (default: yes).",
        FLAG,
        default=True,
    ),
    Option(
        "checkpoint_read",
        ("--checkpoint-read",),
        "Through a mount, plainly as it lies in its folder, or as suits its storage.",
        metavar="auto|mount|plain",
        choices=("auto", "mount", "plain"),
        default="auto",
    ),
)
"""The checkpoint's part of the options of `run`."""


def split(values: Mapping[str, object]) -> tuple[dict[str, object], dict[str, Any]]:
    """The values without the checkpoint's, and the checkpoint's. Raises `UsageError` for the latter without one."""
    names = {option.name for option in CHECKPOINT}
    ours = {option.name: values[option.name] for option in CHECKPOINT}
    if ours["checkpoint"] is None:
        for option in CHECKPOINT:
            if ours[option.name] != option.start:
                raise UsageError(f"{option.flags[-1]} is about a checkpoint", hint="give --checkpoint URI too")
    return {name: value for name, value in values.items() if name not in names}, ours


def wanted(values: Mapping[str, Any], env: Mapping[str, str]) -> CheckpointWanted:
    """What the values ask for. Raises `UsageError`."""
    from pathlib import Path

    from bootseer.artifact.places import cache_root, runtime_root
    from bootseer.cli.image_options import parse_size
    from bootseer.launch.checkpoint import CheckpointWanted

    memory, folder = values["checkpoint_memory"], values["checkpoint_dir"]
    return CheckpointWanted(
        uri=values["checkpoint"],
        target=Path(folder).absolute() if folder else None,
        memory_bytes=parse_size(memory, "--checkpoint-memory") if memory else None,
        cache=cache_root(env, os.getuid()) if values["checkpoint_cache"] else None,
        runtime=runtime_root(env, os.getuid()),
        way=values["checkpoint_read"],
    )

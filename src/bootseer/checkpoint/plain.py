"""Whether a folder of checkpoints is better read as it lies there than through a mount.

A mount pays off where something is far away: it asks many servers at once, begins before the program does, and keeps
what it got. A local disk has one copy at hand, which the kernel brings faster than a daemon that reads it, compares it,
writes it into a cache on the same disk, and hands it over.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from bootseer.checkpoint.head import STRIPES
from bootseer.checkpoint.places.open import open_place
from bootseer.errors import UsageError
from bootseer.mounts.kernel import mount_table, visible

Way = Literal["auto", "mount", "plain"]
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "tmpfs", "ramfs", "overlay"})
"""File systems of disks and of memory. All others may be read over a network."""
_MAX_FOLDERS = 10_000


def plain_folder(uri: str, way: Way) -> tuple[Path | None, str]:
    """The folder to read plainly, or None for a mount; and why, empty where there was no choice.

    Raises `UsageError` when it is to be read plainly (`way`) and cannot be.
    """
    folder = Path(uri.removeprefix("file://")).absolute()
    is_far = not uri or (":" in uri.partition("/")[0] and not uri.startswith("file:///"))
    if is_far or not os.path.isdir(folder):  # noqa: PTH112 - pathlib raises for one that may not be looked at
        # The mount knows what to say of a folder that is not there.
        needed, why = f"{uri} is not a folder of this machine", ""
    else:
        needed = why = _needs_mount(folder)
    if way == "plain":
        if needed:
            raise UsageError(f"it cannot be read plainly: {needed}", hint="leave --checkpoint-read out")
        why = "--checkpoint-read plain was given"
    elif needed or way == "mount":
        return None, why if needed else "--checkpoint-read mount was given"
    elif (kind := _file_system(folder)) in _LOCAL:
        why = f"it lies on this machine ({kind}), where a mount and a second copy would only cost time"
    else:
        return None, f"its file system ({kind or 'unknown'}) may be far away"
    open_place(uri).close()  # refuses what no mount would show
    return folder, why


def _needs_mount(folder: Path) -> str:
    """Why what lies in a folder, or will, is shown by a mount alone; empty when it is not."""
    policies = (f"{above}/{STRIPES}/policy.json" for above in folder.resolve().parents)
    if policy := next(filter(os.path.exists, policies), ""):
        return f"{policy} asks for striped files"
    for number, (path, names, _) in enumerate(os.walk(folder)):
        if STRIPES in names:
            return f"striped files, or a policy that asks for them, are in {path}"
        if number == _MAX_FOLDERS:
            return f"more than {_MAX_FOLDERS:,} folders would have to be searched for striped files"
        names[:] = [name for name in names if not name.startswith(".")]
    return ""


def _file_system(folder: Path) -> str:
    """The kind of the file system that a folder lies in; empty when the table of mounts does not tell."""
    real = folder.resolve()
    above = [mount for mount in visible(mount_table()) if real.is_relative_to(mount.path)]
    return max(above, key=lambda mount: len(mount.path)).kind if above else ""

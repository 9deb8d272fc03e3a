"""Where a capture lays its overlays: which mounts take one, what is attached in which order, what a user may cover.

Looks at the machine and changes nothing. Who calls: `overlay`, `scan`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence

from bootseer.mounts import user_namespace
from bootseer.mounts.kernel import Mount, depth, is_below

_DISKS = {
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "overlay", "reiserfs", "tmpfs", "xfs", "zfs",
}  # fmt: skip
_MAX_SPLIT = 200
"""Overlays that a user namespace may need where mounts lie between the user's folders."""


def takes_overlay(mount: Mount) -> bool:
    """Whether it is a folder on a disk of this machine that can be written to, and reached by this user."""
    return mount.kind in _DISKS and not mount.read_only and os.path.isdir(mount.path)  # noqa: PTH112


def steps(mounts: Sequence[Mount], real: Sequence[str]) -> Iterator[tuple[str, Mount | None]]:
    """What to attach below the new root, upper places first: mounts, and real folders (None). A copy that takes all
    mounts below it with it comes once."""
    taken: list[str] = []
    steps: list[tuple[str, Mount | None]] = [(row.path, row) for row in mounts]
    steps += [(path, None) for path in real]
    for path, mount in sorted(steps, key=lambda step: (depth(step[0]), step[0], step[1] is not None)):
        if not within(path, taken):
            if mount is None or not takes_overlay(mount):
                taken.append(path)
            yield path, mount


def existing(paths: Iterable[str]) -> list[str]:
    """By their real names; what is not there, or is no folder or file, cannot be shown."""
    found = []
    for path in paths:
        real = os.path.realpath(path)
        if real != "/" and (os.path.isdir(real) or (real == path and os.path.isfile(real))):  # noqa: PTH112, PTH113
            found.append(real)
    return topmost(found)


def topmost(paths: Iterable[str]) -> list[str]:
    kept: list[str] = []
    for path in sorted(set(paths), key=lambda path: (depth(path), path)):
        if not within(path, kept):
            kept.append(path)
    return kept


def within(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or is_below(path, folder) for folder in folders)


def holder(path: str, rows: Sequence[Mount]) -> Mount:
    """The mount that a path lies in."""
    return next(row for row in reversed(rows) if row.path == path or is_below(path, row.path))


def user_points(candidates: Iterable[str], rows: Sequence[Mount], real: Sequence[str]) -> list[str]:
    """The topmost folders of the user above the candidates, cut where something is mounted below them: the kernel
    takes no folder as a lower layer from which another mount would have to be left out."""
    tops = []
    for candidate in candidates:
        path = os.path.realpath(candidate)
        owned = [above for above in _upwards(path) if _is_ours(above)]
        if owned:
            tops.append(owned[-1])
    points: list[str] = []
    waiting = list(reversed(topmost(tops)))
    inside = [row.path for row in rows]
    while waiting and len(points) < _MAX_SPLIT:
        path = waiting.pop()
        if within(path, real) or not takes_overlay(holder(path, rows)):
            continue
        if not any(is_below(mount, path) for mount in inside):
            points.append(path)
            continue
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            names = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
            waiting += [name for name in reversed(names) if _is_ours(name)]
    return points


def _upwards(path: str) -> Iterator[str]:
    """The folder itself, then each above it, as long as they can be seen."""
    while True:
        yield path
        if path == "/":
            return
        path = os.path.dirname(path)  # noqa: PTH120


def _is_ours(path: str) -> bool:
    """Whether owner and group of a folder have a name in this user namespace: any, or those of its user."""
    try:
        state = os.stat(path, follow_symlinks=False)  # noqa: PTH116
    except OSError:
        return False
    ours = user_namespace.num_owners() > 1 or (state.st_uid, state.st_gid) == (os.geteuid(), os.getegid())
    return stat.S_ISDIR(state.st_mode) and ours

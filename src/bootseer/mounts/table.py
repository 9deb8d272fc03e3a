"""The kernel's table of mounts: which are there, and which of them a path can reach.

Who calls: `namespace`, and the captures and restores that rebuild a view of the host mount by mount.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of `mountinfo`."""

    id: int
    parent: int
    device: str
    """`major:minor`."""
    root: str
    """What of its file system is shown: `/` unless it is a bind mount."""
    path: str
    """Where it is mounted, as seen from the process's root."""
    options: frozenset[str]
    """Of the mount (`ro`, `nosuid`) and of its file system (`ro`)."""
    kind: str
    """Of its file system: `ext4`, `fuse.sshfs`."""

    @property
    def read_only(self) -> bool:
        """Whether nobody can write through it."""
        return "ro" in self.options


def mount_table() -> list[Mount]:
    """All mounts of this process's namespace."""
    return [parse(line) for line in Path("/proc/self/mountinfo").read_bytes().splitlines()]


def parse(line: bytes) -> Mount:
    """One line; fields without a fixed number end with a dash."""
    left, _, right = line.partition(b" - ")
    number, parent, device, root, path, options = left.split(b" ")[:6]
    kind, _, rest = right.partition(b" ")
    inside = rest.rpartition(b" ")[2]
    words = {*options.split(b","), *(word for word in inside.split(b",") if word == b"ro")}
    return Mount(
        int(number),
        int(parent),
        device.decode(),
        _plain(root),
        _plain(path),
        frozenset(map(os.fsdecode, words)),
        os.fsdecode(kind),
    )


def _plain(word: bytes) -> str:
    """Blanks and the like are written as \\ooo."""
    return os.fsdecode(word.decode("unicode_escape").encode("latin-1") if b"\\" in word else word)


def visible(rows: Sequence[Mount]) -> list[Mount]:
    """The mounts that paths reach, the root first and each before those below it: of mounts on one place the top one,
    and none below a place that was mounted over later. Empty when the process's root is no mount (a plain chroot)."""
    children: dict[int, list[Mount]] = {}
    for row in rows:
        children.setdefault(row.parent, []).append(row)
    ids = {row.id for row in rows}
    found: list[Mount] = []
    waiting = [row for row in rows if row.path == "/" and row.parent not in ids][:1]
    while waiting:
        top = waiting.pop()
        while covering := [row for row in children.get(top.id, ()) if row.path == top.path and row.id != top.id]:
            top = covering[-1]
        found.append(top)
        below = children.get(top.id, [])
        places = {row.path for row in below}
        waiting += [row for row in below if row.id != top.id and not _covered(row.path, places)]
    return sorted(found, key=lambda row: (depth(row.path), row.path))


def _covered(path: str, places: Iterable[str]) -> bool:
    return any(is_below(path, place) for place in places)


def depth(path: str) -> int:
    """How many names a normal absolute path has."""
    return 0 if path == "/" else path.count("/")


def is_below(path: str, folder: str) -> bool:
    """Whether `path` is something inside `folder`; both absolute and normal."""
    return path != folder and path.startswith(folder if folder == "/" else f"{folder}/")


def is_mounted_anywhere(part: str) -> bool:
    """Whether a process that we may look at has a mount, in whatever namespace, whose description has this part."""
    wanted = os.fsencode(part)
    seen = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            namespace = os.readlink(process / "ns" / "mnt")  # noqa: PTH115 - it names a namespace and no file
            if namespace not in seen:
                description = (process / "mountinfo").read_bytes()
                seen.add(namespace)
                if wanted in description:
                    return True
    return False

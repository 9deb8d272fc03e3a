"""Which way to mount block files on this machine, best first, and why not the better ones.

Decides and touches nothing: facts in, choice out. The facts come from a real try or from the doctor's probes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Way(Enum):
    """A way to show layers as one file tree. The value is its name in reports."""

    EROFS_FILE = "EROFS from files"
    """The kernel mounts EROFS straight from the files that FUSE serves, or from complete ones."""
    EROFS_LOOP = "EROFS from loop devices"
    """The same with a block device between, for kernels before 6.12."""
    FUSE_TREE = "file trees through FUSE"
    """The daemon serves the tree of all layers; an overlay for changes is mounted in a user namespace."""
    UNPACK = "unpacked files"
    """Everything is fetched and written to a folder."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What this process can do here. For each thing an empty text, or the reason why not."""

    mount: str = ""
    """Mount in the initial namespace: be root there."""
    namespace: str = ""
    """Make a user namespace, for a container without root."""
    fuse: str = ""
    erofs_file: str = ""
    loop: str = ""
    overlay: str = ""
    user_overlay: str = ""
    """Overlay in a user namespace; for root, which needs none, the same as `overlay`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The way, and each better one with the first thing that it lacks."""

    way: Way
    refused: tuple[tuple[Way, str], ...]


_NEEDS: tuple[tuple[Way, tuple[str, ...]], ...] = (
    (Way.EROFS_FILE, ("mount", "fuse", "overlay", "erofs_file")),
    (Way.EROFS_LOOP, ("mount", "fuse", "overlay", "loop")),
    (Way.FUSE_TREE, ("fuse", "user_overlay")),
)


def choose(facts: Facts, *, complete: bool = False) -> Choice:
    """The best way. `complete` layers are on the disk already, so that nothing needs to be served."""
    refused: list[tuple[Way, str]] = []
    for way, needs in _NEEDS:
        lacks = [getattr(facts, need) for need in needs if not (complete and need == "fuse" and way != Way.FUSE_TREE)]
        lacks = [reason for reason in lacks if reason]
        if not lacks:
            return Choice(way, tuple(refused))
        refused.append((way, lacks[0]))
    return Choice(Way.UNPACK, tuple(refused))

"""One path of a snapshot: what manifests consist of.

Decides and touches nothing. Made by `write`, read by whoever compares files with a snapshot or writes them anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from bootseer.env.changes import Action

Kind = Literal["file", "directory", "symlink", "fifo", "deleted"]
_NO_XATTRS: Mapping[str, bytes] = {}


@dataclass(frozen=True, slots=True)
class Entry:
    """One path of a snapshot. Directories on the way to it that did not change themselves have no entry."""

    path: str
    """Absolute, as the setup saw it; bytes that are no UTF-8 are surrogate escapes."""
    kind: Kind
    mode: int = 0
    """Permission bits, set-user-id and the like included; 0 for what was deleted."""
    uid: int = 0
    gid: int = 0
    size: int = 0
    """Bytes of a file."""
    digest: str = ""
    """`blake3:<hex>` of a file's content as the snapshot has it."""
    target: str = ""
    """What a symbolic link says."""
    xattrs: Mapping[str, bytes] = field(default_factory=lambda: _NO_XATTRS)
    link: str = ""
    """The first path of the same file, for a hard link. All else is repeated."""
    opaque: bool = False
    """A directory that hides the one below."""
    action: Action = Action.ADDED
    before: str = ""
    """See `Change.before`."""
    loose: bool = False
    """Not shown by a mount on a host, but written to the node's own file system."""


def path_bytes(path: str) -> bytes:
    """A path as the kernel has it. Manifests are sorted by this."""
    return path.encode("utf-8", "surrogateescape")

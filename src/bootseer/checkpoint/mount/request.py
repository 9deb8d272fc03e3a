"""What somebody wants to have mounted. Decides and touches nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bootseer.checkpoint.policy import Policy

MEMORY_BYTES = 256 << 20
REWRITE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class MountRequest:
    """A place, and how it is to be shown. Paths are absolute."""

    uri: str
    """As `open_place` takes it."""
    cache: Path | None = None
    """The root of the node's cache, in which what was read of striped files stays; None reads all from the place."""
    spool: Path | None = None
    """A folder on a local disk for what is written and not sent yet; None: one in the cache's root, or without a cache
    where temporary files lie."""
    read_only: bool = False
    memory_bytes: int = MEMORY_BYTES
    """What reading holds in memory of its own, for all files of the mount."""
    rewrite_bytes: int = REWRITE_BYTES
    """The largest published file that may be changed in the middle or appended to, by writing it anew."""
    stripes: int | None = None
    """For new files, in the place of what their folder's policy says."""
    parity: bool | None = None
    """For new files, in the place of what their folder's policy says."""

    only_me: bool = False
    """Whether other users of the machine are shut out; a mount that is not root's is so in any case."""
    slot: str | None = None
    """Which of a job's nodes this is, for a mount that reads ahead what earlier starts read: "" for the only one. None
    reads nothing ahead."""

    def policy(self, folders: Policy) -> Policy:
        """What holds for a new file of this mount, in a folder with this policy."""
        return replace(
            folders,
            stripes=folders.stripes if self.stripes is None else self.stripes,
            parity=folders.parity if self.parity is None else self.parity,
        )

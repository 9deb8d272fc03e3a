"""One change of a setup at one path: the values that captures yield and snapshots are built from.

Paths are absolute in the setup's view, without `.` and `..`; bytes that are not UTF-8 are surrogate escapes, as by
`os.fsdecode`. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from enum import Enum

from msgspec import Struct


class Action(Enum):
    """The kind of a change."""

    ADDED = "added"
    MODIFIED = "modified"
    """It existed before with other content, other attributes, or as another kind of file."""
    DELETED = "deleted"


class Change(Struct, frozen=True):
    """A path that the setup changed."""

    path: str
    action: Action
    source: str = ""
    """Where it can be read now: in an upper layer, or at the path itself. Empty for a deletion."""
    opaque: bool = False
    """A directory that replaced another one: nothing of the old one is visible."""
    before: str = ""
    """State before the setup: `file:sha256:<hex>`, `symlink:<target>`, `directory` or `other`; empty for an added path.

    Recorded only where people keep or edit files: a restore must neither overwrite nor hide a user's files.
    """


def lies_in(path: str, folders: Iterable[str]) -> bool:
    """Whether a path is one of the folders or is in one."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def nearest(path: str, folders: Collection[str]) -> str:
    """The innermost of the folders that a path is or lies in; empty for none."""
    while path and path not in folders:
        path = path.rpartition("/")[0]
    return path


def parents(path: str) -> Iterator[str]:
    """The folders above a path but `/`, the outermost first."""
    end = path.find("/", 1)
    while end != -1:
        yield path[:end]
        end = path.find("/", end + 1)

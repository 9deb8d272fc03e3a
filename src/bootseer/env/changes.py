"""What an environment setup did to one path: the value that captures yield and snapshots are made of.

Paths are absolute, as the setup saw them, without `.` and `..`; bytes that are not UTF-8 are surrogate escapes, as
`os.fsdecode` makes them. Decides and touches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Action(Enum):
    """What happened to the path."""

    ADDED = "added"
    MODIFIED = "modified"
    """It was there before: other content, other attributes, or another kind of file."""
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Change:
    """One path that differs from what it was before the setup."""

    path: str
    action: Action
    source: str = ""
    """Where it can be read now: in an upper layer, or the path itself. Empty for a deletion."""
    opaque: bool = False
    """A directory that replaced one: nothing of the old one shows through."""
    before: str = ""
    """What was there: `file:sha256:<hex>`, `symlink:<target>`, `directory` or `other`; empty for what was added. Only
    asked for where people keep or edit files: a restore must neither overwrite nor hide what a user wrote."""


def lies_in(path: str, folders: Iterable[str]) -> bool:
    """Whether a path is one of the folders or lies in one."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)

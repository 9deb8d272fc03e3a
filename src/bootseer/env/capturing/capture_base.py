"""The interface of all captures; `capture` opens them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, Self

from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.capturing.walk import LeftOut
from bootseer.env.changes import Change

Way = Literal["overlay", "user", "scan"]


class Capture(ABC):
    """An open capture; a context manager."""

    way: Way
    rejected: Mapping[str, str]
    """Ways that were tried before, with their errors."""
    notes: tuple[str, ...] = ()
    """Mounts of the machine that the setup does not see, or whose changes are not captured."""
    points: tuple[str, ...] = ()
    """Folders whose changes are captured, as the setup sees them, without other mounts below them."""
    passthrough: tuple[str, ...] = ()
    """Folders and files below `points` that are the machine's own: changes there persist and are not captured."""

    def __init__(self, exclusions: Exclusions) -> None:
        self.left_out = LeftOut(exclusions)
        """What the rules left out of `changes`, after that was called."""
        self._exclusions = exclusions

    @property
    @abstractmethod
    def root(self) -> Path:
        """A path to the root of the setup's view, valid for all processes of this user until `close`. Absolute symbolic
        links in it are resolved against the reader's own root."""

    @abstractmethod
    def enter(self) -> None:
        """For a child between fork and exec: enter the setup's view, keeping user and working folder. Raises `OSError`.
        Set a parent death signal (`process.die_with`) afterwards, as the kernel may clear it."""

    @abstractmethod
    def changes(self, *, always_changed: Collection[str] = ()) -> list[Change]:
        """The changes of the setup, sorted by path; call it when the setup has ended. For `always_changed` see `Walk`.

        Raises `PermanentError`.
        """

    @abstractmethod
    def source_of(self, path: str) -> Path:
        """Where the changed version of a path, or of a folder with changes, can be read: in an upper layer, with
        overlayfs' marks, or at the path itself."""

    def failure_hint(self) -> str:
        """How the capture itself may have made the setup fail; empty if it has not."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """End the capture and delete its files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

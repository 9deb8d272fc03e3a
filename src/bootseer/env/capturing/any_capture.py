"""What every capture can do, whichever way it captures: see `capture`, which opens them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.capturing.walk import LeftOut
from bootseer.env.changes import Change

Way = Literal["overlay", "user", "scan"]
Stream = int | IO[Any] | None


class Capture(ABC):
    """An open capture. A context manager."""

    way: Way
    refused: Mapping[str, str]
    """Why better ways were not taken: their names, and words."""
    notes: tuple[str, ...] = ()
    """Mounts of the machine that the setup does not see, or whose changes are not captured."""
    points: tuple[str, ...] = ()
    """Folders whose changes are captured, as the setup sees them; what else is mounted below them is not."""
    real: tuple[str, ...] = ()
    """Folders and files inside of them where the setup works on the machine's own, so that changes stay there."""

    def __init__(self, exclusions: Exclusions) -> None:
        self.left_out = LeftOut(exclusions)
        """What the rules kept out of `changes`, once that was called."""
        self._exclusions = exclusions

    @property
    @abstractmethod
    def root(self) -> Path:
        """The root of the setup's view, for other processes of this user too, until `close`. Absolute symbolic links in
        it still lead to the reader's own root."""

    @abstractmethod
    def enter(self) -> None:
        """For a child between fork and exec: see what the setup sees, with the same user, in the same folder. Raises
        `OSError`. Ask for a death signal (`process.die_with`) afterwards, as the kernel may forget it."""

    @abstractmethod
    def changes(self, *, again: Collection[str] = ()) -> list[Change]:
        """What is different now, sorted by path; call it when the setup has ended. `again` is `Walk`'s.

        Raises `PermanentError`.
        """

    @abstractmethod
    def source_of(self, path: str) -> Path:
        """Where the changed version of a path, or of a folder with changes, is to be read: in an upper layer, with
        overlayfs' marks, or the path itself."""

    def trouble(self) -> str:
        """Words about what the capture itself may have to do with a setup that failed; empty for nothing."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """End it and delete what was captured."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

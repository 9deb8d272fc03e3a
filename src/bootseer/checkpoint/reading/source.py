"""What a file is read from: an ordinary file of the place, or the parts of a striped one.

Whoever reads gives a source the memory, and starts the reads in an order and number of its own choice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bootseer.errors import BootseerError, TransientError
from bootseer.io.executor import report_exception

Done = Callable[[BootseerError | None], None]
"""Called once, from any thread, when a read has ended: None, or what went wrong. From then on nobody writes."""


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """Bytes of a file, from `start` on, for `into`."""

    start: int
    into: memoryview
    done: Done
    hold: Callable[[], Callable[[], None]] | None = None
    """Where nobody changes `into` later: keeps it as it is until the function that this returns is called."""
    here: bool = False
    """Whether the thread that starts the read may carry it out."""


class Job(Protocol):
    """One read. Nothing happens before `start`; `done` is called once after it."""

    lane: Hashable
    """Reads of one lane take turns at the same disk, those of different lanes do not."""
    num_bytes: int

    def start(self, *, urgent: bool) -> None:
        """Begin. `urgent`: a reader waits for it. Whatever goes wrong ends the read; only Ctrl-C is raised, too."""

    def hurry(self) -> None:
        """A reader waits for it now."""

    def cancel(self) -> None:
        """Nobody wants it any more; it still ends."""


class Source(Protocol):
    """One version of one file. Safe to use from many threads."""

    size_bytes: int
    version: str
    unit_bytes: int
    """Read-ahead brings so much at once; units begin at multiples of it."""
    row_bytes: int
    """Reading multiples of this together costs least."""
    whole_units: bool
    """Only whole units can be read: each has a digest."""
    max_ahead_bytes: int
    """Read-ahead is worth while so far."""
    num_lanes: int
    """So many lanes wait for each other at most; 0: they do not."""

    def prepare(self) -> None:
        """Find out what this node has of the file already. Reads work without it."""

    def is_local(self, start: int) -> bool:
        """Whether the unit is on this node's disk, as far as is known."""

    def read_local(self, start: int, into: memoryview) -> bool:
        """Read bytes of one unit from this node's disk: whether they were there and right. Blocks for the disk."""

    def jobs(self, wants: Sequence[Want]) -> list[Job]:
        """Reads from the place, for bytes that are wanted together, in the order of the file."""

    def close(self) -> None:
        """Not read any more. Reads that were begun still end."""


def failure(error: BaseException, what: str) -> BootseerError:
    """The error that a read of `what` ends with when `error` was raised on its way: a read that was begun must end.

    To be called in an `except` block. What was not foreseen is reported; Ctrl-C is for the caller to raise again.
    """
    if isinstance(error, BootseerError):
        return error
    if isinstance(error, Exception):
        report_exception()
    return TransientError(f"{what}: {type(error).__name__}: {error}")

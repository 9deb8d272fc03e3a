"""What reads of a file are made of: the source that starts them, the calls that follow from their ends, the counters.

A reader gives a source the memory, and starts the reads in an order and number of its own choice.

*Effects* are calls that are made with no lock held, and never one inside another. A read that ends starts others, which
may end at once, which starts others: a chain without an end, in which each call would find the state of those above it
half changed. So code that changes state under a lock makes a list of calls, and hands it over after the lock
(`carry_out`). In each thread one loop makes them, in their order; what a call hands over itself comes after all others.
Threads do not wait for each other's calls: each compares what it received with its digest. What a call raises is
reported, and the next one is made.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bootseer.errors import BootseerError, TransientError
from bootseer.io.executor import report_exception

Done = Callable[[BootseerError | None], None]
"""Called once, from any thread, when a read has ended: None, or what went wrong. From then on no thread writes."""


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """Bytes of a file, from `start` on, for `into`."""

    start: int
    into: memoryview
    done: Done
    hold: Callable[[], Callable[[], None]] | None = None
    """Where `into` is not changed later: keeps it as it is until the function that this returns is called."""
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
        """It is not wanted any more; it still ends."""


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


Effect = Callable[[], object]
_own = threading.local()


def carry_out(effects: Iterable[Effect]) -> None:
    """Make these calls; from within such a call, a little later. Ctrl-C is raised again when all of them were made."""
    queue: deque[Effect] | None = getattr(_own, "queue", None)
    if queue is not None:
        queue.extend(effects)
        return
    queue = _own.queue = deque(effects)
    interrupt: BaseException | None = None
    try:
        while queue:
            try:
                queue.popleft()()
            except Exception:
                report_exception()
            except BaseException as error:
                interrupt = error
    finally:
        _own.queue = None
    if interrupt is not None:
        raise interrupt


NAMES = (
    "place_bytes",  # came from the place: what readers asked for, parity, and reads ahead
    "cache_bytes",  # came from this node's cache
    "donor_bytes",  # came from chunks of other files in the cache that are the same
    "chunks",  # chunks and pieces that came from the place
    "reads",  # calls of readers
    "rebuilt",  # chunks that were computed from the others of their row
    "wrong_chunks",  # chunks that came with wrong bytes, and were refused
    "retries",  # chunks that were asked for again
    "kept_chunks",  # chunks that were put into the cache
    "not_kept_chunks",  # chunks that were not, because the disk was full or slower than the place
    "claims_waited",  # chunks that another process of this node was fetching already
    "waited_for_room",  # reads that had to wait for memory
)


class Counters:
    """Counts by name, of `NAMES`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Count so many more."""
        with self._lock:
            self._counts[name] += count

    def all(self) -> dict[str, int]:
        """What was counted so far, zeros too."""
        with self._lock:
            return {name: self._counts[name] for name in NAMES}

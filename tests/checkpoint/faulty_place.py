"""A place with configurable read faults: wrong bytes, errors, delays, wrong file sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from bootseer.errors import BootseerError, TransientError
from bootseer.io.pooled_reads import ReadOutcome
from bootseer.places.place import OpenFile, Place

GOOD = "good"
WRONG = "wrong"
ERROR = "error"
NEVER = "never"
"""Hangs until it is cancelled."""
LOST = "lost"
"""Never completes, even if it is cancelled."""


@dataclass
class Read:
    """A requested read."""

    path: str
    offset: int
    length: int
    node: str
    check: bool
    urgent: bool


Decide = Callable[[Read], str | float]
"""The outcome of a read: one of the constants above, or a delay in seconds."""


class FaultyPlace:
    """A wrapper of a `Place`. `decide` may be changed at any time; `log` has all reads."""

    def __init__(self, place: Place, decide: Decide = lambda _: GOOD) -> None:
        self.inner = place
        self.decide = decide
        self.nodes_of: Callable[[str], tuple[str, ...]] = lambda _: ()
        """The nodes of a file, of which the first that is not avoided serves it."""
        self.delay_of: Callable[[str], float] = lambda _: 0.0
        """The place's estimate for any read of a file, in seconds."""
        self.size_of: Callable[[str, int], int] = lambda _, size: size
        """The size that the place reports for a file."""
        self.log: list[Read] = []
        self.under_way = 0
        self.most_under_way = 0
        """Largest number of bytes in flight."""
        self.lock = threading.Lock()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def open(self, path: str) -> FaultyFile:
        return FaultyFile(self, path, self.inner.open(path))


class FaultyFile:
    def __init__(self, place: FaultyPlace, path: str, file: OpenFile) -> None:
        self._place = place
        self._path = path
        self._file = file
        self.size_bytes = place.size_of(path, file.size_bytes)
        self.version = file.version

    def nodes(self, offset):
        return self._place.nodes_of(self._path)

    def delay_s(self, offset, length):
        return self._place.delay_of(self._path)

    def read_into(
        self, offset, into, done, *, check=True, urgent=True, avoid=frozenset(), deadline_s=60.0, inline=False
    ):
        nodes = [node for node in self._place.nodes_of(self._path) if node not in avoid] or [""]
        read = Read(self._path, offset, len(into), nodes[0], check, urgent)
        what = self._place.decide(read)
        with self._place.lock:
            self._place.log.append(read)
            self._place.under_way += len(into)
            self._place.most_under_way = max(self._place.most_under_way, self._place.under_way)
        ticket = _Ticket()

        def end(error: BootseerError | None) -> None:
            with self._place.lock:
                self._place.under_way -= len(into)
            done(ReadOutcome(error, nodes[0]))

        def arrived(outcome: ReadOutcome) -> None:
            if what == WRONG:
                into[len(into) // 2] ^= 1
            end(outcome.error)

        def begin() -> None:
            if ticket.claim():
                self._file.read_into(offset, into, arrived, check=check, urgent=urgent, deadline_s=deadline_s)

        ticket.on_cancel = lambda: end(TransientError("the read was cancelled"))
        if what == LOST:
            ticket.claim()
        elif what == ERROR:
            if ticket.claim():
                end(TransientError(f"{self._path} cannot be read now"))
        elif isinstance(what, float):
            timer = threading.Timer(what, begin)
            timer.daemon = True
            timer.start()
        elif what != NEVER:
            begin()
        return ticket

    def close(self):
        self._file.close()


class _Ticket:
    """The ticket of a read, which begins unless it is cancelled before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self.on_cancel: Callable[[], None] = lambda: None

    def claim(self) -> bool:
        with self._lock:
            taken, self._taken = self._taken, True
        return not taken

    def cancel(self) -> None:
        if self.claim():
            self.on_cancel()

    def prioritize(self) -> None:
        pass

    def remaining_s(self) -> float:
        return 0.0

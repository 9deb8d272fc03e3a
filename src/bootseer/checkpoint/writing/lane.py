"""The order of the steps in which files are written: a `Lane` for each file, over the threads of one `Writing`.

A part does not hold a thread while it waits for its data: work comes in small steps, and a part without data is not
queued. A lane runs as many steps at a time as a segment has parts, of the oldest segment first. So the links never idle
between two segments, and the segments do not all end at the same moment.

Safe to use from many threads.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bootseer.errors import TransientError
from bootseer.io.executor import Executor
from bootseer.io.retry import pause_s

if TYPE_CHECKING:
    from bootseer.checkpoint.writing.segment import PartTask


@dataclass(frozen=True, slots=True)
class WritingSettings:
    """Bounds of all files that are written at the same time. The defaults suit a node of a training cluster."""

    max_threads: int = 20
    """Parts of all files that are written at the same moment; each holds a few chunks of 1 MiB."""
    segments_ahead: int = 2
    """Segments of one file that are open at the same time: while one ends, the next one uses the links."""
    part_tries: int = 8
    """How often a part is begun before its file fails."""
    retry_s: float = 5.0
    """The longest pause between two tries; the first ones are shorter."""
    retry_for_s: float = 90.0
    """No try begins so long after the first failure: a NameNode restarts or another one takes over in less."""
    excluded_s: float = 120.0
    """How long a node is avoided after a part on it failed."""
    spool_bytes: int = 2 << 30
    """Bytes on the local disk that are not safe elsewhere yet, of all files that are written as a stream."""
    random_bytes: int = 16 << 30
    """Bytes on the local disk, besides, that cannot be sent before the file is committed: writers that do not go from
    front to back."""
    idle_s: float = 15.0
    """A segment to which nothing was added for so long is ended: servers drop connections that say nothing."""
    lease_s: float = 60.0
    """How often the lease of an unfinished file is renewed."""
    end_s: float = 30.0
    """How long dropping a file waits for what is on its way."""

    def pause_s(self, failures: int, error: TransientError) -> float:
        """How long to wait after so many failures: longer each time, never to the same moment as all others."""
        return min(pause_s(failures, error), self.retry_s)


class NodeLoad:
    """Of one file. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: Counter[str] = Counter()

    def add(self, nodes: Iterable[str]) -> None:
        """A part goes there."""
        with self._lock:
            self._parts.update(nodes)

    def remove(self, nodes: Iterable[str]) -> None:
        """It did not get there."""
        with self._lock:
            self._parts.subtract(nodes)

    def most_loaded(self, num_parts: int, without: Collection[str]) -> list[str]:
        """The nodes with the most, the most last: fewer remain than so many parts need, so that at least one of these
        goes to a node that has none, if there is one. Those of `without` are not nodes to remain."""
        with self._lock:
            counts = [(count, random.random(), node) for node, count in self._parts.items() if node not in without]  # noqa: S311 - no secret
        return [node for _, _, node in sorted(counts)[num_parts - 1 :]]


class ExcludedNodes:
    """Nodes on which a part has failed lately, each for a while. Safe to use from many threads."""

    def __init__(self, for_s: float) -> None:
        self._for_s = for_s
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()

    def exclude(self, nodes: Iterable[str]) -> None:
        """A part failed there."""
        until = time.monotonic() + self._for_s
        with self._lock:
            self._until.update(dict.fromkeys(nodes, until))

    def names(self) -> frozenset[str]:
        now = time.monotonic()
        with self._lock:
            self._until = {node: until for node, until in self._until.items() if until > now}
            return frozenset(self._until)


_TURN = 8
"""Steps of one file before another file has its turn."""
_STUCK_S = 600.0
"""Longer than any step takes: each has a deadline, and the pause after a failed one is short."""


class Lane:
    """The steps of one file: `width` at a time, in their order."""

    def __init__(self, workers: Executor, width: int) -> None:
        self._workers = workers
        self._width = width
        self._change = threading.Condition()
        self._ready: list[tuple[tuple[int, int], int, PartTask]] = []
        self._count = itertools.count()
        self._num_running = 0
        self._num_apart = 0
        self._moved_s = time.monotonic()

    def ready(self, part: PartTask) -> None:
        """It has something to do. Once, until its `step` has returned False. Raises `TransientError` when no thread can
        be started for it; its step runs when there is a thread again."""
        with self._change:
            self._push(part)
            if self._num_running >= self._width:
                return
            self._workers.submit(self._run)
            self._num_running += 1

    def apart(self, work: Callable[[], None]) -> None:
        """Do what mostly waits, beside the steps: beginning and ending files. Raises `TransientError` when no thread
        can be started for it; then it is not done."""
        with self._change:
            self._moved_s = time.monotonic()
            self._workers.submit(lambda: self._run_apart(work))
            self._num_apart += 1

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs and nothing is ready: whether that was so in time."""
        with self._change:
            return self._change.wait_for(lambda: not (self._num_running or self._num_apart), timeout_s)

    def check_moves(self, operation: str) -> None:
        """Raise `TransientError` when no step has begun or ended for minutes: a call to the storage hangs."""
        still_s = time.monotonic() - self._moved_s
        if still_s > _STUCK_S:
            raise TransientError(f"{operation}: no request to the storage has ended for {still_s:.0f} s; try again")

    def _push(self, part: PartTask) -> None:
        self._moved_s = time.monotonic()
        heapq.heappush(self._ready, (part.order, next(self._count), part))

    def _run(self) -> None:
        try:
            for _ in range(_TURN):
                with self._change:
                    if not self._ready:
                        break
                    part = heapq.heappop(self._ready)[2]
                if part.step():
                    with self._change:
                        self._push(part)
                self._moved_s = time.monotonic()
        finally:
            with self._change:
                if self._ready:
                    self._workers.submit(self._run)
                else:
                    self._num_running -= 1
                    self._change.notify_all()

    def _run_apart(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._change:
                self._moved_s = time.monotonic()
                self._num_apart -= 1
                self._change.notify_all()

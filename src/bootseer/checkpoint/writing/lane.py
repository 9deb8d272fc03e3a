"""The order in which parts are written: one `Lane` per file, over the thread pool of one `Writing`.

Work comes in small steps, and a part without data is not queued, so that no part holds a thread while it waits. A lane
runs as many steps concurrently as a segment has parts, those of the oldest segment first. So links do not idle between
two segments, and segments do not all end at the same moment.

Safe to use from many threads.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from bootseer.errors import TransientError
from bootseer.io.executor import Executor
from bootseer.io.retry import retrying

if TYPE_CHECKING:
    from bootseer.checkpoint.writing.segment import PartTask

T = TypeVar("T")


class WritingSettings(Struct, frozen=True):
    """Limits of all files that are written concurrently. The defaults suit a node of a training cluster."""

    max_threads: int = 20
    """Parts of all files that are written concurrently; each holds a few chunks of 1 MiB."""
    segments_ahead: int = 2
    """Open segments per file: while one is being completed, the next one uses the links."""
    part_tries: int = 8
    """Attempts at a part before its file fails."""
    retry_s: float = 5.0
    """The longest backoff; the first ones are shorter."""
    retry_for_s: float = 90.0
    """No attempt starts this long after the first one (of a part: after its first failure): a NameNode restarts or
    fails over in less."""
    spool_bytes: int = 2 << 30
    """Spool space of all files for sequential writes that are not durable elsewhere yet."""
    random_bytes: int = 16 << 30
    """Additional spool space for what cannot be sent before the commit: files that are not written front to back."""
    idle_s: float = 30.0
    """A segment is sealed when one of its parts has waited for bytes for so long: DataNodes close connections that are
    silent for 60 s. Of a slow stream with many stripes, each part gets a chunk seldom."""
    lease_s: float = 60.0
    """Interval of renewals of an unfinished file's lease."""
    end_s: float = 30.0
    """How long an abort waits for requests in flight."""

    def retry(self, step: Callable[[], T], sleep: Callable[[float], None] = time.sleep) -> T:
        """Call `step` until it succeeds, with backoff; returns its result."""
        return retrying(
            lambda _: step(), attempts=self.part_tries, deadline_s=self.retry_for_s, cap_s=self.retry_s, sleep=sleep
        )


class NodeLoad:
    """The number of parts of one file on each node. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: Counter[str] = Counter()

    def add(self, nodes: Iterable[str]) -> None:
        """A part is placed on these nodes."""
        with self._lock:
            self._parts.update(nodes)

    def remove(self, nodes: Iterable[str]) -> None:
        """A part on these nodes failed: they do not count any more."""
        with self._lock:
            for node in nodes:
                self._parts.pop(node, None)

    def most_loaded(self, num_parts: int) -> list[str]:
        """The nodes to avoid for load, the most loaded last: all but the `num_parts - 1` least loaded ones, so that at
        least one part goes to a node without parts, if there is one."""
        with self._lock:
            counts = [(count, random.random(), node) for node, count in self._parts.items()]  # noqa: S311 - no secret
        return [node for _, _, node in sorted(counts)[num_parts - 1 :]]


_STEPS_PER_TURN = 8
"""Steps of one file before the thread turns to another file."""
_STUCK_S = 600.0
"""Longer than any step takes: each has a deadline, and backoffs are short."""


class Lane:
    """The steps of one file: at most `width` at a time, in their order."""

    def __init__(self, workers: Executor, width: int) -> None:
        self._workers = workers
        self._width = width
        self._lock = threading.RLock()  # taken by blocks, as in `io.executor`
        self._change = threading.Condition(self._lock)
        self._ready: list[tuple[tuple[int, int], int, PartTask]] = []
        self._count = itertools.count()
        self._num_running = 0
        self._num_blocking = 0
        self._progress_s = time.monotonic()

    def schedule(self, part: PartTask) -> None:
        """Queue a part until its `step` returns False. Raises `TransientError` when no thread can be started; the part
        stays queued and runs when there is a thread again."""
        with self._lock:
            self._push(part)
            if self._num_running >= self._width:
                return
            self._workers.submit(self._run)
            self._num_running += 1

    def run_blocking(self, work: Callable[[], None]) -> None:
        """Run what mostly blocks, outside of the lane's width: creating and completing files. Raises `TransientError`
        when no thread can be started; then `work` is not run."""
        with self._lock:
            self._progress_s = time.monotonic()
            self._workers.submit(lambda: self._run_blocking(work))
            self._num_blocking += 1

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs or is queued. Returns whether that was so in time."""
        with self._lock:
            return self._change.wait_for(lambda: not (self._num_running or self._num_blocking), timeout_s)

    def check_progress(self, operation: str) -> None:
        """Raise `TransientError` when no step has started or ended for minutes: a call to the storage hangs."""
        still_s = time.monotonic() - self._progress_s
        if still_s > _STUCK_S:
            raise TransientError(f"{operation}: no request to the storage has ended for {still_s:.0f} s; try again")

    def _push(self, part: PartTask) -> None:
        self._progress_s = time.monotonic()
        heapq.heappush(self._ready, (part.order, next(self._count), part))

    def _run(self) -> None:
        try:
            for _ in range(_STEPS_PER_TURN):
                with self._lock:
                    if not self._ready:
                        break
                    part = heapq.heappop(self._ready)[2]
                if part.step():
                    with self._lock:
                        self._push(part)
                self._progress_s = time.monotonic()
        finally:
            with self._lock:
                if self._ready:
                    self._workers.submit(self._run)
                else:
                    self._num_running -= 1
                    self._change.notify_all()

    def _run_blocking(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._lock:
                self._progress_s = time.monotonic()
                self._num_blocking -= 1
                self._change.notify_all()

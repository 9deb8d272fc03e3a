"""Loads what a plan wants: many reads in flight, decoded in threads, within a bound of memory.

Only the thread that called asks the planner anything, since planners are not made for threads. The first error ends
the load at once: other ranks wait in a collective until this one has something to say.
"""

from __future__ import annotations

import contextlib
import io
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from bootseer.checkpoint.dcp.direct import Expected
from bootseer.checkpoint.dcp.items import Stored
from bootseer.checkpoint.dcp.job import Job, LoadSettings, Undo, perform, prepare
from bootseer.checkpoint.ranges import Range, Span, join, spread
from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.errors import TransientError
from bootseer.io.executor import Executor

_GRACE_S = 5.0
"""How long a failed load waits for reads that still write into tensors."""

Results = list[tuple[ReadItem, torch.Tensor | bytes]]


def load_all(
    items: Sequence[Stored],
    planner: LoadPlanner,
    open_file: Callable[[str], CheckpointFile],
    undo: Undo,
    settings: LoadSettings,
) -> None:
    """Fill the planner's tensors with the items. Raises what the first read that failed raised."""
    by_file: dict[str, list[Range[Stored]]] = {}
    for item in items:
        by_file.setdefault(item.file, []).append(Range(item.offset, item.end, item))
    spans = {
        file: join(ranges, max_bytes=settings.span_bytes, gap_bytes=settings.gap_bytes)
        for file, ranges in by_file.items()
    }
    load = _Load(planner, open_file, undo, settings, Counter({file: len(own) for file, own in spans.items()}))
    load.run(spread(spans), min(settings.threads, sum(map(len, spans.values()))))


class _Load:
    """One load. `_done` is the only way back from its threads."""

    def __init__(
        self,
        planner: LoadPlanner,
        open_file: Callable[[str], CheckpointFile],
        undo: Undo,
        settings: LoadSettings,
        reads_of: Counter[str],
    ) -> None:
        self._planner = planner
        self._undo = undo
        self._settings = settings
        self._files = _Files(open_file, reads_of)
        self._expected = Expected()
        self._ended = False
        self._done: queue.SimpleQueue[tuple[Job, Results | BaseException]] = queue.SimpleQueue()
        self._running = 0
        self._buffered = 0

    def run(self, spans: Iterator[tuple[str, Span[Stored]]], num_threads: int) -> None:
        threads = Executor("bootseer-dcp", num_threads)
        try:
            held: Job | None = None
            while True:
                while self._running < 2 * num_threads:
                    if held is None:
                        span = next(spans, None)
                        if span is None:
                            break
                        held = prepare(*span, self._planner, self._expected, self._settings)
                    if self._running and self._buffered + held.buffer_bytes > self._settings.buffer_bytes:
                        break
                    self._start(held, threads)
                    held = None
                if not self._running:
                    return
                self._take(self._settings.stall_s)
        finally:
            self._end()
            threads.close()

    def _start(self, job: Job, threads: Executor) -> None:
        threads.submit(partial(self._work, job))
        self._running += 1
        self._buffered += job.buffer_bytes

    def _take(self, timeout_s: float) -> None:
        """Hand one finished job to the planner. Raises its error."""
        try:
            job, results = self._done.get(timeout=timeout_s)
        except queue.Empty:
            raise TransientError(f"the checkpoint: nothing has arrived for {timeout_s:.0f} s") from None
        self._running -= 1
        self._buffered -= job.buffer_bytes
        if isinstance(results, BaseException):
            raise results
        for request, result in results:
            if isinstance(result, bytes):
                self._planner.load_bytes(request, io.BytesIO(result))
            else:
                self._planner.commit_tensor(request, result)

    def _end(self) -> None:
        """After an error, drop what was not begun, and wait a little for what was."""
        self._ended = True
        self._files.close()
        until = time.monotonic() + _GRACE_S
        with contextlib.suppress(queue.Empty):
            while self._running > 0:
                self._done.get(timeout=max(until - time.monotonic(), 0.0))
                self._running -= 1

    def _work(self, job: Job) -> None:
        results: Results | BaseException = []
        try:
            if not self._ended:
                with self._files.use(job.file) as file:
                    results = perform(job, file, self._expected, self._undo)
        except BaseException as error:  # raised in the thread that waits for it
            results = error
        self._done.put((job, results))


class _Files:
    """Files that are opened when they are first read, and closed after their last read."""

    def __init__(self, open_file: Callable[[str], CheckpointFile], reads_of: Counter[str]) -> None:
        self._open_file = open_file
        self._reads_of = reads_of
        self._lock = threading.Lock()  # guards what follows; each file has another for its opening
        self._opening = {file: threading.Lock() for file in reads_of}
        self._open: dict[str, CheckpointFile] = {}
        self._is_closed = False

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[CheckpointFile]:
        """The file, for one read."""
        with self._opening[name]:
            file = self._open.get(name)
            if file is None:
                file = self._open_file(name)
                with self._lock:
                    self._open[name] = file
        try:
            yield file
        finally:
            with self._lock:
                self._reads_of[name] -= 1
                is_last = self._is_closed or not self._reads_of[name]
                mine = self._open.pop(name, None) if is_last else None
            if mine is not None:
                mine.close()

    def close(self) -> None:
        """Close what is still open, which ends the reads of it."""
        with self._lock:
            self._is_closed = True
            left = list(self._open.values())
            self._open.clear()
        for file in left:
            file.close()

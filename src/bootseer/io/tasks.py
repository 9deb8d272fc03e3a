"""Parallel calls in a `with` block: `concurrent.futures` on the program's thread pool.

Unlike `ThreadPoolExecutor`, leaving the block has a deadline, a hung thread does not keep the process from ending, and
without threads the calls run in the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor as FuturesExecutor
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Any, ParamSpec, TypeVar

from bootseer.errors import TransientError
from bootseer.io.executor import Executor

P = ParamSpec("P")
T = TypeVar("T")

_LEAVE_S = 90.0
"""Longer than the deadlines of calls to stores and places; calls that still run then are abandoned."""


class Tasks(FuturesExecutor):
    """Leaving the block cancels calls that have not begun and waits for others for a while; take results before."""

    def __init__(self, name: str, max_threads: int, *, leave_s: float = _LEAVE_S) -> None:
        self._pool = Executor(name, max_threads)
        self._leave_s = leave_s
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        """Unfinished calls."""

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As in `concurrent.futures`: a future for the call."""
        future: Future[T] = Future()
        with self._lock:
            self._open.add(future)
        future.add_done_callback(self._ended)
        job = partial(_perform, future, partial(call, *args, **kwargs))
        try:
            self._pool.submit(job)
        except TransientError:  # no further thread can be started
            job()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """As in `concurrent.futures`, with a limited wait."""
        with self._lock:
            left = list(self._open)
        if cancel_futures:
            left = [future for future in left if not future.cancel()]
        if wait:
            wait_for(left, self._leave_s)
        self._pool.close()

    def _ended(self, future: Future[Any]) -> None:
        with self._lock:
            self._open.discard(future)


def _perform(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # raised by `Future.result`
        future.set_exception(error)
    else:
        future.set_result(result)


class Count:
    """Progress of many threads, passed to a callback by one thread at a time without locks.

    A hanging callback (on a stopped terminal) blocks only the thread that calls it. Steps may be skipped, except the
    last.
    """

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._total = total
        self._progress = progress or (lambda done, total: None)
        self._lock = threading.Lock()
        self.done = 0
        self._is_showing = False

    def add(self, amount: int) -> None:
        """Add finished work. Raises what the callback raises."""
        with self._lock:
            self.done += amount
        shown = -1
        while (done := self._next(shown)) is not None:
            try:
                self._progress(done, self._total)
            finally:
                self._is_showing = False
            shown = done

    def _next(self, shown: int) -> int | None:
        """The next value to report; None while another thread reports, or if there is nothing new."""
        with self._lock:
            done = min(self.done, self._total)
            if self._is_showing or done == shown or (shown >= 0 and done < self._total):
                return None
            self._is_showing = True
            return done

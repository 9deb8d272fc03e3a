"""Calls side by side within a `with` block: `concurrent.futures` over the program's own pool.

Unlike with `ThreadPoolExecutor`, leaving the block has a deadline, a thread that hangs does not keep the process from
ending, and where the system refuses threads the caller's own does the work.
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
"""Longer than the deadlines of calls to stores and places: a call that has not returned by then is left behind."""


class Tasks(FuturesExecutor):
    """Leaving the block cancels what has not begun and waits a while for what has; results are to be taken before."""

    def __init__(self, name: str, max_threads: int, *, leave_s: float = _LEAVE_S) -> None:
        self._pool = Executor(name, max_threads)
        self._leave_s = leave_s
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        """What has not ended."""

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As of `concurrent.futures`: the call's result or error, later."""
        future: Future[T] = Future()
        with self._lock:
            self._open.add(future)
        future.add_done_callback(self._ended)
        job = partial(_perform, future, partial(call, *args, **kwargs))
        try:
            self._pool.submit(job)
        except TransientError:  # there is no thread but this one
            job()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """As of `concurrent.futures`, within the time that leaving may take."""
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
    except BaseException as error:  # it is raised where the result is asked for
        future.set_exception(error)
    else:
        future.set_result(result)

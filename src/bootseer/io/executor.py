"""The program's thread pool.

Threads are started on demand and end after a while without work. All are daemon threads: one that hangs on a dead
connection or disk must not keep the process alive.

Errors of threads are handled here. A job that raises is reported to `threading.excepthook`, and its thread continues
with the next job. If the system refuses a thread (process limit, no memory), the job waits for an existing thread;
without one, `submit` raises `TransientError` and nothing stays queued. A thread counts only once it is started.

Jobs run in the order of submission, urgent ones first. For another order, keep the items elsewhere and submit one job
per item that takes the best item at its turn.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

from bootseer.errors import Interrupted, TransientError
from bootseer.io.fork import in_each_process

Job = Callable[[], object]

_IDLE_S = 10.0
"""Idle time after which a thread ends."""
_SHOWN_CALLS = 6
_SHOW_EVERY_S = 60.0
_shown_s = -_SHOW_EVERY_S


class Executor:
    """Safe to use from many threads, and in the child of a fork, which starts without threads and jobs."""

    def __init__(
        self,
        name: str,
        max_threads: int | None = None,
        *,
        idle_s: float = _IDLE_S,
        when_idle: Callable[[], object] | None = None,
    ) -> None:
        """`max_threads`: None for no limit. `when_idle` is called in the last thread, idle for `idle_s`, at its end."""
        self._name = name
        self._max_threads = max_threads
        self._first_idle_s = idle_s
        self._when_idle = when_idle
        in_each_process(self._begin)

    def _begin(self) -> None:
        # Blocks take the lock itself: the exception of a signal may be raised inside the condition's `__enter__`,
        # which is Python code, when the lock is held but the block has not begun. Nothing would release it.
        self._lock = threading.Lock()
        self._change = threading.Condition(self._lock)
        self._urgent: deque[Job] = deque()
        self._others: deque[Job] = deque()
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._idle_s = self._first_idle_s

    def __len__(self) -> int:
        return len(self._threads)

    def submit(self, job: Job, *, urgent: bool = True, at_once: bool = False) -> None:
        """Run the job in a thread; never waits, never runs it in this thread.

        `at_once`: refuse a job that would have to wait for a busy thread. Raises `TransientError` if it is refused, or
        if there is no thread and none can be started; the job does not run then.
        """
        queue = self._urgent if urgent else self._others
        with self._lock:
            queue.append(job)
            try:
                if self._num_idle >= len(self._urgent) + len(self._others):
                    self._change.notify()
                elif not self._start_thread() and (at_once or not self._threads):
                    raise TransientError(f"{self._name}: {self._why_refused()}")
            except BaseException:  # KeyboardInterrupt too: a refused job must not run
                queue.pop()
                self._change.notify_all()  # an interrupted `notify` can leave a stale waiter, which gets the next one
                raise

    def prioritize(self, job: Job) -> None:
        """Make a waiting job urgent."""
        with self._lock, contextlib.suppress(ValueError):
            self._others.remove(job)
            self._urgent.append(job)

    def close(self, timeout_s: float = 0.0) -> None:
        """End threads when nothing is queued. Jobs are still accepted and run. Threads that do not end within
        `timeout_s` seconds are abandoned."""
        with self._lock:
            self._idle_s = 0.0
            self._change.notify_all()
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        until = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))

    def _start_thread(self) -> bool:
        """Start one more thread if the limit allows; returns whether it did. Called with the lock."""
        if self._max_threads is not None and len(self._threads) >= self._max_threads:
            return False
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            return False
        self._threads.add(thread)
        return True

    def _why_refused(self) -> str:
        if len(self._threads) == self._max_threads:
            return f"all of its {self._max_threads} threads are busy with calls that have not returned"
        return "the system refuses to start a thread; see its limits of processes and memory (ulimit -u, pids.max)"

    def _work(self) -> None:
        while (job := self._next()) is not None:
            run_reported(job)
            del job  # a job may refer to large buffers

    def _next(self) -> Job | None:
        """The next job; None if this thread is to end, which is then no longer counted."""
        idle_was_called = self._when_idle is None
        while True:
            with self._lock:
                if self._idle_s and not (self._urgent or self._others):
                    self._num_idle += 1
                    self._change.wait_for(
                        lambda: self._urgent or self._others or not self._idle_s, timeout=self._idle_s
                    )
                    self._num_idle -= 1
                if queue := self._urgent or self._others:
                    return queue.popleft()
                if idle_was_called or len(self._threads) > 1:
                    self._threads.discard(threading.current_thread())
                    return None
            idle_was_called = True
            if self._when_idle is not None:
                run_reported(self._when_idle)


def run_reported(job: Job) -> None:
    """Run a job; exceptions go to `threading.excepthook`, except signals in the main thread."""
    try:
        job()
    except BaseException as error:  # panics in Rust code are not Exceptions
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and isinstance(error, (KeyboardInterrupt, Interrupted)):
            raise
        report_exception()


def report_exception() -> None:
    """Report the current exception to `threading.excepthook`."""
    kind, value, trace = sys.exc_info()
    if kind is not None:
        threading.excepthook(threading.ExceptHookArgs((kind, value, trace, threading.current_thread())))


def show_threads(reason: str) -> None:
    """Print a line for each thread of this process with its innermost calls on standard error. At most once a minute:
    readers often hang together."""
    global _shown_s  # noqa: PLW0603 - of the whole process
    now_s = time.monotonic()
    if now_s < _shown_s + _SHOW_EVERY_S:
        return
    _shown_s = now_s
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [f"bootseer: {reason}; its threads:\n"]
    for ident, frame in sys._current_frames().items():
        calls = traceback.extract_stack(frame)[-_SHOWN_CALLS:]
        stack = " < ".join(f"{call.name} ({call.filename}:{call.lineno})" for call in reversed(calls))
        lines.append(f"  {names.get(ident, ident)}: {stack}\n")
    sys.stderr.write("".join(lines))

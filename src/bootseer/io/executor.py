"""Threads that run jobs: the one pool of the program.

Threads are started when there is work and end when there has been none for a while. All are daemon threads: one that
hangs in a dead connection or disk must not keep the process alive.

What can go wrong with threads is handled here, once. A job that raises is reported to `threading.excepthook`, and its
thread goes on with the next job. When the system refuses a thread (a limit of processes, no memory), the job waits for
one of the threads that are there; when there is none, `submit` raises `TransientError` and nothing is left queued. A
thread counts only after it was started.

Jobs run in the order of submission, urgent ones first. For another order, keep the items elsewhere and submit one job
per item that takes the first item when its turn comes.
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
"""A thread without work ends after this; the next job starts another one."""
_SHOWN_CALLS = 6
_SHOW_EVERY_S = 60.0
_shown_s = -_SHOW_EVERY_S


class Executor:
    """Safe to use from many threads, and in the child of a fork, which begins without threads and jobs."""

    def __init__(
        self,
        name: str,
        max_threads: int | None = None,
        *,
        idle_s: float = _IDLE_S,
        when_idle: Callable[[], object] | None = None,
    ) -> None:
        """`max_threads`: None for as many as there are jobs. `when_idle` is called in the last thread before that ends,
        when there has been no job for `idle_s`."""
        self._name = name
        self._max_threads = max_threads
        self._first_idle_s = idle_s
        self._when_idle = when_idle
        in_each_process(self._begin)

    def _begin(self) -> None:
        self._change = threading.Condition(threading.Lock())
        self._urgent: deque[Job] = deque()
        self._others: deque[Job] = deque()
        self._threads: set[threading.Thread] = set()
        self._num_idle = 0
        self._idle_s = self._first_idle_s

    def __len__(self) -> int:
        """The number of threads."""
        return len(self._threads)

    def submit(self, job: Job, *, urgent: bool = True, at_once: bool = False) -> None:
        """Have a thread run this. Never waits, never runs it in this thread.

        `at_once`: refuse a job that would have to wait for a busy thread. Raises `TransientError` when it is refused,
        or when there is no thread and none can be started; it is not run then.
        """
        queue = self._urgent if urgent else self._others
        with self._change:
            queue.append(job)
            try:
                if self._num_idle >= len(self._urgent) + len(self._others):
                    self._change.notify()
                elif not self._start_thread() and (at_once or not self._threads):
                    raise TransientError(f"{self._name}: {self._why_refused()}")
            except BaseException:  # Ctrl-C too: a job that was not accepted must not run
                queue.pop()
                raise

    def prioritize(self, job: Job) -> None:
        """Make a job urgent that is not and waits for its turn."""
        with self._change, contextlib.suppress(ValueError):
            self._others.remove(job)
            self._urgent.append(job)

    def close(self, timeout_s: float = 0.0) -> bool:
        """Let threads end when nothing is queued, now and later, and wait for them. Jobs are still taken and run.

        False when some had not ended within `timeout_s` seconds; these are left behind.
        """
        with self._change:
            self._idle_s = 0.0
            self._change.notify_all()
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        until = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in threads)

    def _start_thread(self) -> bool:
        """Start one more, unless there are enough: whether that was done. Under the lock."""
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
            del job  # a job may hold the bytes of its request

    def _next(self) -> Job | None:
        """The next job; None when this thread is to end, which does not count any more then."""
        was_told = self._when_idle is None
        while True:
            with self._change:
                if self._idle_s and not (self._urgent or self._others):
                    self._num_idle += 1
                    self._change.wait_for(
                        lambda: self._urgent or self._others or not self._idle_s, timeout=self._idle_s
                    )
                    self._num_idle -= 1
                if queue := self._urgent or self._others:
                    return queue.popleft()
                if was_told or len(self._threads) > 1:
                    self._threads.discard(threading.current_thread())
                    return None
            was_told = True
            if self._when_idle is not None:
                run_reported(self._when_idle)


def run_reported(job: Job) -> None:
    """Run it; what it raises goes to `threading.excepthook`, as of a thread that ends by it. Signals, which come to the
    main thread alone, are not swallowed."""
    try:
        job()
    except BaseException as error:  # panics of Rust code are not Exceptions
        if isinstance(error, (KeyboardInterrupt, Interrupted)) and _is_main():
            raise
        report_exception()


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def report_exception() -> None:
    """Give the exception that is being handled to `threading.excepthook`."""
    kind, value, trace = sys.exc_info()
    if kind is not None:
        threading.excepthook(threading.ExceptHookArgs((kind, value, trace, threading.current_thread())))


def show_threads(reason: str) -> None:
    """Print on standard error what each thread of this process does: a line each, the innermost calls first.

    Once a minute: what hangs for one reader hangs for many."""
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

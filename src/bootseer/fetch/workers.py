"""Threads that do what they are given, started when they are needed.

`engine` gives each request to a thread of its own; the scheduler bounds how many there are. All are daemon threads:
one that hangs in a dead connection must not keep the process alive.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], None]


class Workers:
    """A pool that grows when all its threads are busy. `_lock` guards the two numbers and the list of threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._free = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._threads)

    def submit(self, job: Job) -> None:
        """Have a thread do this, at once if there can be one. After `close` nothing is done any more."""
        with self._lock:
            if self._closed:
                return
            if self._free > 0 or not self._start_thread():
                self._free -= 1
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Let the threads end what they do and go. False when some had not gone in time; they are left behind."""
        with self._lock:
            self._closed = True
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        for _ in self._threads:
            self._jobs.put(None)
        until = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in threads)

    def _start_thread(self) -> bool:
        """False when the machine has no room for one more thread: then one of those that are there does the job later,
        and `_free` says below zero how many jobs wait. Raises `RuntimeError` when there is none at all."""
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
            return False
        self._threads.append(thread)
        return True

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                report_exception()
            del job  # a job holds the bytes of its request
            with self._lock:
                self._free += 1


def report_exception() -> None:
    """Tell the one who watches over threads of the exception that is being handled."""
    kind, value, trace = sys.exc_info()
    if kind is not None:
        threading.excepthook(threading.ExceptHookArgs((kind, value, trace, threading.current_thread())))

"""Threads that do what they are given, started when they are needed.

`fetcher` gives each request to a thread of its own; the scheduler bounds how many there are. All are daemon threads:
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
        """Have a thread do this at once. After `close` nothing is done any more."""
        with self._lock:
            if self._closed:
                return
            if self._free:
                self._free -= 1
            else:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
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

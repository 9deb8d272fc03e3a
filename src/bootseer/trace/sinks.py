"""Where event lines go: a spool file, stderr, or several sinks at once.

A sink takes one complete line and never raises: a full disk or a closed pipe costs events, which are counted,
and never the job.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from _thread import RLock  # threading's own, without its 1.5 ms in front of every job
from collections.abc import Sequence
from typing import Protocol

from bootseer.io.fork import in_each_process

SUFFIX = ".events"


class Sink(Protocol):
    """Takes event lines."""

    @property
    def lost(self) -> int:
        """Lines that could not be written."""

    def write(self, line: bytes) -> None:
        """Take one line that ends in a newline. Never raises, never blocks for long."""

    def close(self) -> None:
        """Release what is held; a later write may open it again."""


def safe_name(text: str) -> str:
    """A file name made of `text`: no separators, no hidden files, at most 80 characters."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", text)[:80].lstrip(".")
    return name or "unnamed"


class SpoolSink:
    """An append-only file for this process alone, opened at the first event.

    One `write(2)` per line: what was written is in the page cache and survives `kill -9`. A line that the disk
    took only in part is closed by a newline before the next one, so that one full disk costs one event.
    """

    def __init__(self, folder: str, node: str) -> None:
        self.lost = 0
        self._folder = folder
        self._node = safe_name(node)
        self._fd = -1
        self._pid = 0
        self._torn = False
        in_each_process(self._renew_lock)

    def _renew_lock(self) -> None:
        # Reentrant: a signal handler of the job may write while this thread writes.
        self._lock = RLock()

    def write(self, line: bytes) -> None:
        with self._lock:
            try:
                if self._pid != os.getpid():  # first use, or a fork: a file has one writer
                    self._open()
                data = b"\n" + line if self._torn else line
                written = os.write(self._fd, data)
                self._torn = written != len(data)
            except OSError:
                self._torn = self._fd >= 0
                self.lost += 1
            else:
                self.lost += self._torn

    def _open(self) -> None:
        self._pid, self._fd = 0, -1  # the parent's descriptor stays the parent's
        folder = self._folder
        os.makedirs(folder, mode=0o700, exist_ok=True)
        # Events are their user's; the set-group-ID bit says that a group is to read them.
        mode = 0o640 if os.stat(folder).st_mode & stat.S_ISGID else 0o600
        name = f"{self._node}.{os.getpid()}.{time.monotonic_ns()}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(os.path.join(folder, name), flags, mode)
        self._pid = os.getpid()

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0 and self._pid == os.getpid():
                with contextlib.suppress(OSError):
                    os.close(self._fd)
            self._fd, self._pid = -1, 0


class StderrSink:
    """File descriptor 2: events travel with the job's own log, to wherever that is collected."""

    def __init__(self) -> None:
        self.lost = 0

    def write(self, line: bytes) -> None:
        try:
            if os.write(2, line) != len(line):
                self.lost += 1
        except OSError:
            self.lost += 1

    def close(self) -> None:
        return None


class FanOut:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = sinks

    @property
    def lost(self) -> int:
        return sum(sink.lost for sink in self.sinks)

    def write(self, line: bytes) -> None:
        for sink in self.sinks:
            sink.write(line)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()

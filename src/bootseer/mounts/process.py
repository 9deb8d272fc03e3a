"""Processes: identity that survives reuse of pids, parent-death signals, and messages as JSON lines over pipes and
sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from bootseer.fuse.syscalls import libc
from bootseer.io import proc

_PR_SET_PDEATHSIG = 1
_TICK_S = 0.5
_MAX_LINE = 1 << 20


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this forked child a signal when its `parent` ends.

    The kernel clears this on a change of credentials or namespaces: call it after those.
    """
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl
        os.kill(os.getpid(), number)


def drop_descriptors(log: Path, drops: Callable[[int], bool]) -> None:
    """After a fork: redirect standard input, and the inherited descriptors for which `drops` is true, to /dev/null, and
    both outputs to the file `log`. Raises `OSError`.

    Not closed: objects copied from the parent hold the numbers and may close them later, when they are in use again.
    """
    null = os.open(os.devnull, os.O_RDWR)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in proc.open_files():
        if number not in (0, 1, 2, null, file) and drops(number):
            try:
                os.dup2(null, number, inheritable=False)
            except OSError:  # beyond a limit of descriptors that was lowered since: it cannot be in use again
                os.close(number)
    os.dup2(null, 0)
    for stream in (1, 2):
        os.dup2(file, stream)


def json_lines(
    fd: int, until: float, waiting: Callable[[], None] = lambda: None, max_bytes: int = _MAX_LINE
) -> Iterator[Any]:
    """Read JSON values, one per line, from a pipe or socket until its other end is closed.

    `waiting` is called twice a second. `until` (monotonic clock) limits the whole exchange. Raises `TimeoutError`,
    `ValueError` for a malformed line or one above `max_bytes`, `OSError`, and what `waiting` raises.
    """
    data, poll = bytearray(), select.poll()
    poll.register(fd, select.POLLIN)
    while (left_s := until - time.monotonic()) > 0:
        if not poll.poll(1000 * min(_TICK_S, left_s)):
            waiting()
            continue
        piece = os.read(fd, min(max_bytes, _MAX_LINE))
        data += piece
        if b"\n" in piece:
            *lines, data = data.split(b"\n")
            yield from map(json.loads, lines)
        if len(data) >= max_bytes:
            raise ValueError("a line is too long")
        if not piece:
            return
    raise TimeoutError("it took too long")


def send_line(fd: int, message: Mapping[str, Any]) -> bool:
    """Write a JSON value as one line, for `json_lines`. False if the other end is closed."""
    data = memoryview(json.dumps(message).encode() + b"\n")
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return False
    return True


def readable(watched: Sequence[int | socket.socket], timeout_s: float | None = None) -> list[int | socket.socket]:
    """Wait for one of these to have data or a closed other end; returns those. Unlike select(2), it takes descriptors
    above 1023: a daemon inherits some for each layer."""
    numbers = {each if isinstance(each, int) else each.fileno(): each for each in watched}
    poll = select.poll()
    for number in numbers:
        poll.register(number, select.POLLIN)
    return [numbers[number] for number, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s)]


class ProcessId(Struct, frozen=True):
    """A pid and its start time, in clock ticks since boot: together unique, where a pid alone may be reused."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The running process with this pid; None when there is none or it is a zombie."""
        fields = proc.stat(pid)
        return None if not fields or fields[0] in (b"Z", b"X") else cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        """Whether this process, not a later one of the same pid, still runs."""
        return ProcessId.of(self.pid) == self

    def signal(self, number: int = signal.SIGTERM) -> None:
        with contextlib.suppress(ProcessLookupError):
            # The pidfd refers to one process: no other one can get the signal if the pid is reused meanwhile.
            handle = os.pidfd_open(self.pid)
            try:
                if self.alive:
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)

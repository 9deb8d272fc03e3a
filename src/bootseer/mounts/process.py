"""A process that can be recognised later: its number alone may belong to another one by then.

And the other way round: a process that ends with the one that started it, children whose end is waited for, and what
other processes write into pipes and sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootseer.fuse.syscalls import libc

_PR_SET_PDEATHSIG = 1
_TICK_S = 0.5
_MAX_LINE = 1 << 20


def end_child(pid: int, timeout_s: float = 1.0, *, kill: bool = True) -> int | None:
    """Kill a child, unless it ends by itself (`kill=False`), and wait for it: its wait status.

    None when it has not ended within `timeout_s` seconds: one that hangs in a system call, such as in a dead mount,
    does not even die of SIGKILL until the call returns. It is left behind then. None too when it was waited for
    elsewhere, as process 1 does for all.
    """
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        handle = os.pidfd_open(pid)
        try:
            if kill:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            ended = select.poll()
            ended.register(handle, select.POLLIN)
            if ended.poll(1000 * timeout_s):
                return os.waitpid(pid, 0)[1]
        finally:
            os.close(handle)
    return None


def die_with(parent: int) -> None:
    """Be killed when the process `parent`, which started this one, ends: for children behind a fork.

    The kernel forgets it where a process changes its rights or enters a namespace: call it later than that.
    """
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it was faster
        os.kill(os.getpid(), signal.SIGKILL)


def json_lines(
    fd: int, until: float, waiting: Callable[[], None] = lambda: None, max_bytes: int = _MAX_LINE
) -> Iterator[Any]:
    """What another process writes into a pipe or socket, one JSON value per line, until it closes its end.

    `waiting` is called twice a second. Raises `TimeoutError` after `until` (of the monotonic clock), however slowly a
    line comes, `ValueError` for a malformed or longer line, `OSError`, and what `waiting` raises.
    """
    data, poll = b"", select.poll()
    poll.register(fd, select.POLLIN)
    while (left_s := until - time.monotonic()) > 0:
        if not poll.poll(1000 * min(_TICK_S, left_s)):
            waiting()
            continue
        piece = os.read(fd, max_bytes)
        *lines, data = (data + piece).split(b"\n")
        yield from map(json.loads, lines)
        if len(data) >= max_bytes:
            raise ValueError("a line is too long")
        if not piece:
            return
    raise TimeoutError


@dataclass(frozen=True, slots=True)
class ProcessId:
    """`started` is the start time in clock ticks since the machine's boot."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this number now; None when there is none or it has ended."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return None
        # The name in parentheses may hold anything, so that counting begins behind it.
        fields = stat.rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        return ProcessId.of(self.pid) == self

    def signal(self, number: int = signal.SIGTERM) -> None:
        with contextlib.suppress(ProcessLookupError):
            # The descriptor pins the number between the look and the signal.
            handle = os.pidfd_open(self.pid)
            try:
                if self.alive:
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)

"""A process that can be recognised later: its number alone may belong to another one by then.

And the other way round: a process that ends with the one that started it, and children whose end is waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

from bootseer.fuse.syscalls import libc

_PR_SET_PDEATHSIG = 1


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
        """Send a signal, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            # The descriptor pins the number between the look and the signal.
            handle = os.pidfd_open(self.pid)
            try:
                if self.alive:
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)

"""Restart a mount daemon that died under its mount, so that readers wait for a moment instead of getting I/O errors.

The process that `daemon` forks does not serve itself: it forks the one that does, keeps a copy of its FUSE descriptor,
and waits. As long as any process has the descriptor open, the kernel keeps the mount and lets its readers wait. When
the serving process is killed (out of memory, a fault in a library, by hand), the next one is forked with the same
descriptor: everything it needs is imported, and of the dead one it uses only what is on the disk. Requests that the
dead one had taken and not answered are lost, and the kernel would wait for their answers for ever: it is asked to send
them again (FUSE_NOTIFY_RESEND, Linux 6.9). Where it cannot, and when a daemon dies again and again, readers get I/O
errors.

Only trees that do not change are served on: their inodes are numbers that every process gives to the same files, and
they have neither open files nor unwritten data.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import time
from collections import deque
from typing import Final

from bootseer import logs
from bootseer.mounts.control import LOG
from bootseer.mounts.process import die_with
from bootseer.mounts.serve import DaemonSpec, catch_signals, protect_from_oom, serve

_LOG = logs.logger(__name__)
_DEATHS, _WITHIN_S = 3, 60.0
"""A daemon that dies so often has a lasting reason: readers should get errors."""
_REOPEN_S = 20.0
_READY: Final = b"m"


def serve_on(spec: DaemonSpec, report: int, lifeline: int | None) -> int:
    """Serve a mount from child processes, one after the other as they are killed; the exit code of the last one.

    Ends with its child when that ends by itself, and kills it by its own end. Call it in a process with one thread.
    """
    logs.set_up(os.environ, file=spec.folder / LOG)
    wake = catch_signals()
    protect_from_oom()
    gc.freeze()  # a collection in one of the processes would copy the pages that they share
    device: int | None = None
    deaths: deque[float] = deque(maxlen=_DEATHS)
    restarts = 0
    while True:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            ours.close()
            wake.close()
            die_with(parent)
            os._exit(_serve(spec, report, lifeline, theirs, device, restarts))
        theirs.close()
        if report >= 0:
            os.close(report)  # from now on the child's: its end must be heard on the pipe
            report = -1
        with ours:
            device, status, is_asked_to_end = _watch(child, ours, wake, device)
        if is_asked_to_end or not os.WIFSIGNALED(status) or device is None:
            return os.waitstatus_to_exitcode(status) & 0xFF
        now = time.monotonic()
        deaths.append(now)
        died = f"the process that serves {spec.label} was killed by signal {os.WTERMSIG(status)}"
        if len(deaths) == _DEATHS and now - deaths[0] < _WITHIN_S:
            _LOG.error("%s, the %d. time in %g s: its readers get errors", died, _DEATHS, now - deaths[0])
            return 1
        _LOG.warning("%s: it is started again", died)
        restarts += 1


def _serve(
    spec: DaemonSpec, report: int, lifeline: int | None, link: socket.socket, device: int | None, restarts: int
) -> int:
    if restarts:  # readers wait: one that hangs while it opens the store is a death too. `serve` calls it off
        signal.setitimer(signal.ITIMER_REAL, _REOPEN_S)

    def keep(mounted: int) -> None:
        socket.send_fds(link, [_READY], [mounted])

    return serve(spec, report, lifeline, keep=keep, device=device, restarts=restarts)


def _watch(child: int, link: socket.socket, wake: socket.socket, device: int | None) -> tuple[int | None, int, bool]:
    """Until the child has ended: the FUSE descriptor, once there is one, the child's wait status, and whether a signal
    came that ends a daemon."""
    is_asked_to_end = False
    handle = os.pidfd_open(child)
    watched: list[int | socket.socket] = [handle, link, wake]
    try:
        while True:
            readable = select.select(watched, [], [])[0]
            if wake in readable:
                wake.recv(64)
                is_asked_to_end = True
                os.kill(child, signal.SIGTERM)
            if link in readable:
                watched.remove(link)
                with contextlib.suppress(OSError):  # it died between the two
                    _, numbers, _, _ = socket.recv_fds(link, 1, 1)
                    signal.setitimer(signal.ITIMER_REAL, 0)  # it serves: the start's time limit is over
                    if device is None and numbers:
                        device = numbers[0]
            if handle in readable:
                return device, os.waitpid(child, 0)[1], is_asked_to_end
    finally:
        os.close(handle)

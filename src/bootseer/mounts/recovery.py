"""Restart a mount daemon that died under its mount: readers wait for a moment instead of getting I/O errors.

The process that `daemon` forks does not serve. It forks the one that does, keeps a copy of its FUSE descriptor, and
waits. As long as any process has the descriptor open, the kernel keeps the mount, and readers block. When the serving
process is killed (out of memory, a crash in a library, by hand), a new one is forked with the same descriptor: all code
is imported already, and of the dead process only files on the disk are used. Requests that it had read and not answered
would block their callers for ever: the kernel is asked to send them again (FUSE_NOTIFY_RESEND, Linux 6.9). On older
kernels, and when the daemon keeps dying, readers get I/O errors.

Only for immutable trees: every process assigns the same inode numbers to them, and they have neither open file handles
nor unwritten data, so that a new process can continue where the dead one stopped.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import time
from collections import deque
from functools import partial
from typing import Final

from bootseer import logs
from bootseer.mounts.control import LOG
from bootseer.mounts.process import die_with, readable
from bootseer.mounts.serve import DaemonSpec, catch_signals, protect_from_oom, serve

_LOG = logs.logger(__name__)
_DEATHS, _WITHIN_S = 3, 60.0
"""After this many deaths within this many seconds, it is not restarted again: readers get errors."""
_REOPEN_S = 20.0
_READY: Final = b"m"


def serve_with_restarts(spec: DaemonSpec, report: int, lifeline: int | None) -> int:
    """Serve a mount from child processes, a new one for each that is killed; the exit code of the last one.

    Returns when a child exits by itself; when this process is killed, so is the child. Requires a single thread.
    """
    logs.set_up(os.environ, file=spec.folder / LOG)
    wake = catch_signals()
    protect_from_oom()
    gc.freeze()  # a garbage collection in either process would copy the memory pages that they share
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
            if restarts:  # readers are blocked: hanging while the store is opened counts as a death. `serve` cancels it
                signal.setitimer(signal.ITIMER_REAL, _REOPEN_S)
            hand_over = partial(_hand_over, theirs)
            os._exit(serve(spec, report, lifeline, on_mounted=hand_over, device=device, restarts=restarts))
        theirs.close()
        if report >= 0:
            os.close(report)  # only the child keeps it: its death must show as end-of-file on the pipe
            report = -1
        with ours:
            device, status, stop_requested = _watch(child, ours, wake, device)
        if stop_requested or not os.WIFSIGNALED(status) or device is None:
            return os.waitstatus_to_exitcode(status) & 0xFF
        now = time.monotonic()
        deaths.append(now)
        died = f"the process that serves {spec.label} was killed by signal {os.WTERMSIG(status)}"
        if len(deaths) == _DEATHS and now - deaths[0] < _WITHIN_S:
            _LOG.error("%s, death %d in %g s: its readers get errors", died, _DEATHS, now - deaths[0])
            return 1
        _LOG.warning("%s: restarting it", died)
        restarts += 1


def _hand_over(link: socket.socket, device: int) -> None:
    socket.send_fds(link, [_READY], [device])


def _watch(child: int, link: socket.socket, wake: socket.socket, device: int | None) -> tuple[int | None, int, bool]:
    """Wait for the child's end: the FUSE descriptor, if any, the wait status, and whether a stop was requested."""
    stop_requested = False
    handle = os.pidfd_open(child)
    watched: list[int | socket.socket] = [handle, link, wake]
    try:
        while True:
            ready = readable(watched)
            if wake in ready:
                wake.recv(64)
                stop_requested = True
                os.kill(child, signal.SIGTERM)
            if link in ready:
                watched.remove(link)
                with contextlib.suppress(OSError):  # the child died in between
                    _, numbers, _, _ = socket.recv_fds(link, 1, 1)
                    signal.setitimer(signal.ITIMER_REAL, 0)  # it serves: cancel the time limit of the start
                    if device is None and numbers:
                        device = numbers[0]
            if handle in ready:
                return device, os.waitpid(child, 0)[1], stop_requested
    finally:
        os.close(handle)

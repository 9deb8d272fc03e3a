"""Run a function in a forked child process: for store clients that a fork would break, and beside this process.

The clients of object stores and of HDFS have threads for as long as the process lives. A mount daemon forked from this
process would inherit their locks without these threads. So requests to such a store before the fork are made by a
child, which leaves the results in the node's cache.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bootseer.errors import BootseerError, TransientError, as_message, from_message
from bootseer.io.proc import end_child
from bootseer.mounts.process import die_with, drop_descriptors, json_lines, send_line

DEADLINE_S = 300.0
"""More than the deadlines of all requests together: only for a client that hangs."""
_MAX_BYTES = 64 << 20


def breaks_forks(uri: str | None) -> bool:
    """Whether the client of this store must not be used before a fork."""
    return (uri or "").partition("://")[0] in ("s3", "gs", "az", "hdfs", "viewfs")


class Child(NamedTuple):
    """A child process and the pipe of its answer, for `result_of`."""

    pid: int
    answer: int


def run_in_child(
    work: Callable[[], Any], *, deadline_s: float = DEADLINE_S, waiting: Callable[[], None] = lambda: None
) -> Any:
    """The result of `work` in a child process, passed as JSON. Raises the `BootseerError` that it raised.

    `waiting` is called twice a second. The child is killed after `deadline_s` seconds: `TransientError`.
    """
    return result_of(start_child(work), deadline_s=deadline_s, waiting=waiting)


def start_child(work: Callable[[], Any], *, alone: bool = False) -> Child:
    """Start `work` in a child process. Raises `OSError`.

    `alone`: it runs beside this process, which may never ask for its result. It ends with this process and by the
    default action of each signal, and has none of its descriptors.
    """
    answer, report = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os.close(answer)
        os.close(report)
        raise
    if pid == 0:
        _run_and_report(work, report, parent if alone else 0)
    os.close(report)
    return Child(pid, answer)


def result_of(child: Child, *, deadline_s: float = DEADLINE_S, waiting: Callable[[], None] = lambda: None) -> Any:
    """The result of a started child, as for `run_in_child`. Call it once."""
    # Its pid may be that of another process, if it has ended and was reaped by a wait for any child.
    has_ended = False
    try:
        said: dict[str, Any] = next(json_lines(child.answer, time.monotonic() + deadline_s, waiting, _MAX_BYTES), {})
        has_ended = True
    except TimeoutError:
        raise TransientError(
            f"the child process that accesses the store has no result after {deadline_s:g} s"
        ) from None
    finally:
        os.close(child.answer)
        end_child(child.pid, kill=not has_ended)
    if "error" in said:
        raise from_message(said)
    if "found" not in said:
        raise TransientError("the child process that accesses the store ended without a result")
    return said["found"]


def _run_and_report(work: Callable[[], Any], report: int, parent: int) -> None:
    try:
        signal.set_wakeup_fd(-1)  # inherited: a signal of this child would wake the parent
        if parent:
            _separate(report, parent)
        said = {"found": work()}
    except BootseerError as error:
        said = as_message(error)
    except BaseException as error:  # must not continue in the parent's code
        said = as_message(TransientError(f"{type(error).__name__}: {error}"))
    try:
        send_line(report, said)
    finally:
        os._exit(0)


def _separate(report: int, parent: int) -> None:
    die_with(parent)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    drop_descriptors(Path(os.devnull), lambda number: number != report)

"""Run a function in a forked child process, for store clients that a fork would break.

The clients of object stores and of HDFS have threads for as long as the process lives. A mount daemon forked from this
process would inherit their locks without these threads. So requests to such a store before the fork are made by a
child, which leaves the results in the node's cache.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from bootseer.errors import BootseerError, TransientError, as_message, from_message
from bootseer.io.proc import end_child
from bootseer.mounts.process import json_lines, send_line

DEADLINE_S = 300.0
"""More than the deadlines of all requests together: only for a client that hangs."""
_MAX_BYTES = 64 << 20


def breaks_forks(uri: str | None) -> bool:
    """Whether the client of this store must not be used before a fork."""
    return (uri or "").partition("://")[0] in ("s3", "gs", "az", "hdfs", "viewfs")


def run_in_child(
    work: Callable[[], Any], *, deadline_s: float = DEADLINE_S, waiting: Callable[[], None] = lambda: None
) -> Any:
    """The result of `work` in a child process, passed as JSON. Raises the `BootseerError` that it raised.

    `waiting` is called twice a second. The child is killed after `deadline_s` seconds: `TransientError`.
    """
    answer, report = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _run_and_report(work, report)
    os.close(report)
    try:
        said: dict[str, Any] = next(json_lines(answer, time.monotonic() + deadline_s, waiting, _MAX_BYTES), {})
    except TimeoutError:
        raise TransientError(
            f"the child process that accesses the store has no result after {deadline_s:g} s"
        ) from None
    finally:
        os.close(answer)
        end_child(pid)
    if "error" in said:
        raise from_message(said)
    if "found" not in said:
        raise TransientError("the child process that accesses the store ended without a result")
    return said["found"]


def _run_and_report(work: Callable[[], Any], report: int) -> None:
    try:
        signal.set_wakeup_fd(-1)  # inherited: a signal of this child would wake the parent
        said = {"found": work()}
    except BootseerError as error:
        said = as_message(error)
    except BaseException as error:  # must not continue in the parent's code
        said = as_message(TransientError(f"{type(error).__name__}: {error}"))
    try:
        send_line(report, said)
    finally:
        os._exit(0)

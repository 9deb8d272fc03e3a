"""Do something in a process of its own, for clients of stores that a fork would break.

The clients of object stores and of HDFS run threads of their own for as long as the process lives. A mount daemon is
forked from this process, and would inherit their locks without their threads. So whatever must be asked of such a store
before the fork is asked by a child, which leaves its answers in the node's cache.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from bootseer import errors
from bootseer.errors import BootseerError, TransientError
from bootseer.mounts.process import end_child

DEADLINE_S = 300.0
"""More than all deadlines of what is asked for together: only for a client that hangs."""
_MAX_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
_END_S = 10.0


def breaks_forks(uri: str | None) -> bool:
    """Whether the client of this store must not be used before a fork."""
    return (uri or "").partition("://")[0] in ("s3", "gs", "az", "hdfs")


def run_in_child(work: Callable[[], Any], *, deadline_s: float = DEADLINE_S) -> Any:
    """What `work` gives in a child process, as JSON has it. Raises the `BootseerError` that it raised.

    `TransientError` after `deadline_s` seconds: the child is killed then.
    """
    answer, report = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _work(work, report)
    os.close(report)
    try:
        result = _hear(answer, deadline_s)
        status = end_child(pid, _END_S, kill=False)
    except BaseException:
        end_child(pid)
        raise
    found, kind, message = json.loads(result) if result else (None, "", "")
    if kind:
        error = getattr(errors, kind, None)
        raise (error if isinstance(error, type) and issubclass(error, BootseerError) else BootseerError)(message)
    if status is None:
        end_child(pid)
        raise TransientError(f"the process that asked the store has answered, and not ended for {_END_S:g} s")
    if status:
        raise TransientError(f"the process that asked the store ended with status {status}")
    return found


def _hear(answer: int, deadline_s: float) -> bytes:
    """What the child says until it ends."""
    result, end = b"", time.monotonic() + deadline_s
    with os.fdopen(answer, "rb", buffering=0) as pipe:
        while len(result) < _MAX_BYTES:
            if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TransientError(f"the process that asked the store has not answered for {deadline_s:g} s")
            piece = pipe.read(_PIECE_BYTES)
            if not piece:
                break
            result += piece
    return result


def _work(work: Callable[[], Any], report: int) -> None:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        result = [work(), "", ""]
        code = 0
    except BaseException as error:  # nothing may unwind into the parent's code
        kind = type(error).__name__ if isinstance(error, BootseerError) else "TransientError"
        message = str(error) if isinstance(error, BootseerError) else f"{type(error).__name__}: {error}"
        result = [None, kind, message[:4000]]
    try:
        with os.fdopen(report, "wb") as pipe:
            pipe.write(json.dumps(result).encode())
    finally:
        os._exit(code)

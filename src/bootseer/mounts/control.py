"""Control socket of a mount daemon: one JSON line as a request, one JSON line as the response, over a Unix socket.

The socket lies in a folder that only its user may enter.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bootseer.errors import BootseerError, NotFoundError, PermanentError, TransientError
from bootseer.mounts.process import json_lines

NAME = "control"
LOG = "log"
FILES = "files"
"""What else lies in the folder: the daemon's log, and its mount point."""
_MAX_LINE = 65_536
_PATIENCE_S = 2.0
"""How long the daemon waits for a whole question, and for its answer to be taken: it answers one at a time."""
Answer = dict[str, object]


@contextlib.contextmanager
def socket_path(folder: Path, name: str = NAME) -> Iterator[str]:
    """The path of a socket in `folder`, in a form that fits into the 108 bytes of a socket address."""
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{handle}/{name}"
    finally:
        os.close(handle)


def listen(folder: Path) -> socket.socket:
    """A listening socket in `folder`, in the place of one that a dead daemon left."""
    with contextlib.suppress(FileNotFoundError):
        (folder / NAME).unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket_path(folder) as path:
            listener.bind(path)
        (folder / NAME).chmod(0o600)
        listener.listen(16)
    except BaseException:
        listener.close()
        raise
    return listener


def serve_one(listener: socket.socket, answer: Callable[[str], Answer]) -> None:
    """Take one connection and answer its question. Raises neither for the other side's doing nor for `answer`'s."""
    try:
        link, _ = listener.accept()
    except OSError:
        return
    with link:
        until = time.monotonic() + _PATIENCE_S
        try:
            question = str(next(json_lines(link.fileno(), until, max_bytes=_MAX_LINE))["do"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError, StopIteration):
            line = _encoded({"error": "malformed request"})
        else:
            line = _answered(answer, question)
        with contextlib.suppress(OSError):
            link.settimeout(_PATIENCE_S)
            link.sendall(line)


def _answered(answer: Callable[[str], Answer], question: str) -> bytes:
    try:
        return _encoded(answer(question))
    except BootseerError as error:
        return _encoded({"error": str(error)})
    except Exception as error:  # a question that goes wrong must not end what others read from
        return _encoded({"error": f"{type(error).__name__}: {error}"})


def _encoded(reply: Answer) -> bytes:
    return json.dumps(reply).encode() + b"\n"


def ask(folder: Path, request: str, *, timeout_s: float = 5.0, waiting: Callable[[], None] = lambda: None) -> Answer:
    """Ask the daemon of `folder`. `waiting` is called twice a second until it answers.

    Raises `NotFoundError` when none answers, `TransientError` after `timeout_s`, `PermanentError` for a refusal.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with link:
        link.settimeout(timeout_s)
        until = time.monotonic() + timeout_s
        try:
            with socket_path(folder) as path:
                link.connect(path)
            link.sendall(_encoded({"do": request}))
            reply = next(json_lines(link.fileno(), until, waiting))
        except TimeoutError as error:
            raise TransientError(f"the mount daemon of {folder} did not answer in {timeout_s:g} s") from error
        except (OSError, ValueError, StopIteration) as error:
            raise NotFoundError(f"the mount daemon of {folder} does not run") from error
    if not isinstance(reply, dict):
        raise PermanentError(f"the mount daemon of {folder} sent a malformed response")
    if "error" in reply:
        raise PermanentError(str(reply["error"]))
    return reply

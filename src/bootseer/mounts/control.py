"""Control socket of a mount daemon: one JSON line as request, one as response, over a Unix socket in a 0700 folder."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bootseer.errors import NotFoundError, PermanentError, TransientError, as_message
from bootseer.mounts.process import json_lines

NAME = "control"
LOG = "log"
FILES = "files"
"""Other names in the daemon's folder: its log, and its mount point."""
_MAX_LINE = 65_536
_CLIENT_TIMEOUT_S = 2.0
"""Limit for receiving a request and for sending its response: the daemon serves one client at a time."""
Answer = dict[str, object]


@contextlib.contextmanager
def socket_path(folder: Path, name: str = NAME) -> Iterator[str]:
    """A path of a socket in `folder` that fits into the 108 bytes of a socket address, however long `folder` is."""
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{handle}/{name}"
    finally:
        os.close(handle)


def listen(folder: Path, name: str = NAME) -> socket.socket:
    """Listen on a socket in `folder`, replacing one that a dead process left. Raises `OSError`."""
    (folder / name).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket_path(folder, name) as path:
            listener.bind(path)
        (folder / name).chmod(0o600)
        listener.listen(16)
    except BaseException:
        listener.close()
        raise
    return listener


def serve_one(listener: socket.socket, handle: Callable[[str], Answer]) -> None:
    """Accept one connection and answer its request. Errors of the client and of `handle` go into the response."""
    try:
        link, _ = listener.accept()
    except OSError:
        return
    with link:
        until = time.monotonic() + _CLIENT_TIMEOUT_S
        try:
            request = str(next(json_lines(link.fileno(), until, max_bytes=_MAX_LINE))["do"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError, StopIteration):
            response = _encode({"error": "malformed request"})
        else:
            try:
                response = _encode(handle(request))
            except Exception as error:  # a failed request must not end the daemon that others read from
                response = _encode(as_message(error))
        with contextlib.suppress(OSError):
            link.settimeout(_CLIENT_TIMEOUT_S)
            link.sendall(response)


def _encode(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def send_request(
    folder: Path, request: str, *, timeout_s: float = 5.0, waiting: Callable[[], None] = lambda: None
) -> Answer:
    """The response of the daemon of `folder`. `waiting` is called twice a second until it comes.

    Raises `NotFoundError` when no daemon listens, `TransientError` after `timeout_s`, `PermanentError` for a refusal.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with link:
        link.settimeout(timeout_s)
        until = time.monotonic() + timeout_s
        try:
            with socket_path(folder) as path:
                link.connect(path)
            link.sendall(_encode({"do": request}))
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

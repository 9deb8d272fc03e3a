"""Search the command's output for a pattern (`--began-pattern`), for frameworks whose first step shows only in a log.

The command writes into a pipe, or into a pseudo terminal where it had a terminal, and every byte is forwarded at once
and unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import pty
import re
import select
import signal
import struct
import termios
import threading
import time
import tty
from collections.abc import Callable

from bootseer.launch.supervise import ENDING, say

_READ_BYTES = 1 << 16
_KEEP_BYTES = 1 << 12
"""A line is searched once its newline has come; of a longer line only this many last bytes are."""
_SLOW_S = 0.5
_POLL_S = 0.05


class Relay:
    """Stands between the command and one of our output descriptors."""

    def __init__(self, target: int, pattern: re.Pattern[bytes], on_found: Callable[[], None]) -> None:
        """Begins to forward. Raises `OSError` without descriptors, and `RuntimeError` without a thread."""
        self._target = target
        self._pattern: re.Pattern[bytes] | None = pattern
        self._on_found = on_found
        self._is_forwarding = False
        self._num_forwarded = 0
        if os.isatty(target):
            self._read, self.write = pty.openpty()
            tty.setraw(self.write)  # the real terminal does the line editing
            self.resize()
        else:
            self._read, self.write = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"relay-{target}", daemon=True)
        self._thread.start()

    def resize(self) -> None:
        """Give the pseudo terminal the size of the real one."""
        with contextlib.suppress(OSError):  # no terminal, or the command has ended
            fcntl.ioctl(self._read, termios.TIOCSWINSZ, fcntl.ioctl(self._target, termios.TIOCGWINSZ, b"\0" * 8))

    def release(self) -> None:
        """The command has been started: close this process's copy of the write end."""
        os.close(self.write)

    def finish(self, deadline_s: float) -> None:
        """Wait until everything is forwarded, or a signal asks for the end.

        A daemon may keep the pipe open, and write without end: from `deadline_s` of the monotonic clock on, only output
        that is there at that time is waited for, as a slow reader may not have taken it yet.
        """
        last = math.inf
        while self._thread.is_alive() and (time.monotonic() < deadline_s or self._is_behind()):
            if self._num_forwarded >= last or ENDING.intersection(signal.sigpending()):
                return
            if last == math.inf and time.monotonic() >= deadline_s:
                # The pipe first: what the thread takes from it meanwhile is counted twice, not missed.
                last = self._num_waiting() + self._num_forwarded + _READ_BYTES
            self._thread.join(_POLL_S)

    def _is_behind(self) -> bool:
        # In this order: the thread sets the flag before it takes data from the pipe.
        return self._num_waiting() > 0 or self._is_forwarding

    def _num_waiting(self) -> int:
        with contextlib.suppress(OSError):
            return int(struct.unpack("=i", fcntl.ioctl(self._read, termios.FIONREAD, bytes(4)))[0])
        return 0

    def _run(self) -> None:
        try:
            self._forward()
        finally:
            os.close(self._read)  # if the reader has gone, the command's next write gets EPIPE, as without the relay

    def _forward(self) -> None:
        rest, poll = b"", select.poll()
        poll.register(self._read, select.POLLIN)
        while True:
            self._is_forwarding = False
            poll.poll()
            self._is_forwarding = True
            try:
                data = os.read(self._read, _READ_BYTES)
            except OSError:  # EIO: the last writer has closed the pseudo terminal
                data = b""
            if not data:
                return
            if not self._write(data):
                return
            self._num_forwarded += len(data)
            if self._pattern is not None:
                *lines, rest = re.split(rb"[\r\n]", rest + data)
                for line in lines:
                    self._search(line[-_KEEP_BYTES:])
                rest = rest[-_KEEP_BYTES:]

    def _write(self, data: bytes) -> bool:
        """Forward data; False when the reader is gone. Data that does not fit on a full disk is lost."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._target, view) :]
            except BlockingIOError:  # another process has set the shared descriptor to non-blocking
                select.select([], [self._target], [])  # without a timeout: the command itself would block as long
            except OSError as error:
                return error.errno not in (errno.EPIPE, errno.EIO)
        return True

    def _search(self, line: bytes) -> None:
        if self._pattern is None:
            return
        began_s = time.monotonic()
        is_found = self._pattern.search(line)
        took_s = time.monotonic() - began_s
        if is_found:
            self._pattern = None
            try:
                self._on_found()  # without the line, which may hold secrets
            except Exception as error:  # the command's output must continue
                say(f"the begin of training was seen and could not be recorded: {error}")
        elif took_s > _SLOW_S:  # `re` holds the GIL: the next line might block the whole process for hours
            self._pattern = None
            say(f"--began-pattern took {took_s:.1f} s for one line and is no longer searched for; simplify it")

"""Watch the command's output for a pattern, for frameworks whose first step only a log line tells.

Only used when the user asks for it (`--began-pattern`): the command then writes into a pipe, or into a pseudo terminal
where it had a terminal, and every byte is passed on at once and unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import re
import select
import signal
import termios
import threading
import time
import tty
from collections.abc import Callable

from bootseer.launch.supervise import say

_READ_BYTES = 1 << 16
_KEEP_BYTES = 1 << 12
"""A line is matched when its newline comes; of a longer one, the last so many bytes are."""
_SLOW_S = 0.5


class Relay:
    """Stands between the command and one of our output descriptors."""

    def __init__(self, target: int, pattern: re.Pattern[bytes], found: Callable[[], None]) -> None:
        self._target = target
        self._pattern: re.Pattern[bytes] | None = pattern
        self._found = found
        self._terminal = os.isatty(target)
        if self._terminal:
            self._read, self.write = pty.openpty()
            tty.setraw(self.write)  # the real terminal behind us does the line editing
            self.resize()
        else:
            self._read, self.write = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._pass_on, name=f"relay-{target}", daemon=True)

    def resize(self) -> None:
        """Give the pseudo terminal the size of the real one."""
        if self._terminal:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(self._target, termios.TIOCGWINSZ, b"\0" * 8)
                fcntl.ioctl(self.write if self.write >= 0 else self._read, termios.TIOCSWINSZ, size)

    def start(self) -> None:
        """Begin to pass on; the command has been started, so that our end for writing is closed."""
        os.close(self.write)
        self.write = -1
        self._thread.start()

    def finish(self, deadline_s: float) -> None:
        """Wait until everything is passed on, to a moment of the monotonic clock: a daemon may keep the pipe open."""
        self._thread.join(max(deadline_s - time.monotonic(), 0))

    def _pass_on(self) -> None:
        line = b""
        while True:
            try:
                data = os.read(self._read, _READ_BYTES)
            except OSError:  # EIO: the last writer has closed the pseudo terminal
                data = b""
            if not data:
                return
            if not self._write(data):
                self._terminal = False
                os.close(self._read)  # the command's next write finds its reader gone, as it would without us
                return
            if self._pattern is not None:
                line = self._match(line + data)

    def _write(self, data: bytes) -> bool:
        """Pass data on; false when its reader is gone. What a full disk does not take is lost."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._target, view) :]
            except BlockingIOError:  # a process that shares the descriptor has made it so
                # For as long as the reader does not read: so long the command itself would be held up without us.
                select.select([], [self._target], [])
            except OSError as error:
                return error.errno not in (errno.EPIPE, errno.EIO)
        return True

    def _match(self, text: bytes) -> bytes:
        *lines, rest = re.split(rb"[\r\n]", text)
        for line in lines:
            self._search(line[-_KEEP_BYTES:])
        return rest[-_KEEP_BYTES:]

    def _search(self, line: bytes) -> None:
        if self._pattern is None:
            return
        began_s = time.monotonic()
        is_found = self._pattern.search(line)
        took_s = time.monotonic() - began_s
        if is_found:
            self._pattern = None
            try:
                self._found()  # without the line, which may hold secrets
            except Exception as error:  # the command's output has to go on
                say(f"the begin of training was seen and could not be written down: {error}")
        elif took_s > _SLOW_S:  # the next line may take hours; nothing else runs meanwhile, as `re` does not give way
            self._pattern = None
            say(f"--began-pattern took {took_s:.1f} s for one line and is not searched for any more; write it simpler")


def follow_window_size(relays: list[Relay]) -> None:
    """Pass changes of the terminal's size on to the pseudo terminals."""

    def changed(signum: int, frame: object) -> None:
        for relay in relays:
            relay.resize()

    if any(os.isatty(fd) for fd in (1, 2)):
        signal.signal(signal.SIGWINCH, changed)

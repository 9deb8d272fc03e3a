"""The device's end of a mount: the reads that wait for an answer, the answers, and the end.

What a mounted tree (`session`) and a mounted file system (`writable_session`) have in common; how requests are taken
from the device and carried out is theirs. Answers may be sent from any thread, in any order.

State: `_waiting` maps the number of a request to the read that is under way. The thread that takes an entry out of it,
which is one step under Python's lock, owns the answer; so there is exactly one.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from bootseer.errors import BootseerError, TransientError
from bootseer.fuse import attach, protocol
from bootseer.fuse.filesystem import Cancel, Data
from bootseer.io.executor import run_reported, show_threads

OnError = Callable[[str], None]
"""Called with a fault, in one line, from any thread."""

GONE = (errno.ENODEV, errno.ECONNABORTED, errno.EBADF)
"""What the device says when the mount has ended."""
JOIN_S = 5.0
"""How long `close` waits until what was unmounted is not in use any more."""
READ_DEADLINE_S = 90.0
"""A read that was not answered by then is an I/O error. The kernel may be told to give up a whole mount for one
request (fs.fuse.max_request_timeout), and a reader should hear of trouble one day."""
LOOK_S = 1.0
"""How often reads that wait are looked after."""
_MAX_ERRNO = 511
"""The kernel refuses an answer with a larger error number, which would leave its caller waiting."""


class Reading:
    """One read on its way: what is called to answer it, with `least` to `length` bytes or an error number."""

    __slots__ = ("begun_s", "cancel", "least", "length", "mounted", "unique")

    def __init__(self, mounted: Mounted[Any], unique: int, least: int, length: int) -> None:
        self.mounted = mounted
        self.unique = unique
        self.least = least
        self.length = length
        self.cancel: Cancel | None = None
        self.begun_s = time.monotonic()

    def __call__(self, result: Data | int) -> None:
        mounted = self.mounted
        if mounted._waiting.pop(self.unique, None) is None:
            return  # answered before, or not waited for any more
        if isinstance(result, int):
            mounted._send_error(self.unique, result)
            return
        size = len(result) if not isinstance(result, memoryview) else result.nbytes
        if not self.least <= size <= self.length:
            mounted._on_error(f"{mounted.target}: a read of {self.length} bytes was answered with {size}")
            mounted._send_error(self.unique, errno.EIO)
            return
        mounted.read_bytes += size
        mounted._send(self.unique, result, size)


R = TypeVar("R", bound=Reading)


class Mounted(Generic[R]):
    """One mount, until `close`, an unmount from outside or the end of the process. `R`: what it knows of a read."""

    def __init__(self, target: Path, device: int, on_error: OnError) -> None:
        self.target = target
        self.requests = 0
        """Requests of all kinds so far. What several threads count, this and the next two, is a close estimate."""
        self.reads = 0
        """Read requests so far."""
        self.read_bytes = 0
        """Bytes handed to the kernel so far."""
        self._device = device
        # Replies hold the mount, so that the number of the descriptor is free again only when none can come.
        weakref.finalize(self, os.close, device)
        self._on_error = on_error
        self._waiting: dict[int, R] = {}
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._give_up_reads, name=f"fuse late {target.name}", daemon=True)
        """Ends reads that are not answered. To be started with the others."""

    @property
    def num_waiting(self) -> int:
        """Reads that were not answered yet."""
        return len(self._waiting)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the mount is gone, however that came; False when it is still there."""
        return self._ended.wait(timeout_s)

    def close(self, *, force: bool = False) -> None:
        """Unmount. Raises `TransientError` while files are in use, unless `force`, which fails their users."""
        if self._ended.is_set():
            return
        try:
            attach.detach(self.target, force=force)
        except BootseerError:
            # Another process unmounted it a moment ago: then the threads that take requests end by themselves.
            if not self._ended.wait(0.1):
                raise
        if not self._ended.wait(JOIN_S) and not force:
            raise TransientError(f"{self.target} is unmounted, but something still uses it")

    def leave(self) -> None:
        """Unmount lazily: it is out of sight at once, and ends with its last user."""
        if not self._ended.is_set():
            attach.detach(self.target, lazy=True)

    def _stop(self) -> None:
        """No requests come any more: stop what is in flight, and let go of the device."""
        self._ended.set()
        for unique in list(self._waiting):
            reading = self._waiting.pop(unique, None)
            if reading is not None and reading.cancel is not None:
                reading.cancel()
        # Not closed: a reply on its way from another thread could then hit a file that was opened since.
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, self._device, inheritable=False)
        os.close(nowhere)

    def _give_up(self, reading: R, number: int) -> bool:
        """Answer a read with an error; False when it was answered already."""
        if self._waiting.pop(reading.unique, None) is None:
            return False
        if reading.cancel is not None:
            run_reported(reading.cancel)
        self._send_error(reading.unique, number)
        return True

    def _give_up_reads(self) -> None:
        while not self._ended.wait(LOOK_S):
            now = time.monotonic()
            for reading in self._waiting.copy().values():
                if reading.begun_s < now - READ_DEADLINE_S:
                    if self._give_up(reading, errno.EIO):
                        problem = f"{self.target}: a read was not answered within {READ_DEADLINE_S:g} s"
                        show_threads(problem)
                        self._on_error(problem)
                elif reading.begun_s < now - LOOK_S and self._is_abandoned(reading):
                    self._give_up(reading, errno.EINTR)

    def _is_abandoned(self, reading: R) -> bool:
        """Whether it is not waited for any more."""
        return False

    def _fail(self, unique: int, number: int) -> None:
        self._waiting.pop(unique, None)
        self._send_error(unique, number)

    def _send_error(self, unique: int, number: int) -> None:
        self._write([protocol.header(unique, 0, number if 0 < number <= _MAX_ERRNO else errno.EIO)])

    def _send(self, unique: int, body: Data, size: int) -> None:
        self._write([protocol.header(unique, size), body])

    def _write(self, parts: list[Data]) -> None:
        try:
            os.writev(self._device, parts)
        except OSError as error:
            # ENOENT: the caller was killed meanwhile. The others: the mount is gone.
            if error.errno != errno.ENOENT and error.errno not in GONE:
                self._on_error(f"{self.target}: cannot answer: {error.strerror}")

"""A mounted file system that can be changed: reads the kernel's requests, asks the file system, sends the answers.

Several threads read requests, each into a buffer of its own, and run the file system's methods, which may wait: as
long as one is idle no other is started, and when all wait another one is, up to a bound. A read may be answered from
any thread, so that none of these has to wait for its data; the thread of a small file's read may fetch them itself.
Who calls: the daemon of `checkpoint.mount`, and the tests. How answers are sent, and how it ends: `mounted`.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from bootseer.fuse import attach, messages, protocol
from bootseer.fuse.dying import is_dying
from bootseer.fuse.filesystem import Caller, FileSystem
from bootseer.fuse.mounted import GONE, Mounted, OnError, Reading
from bootseer.fuse.requests import Request, Requests

READ_AHEAD_KIB = 8 * 1024
"""What the kernel reads ahead of a sequential reader: eight requests, so that several servers work for one reader."""
VALID_S = 1
"""How long the kernel may answer from memory what a name leads to. Opening a file always asks."""
_MAX_THREADS = 256
"""More than the programs of a node that write or publish at the same moment: while so many wait, nobody reads."""
_IDLE_THREADS = 8
_BODY = protocol.IN_HEADER.size


class _Reading(Reading):
    """A read that is looked after: since when, and for which thread."""

    __slots__ = ("thread",)

    def __init__(self, session: WritableSession, unique: int, thread: int, length: int) -> None:
        super().__init__(session, unique, 0, length)
        self.thread = thread


class WritableSession(Mounted[_Reading]):
    """One mount. Made by `mount_writable`; ends by `close`, by an unmount from outside, or with the process."""

    def __init__(self, files: FileSystem, target: Path, device: int, on_error: OnError) -> None:
        super().__init__(target, device, on_error)
        self.writes = 0
        """Write requests so far."""
        self._files = files
        self._requests = Requests(files, VALID_S)
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0

    def start(self) -> None:
        """Begin to answer."""
        self._start_thread()
        self._watch.start()

    def _start_thread(self) -> None:
        with self._lock:
            self._threads += 1
            self._idle += 1
            name = f"fuse {self.target.name} {self._threads}"
        try:
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        except RuntimeError as error:  # no room for another thread: those that are there go on
            with self._lock:
                self._threads -= 1
                self._idle -= 1
            self._on_error(f"{self.target}: {error}")

    def _serve(self) -> None:
        buffer = bytearray(messages.REQUEST_BYTES)
        view = memoryview(buffer)
        try:
            while self._receive(buffer, view):
                pass
        except Exception as error:  # the others go on; a mount with one thread less must say why
            self._on_error(f"{self.target}: a thread has ended: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._threads -= 1
                last = self._threads == 0
            if last:
                self._stop()

    def _receive(self, buffer: bytearray, view: memoryview) -> bool:
        """Take one request and handle it; False when this thread is not needed any more."""
        try:
            received = os.readv(self._device, (buffer,))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EAGAIN, errno.EINTR):
                return True  # the caller was killed before its request came to us
            if error.errno not in GONE:
                self._on_error(f"{self.target}: cannot read requests: {error.strerror}")
            self._ended.set()
            return False
        if received == 0:
            self._ended.set()
            return False
        with self._lock:
            self._idle -= 1
            alone = self._idle == 0 and self._threads < _MAX_THREADS and not self._ended.is_set()
        if alone:
            self._start_thread()
        ended = self._take(buffer, view, received)
        with self._lock:
            surplus = self._idle >= _IDLE_THREADS
            if not surplus:
                self._idle += 1
        if ended:
            self._ended.set()
        return not ended and not surplus

    def _take(self, buffer: bytearray, view: memoryview, received: int) -> bool:
        """Handle one request; True after the last one."""
        self.requests += 1
        head = protocol.IN_HEADER.unpack_from(buffer) if received >= _BODY else (0,)
        if head[0] != received:
            self._on_error(f"{self.target}: the kernel sent a request that is none")
            return False
        _, opcode, unique, node, uid, gid, thread, *_ = head
        body = view[_BODY:received]
        try:
            if opcode == protocol.READ:
                self._read(unique, node, thread, body, view)
            elif opcode == protocol.INTERRUPT:
                self._interrupt(*protocol.INTERRUPT_IN.unpack_from(body))
            elif opcode == protocol.DESTROY:
                self._send(unique, b"", 0)
                return True
            else:
                self.writes += opcode == messages.WRITE
                answer = self._requests.answer(Request(opcode, unique, node, Caller(uid, gid, thread), body))
                if answer is not None:
                    self._send(unique, answer, len(answer))
        except OSError as error:
            self._fail(unique, error.errno or errno.EIO)
        except Exception as error:  # a fault in a file system must not end the mount for all others
            self._on_error(f"{self.target}: request {opcode} of node {node}: {type(error).__name__}: {error}")
            self._fail(unique, errno.EIO)
        return False

    def _read(self, unique: int, node: int, thread: int, body: memoryview, room: memoryview) -> None:
        handle, offset, length = protocol.READ_IN.unpack_from(body)
        self.reads += 1
        reading = _Reading(self, unique, thread, length)
        self._waiting[unique] = reading
        # The request was taken out of its buffer, so that the answer may lie there.
        reading.cancel = self._files.read(node, handle, offset, length, reading, room[:length])

    def _interrupt(self, unique: int) -> None:
        """A caller was hit by a signal. Reads of one that is killed are called off here, or soon, when that shows a
        moment later; what else waits looks for itself, and all the rest comes to its end."""
        reading = self._waiting.get(unique)
        # Of a thread that cannot be seen any signal may be the last.
        if reading is not None and (reading.thread == 0 or is_dying(reading.thread)):
            self._give_up(reading, errno.EINTR)

    def _is_abandoned(self, reading: _Reading) -> bool:
        return is_dying(reading.thread)


def mount_writable(
    files: FileSystem,
    target: Path,
    *,
    label: str = "bootseer",
    read_only: bool = False,
    shared: bool = True,
    on_error: OnError = lambda message: None,
    helper: bool | None = None,
) -> WritableSession:
    """Show `files` on the folder `target`; it answers when this returns. `read_only`: the kernel refuses changes.

    `on_error` hears of faults, in one line each, from any thread. `shared`, `helper`: see `attach`.
    """
    device = attach.attach(target, label=label, helper=helper, writable=not read_only, shared=shared)
    session = WritableSession(files, target, device, on_error)
    session.start()
    attach.widen_read_ahead(target, READ_AHEAD_KIB)
    return session

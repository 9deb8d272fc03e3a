"""A mounted tree: reads the kernel's requests, asks the tree, sends the answers.

One thread reads requests and runs the tree's methods. Answers to reads may come from any thread, in any order, so
that a read that waits for the network holds up no other one. When this process dies the kernel answers all readers
with an error at once; it never makes up data.

State: `_waiting` maps the number of a request to the reply that is due. Whoever takes an entry out of it, which is one
step under Python's lock, owns the answer; so there is exactly one. Who calls: `mounts.lazy` and the tests.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from bootseer.errors import BootseerError, TransientError
from bootseer.fuse import attach, protocol
from bootseer.fuse.tree import Cancel, Data, Entry, Tree

OnError = Callable[[str], None]

_MAX_ERRNO = 511
"""The kernel refuses an answer with a larger error number, which would leave its reader waiting."""
_BODY = protocol.IN_HEADER.size
_GONE = (errno.ENODEV, errno.ECONNABORTED, errno.EBADF)
_JOIN_S = 5.0


class _Reading:
    """One read on its way: what the tree calls to answer it."""

    __slots__ = ("cancel", "length", "session", "unique")

    def __init__(self, session: Session, unique: int, length: int) -> None:
        self.session = session
        self.unique = unique
        self.length = length
        self.cancel: Cancel | None = None

    def __call__(self, result: Data | int) -> None:
        session = self.session
        if session._waiting.pop(self.unique, None) is None:
            return  # answered before, or nobody waits any more
        if isinstance(result, int):
            session._send_error(self.unique, result)
            return
        size = len(result) if not isinstance(result, memoryview) else result.nbytes
        if size != self.length:
            # The kernel would fill what is missing with zeros.
            session._on_error(f"{session.target}: a read of {self.length} bytes was answered with {size}")
            session._send_error(self.unique, errno.EIO)
            return
        session.read_bytes += size
        session._send(self.unique, result, size)


class Session:
    """One mount. Made by `mount`; ends by `close`, by an unmount from outside, or with the process."""

    def __init__(self, tree: Tree, target: Path, device: int, on_error: OnError) -> None:
        self.tree = tree
        self.target = target
        self.requests = 0
        """Requests of all kinds so far."""
        self.reads = 0
        """Read requests so far."""
        self.read_bytes = 0
        """Bytes handed to the kernel so far; several threads add to it, so it is a close estimate."""
        self._device = device
        # Replies hold the session, so that the number of the descriptor is free again only when none can come.
        weakref.finalize(self, os.close, device)
        self._on_error = on_error
        self._waiting: dict[int, _Reading] = {}
        self._folder: tuple[int, Sequence[Entry]] = (0, ())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"fuse {target.name}", daemon=True)

    @property
    def num_waiting(self) -> int:
        """Reads that were not answered yet."""
        return len(self._waiting)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the mount is gone, by whomever; False when it is still there."""
        return self._ended.wait(timeout_s)

    def close(self, *, force: bool = False) -> None:
        """Unmount. Raises `TransientError` while files are in use, unless `force`, which fails their readers."""
        if not self._ended.is_set():
            try:
                attach.detach(self.target, force=force)
            except BootseerError:
                # Somebody else unmounted it a moment ago: then the request loop ends by itself.
                if not self._ended.wait(0.1):
                    raise
            if not self._ended.wait(_JOIN_S) and not force:
                raise TransientError(f"{self.target} is unmounted, but something still reads from it")
        self._thread.join(_JOIN_S if self._ended.is_set() else 0)

    def _serve(self) -> None:
        buffer = bytearray(protocol.REQUEST_BYTES)
        buffers, device, readv = [buffer], self._device, os.readv
        try:
            while True:
                try:
                    received = readv(device, buffers)
                except OSError as error:
                    if error.errno in _GONE:
                        return
                    if error.errno in (errno.ENOENT, errno.EAGAIN, errno.EINTR):
                        continue  # the reader was killed before its request came to us
                    self._on_error(f"{self.target}: cannot read requests: {error.strerror}")
                    return
                if received == 0 or not self._take(buffer, received):
                    return
        finally:
            self._stop()

    def _stop(self) -> None:
        """Nobody asks any more: stop what is under way, and let go of the device."""
        self._ended.set()
        for unique in list(self._waiting):
            reading = self._waiting.pop(unique, None)
            if reading is not None and reading.cancel is not None:
                reading.cancel()
        # Not closed: a reply on its way from another thread could then hit a file that was opened since.
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, self._device, inheritable=False)
        os.close(nowhere)

    def _take(self, buffer: bytearray, received: int) -> bool:
        """Handle one request; False after the last one."""
        self.requests += 1
        request = protocol.parse_request(buffer, received)
        if request is None:
            self._on_error(f"{self.target}: the kernel sent a request that is none")
            return True
        opcode, unique, inode, end = request
        try:
            if opcode == protocol.READ:
                self._read(buffer, unique, inode)
            elif opcode == protocol.INTERRUPT:
                self._interrupt(*protocol.INTERRUPT_IN.unpack_from(buffer, _BODY))
            elif opcode in (protocol.FORGET, protocol.BATCH_FORGET):
                pass  # inodes are numbers of the tree, there is nothing to drop; no answer is expected
            else:
                answer = self._answer(opcode, inode, memoryview(buffer)[_BODY:end])
                if isinstance(answer, int):
                    self._send_error(unique, answer)
                else:
                    self._send(unique, answer, len(answer))
        except OSError as error:
            self._fail(unique, error.errno or errno.EIO)
        except Exception as error:  # a fault in a tree must not end the mount for all others
            self._on_error(f"{self.target}: request {opcode} of inode {inode}: {type(error).__name__}: {error}")
            self._fail(unique, errno.EIO)
        return opcode != protocol.DESTROY

    def _read(self, buffer: bytearray, unique: int, inode: int) -> None:
        _, offset, length = protocol.READ_IN.unpack_from(buffer, _BODY)
        self.reads += 1
        length = min(length, self.tree.attributes(inode).size - offset)
        if length <= 0:
            self._send(unique, b"", 0)
            return
        reading = _Reading(self, unique, length)
        self._waiting[unique] = reading
        # INTERRUPT comes in on this very thread, so that nobody looks for the cancel before it is stored.
        reading.cancel = self.tree.read(inode, offset, length, reading)

    def _interrupt(self, unique: int) -> None:
        reading = self._waiting.pop(unique, None)
        if reading is None:
            return  # the answer was faster
        if reading.cancel is not None:
            reading.cancel()
        self._send_error(unique, errno.EINTR)

    def _answer(self, opcode: int, inode: int, body: memoryview) -> bytes | int:  # noqa: PLR0911 - one per request
        tree = self.tree
        match opcode:
            case protocol.LOOKUP:
                return protocol.entry_out(tree.lookup(inode, protocol.parse_name(body)))
            case protocol.GETATTR:
                return protocol.attr_out(tree.attributes(inode))
            case protocol.READDIR:
                return self._list(inode, body)
            case protocol.READLINK:
                return tree.readlink(inode)
            case protocol.GETXATTR:
                value = tree.xattrs(inode).get(protocol.parse_name(body[protocol.XATTR_IN.size :]))
                return errno.ENODATA if value is None else self._xattr(body, value)
            case protocol.LISTXATTR:
                return self._xattr(body, b"".join(name + b"\0" for name in sorted(tree.xattrs(inode))))
            case protocol.STATFS:
                return protocol.statfs_out(*tree.total())
            case protocol.INIT:
                return protocol.init_out(protocol.Hello(*protocol.INIT_IN.unpack_from(body)))
            case protocol.DESTROY:
                return b""
            case _:
                # For OPEN and OPENDIR this says that there is no need to ask: data and names stay in the kernel's
                # cache, and opening a file costs no request. Everything else is what a read-only tree cannot do.
                return errno.ENOSYS

    def _list(self, inode: int, body: memoryview) -> bytes:
        _, start, room = protocol.READ_IN.unpack_from(body)
        if start == 0 or self._folder[0] != inode:
            self._folder = (inode, self.tree.entries(inode))
        return protocol.directory(self._folder[1], start, room)

    @staticmethod
    def _xattr(body: memoryview, value: bytes) -> bytes | int:
        room, _ = protocol.XATTR_IN.unpack_from(body)
        if room == 0:
            return protocol.xattr_size_out(len(value))
        return value if len(value) <= room else errno.ERANGE

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
            # ENOENT: the reader was killed meanwhile. The others: the mount is gone.
            if error.errno != errno.ENOENT and error.errno not in _GONE:
                self._on_error(f"{self.target}: cannot answer: {error.strerror}")


def mount(
    tree: Tree,
    target: Path,
    *,
    label: str = "bootseer",
    on_error: OnError = lambda message: None,
    helper: bool | None = None,
) -> Session:
    """Show `tree` on the folder `target`; it answers when this returns.

    `on_error` hears of faults, in one line each, from any thread. `helper`: see `attach`.
    """
    device = attach.attach(target, label=label, helper=helper)
    session = Session(tree, target, device, on_error)
    session._thread.start()
    attach.widen_read_ahead(target)
    return session


def showing(tree: Tree) -> Callable[[Path, str, OnError], Session]:
    """`mount`, for a daemon that knows nothing of trees: called with a folder, a label and who hears of faults."""

    def show(target: Path, label: str, on_error: OnError) -> Session:
        return mount(tree, target, label=label, on_error=on_error)

    return show

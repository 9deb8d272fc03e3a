"""A mounted tree or file system: reads the kernel's requests, calls the handler, and sends the answers.

Threads read requests, each into its own buffer, and call the handler: one thread for a read-only tree, whose methods do
not block; several for a writable file system, where a new thread is started whenever no other one is idle, up to a
limit. Reads may be answered from any thread and in any order, so one that waits for the network blocks no other. When
this process dies, the kernel fails all requests at once; it never invents data.

Why answers need no lock although any thread may give them: `_pending` maps request numbers to unanswered reads, and
`dict.pop` is atomic under the GIL. An answer, an interrupt, a timeout and the unmount may race for a read; the one
whose `pop` returns it sends the answer, so that the kernel gets exactly one.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bootseer.errors import BootseerError, PermanentError, TransientError, os_errors_as
from bootseer.fuse import attach, protocol
from bootseer.fuse.filesystem import Caller, Cancel, Data, FileSystem, Listed, Space, Tree
from bootseer.fuse.requests import FileRequests, Request
from bootseer.io.executor import run_reported, show_threads
from bootseer.io.proc import is_dying

OnError = Callable[[str], None]
"""Called with an error as one line, from any thread."""

_UNMOUNTED = (errno.ENODEV, errno.ECONNABORTED, errno.EBADF)
"""Errors of the device after the unmount."""
JOIN_S = 5.0
"""How long `close` waits for the remaining users of the mount."""
READ_DEADLINE_S = 90.0
"""A read not answered by then fails with an I/O error: readers should get an error eventually, and the kernel may be
configured to abort a whole mount for one late request (fs.fuse.max_request_timeout)."""
CHECK_S = 1.0
"""Interval of checks for late reads and dead callers."""
_MAX_ERRNO = 511
"""The kernel rejects answers with larger error numbers, and the caller would keep waiting."""
_IDLE_THREADS = 8
_TREE_READ_AHEAD_KIB = protocol.MAX_READ // 1024
"""The kernel's read-ahead for a sequential reader: one full request."""
_FILES_READ_AHEAD_KIB = 8 * _TREE_READ_AHEAD_KIB
"""For a writable file system eight, so that several servers work for one reader."""
_BODY = protocol.IN_HEADER.size


class TreeRequests:
    """A read-only tree, called from one thread: its methods do not block."""

    request_bytes = protocol.REQUEST_BYTES
    max_threads = 1

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._folder: tuple[int, Sequence[Listed]] = (0, ())

    def read(
        self, answer: KernelRead, node: int, handle: int, offset: int, size: int, room: memoryview
    ) -> Cancel | None:
        """Begin a read that `answer` completes; returns a function that cancels it."""
        size = max(min(size, self._tree.attributes(node).size - offset), 0)
        # The kernel would fill missing bytes with zeros: a shorter answer is an error.
        answer.min_length = answer.length = size
        if not size:
            answer(b"")
            return None
        # INTERRUPT is handled by this same thread, so it cannot miss a `cancel` that is not stored yet.
        return self._tree.read(node, offset, size, answer)

    def answer(self, request: Request) -> bytes | int | None:  # noqa: PLR0911 - one per request
        tree, inode, body = self._tree, request.node, request.body
        match request.opcode:
            case protocol.FORGET | protocol.BATCH_FORGET:
                return None  # inode numbers need no references; no answer is expected
            case protocol.LOOKUP:
                found = tree.lookup(inode, protocol.parse_name(body))
                return protocol.entry_out(found.inode if found else 0, found)
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
                size_bytes, num_files = tree.total()
                return protocol.statfs_out(Space(size_bytes, 0), protocol.PAGE, num_files)
            case protocol.INIT:
                return protocol.init_out(body)
            case protocol.DESTROY:
                return b""
            case _:
                # For OPEN and OPENDIR this tells the kernel not to ask again: data and names stay in its cache, and
                # opening a file costs no request. Everything else is not supported by a read-only tree.
                return errno.ENOSYS

    def _list(self, inode: int, body: memoryview) -> bytes:
        _, start, room = protocol.READ_IN.unpack_from(body)
        if start == 0 or self._folder[0] != inode:
            self._folder = (inode, self._tree.entries(inode))
        return protocol.directory(self._folder[1], start, room)

    @staticmethod
    def _xattr(body: memoryview, value: bytes) -> bytes | int:
        room, _ = protocol.XATTR_IN.unpack_from(body)
        if room == 0:
            return protocol.SIZE_OUT.pack(len(value), 0)
        return value if len(value) <= room else errno.ERANGE


@dataclass(slots=True, eq=False)
class KernelRead:
    """An unanswered read; call it with the answer (`filesystem.Reply`): `min_length` to `length` bytes, or an error."""

    session: Session
    unique: int
    thread: int
    length: int
    min_length: int = 0
    cancel: Cancel | None = None
    begun_s: float = field(default_factory=time.monotonic)

    def __call__(self, result: Data | int | BootseerError) -> None:
        session = self.session
        if session._pending.pop(self.unique, None) is None:
            return  # answered before, or cancelled
        if isinstance(result, BootseerError):
            session._on_error(str(result))
            result = errno.EIO
        if isinstance(result, int):
            session._send_error(self.unique, result)
            return
        size = len(result) if not isinstance(result, memoryview) else result.nbytes
        if not self.min_length <= size <= self.length:
            session._on_error(f"{session.target}: a read of {self.length} bytes was answered with {size}")
            session._send_error(self.unique, errno.EIO)
            return
        session.read_bytes += size
        session._send(self.unique, result, size)


class Session:
    """One mount, until `close`, an external unmount, or the end of the process."""

    def __init__(self, handler: TreeRequests | FileRequests, target: Path, device: int, on_error: OnError) -> None:
        self.target = target
        self.requests = 0
        """Requests of all kinds so far. This and the next two are approximate if several threads count."""
        self.reads = 0
        """Read requests so far."""
        self.read_bytes = 0
        """Bytes sent to the kernel so far."""
        self._handler = handler
        self.device = device
        """The descriptor that requests arrive on."""
        # Replies reference the session, so the descriptor is closed, and its number reused, only after the last reply.
        weakref.finalize(self, os.close, device)
        self._on_error = on_error
        self._pending: dict[int, KernelRead] = {}
        self._ended = threading.Event()
        self._is_detached = False
        """Whether it is gone from its folder. Another mount namespace may have a copy that is in use, and the folder
        another mount."""
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0

    @property
    def num_pending(self) -> int:
        """Unanswered reads."""
        return len(self._pending)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the unmount, however it happens; False if it is still mounted after the timeout."""
        return self._ended.wait(timeout_s)

    def resend(self) -> None:
        """Ask the kernel to send again all requests that a dead process had read and not answered.

        Call it before `start`. Raises `PermanentError` if the kernel does not support it (before Linux 6.9).
        """
        with os_errors_as(PermanentError, f"{self.target}: the kernel cannot resend requests, which needs Linux 6.9"):
            os.writev(self.device, [protocol.OUT_HEADER.pack(protocol.OUT_HEADER.size, protocol.NOTIFY_RESEND, 0)])

    def start(self) -> None:
        """Start to answer requests, and to fail late ones. Without a thread, unmounts and raises `TransientError`."""
        if not self._start_thread():
            self._stop()
            attach.detach(self.target, lazy=True)
            raise TransientError(f"{self.target}: no thread can be started to serve the kernel's requests")
        threading.Thread(target=self._check_pending, name=f"fuse late {self.target.name}", daemon=True).start()

    def close(self, *, force: bool = False) -> None:
        """Unmount. Raises `TransientError` while files are in use; with `force`, their users get errors instead."""
        if not self._ended.is_set():
            if not self._is_detached:
                try:
                    attach.detach(self.target, force=force)
                    self._is_detached = True
                except BootseerError:
                    # Another process may have unmounted it a moment ago: then the reading threads end by themselves.
                    if not self._ended.wait(0.1):
                        raise
            if not self._ended.wait(JOIN_S) and not force:
                raise TransientError(f"{self.target} is unmounted, but something still uses it")
        if self._ended.is_set() and self._handler.max_threads == 1:
            self._stopped.wait(JOIN_S)

    def detach(self) -> None:
        """Unmount lazily: it disappears at once, and ends with its last user."""
        if not self._ended.is_set() and not self._is_detached:
            attach.detach(self.target, lazy=True)
            self._is_detached = True

    # Threads that read requests

    def _start_thread(self) -> bool:
        with self._lock:
            self._threads += 1
            self._idle += 1
            name = f"fuse {self.target.name} {self._threads}"
        try:
            threading.Thread(target=self._serve, name=name, daemon=True).start()
        except RuntimeError as error:  # thread limit: the existing threads go on
            with self._lock:
                self._threads -= 1
                self._idle -= 1
            self._on_error(f"{self.target}: {error}")
            return False
        return True

    def _serve(self) -> None:
        buffer = bytearray(self._handler.request_bytes)
        view, buffers, readv = memoryview(buffer), (buffer,), os.readv
        try:
            while True:
                try:
                    received = readv(self.device, buffers)
                except OSError as error:
                    if error.errno in (errno.ENOENT, errno.EAGAIN, errno.EINTR):
                        continue  # the caller was killed before the request was read
                    if error.errno not in _UNMOUNTED:
                        self._on_error(f"{self.target}: cannot read requests: {error.strerror}")
                    received = 0
                if received == 0:
                    self._ended.set()
                    return
                if not self._handle_in_pool(view, received):
                    return
        except Exception as error:  # the other threads go on
            self._on_error(f"{self.target}: a thread has ended: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._threads -= 1
                last = self._threads == 0
            if last:
                self._stop()

    def _handle_in_pool(self, view: memoryview, received: int) -> bool:
        """Handle one request while another thread reads the next; False if this thread is not needed any more."""
        if self._handler.max_threads == 1:
            ended = self._handle(view, received)
            surplus = False
        else:
            with self._lock:
                self._idle -= 1
                alone = self._idle == 0 and self._threads < self._handler.max_threads and not self._ended.is_set()
            if alone:
                self._start_thread()
            ended = self._handle(view, received)
            with self._lock:
                surplus = self._idle >= _IDLE_THREADS
                if not surplus:
                    self._idle += 1
        if ended:
            self._ended.set()
        return not ended and not surplus

    def _handle(self, view: memoryview, received: int) -> bool:
        self.requests += 1
        head = protocol.IN_HEADER.unpack_from(view) if received >= _BODY else (-1,)
        if head[0] != received:
            self._on_error(f"{self.target}: malformed FUSE request")
            return False
        _, opcode, unique, node, uid, gid, thread, *_ = head
        try:
            if opcode == protocol.READ:
                handle, offset, length = protocol.READ_IN.unpack_from(view, _BODY)
                self.reads += 1
                reading = KernelRead(self, unique, thread, length)
                self._pending[unique] = reading
                # The request is parsed: its buffer may hold the answer now.
                reading.cancel = self._handler.read(reading, node, handle, offset, length, view)
            elif opcode == protocol.INTERRUPT:
                self._interrupt(*protocol.INTERRUPT_IN.unpack_from(view, _BODY))
            else:
                answer = self._handler.answer(Request(opcode, node, Caller(uid, gid, thread), view[_BODY:received]))
                if isinstance(answer, int):
                    self._send_error(unique, answer)
                elif answer is not None:
                    self._send(unique, answer, len(answer))
        except OSError as error:
            self._fail(unique, error.errno or errno.EIO)
        except Exception as error:  # a bug in a file system must not end the mount for all others
            self._on_error(f"{self.target}: request {opcode} of node {node}: {type(error).__name__}: {error}")
            self._fail(unique, errno.EIO)
        return bool(opcode == protocol.DESTROY)

    def _stop(self) -> None:
        """No more requests will come: cancel pending reads, and release the device."""
        self._ended.set()
        for unique in list(self._pending):
            reading = self._pending.pop(unique, None)
            if reading is not None and reading.cancel is not None:
                reading.cancel()
        # Redirected, not closed: a late reply of another thread must not hit a file opened under the same number.
        devnull = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(devnull, self.device, inheritable=False)
        os.close(devnull)
        self._stopped.set()

    # Interrupted and late reads

    def _interrupt(self, unique: int) -> None:
        """A caller got a signal: cancel its read if that kills it, which may become visible a moment later
        (`_check_pending`): the kernel tells the first signal only, whether or not it ends the process. A caller that
        goes on must not see EINTR: a page fault would turn it into SIGBUS, and the kernel reads inodes of EROFS in the
        same way, and would pass it on as the result of stat(2), open(2) or execve(2)."""
        reading = self._pending.get(unique)
        if reading is None:
            return  # answered already
        # For a thread that is not visible in /proc, every signal counts as fatal.
        if reading.thread == 0 or is_dying(reading.thread):
            self._abort(reading, errno.EINTR)

    def _abort(self, reading: KernelRead, number: int) -> bool:
        """Cancel a read and answer it with an error; False if it was answered already."""
        if self._pending.pop(reading.unique, None) is None:
            return False
        if reading.cancel is not None:
            run_reported(reading.cancel)
        self._send_error(reading.unique, number)
        return True

    def _check_pending(self) -> None:
        while not self._ended.wait(CHECK_S):
            now = time.monotonic()
            for reading in self._pending.copy().values():
                if reading.begun_s < now - READ_DEADLINE_S:
                    if self._abort(reading, errno.EIO):
                        problem = f"{self.target}: a read was not answered within {READ_DEADLINE_S:g} s"
                        show_threads(problem)
                        self._on_error(problem)
                elif reading.begun_s < now - CHECK_S and is_dying(reading.thread):
                    self._abort(reading, errno.EINTR)

    # Answers

    def _fail(self, unique: int, number: int) -> None:
        self._pending.pop(unique, None)
        self._send_error(unique, number)

    def _send_error(self, unique: int, number: int) -> None:
        number = number if 0 < number <= _MAX_ERRNO else errno.EIO
        self._write([protocol.OUT_HEADER.pack(protocol.OUT_HEADER.size, -number, unique)])

    def _send(self, unique: int, body: Data, size: int) -> None:
        self._write([protocol.OUT_HEADER.pack(protocol.OUT_HEADER.size + size, 0, unique), body])

    def _write(self, parts: list[Data]) -> None:
        try:
            os.writev(self.device, parts)
        except OSError as error:
            # ENOENT: the caller was killed meanwhile. The others: unmounted.
            if error.errno != errno.ENOENT and error.errno not in _UNMOUNTED:
                self._on_error(f"{self.target}: cannot answer: {error.strerror}")


def mount(
    tree: Tree,
    target: Path,
    label: str = "bootseer",
    on_error: OnError = lambda message: None,
    device: int | None = None,
) -> Session:
    """Mount a read-only `tree` on the folder `target`; it is readable when this returns.

    `on_error` is called with errors, one line each, from any thread. `device`: the descriptor of an existing mount
    whose process is dead; the tree must be the same.
    """
    opened = attach.attach(target, label=label) if device is None else device
    session = Session(TreeRequests(tree), target, opened, on_error)
    if device is not None:
        session.resend()
    return _started(session, _TREE_READ_AHEAD_KIB)


def mount_writable(
    files: FileSystem,
    target: Path,
    *,
    label: str = "bootseer",
    read_only: bool = False,
    shared: bool = True,
    on_error: OnError = lambda message: None,
) -> Session:
    """Mount a writable file system; it is usable when this returns. `read_only`: the kernel refuses changes.

    `shared`: see `attach`. `on_error`: see `mount`.
    """
    device = attach.attach(target, label=label, writable=not read_only, shared=shared)
    return _started(Session(FileRequests(files), target, device, on_error), _FILES_READ_AHEAD_KIB)


def _started(session: Session, read_ahead_kib: int) -> Session:
    session.start()
    attach.widen_read_ahead(session.target, read_ahead_kib)
    return session

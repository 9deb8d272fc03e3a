"""A mounted tree or file system: takes the kernel's requests, has them answered, and sends the answers.

Threads read requests, each into a buffer of its own, and run the methods of what is mounted (`requests`): one thread
for a read-only tree, whose methods do not wait; several for a file system that can be changed, where as long as one is
idle no other is started, and when all wait another one is, up to a bound. Answers to reads may come from any thread, in
any order, so that a read that waits for the network holds up no other one. When this process dies the kernel answers
all readers with an error at once; it never makes up data.

State: `_waiting` maps the number of a request to the read that is under way. The thread that takes an entry out of it,
which is one step under Python's lock, owns the answer; so there is exactly one.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from bootseer.errors import BootseerError, PermanentError, TransientError
from bootseer.fuse import attach, protocol
from bootseer.fuse.callers import is_dying
from bootseer.fuse.filesystem import Caller, Cancel, Data, Entry, FileSystem, Tree
from bootseer.fuse.requests import FileRequests, Request
from bootseer.io.executor import run_reported, show_threads
from bootseer.logs import logger

_LOG = logger(__name__)
OnError = Callable[[str], None]
"""Called with a fault, in one line, from any thread."""

_GONE = (errno.ENODEV, errno.ECONNABORTED, errno.EBADF)
"""What the device says when the mount has ended."""
JOIN_S = 5.0
"""How long `close` waits until what was unmounted is not in use any more."""
READ_DEADLINE_S = 90.0
"""A read that was not answered by then is an I/O error. The kernel may be configured to give up a whole mount for one
request (fs.fuse.max_request_timeout), and a reader should get an error eventually."""
LOOK_S = 1.0
"""How often reads that wait are looked after."""
_MAX_ERRNO = 511
"""The kernel refuses an answer with a larger error number, which would leave its caller waiting."""
_IDLE_THREADS = 8
READ_AHEAD_KIB = 8 * 1024
"""What the kernel reads ahead of a sequential reader of a file system: eight requests, so that several servers work for
one reader."""
_BODY = protocol.IN_HEADER.size


class TreeRequests:
    """A read-only tree, asked by one thread: its methods do not wait."""

    request_bytes = protocol.REQUEST_BYTES
    max_threads = 1
    ignores_signals = False

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._folder: tuple[int, Sequence[Entry]] = (0, ())

    def read(self, answer: Reading, node: int, handle: int, offset: int, size: int, room: memoryview) -> Cancel | None:
        """Begin a read, to be answered by `answer`; what to call when it is not waited for any more."""
        size = max(min(size, self._tree.attributes(node).size - offset), 0)
        # The kernel would fill what is missing with zeros, so that less is not an answer.
        answer.least = answer.length = size
        if not size:
            answer(b"")
            return None
        # INTERRUPT comes in on this very thread, so that the cancel is not looked for before it is stored.
        return self._tree.read(node, offset, size, answer)

    def answer(self, request: Request) -> bytes | int | None:  # noqa: PLR0911 - one per request
        tree, inode, body = self._tree, request.node, request.body
        match request.opcode:
            case protocol.FORGET | protocol.BATCH_FORGET:
                return None  # inodes are numbers of the tree, there is nothing to drop; no answer is expected
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
            self._folder = (inode, self._tree.entries(inode))
        return protocol.directory(self._folder[1], start, room)

    @staticmethod
    def _xattr(body: memoryview, value: bytes) -> bytes | int:
        room, _ = protocol.XATTR_IN.unpack_from(body)
        if room == 0:
            return protocol.xattr_size_out(len(value))
        return value if len(value) <= room else errno.ERANGE


class Reading:
    """One read on its way: what is called to answer it, with `least` to `length` bytes or an error number."""

    __slots__ = ("begun_s", "cancel", "least", "length", "session", "thread", "unique")

    def __init__(self, session: Session, unique: int, thread: int, length: int) -> None:
        self.session = session
        self.unique = unique
        self.thread = thread
        self.least = 0
        self.length = length
        self.cancel: Cancel | None = None
        self.begun_s = time.monotonic()

    def __call__(self, result: Data | int) -> None:
        session = self.session
        if session._waiting.pop(self.unique, None) is None:
            return  # answered before, or not waited for any more
        if isinstance(result, int):
            session._send_error(self.unique, result)
            return
        size = len(result) if not isinstance(result, memoryview) else result.nbytes
        if not self.least <= size <= self.length:
            session._on_error(f"{session.target}: a read of {self.length} bytes was answered with {size}")
            session._send_error(self.unique, errno.EIO)
            return
        session.read_bytes += size
        session._send(self.unique, result, size)


class Session:
    """One mount, until `close`, an unmount from outside or the end of the process."""

    def __init__(self, handler: TreeRequests | FileRequests, target: Path, device: int, on_error: OnError) -> None:
        self.target = target
        self.requests = 0
        """Requests of all kinds so far. What several threads count, this and the next three, is a close estimate."""
        self.reads = 0
        """Read requests so far."""
        self.read_bytes = 0
        """Bytes handed to the kernel so far."""
        self.writes = 0
        """Write requests so far."""
        self._handler = handler
        self._device = device
        # Replies hold the session, so that the number of the descriptor is free again only when none can come.
        weakref.finalize(self, os.close, device)
        self._on_error = on_error
        self._waiting: dict[int, Reading] = {}
        self._ended = threading.Event()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0

    @property
    def num_waiting(self) -> int:
        """Reads that were not answered yet."""
        return len(self._waiting)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the mount is gone, however that came; False when it is still there."""
        return self._ended.wait(timeout_s)

    @property
    def device(self) -> int:
        """The descriptor that requests arrive on."""
        return self._device

    def resend(self) -> None:
        """Have the kernel send again what was taken from the device and not answered, by a process that is dead.

        Call it before `start`. Raises `PermanentError` where the kernel cannot (before Linux 6.9).
        """
        try:
            os.writev(self._device, [protocol.OUT_HEADER.pack(protocol.OUT_HEADER.size, protocol.NOTIFY_RESEND, 0)])
        except OSError as error:
            raise PermanentError(
                f"{self.target}: the kernel does not send requests again, which Linux 6.9 does: {error.strerror}"
            ) from error

    def start(self) -> None:
        """Begin to answer, and to end reads that are not answered. Raises `TransientError` where the system refuses a
        thread, and unmounts."""
        if not self._start_thread():
            self._stop()
            attach.detach(self.target, lazy=True)
            raise TransientError(f"{self.target}: no thread can be started to answer the kernel")
        threading.Thread(target=self._give_up_reads, name=f"fuse late {self.target.name}", daemon=True).start()

    def close(self, *, force: bool = False) -> None:
        """Unmount. Raises `TransientError` while files are in use, unless `force`, which fails their users."""
        if not self._ended.is_set():
            try:
                attach.detach(self.target, force=force)
            except BootseerError:
                # Another process unmounted it a moment ago: then the threads that take requests end by themselves.
                if not self._ended.wait(0.1):
                    raise
            if not self._ended.wait(JOIN_S) and not force:
                raise TransientError(f"{self.target} is unmounted, but something still uses it")
        if self._ended.is_set() and self._handler.max_threads == 1:
            self._stopped.wait(JOIN_S)

    def detach(self) -> None:
        """Unmount lazily: it is out of sight at once, and ends with its last user."""
        if not self._ended.is_set():
            attach.detach(self.target, lazy=True)

    # Threads that take requests

    def _start_thread(self) -> bool:
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
            return False
        return True

    def _serve(self) -> None:
        buffer = bytearray(self._handler.request_bytes)
        view, buffers, readv = memoryview(buffer), (buffer,), os.readv
        try:
            while True:
                try:
                    received = readv(self._device, buffers)
                except OSError as error:
                    if error.errno in (errno.ENOENT, errno.EAGAIN, errno.EINTR):
                        continue  # the caller was killed before its request came to us
                    if error.errno not in _GONE:
                        self._on_error(f"{self.target}: cannot read requests: {error.strerror}")
                    received = 0
                if received == 0:
                    self._ended.set()
                    return
                if not self._take_among_others(view, received):
                    return
        except Exception as error:  # the others go on; a mount with one thread less must say why
            self._on_error(f"{self.target}: a thread has ended: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._threads -= 1
                last = self._threads == 0
            if last:
                self._stop()

    def _take_among_others(self, view: memoryview, received: int) -> bool:
        """Handle one request, and have another thread listen meanwhile; False when this one is not needed any more."""
        if self._handler.max_threads == 1:
            ended = self._take(view, received)
            surplus = False
        else:
            with self._lock:
                self._idle -= 1
                alone = self._idle == 0 and self._threads < self._handler.max_threads and not self._ended.is_set()
            if alone:
                self._start_thread()
            ended = self._take(view, received)
            with self._lock:
                surplus = self._idle >= _IDLE_THREADS
                if not surplus:
                    self._idle += 1
        if ended:
            self._ended.set()
        return not ended and not surplus

    def _take(self, view: memoryview, received: int) -> bool:
        """Handle one request; True after the last one."""
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
                reading = Reading(self, unique, thread, length)
                self._waiting[unique] = reading
                # The request was taken out of its buffer, so that the answer may lie there.
                reading.cancel = self._handler.read(reading, node, handle, offset, length, view)
            elif opcode == protocol.INTERRUPT:
                self._interrupt(*protocol.INTERRUPT_IN.unpack_from(view, _BODY))
            else:
                self.writes += opcode == protocol.WRITE
                answer = self._handler.answer(Request(opcode, node, Caller(uid, gid, thread), view[_BODY:received]))
                if isinstance(answer, int):
                    self._send_error(unique, answer)
                elif answer is not None:
                    self._send(unique, answer, len(answer))
        except OSError as error:
            self._fail(unique, error.errno or errno.EIO)
        except Exception as error:  # a fault in a file system must not end the mount for all others
            self._on_error(f"{self.target}: request {opcode} of node {node}: {type(error).__name__}: {error}")
            self._fail(unique, errno.EIO)
        return bool(opcode == protocol.DESTROY)

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
        self._stopped.set()

    # Reads that are not waited for, or not answered

    def _interrupt(self, unique: int) -> None:
        """A caller was hit by a signal. Its read is called off here; or, where only the death of a caller ends reads,
        when it is being killed, which may show a moment later. What else waits comes to its end."""
        reading = self._waiting.get(unique)
        if reading is None:
            return  # the answer was faster
        # Of a thread that cannot be seen any signal may be the last.
        if not self._handler.ignores_signals or reading.thread == 0 or is_dying(reading.thread):
            self._give_up(reading, errno.EINTR)

    def _give_up(self, reading: Reading, number: int) -> bool:
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
                elif self._handler.ignores_signals and reading.begun_s < now - LOOK_S and is_dying(reading.thread):
                    self._give_up(reading, errno.EINTR)

    # Answers

    def _fail(self, unique: int, number: int) -> None:
        self._waiting.pop(unique, None)
        self._send_error(unique, number)

    def _send_error(self, unique: int, number: int) -> None:
        number = number if 0 < number <= _MAX_ERRNO else errno.EIO
        self._write([protocol.OUT_HEADER.pack(protocol.OUT_HEADER.size, -number, unique)])

    def _send(self, unique: int, body: Data, size: int) -> None:
        self._write([protocol.OUT_HEADER.pack(protocol.OUT_HEADER.size + size, 0, unique), body])

    def _write(self, parts: list[Data]) -> None:
        try:
            os.writev(self._device, parts)
        except OSError as error:
            # ENOENT: the caller was killed meanwhile. The others: the mount is gone.
            if error.errno != errno.ENOENT and error.errno not in _GONE:
                self._on_error(f"{self.target}: cannot answer: {error.strerror}")


def mount(
    tree: Tree,
    target: Path,
    label: str = "bootseer",
    on_error: OnError = lambda message: None,
    device: int | None = None,
    *,
    helper: bool | None = None,
) -> Session:
    """Show a read-only `tree` on the folder `target`; it answers when this returns.

    `on_error` is called with faults, in one line each, from any thread. `helper`: see `attach`. `device`: the
    descriptor of a mount that is there already, and whose process is dead; the tree must be the same as then.
    """
    if device is None:
        session = Session(TreeRequests(tree), target, attach.attach(target, label=label, helper=helper), on_error)
    else:
        session = Session(TreeRequests(tree), target, device, on_error)
        session.resend()
    return _started(session, attach.READ_AHEAD_KIB)


def mount_writable(
    files: FileSystem,
    target: Path,
    *,
    label: str = "bootseer",
    read_only: bool = False,
    shared: bool = True,
    on_error: OnError = lambda message: None,
    helper: bool | None = None,
) -> Session:
    """Show a file system that can be changed; it answers when this returns. `read_only`: the kernel refuses changes.

    `shared`, `helper`: see `attach`. `on_error` as of `mount`.
    """
    device = attach.attach(target, label=label, helper=helper, writable=not read_only, shared=shared)
    return _started(Session(FileRequests(files), target, device, on_error), READ_AHEAD_KIB)


def _started(session: Session, read_ahead_kib: int) -> Session:
    session.start()
    wide = attach.widen_read_ahead(session.target, read_ahead_kib)
    _LOG.debug("%s is mounted, read-ahead %s", session.target, f"{read_ahead_kib} KiB" if wide else "as the kernel's")
    return session

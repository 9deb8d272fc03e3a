"""A mounted file system that can be changed: reads the kernel's requests, asks the file system, sends the answers.

Several threads read requests, each into a buffer of its own, and run the file system's methods, which may wait: as
long as one is idle no other is started, and when all wait another one is, up to a bound. A read may be answered from
any thread, so that none of these has to wait for its data; the thread of a small file's read may fetch them itself.
How answers are sent, and how it ends: `mounted`.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bootseer.fuse import attach, messages, protocol
from bootseer.fuse.callers import is_dying
from bootseer.fuse.filesystem import Caller, FileSystem, FoundNode, Listed
from bootseer.fuse.mounted import GONE, Mounted, OnError, Reading

_NAMES_AT_ONCE = 256
"""Entries that the file system is asked for at a time: no listing has all nodes of a large folder in the air."""
_NO_ANSWER = b""


class Request(NamedTuple):
    """One request; `body` is valid until it was handled."""

    opcode: int
    unique: int
    node: int
    caller: Caller
    body: memoryview


class Requests:
    """Calls one file system. Safe for many threads, as the file system is."""

    def __init__(self, files: FileSystem, valid_s: int) -> None:
        """Names and attributes that were answered hold for `valid_s` seconds."""
        self._files = files
        self._valid_s = valid_s
        self._handlers: dict[int, Callable[[Request], bytes]] = {
            protocol.INIT: self._init,
            protocol.LOOKUP: self._lookup,
            protocol.FORGET: self._forget,
            protocol.BATCH_FORGET: self._forget_many,
            protocol.GETATTR: self._attributes,
            messages.SETATTR: self._change,
            messages.MKNOD: self._make_node,
            messages.CREATE: self._create,
            protocol.OPEN: self._open,
            messages.WRITE: self._write,
            messages.FLUSH: self._flush,
            messages.FSYNC: self._sync,
            messages.RELEASE: self._release,
            messages.UNLINK: self._unlink,
            messages.MKDIR: self._make_folder,
            messages.RMDIR: self._remove_folder,
            messages.RENAME: self._rename,
            messages.RENAME2: self._rename,
            protocol.OPENDIR: self._open_folder,
            protocol.READDIR: self._list,
            messages.READDIRPLUS: self._list,
            messages.RELEASEDIR: self._release_folder,
            # All that happened in a folder has happened in the place when its call returned.
            messages.FSYNCDIR: lambda request: _NO_ANSWER,
            protocol.STATFS: lambda request: messages.statfs_out(files.space()),
        }
        self._refusals = {messages.SYMLINK: errno.EPERM, messages.LINK: errno.EPERM, protocol.READLINK: errno.EINVAL}

    def answer(self, request: Request) -> bytes | None:
        """The body of the answer, None when the kernel expects none. Raises `OSError` with the number to answer with.

        Unknown requests are refused with ENOSYS, which the kernel remembers: it does not ask again for extended
        attributes before each write.
        """
        handler = self._handlers.get(request.opcode)
        if handler is None:
            number = self._refusals.get(request.opcode, errno.ENOSYS)
            raise OSError(number, os.strerror(number))
        body = handler(request)
        return None if request.opcode in (protocol.FORGET, protocol.BATCH_FORGET) else body

    def _init(self, request: Request) -> bytes:
        return messages.init_out(protocol.Hello(*protocol.INIT_IN.unpack_from(request.body)))

    def _lookup(self, request: Request) -> bytes:
        found = self._files.lookup(request.node, protocol.parse_name(request.body))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such file")
        return self._entry(found)

    def _entry(self, found: FoundNode) -> bytes:
        return messages.entry_out(found, self._valid_s)

    def _forget(self, request: Request) -> bytes:
        self._files.forget(request.node, *messages.FORGET_IN.unpack_from(request.body))
        return _NO_ANSWER

    def _forget_many(self, request: Request) -> bytes:
        for node, count in messages.parse_forgets(request.body):
            self._files.forget(node, count)
        return _NO_ANSWER

    def _attributes(self, request: Request) -> bytes:
        return messages.attr_out(self._files.attributes(request.node), self._valid_s)

    def _change(self, request: Request) -> bytes:
        changes = messages.parse_changes(request.body, time.time_ns())
        return messages.attr_out(self._files.change(request.node, changes), self._valid_s)

    def _make_node(self, request: Request) -> bytes:
        mode, *_ = messages.MKNOD_IN.unpack_from(request.body)
        if not stat.S_ISREG(mode):
            raise PermissionError(errno.EPERM, "only files and folders")
        name = protocol.parse_name(request.body[messages.MKNOD_IN.size :])
        files, flags = self._files, os.O_WRONLY | os.O_CREAT | os.O_EXCL
        found, opened = files.create(request.node, name, stat.S_IMODE(mode), flags, request.caller)
        try:
            files.flush(found.node, opened.handle, request.caller)
        finally:
            files.release(found.node, opened.handle)
        return self._entry(found)

    def _create(self, request: Request) -> bytes:
        flags, mode, *_ = messages.CREATE_IN.unpack_from(request.body)
        name = protocol.parse_name(request.body[messages.CREATE_IN.size :])
        found, opened = self._files.create(request.node, name, stat.S_IMODE(mode), flags, request.caller)
        return self._entry(found) + messages.open_out(opened.handle)

    def _open(self, request: Request) -> bytes:
        flags, _ = messages.OPEN_IN.unpack_from(request.body)
        opened = self._files.open(request.node, flags, request.caller)
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        return messages.open_out(opened.handle, keep_pages=opened.keep_pages, writes=writes)

    def _write(self, request: Request) -> bytes:
        handle, offset, size, *_ = messages.WRITE_IN.unpack_from(request.body)
        data = request.body[messages.WRITE_IN.size :]
        if size != len(data):
            raise OSError(errno.EIO, "a write of another length than its data")
        self._files.write(request.node, handle, offset, data, request.caller)
        return messages.write_out(size)

    def _flush(self, request: Request) -> bytes:
        (handle,) = messages.HANDLE_IN.unpack_from(request.body)
        self._files.flush(request.node, handle, request.caller)
        return _NO_ANSWER

    def _sync(self, request: Request) -> bytes:
        (handle,) = messages.HANDLE_IN.unpack_from(request.body)
        self._files.sync(request.node, handle, request.caller)
        return _NO_ANSWER

    def _release(self, request: Request) -> bytes:
        self._files.release(request.node, *messages.HANDLE_IN.unpack_from(request.body))
        return _NO_ANSWER

    def _unlink(self, request: Request) -> bytes:
        self._files.unlink(request.node, protocol.parse_name(request.body))
        return _NO_ANSWER

    def _make_folder(self, request: Request) -> bytes:
        mode, _ = messages.MKDIR_IN.unpack_from(request.body)
        name = protocol.parse_name(request.body[messages.MKDIR_IN.size :])
        return self._entry(self._files.make_folder(request.node, name, stat.S_IMODE(mode), request.caller))

    def _remove_folder(self, request: Request) -> bytes:
        self._files.remove_folder(request.node, protocol.parse_name(request.body))
        return _NO_ANSWER

    def _rename(self, request: Request) -> bytes:
        wish = messages.parse_rename(request.body, has_flags=request.opcode == messages.RENAME2)
        if not wish.is_known:
            raise OSError(errno.EINVAL, "two names cannot be exchanged in one step")
        self._files.rename(request.node, wish.name, wish.to_parent, wish.to_name, replace=wish.replace)
        return _NO_ANSWER

    def _open_folder(self, request: Request) -> bytes:
        return messages.open_out(self._files.open_folder(request.node))

    def _release_folder(self, request: Request) -> bytes:
        self._files.release_folder(*messages.HANDLE_IN.unpack_from(request.body))
        return _NO_ANSWER

    def _list(self, request: Request) -> bytes:
        handle, number, room = protocol.READ_IN.unpack_from(request.body)
        plus = request.opcode == messages.READDIRPLUS
        out = bytearray()
        while True:
            entries = self._files.entries(handle, number, _NAMES_AT_ONCE, attributes=plus)
            for place, entry in enumerate(entries):
                if len(out) + messages.entry_size(entry.name, plus=plus) > room:
                    self._let_go(entries[place:])
                    return bytes(out)
                out += messages.listed(entry, number, self._valid_s, plus=plus)
                number += 1
            if not entries:
                return bytes(out)

    def _let_go(self, entries: Sequence[Listed]) -> None:
        """Entries that did not fit are asked for again: the kernel does not hold their nodes yet."""
        for entry in entries:
            if entry.found is not None:
                self._files.forget(entry.found.node, 1)


READ_AHEAD_KIB = 8 * 1024
"""What the kernel reads ahead of a sequential reader: eight requests, so that several servers work for one reader."""
VALID_S = 1
"""How long the kernel may answer from memory what a name leads to. Opening a file always asks."""
_MAX_THREADS = 256
"""More than the programs of a node that write or publish at the same moment: while so many wait, no thread reads
requests."""
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
            self._on_error(f"{self.target}: malformed FUSE request")
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

    `on_error` is called with faults, in one line each, from any thread. `shared`, `helper`: see `attach`.
    """
    device = attach.attach(target, label=label, helper=helper, writable=not read_only, shared=shared)
    session = WritableSession(files, target, device, on_error)
    session.start()
    attach.widen_read_ahead(target, READ_AHEAD_KIB)
    return session

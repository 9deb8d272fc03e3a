"""Handle the kernel's requests to a writable file system."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bootseer.fuse import protocol
from bootseer.fuse.filesystem import Attributes, Caller, Cancel, FileSystem, FoundNode, Listed, Reply

VALID_S = 1
"""How long the kernel may cache names and attributes. Opening a file always asks."""
_NAMES_AT_ONCE = 256
"""How many entries are requested from the file system at a time, which limits the nodes referenced by a listing."""


class Request(NamedTuple):
    """One request; `body` is valid while it is handled."""

    opcode: int
    node: int
    caller: Caller
    body: memoryview


class FileRequests:
    """Requests to a writable file system, as thread-safe as it is. A read may be answered from any thread, so that the
    handling thread need not wait for the data; for a small file it may fetch the data itself."""

    request_bytes = protocol.WRITE_REQUEST_BYTES
    max_threads = 256
    """Must exceed the number of programs on a node that write or publish at the same time, because no request is read
    while all threads wait."""

    def __init__(self, files: FileSystem) -> None:
        self._files = files
        name = protocol.parse_name

        def handle(request: Request) -> int:
            return int(protocol.HANDLE_IN.unpack_from(request.body)[0])

        self._handlers: dict[int, Callable[[Request], bytes | None]] = {
            protocol.INIT: lambda request: protocol.init_out(request.body, writable=True),
            protocol.LOOKUP: self._lookup,
            protocol.FORGET: lambda request: files.forget(request.node, *protocol.FORGET_IN.unpack_from(request.body)),
            protocol.BATCH_FORGET: self._forget_many,
            protocol.GETATTR: lambda request: self._attributes(files.attributes(request.node)),
            protocol.SETATTR: self._change,
            protocol.MKNOD: self._make_node,
            protocol.CREATE: self._create,
            protocol.OPEN: self._open,
            protocol.WRITE: self._write,
            protocol.FLUSH: lambda request: files.flush(request.node, handle(request), request.caller),
            protocol.FSYNC: lambda request: files.sync(request.node, handle(request), request.caller),
            protocol.RELEASE: lambda request: files.release(request.node, handle(request)),
            protocol.UNLINK: lambda request: files.unlink(request.node, name(request.body)),
            protocol.MKDIR: self._make_folder,
            protocol.RMDIR: lambda request: files.remove_folder(request.node, name(request.body)),
            protocol.RENAME: self._rename,
            protocol.RENAME2: self._rename,
            protocol.OPENDIR: lambda request: protocol.open_out(files.open_folder(request.node)),
            protocol.READDIR: self._list,
            protocol.READDIRPLUS: self._list,
            protocol.RELEASEDIR: lambda request: files.release_folder(handle(request)),
            # Changes in a folder are complete in the place when their call returns.
            protocol.FSYNCDIR: lambda request: None,
            protocol.STATFS: lambda request: protocol.statfs_out(files.space(), protocol.PREFERRED_BYTES),
            protocol.DESTROY: lambda request: None,
        }
        self._refusals = {protocol.SYMLINK: errno.EPERM, protocol.LINK: errno.EPERM, protocol.READLINK: errno.EINVAL}

    def read(self, answer: Reply, node: int, handle: int, offset: int, size: int, room: memoryview) -> Cancel | None:
        """Begin a read that `answer` completes; returns a function that cancels it. An answer given before this returns
        may lie in `room`."""
        return self._files.read(node, handle, offset, size, answer, room[:size])

    def answer(self, request: Request) -> bytes | int | None:
        """The body of the answer, an error number, or None if the kernel expects no answer. Raises `OSError` to be
        answered with its number.

        Unknown requests get ENOSYS, which the kernel remembers: it does not ask for extended attributes before each
        write.
        """
        handler = self._handlers.get(request.opcode)
        if handler is None:
            return self._refusals.get(request.opcode, errno.ENOSYS)
        body = handler(request)
        return None if request.opcode in (protocol.FORGET, protocol.BATCH_FORGET) else body or b""

    def _lookup(self, request: Request) -> bytes:
        found = self._files.lookup(request.node, protocol.parse_name(request.body))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such file")
        return self._entry(found)

    def _entry(self, found: FoundNode) -> bytes:
        return protocol.entry_out(found.node, found.attributes, VALID_S, protocol.PREFERRED_BYTES)

    def _forget_many(self, request: Request) -> None:
        for node, count in protocol.parse_forgets(request.body):
            self._files.forget(node, count)

    def _attributes(self, of: Attributes) -> bytes:
        return protocol.attr_out(of, VALID_S, protocol.PREFERRED_BYTES)

    def _change(self, request: Request) -> bytes:
        changes = protocol.parse_changes(request.body, time.time_ns())
        return self._attributes(self._files.change(request.node, changes))

    def _make_node(self, request: Request) -> bytes:
        mode, *_ = protocol.MKNOD_IN.unpack_from(request.body)
        if not stat.S_ISREG(mode):
            raise PermissionError(errno.EPERM, "only files and folders")
        name = protocol.parse_name(request.body[protocol.MKNOD_IN.size :])
        files, flags = self._files, os.O_WRONLY | os.O_CREAT | os.O_EXCL
        found, opened = files.create(request.node, name, stat.S_IMODE(mode), flags, request.caller)
        try:
            files.flush(found.node, opened.handle, request.caller)
        finally:
            files.release(found.node, opened.handle)
        return self._entry(found)

    def _create(self, request: Request) -> bytes:
        flags, mode, *_ = protocol.CREATE_IN.unpack_from(request.body)
        name = protocol.parse_name(request.body[protocol.CREATE_IN.size :])
        found, opened = self._files.create(request.node, name, stat.S_IMODE(mode), flags, request.caller)
        return self._entry(found) + protocol.open_out(opened.handle)

    def _open(self, request: Request) -> bytes:
        flags, _ = protocol.OPEN_IN.unpack_from(request.body)
        opened = self._files.open(request.node, flags, request.caller)
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        return protocol.open_out(opened.handle, keep_pages=opened.keep_pages, writes=writes)

    def _write(self, request: Request) -> bytes:
        handle, offset, size, *_ = protocol.WRITE_IN.unpack_from(request.body)
        data = request.body[protocol.WRITE_IN.size :]
        if size != len(data):
            raise OSError(errno.EIO, "the size of a write differs from its data")
        self._files.write(request.node, handle, offset, data, request.caller)
        return protocol.SIZE_OUT.pack(size, 0)

    def _make_folder(self, request: Request) -> bytes:
        mode, _ = protocol.MKDIR_IN.unpack_from(request.body)
        name = protocol.parse_name(request.body[protocol.MKDIR_IN.size :])
        return self._entry(self._files.make_folder(request.node, name, stat.S_IMODE(mode), request.caller))

    def _rename(self, request: Request) -> None:
        has_flags = request.opcode == protocol.RENAME2
        name, to_parent, to_name, flags = protocol.parse_rename(request.body, has_flags=has_flags)
        if flags & ~protocol.RENAME_NOREPLACE:
            raise OSError(errno.EINVAL, "exchanging two names is not supported")
        self._files.rename(request.node, name, to_parent, to_name, replace=not flags)

    def _list(self, request: Request) -> bytes:
        handle, number, room = protocol.READ_IN.unpack_from(request.body)
        plus = request.opcode == protocol.READDIRPLUS
        out = bytearray()
        while True:
            entries = self._files.entries(handle, number, _NAMES_AT_ONCE, attributes=plus)
            for place, entry in enumerate(entries):
                packed = protocol.listed(entry, number, VALID_S, plus=plus)
                if len(out) + len(packed) > room:
                    self._forget_unsent(entries[place:])
                    return bytes(out)
                out += packed
                number += 1
            if not entries:
                return bytes(out)

    def _forget_unsent(self, entries: Sequence[Listed]) -> None:
        """Drop the references of entries that did not fit: the kernel will ask for them again."""
        for entry in entries:
            if entry.found is not None:
                self._files.forget(entry.found.node, 1)

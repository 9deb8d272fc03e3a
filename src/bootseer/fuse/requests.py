"""From the bytes of a request to a call of the file system, and from what it returns to the bytes of the answer.

All requests but READ, INTERRUPT and the last one, which `writable_session` handles itself: it alone knows what is
waiting.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bootseer.fuse import messages, protocol
from bootseer.fuse.filesystem import Caller, FileSystem, Found, Listed

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
        """Names and attributes that were told hold for `valid_s` seconds."""
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

        What nobody knows is refused with ENOSYS, which the kernel remembers: it does not ask again for extended
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

    def _entry(self, found: Found) -> bytes:
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

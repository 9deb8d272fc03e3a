"""A mounted tree: reads the kernel's requests, asks the tree, sends the answers.

One thread reads requests and runs the tree's methods. Answers to reads may come from any thread, in any order, so
that a read that waits for the network holds up no other one. When this process dies the kernel answers all readers
with an error at once; it never makes up data.

How answers are sent, and how it ends: `mounted`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from bootseer.fuse import attach, protocol
from bootseer.fuse.filesystem import Entry, Tree
from bootseer.fuse.mounted import GONE, JOIN_S, Mounted, OnError, Reading

_BODY = protocol.IN_HEADER.size


class Session(Mounted[Reading]):
    """One mount. Made by `mount`; ends by `close`, by an unmount from outside, or with the process."""

    def __init__(self, tree: Tree, target: Path, device: int, on_error: OnError) -> None:
        super().__init__(target, device, on_error)
        self.tree = tree
        self._folder: tuple[int, Sequence[Entry]] = (0, ())
        self._thread = threading.Thread(target=self._serve, name=f"fuse {target.name}", daemon=True)

    def close(self, *, force: bool = False) -> None:
        super().close(force=force)
        self._thread.join(JOIN_S if self._ended.is_set() else 0)

    def _serve(self) -> None:
        buffer = bytearray(protocol.REQUEST_BYTES)
        buffers, device, readv = [buffer], self._device, os.readv
        try:
            while True:
                try:
                    received = readv(device, buffers)
                except OSError as error:
                    if error.errno in GONE:
                        return
                    if error.errno in (errno.ENOENT, errno.EAGAIN, errno.EINTR):
                        continue  # the reader was killed before its request came to us
                    self._on_error(f"{self.target}: cannot read requests: {error.strerror}")
                    return
                if received == 0 or not self._take(buffer, received):
                    return
        finally:
            self._stop()

    def _take(self, buffer: bytearray, received: int) -> bool:
        """Handle one request; False after the last one."""
        self.requests += 1
        request = protocol.parse_request(buffer, received)
        if request is None:
            self._on_error(f"{self.target}: malformed FUSE request")
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
        # The kernel would fill what is missing with zeros, so that less is no answer.
        reading = Reading(self, unique, length, length)
        self._waiting[unique] = reading
        # INTERRUPT comes in on this very thread, so that the cancel is not looked for before it is stored.
        reading.cancel = self.tree.read(inode, offset, length, reading)

    def _interrupt(self, unique: int) -> None:
        reading = self._waiting.get(unique)
        if reading is not None:  # otherwise the answer was faster
            self._give_up(reading, errno.EINTR)

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


def mount(
    tree: Tree,
    target: Path,
    *,
    label: str = "bootseer",
    on_error: OnError = lambda message: None,
    helper: bool | None = None,
) -> Session:
    """Show `tree` on the folder `target`; it answers when this returns.

    `on_error` is called with faults, in one line each, from any thread. `helper`: see `attach`.
    """
    device = attach.attach(target, label=label, helper=helper)
    session = Session(tree, target, device, on_error)
    session._thread.start()
    session._watch.start()
    attach.widen_read_ahead(target)
    return session


def showing(tree: Tree) -> Callable[[Path, str, OnError], Session]:
    """`mount`, for a daemon that knows nothing of trees: called with a folder, a label and a callback for faults."""

    def show(target: Path, label: str, on_error: OnError) -> Session:
        return mount(tree, target, label=label, on_error=on_error)

    return show

"""The content of one open file: a published version that is read, or new content that will be published.

A file that is written exists twice: what the place has under its name, which all other machines see, and what was
written here, which everybody on this mount sees. `publish` makes the second take the place of the first, in one step.
To change a part of a published file, or to append to it, it is written anew, which is done for small files only.

Called by `open_files` and `filesystem`. `lock` orders what changes the content and its name; reading takes it for no
longer than it takes to open a version.
"""

from __future__ import annotations

import contextlib
import errno
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from bootseer.checkpoint.files import Files
from bootseer.checkpoint.mount.held import Held
from bootseer.checkpoint.mount.nodes import Node
from bootseer.checkpoint.mount.numbers import number_of, refusal, stale
from bootseer.errors import BootseerError, PermanentError
from bootseer.fuse.tree import Cancel, Data, Reply

_COPY_BYTES = 4 << 20
Check = Callable[[], None]
"""Raises when nobody waits any more for what is being waited for."""


def no_check() -> None:
    """Somebody waits."""


class Reader(Protocol):
    """One version of a file, as `Reading` opens it."""

    @property
    def size_bytes(self) -> int:
        """Of the content."""

    @property
    def version(self) -> str:
        """As the place says it."""

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of a range inside the file."""

    def read_async(
        self,
        offset: int,
        length: int,
        done: Callable[[Data | BootseerError], None],
        room: memoryview | None = None,
    ) -> Cancel | None:
        """Begin to read a range inside the file; `done` is called once, from any thread. What it gets may lie in `room`
        when it is called before this returns."""

    def close(self) -> None:
        """Not read any more."""


class Writer(Protocol):
    """New content of a file, as `Writing` makes it: see `FileWriter`."""

    path: str

    @property
    def size_bytes(self) -> int:
        """As long as it is now."""

    def write_at(self, offset: int, data: bytes | bytearray | memoryview, check: Check) -> None:
        """Write anywhere. `check` is called while this waits for long; what it raises ends that."""

    def read_at(self, offset: int, length: int) -> bytes:
        """What was written; fewer bytes at the end."""

    def truncate(self, size_bytes: int) -> None:
        """Cut, or continue by zeros."""

    def sync(self, check: Check) -> object:
        """Publish what was written so far; it may be written on. `check` as for `write_at`."""

    def commit(self) -> object:
        """Publish and end; aborted after an error."""

    def abort(self) -> None:
        """Drop what is not published."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where content comes from and goes to."""

    files: Files
    open: Callable[[str], Reader]
    begin: Callable[[str, int], Writer]
    """Begins new content for a path, with these permission bits."""
    rewrite_bytes: int
    """The largest published file that is written anew when a part of it changes."""
    on_error: Callable[[str], None]
    on_read: Callable[[str, int, int], None]
    """Hears of each read of a published file: path, offset and length."""


class Content:
    """See the module. Made when a file is opened; over when the last one has closed it."""

    def __init__(self, node: Node, sources: Sources, detach: Callable[[Node], None]) -> None:
        """`detach` lets the node's name lead to what the place has."""
        self.lock = threading.RLock()
        self.handles: set[int] = set()
        """The open files that lead here; kept by `open_files`."""
        self._node = node
        self._sources = sources
        self._detach = detach
        self._read: Held | None = None
        """The version that is read, once somebody does."""
        self._writer: Writer | None = None
        self._is_dirty = False
        self._is_removed = False
        self._mtime_ns: int | None = None
        """What somebody wants the time of the last change to be."""

    @property
    def is_live(self) -> bool:
        """Whether this, and not the place, says what the file's name leads to."""
        return self._writer is not None and not self._is_removed

    @property
    def is_removed(self) -> bool:
        """Whether the name is gone, or leads to another file, by what was done here."""
        return self._is_removed

    @property
    def is_dirty(self) -> bool:
        """Whether something of it is not published, and should be."""
        return self._is_dirty and not self._is_removed

    @property
    def size_bytes(self) -> int:
        """Bytes now."""
        writer = self._writer
        return self._node.info.size_bytes if writer is None else writer.size_bytes

    def begin_reading(self) -> bool:
        """Open what the name leads to now. Whether pages that the kernel has of the node are of that.

        Raises ESTALE when the node is of another version: its name leads to another node from then on.
        """
        with self.lock:
            if self._writer is not None:
                return True
            fresh = self._open_version()
            if self._read is not None and fresh.version != self._read.reader.version:
                fresh.close()
                self._detach(self._node)
                raise stale()
            keep = self._read is not None or self._node.pages_of in (None, fresh.version)
            self._begin_reading(fresh)
            return keep

    def begin_writing(self) -> bool:
        """Somebody may write, who reads nothing. As `begin_reading`."""
        with self.lock:
            if self._writer is None and self._read is None:
                # Whatever is written anew begins with what the place has then.
                self._node.pages_of = None
                return False
            return True

    def begin_appending(self) -> None:
        """Refuse what `write` would refuse at the end of the file."""
        if self._writer is None:
            self._check_small(self.size_bytes)

    def _hold_reader(self) -> Held | None:
        """The published version, to be let go of, or None while there is new content."""
        with self.lock:
            if self._writer is not None:
                return None
            if self._read is None:
                # What was written has ended, while the file stayed open; the pages are of what was written.
                self._begin_reading(self._open_version())
                self._node.pages_of = ""
            elif self._node.path not in (None, self._read.path):
                with contextlib.suppress(BootseerError, OSError):  # the old one may have all that it needs
                    self.begin_reading()
            return None if self._read is None else self._read.hold()

    def _begin_reading(self, reader: Reader) -> None:
        """Read by this one from now on; reads that were begun by another one still end."""
        self._end_reading()
        self._read = Held(reader, self._node.path or "")
        self._node.pages_of = reader.version

    def _end_reading(self) -> None:
        held, self._read = self._read, None
        if held is not None:
            held.let_go()

    def _open_version(self) -> Reader:
        path = self._node.path
        if path is None:
            raise stale()
        reader = self._sources.open(path)
        if reader.size_bytes != self._node.info.size_bytes:
            # The kernel knows another size, and would cut off the rest.
            reader.close()
            self._detach(self._node)
            raise stale()
        return reader

    def read(self, offset: int, length: int, reply: Reply, room: memoryview) -> Cancel | None:
        """Answer a read: from what was written, or from the node's version. See `FileSystem.read`."""
        # Without the lock: a writer that waits for room must not hold up readers.
        writer = self._writer
        while writer is not None:
            try:
                reply(writer.read_at(offset, length))
                return None
            except BootseerError:
                # It may just have ended: then the published version has it all.
                with self.lock:
                    if writer is self._writer:
                        raise
                    writer = self._writer
        held = self._hold_reader()
        if held is None:
            return self.read(offset, length, reply, room)
        try:
            return self._read_version(held.reader, offset, length, reply, room)
        finally:
            held.let_go()

    def _read_version(self, reader: Reader, offset: int, length: int, reply: Reply, room: memoryview) -> Cancel | None:
        wanted = min(length, reader.size_bytes - offset)
        if wanted <= 0:
            reply(b"")
            return None
        self._sources.on_read(self._node.info.path, offset, wanted)

        def done(result: Data | BootseerError) -> None:
            if isinstance(result, BootseerError):
                self._sources.on_error(f"reading {self._node.info.path}: {result}")
                reply(number_of(result))
            elif len(result) == wanted:
                reply(result)
            else:  # which would tell the kernel that the file ends there
                self._sources.on_error(f"reading {self._node.info.path}: {len(result)} bytes in place of {wanted}")
                reply(errno.EIO)

        return reader.read_async(offset, wanted, done, room[:wanted])

    def begin_empty(self) -> None:
        """New content from nothing. What the place has stays until it is published."""
        with self.lock:
            if self._writer is not None:
                self._writer.truncate(0)
            else:
                self._begin()
            self._changed()

    def write(self, offset: int, data: memoryview, check: Check) -> None:
        """Write anywhere; a published file is written anew first, if it is small."""
        with self.lock:
            writer = self._writer or self._rewrite(self.size_bytes, check)
            writer.write_at(offset, data, check)
            self._changed()

    def truncate(self, size_bytes: int) -> None:
        """Cut, or continue by zeros."""
        with self.lock:
            if size_bytes == self.size_bytes:
                return
            writer = self._writer or self._rewrite(min(size_bytes, self.size_bytes))
            writer.truncate(size_bytes)
            self._changed()

    def attributes_changed(self, mtime_ns: int | None) -> None:
        """The node has other attributes, which what is published gets too; the time of the change if it is given."""
        with self.lock:
            self._mtime_ns = self._mtime_ns if mtime_ns is None else mtime_ns
            self._is_dirty = True

    def publish(self, check: Check = no_check) -> None:
        """Make what was written durable, verified, and visible to all. After an error it may be tried again."""
        with self.lock:
            if self.is_dirty and self._writer is not None:
                self._writer.sync(check)
                self._settle()
                self._is_dirty = False

    def end_writing(self) -> bool:
        """Publish, and let the place say again what the name leads to: whether there was anything to publish. After an
        error what was written is gone.
        """
        with self.lock:
            writer, was_dirty = self._writer, self.is_dirty
            if writer is None:
                return False
            try:
                if was_dirty:
                    writer.commit()
                    self._settle()
            except BaseException:
                self.give_up()
                raise
            self._writer = None
            self._is_dirty = False
            writer.abort()
            # What was written is in the kernel's pages. What is read from now on comes from where others read it.
            self._node.pages_of = ""
            return was_dirty

    def give_up(self) -> None:
        """Drop what was written: the name leads to what the place has."""
        with self.lock:
            writer, self._writer, self._is_dirty = self._writer, None, False
            if writer is not None:
                self._detach(self._node)
                writer.abort()

    def renamed(self, path: str) -> None:
        """The file, which was published, has another name in the same folder."""
        with self.lock:
            if self._writer is not None:
                self._writer.path = path

    def removed(self) -> None:
        """The name is gone, or leads to another file: what is written is for those who have it open."""
        with self.lock:
            self._is_removed = True

    def close(self) -> None:
        """Nobody has it open any more: publish what is not, if it has a name."""
        with self.lock:
            try:
                self.end_writing()
            finally:
                self._end_reading()

    def _changed(self) -> None:
        self._is_dirty = True
        self._mtime_ns = None
        entry = replace(self._node.info.entry, mtime_ns=time.time_ns())
        self._node.info = replace(self._node.info, entry=entry)

    def _begin(self) -> Writer:
        # What has no name any more is never published, and wants no other room than what has one.
        path = self._node.info.path if self._is_removed else self._node.path
        if path is None:
            raise stale()
        self._writer = self._sources.begin(path, stat.S_IMODE(self._node.info.entry.mode))
        self._end_reading()
        return self._writer

    def _rewrite(self, keep_bytes: int, check: Check = no_check) -> Writer:
        """Begin with the first `keep_bytes` of what is published."""
        self._check_small(keep_bytes)
        if keep_bytes == 0:
            return self._begin()
        held = Held(self._open_version(), "") if self._read is None else self._read.hold()
        base = held.reader
        try:
            writer = self._begin()
            try:
                for offset in range(0, keep_bytes, _COPY_BYTES):
                    check()
                    writer.write_at(offset, base.read(offset, min(_COPY_BYTES, keep_bytes - offset)), check)
            except BaseException:
                self._writer = None
                writer.abort()
                raise
        finally:
            held.let_go()
        return writer

    def _check_small(self, keep_bytes: int) -> None:
        if keep_bytes > self._sources.rewrite_bytes:
            self._sources.on_error(f"{self._node.info.path} is too large to be changed or appended to: write it anew")
            raise refusal(errno.EOPNOTSUPP)

    def _settle(self) -> None:
        """Give what was published the owner, the rights and the time that it should have, and look at it."""
        path, wanted, files = self._node.path, self._node.info.entry, self._sources.files
        if path is None:
            raise stale()
        info = files.stat(path)
        is_same = True
        owner, group = wanted.owner or info.entry.owner, wanted.group or info.entry.group
        if (owner, group) != (info.entry.owner, info.entry.group):
            with contextlib.suppress(PermanentError):  # only few may give files away
                files.set_owner(path, owner, group)
                is_same = False
        if stat.S_IMODE(info.entry.mode) != stat.S_IMODE(wanted.mode):
            files.set_mode(path, stat.S_IMODE(wanted.mode))
            is_same = False
        if self._mtime_ns is not None:
            files.set_mtime(path, self._mtime_ns)
            is_same = False
        self._node.info = info if is_same else files.stat(path)

"""The content of one open file: a published version that is read, or new content that will be published.

A file that is being written has two contents: the published one in the place, which all other machines see, and the new
one, which every program on this mount sees. `publish` replaces the first by the second atomically. Published files
cannot be changed in place: to change a part or to append, a small file is rewritten.

Two locks, `changing` before `lock`. `changing` serializes changes of the content and its name, and is held as long as a
publication takes. `lock` guards the state and is held for moments, never during a request to the place. So a file can
be opened, read and looked at while it is published.
"""

from __future__ import annotations

import contextlib
import errno
import stat
import threading
import time
from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from bootseer.checkpoint.files import FileInfo, Files
from bootseer.checkpoint.mount.nodes import Node
from bootseer.checkpoint.os_errors import number_of, os_error
from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.checkpoint.writing.publication import Written
from bootseer.checkpoint.writing.writing import Check, FileWriter, no_check
from bootseer.errors import BootseerError, NotFoundError, PermanentError
from bootseer.fuse.filesystem import Data, Reply
from bootseer.places.place import Entry, folder_of

_COPY_BYTES = 4 << 20
_LOOK_S = 0.5
"""Interval at which a caller that waits for `changing` checks whether it is being killed."""


class MountContext(Struct, frozen=True):
    """The mount's file tree and settings."""

    files: Files
    open: Callable[[str], CheckpointFile]
    begin: Callable[[str, int], FileWriter]
    """Begins new content for a path, with these permission bits."""
    rewrite_bytes: int
    """The largest published file that may be rewritten to change a part of it."""
    on_error: Callable[[str], None]
    on_read: Callable[[str, int, int], None]
    """Called for each read of a published file with path, offset and length."""


class Content:
    """See the module. Created when a file is opened; ends with the last close."""

    def __init__(self, node: Node, context: MountContext, detach: Callable[[Node], None]) -> None:
        """`detach` makes the node's name lead to what the place has."""
        self.lock = threading.RLock()
        self._turn = threading.RLock()
        self.handles: set[int] = set()
        """Handles of the file; maintained by `open_files`."""
        self.writers: set[int] = set()
        """Those of them that can write and are not closed yet. The kernel reports the end of a handle (RELEASE) after
        close(2) has returned, when another machine may have written the file. Maintained by `open_files`."""
        self._node = node
        self._context = context
        self._detach = detach
        self._read: CheckpointFile | None = None
        """The version that is read; None until the first read. After another open or a rename it is replaced; reads in
        flight hold the old one, which must not be closed under them."""
        self._writer: FileWriter | None = None
        self._is_dirty = False
        self._num_changes = 0
        """Incremented with every change of content or attributes, so that code that ran without the lock can detect
        one."""
        self.is_removed = False
        """Whether the file was unlinked or replaced on this mount."""
        self._mtime_ns: int | None = None
        """The modification time that a program has set."""
        self._discard_reason: BootseerError | None = None
        self._published: Written | None = None
        """The latest publication. A writer returns the same one if nothing was written since."""

    @property
    def is_live(self) -> bool:
        """Whether this content, and not the place's, is what the file's name leads to."""
        return self._writer is not None and not self.is_removed and (self._is_dirty or bool(self.writers))

    @property
    def is_published(self) -> bool:
        """Whether all writers have closed it and only readers are left: the place may have another version by now."""
        return self._writer is not None and not self.is_removed and not self.is_live

    @property
    def is_dirty(self) -> bool:
        return self._is_dirty and not self.is_removed

    @property
    def size_bytes(self) -> int:
        writer = self._writer
        return self._node.info.size_bytes if writer is None else writer.size_bytes

    @contextlib.contextmanager
    def changing(self, check: Check = no_check) -> Iterator[None]:
        """Serialize changes of the content or its name. `check` is called regularly while this waits."""
        while not self._turn.acquire(timeout=_LOOK_S):
            check()
        try:
            yield
        finally:
            self._turn.release()

    def begin_reading(self) -> bool:
        """Open the current version. Returns whether the kernel's cached pages belong to it.

        Raises ESTALE when it is not the node's version: the name leads to another node from then on.
        """
        while True:
            with self.lock:
                if self._writer is not None:
                    return True
                num_changes = self._num_changes
            fresh = self._open_version()
            with self.lock:
                if num_changes == self._num_changes:
                    if not self._matches_node(fresh):
                        break
                    keep = self._read is not None or self._node.cached_version in (None, fresh.version)
                    self._end_reading()  # reads in flight still end
                    self._read, self._node.cached_version = fresh, fresh.version
                    return keep
            fresh.close()
        raise self._stale_version(fresh)

    def begin_writing(self) -> bool:
        """Open for writing only. Returns as `begin_reading`."""
        with self.lock:
            if self._writer is None and self._read is None:
                # A rewrite will start from the version that the place has then.
                self._node.cached_version = None
                return False
            return True

    def begin_appending(self) -> None:
        """Refuse to append to a file that is too large for it."""
        if self._writer is None:
            self._check_small(self.size_bytes)

    def _hold_reader(self) -> CheckpointFile | None:
        """The published version, to be closed by the caller; None while there is new content."""
        with self.lock:
            held = self._held_reader()
            is_moved = held is not None and self._node.path not in (None, held.path)
            if self._writer is not None or (held is not None and not is_moved):
                return held
        try:
            self.begin_reading()
        except (BootseerError, OSError):
            if held is None:
                raise
            return held  # the old reader may have all it needs open
        if held is not None:
            held.close()
        with self.lock:
            if not is_moved:
                # The new content was published while the file stayed open; cached pages are those of the new content.
                self._node.cached_version = ""
            return self._held_reader()

    def _held_reader(self) -> CheckpointFile | None:
        return None if self._read is None or self._writer is not None else self._read.retain()

    def _end_reading(self) -> None:
        held, self._read = self._read, None
        if held is not None:
            held.close()

    def _open_version(self) -> CheckpointFile:
        path = self._node.path
        if path is None:
            raise os_error(errno.ESTALE)
        try:
            return self._context.open(path)
        except NotFoundError:
            # It may be being renamed just now.
            with self.changing():
                moved = self._node.path
                if moved is None or moved == path:
                    # Removed elsewhere. The kernel looks the name up again, and creates the file if that was asked for.
                    raise self._stale_version() from None
                return self._context.open(moved)

    def _matches_node(self, reader: CheckpointFile) -> bool:
        """Whether the reader is of the node's version. The kernel would cut off content beyond the size it knows."""
        known = self._read is None or reader.version == self._read.version
        return known and reader.size_bytes == self._node.info.size_bytes

    def _stale_version(self, fresh: CheckpointFile | None = None) -> OSError:
        """The name leads to another version than the node's, or is gone."""
        if fresh is not None:
            fresh.close()
        self._detach(self._node)
        return os_error(errno.ESTALE)

    def read(self, offset: int, length: int, reply: Reply, room: memoryview) -> None:
        """Answer a read from new content, or from the node's version. See `FileSystem.read`."""
        # Without the lock: a writer that waits for spool space must not block readers.
        writer = self._writer
        while writer is not None:
            try:
                reply(writer.read_at(offset, length))
                return
            except BootseerError:
                # The writer may have ended just now: then the published version has all of it.
                with self.lock:
                    if writer is self._writer:
                        raise
                    writer = self._writer
        held = self._hold_reader()
        if held is None:
            self.read(offset, length, reply, room)
            return
        with held:
            self._read_version(held, offset, length, reply, room)

    def _read_version(self, reader: CheckpointFile, offset: int, length: int, reply: Reply, room: memoryview) -> None:
        wanted = min(length, reader.size_bytes - offset)
        if wanted <= 0:
            reply(b"")
            return
        self._context.on_read(self._node.info.path, offset, wanted)

        def done(result: Data | BootseerError) -> None:
            if isinstance(result, BootseerError):
                self._context.on_error(f"reading {self._node.info.path}: {result}")
                reply(number_of(result))
            elif len(result) == wanted:
                reply(result)
            else:  # a short answer would mean the end of the file to the kernel
                self._context.on_error(f"reading {self._node.info.path}: {len(result)} bytes in place of {wanted}")
                reply(errno.EIO)

        reader.read_async(offset, wanted, done, room[:wanted])

    def begin_empty(self, check: Check = no_check) -> None:
        """Begin new, empty content. The published version stays until it is replaced."""
        with self.changing(check):
            if self._writer is not None:
                self._writer.truncate(0)
            else:
                self._start(self._begin())
            self._changed()

    def write(self, offset: int, data: memoryview, check: Check) -> None:
        """Write at any offset; a small published file is rewritten first."""
        with self.changing(check):
            writer = self._writer or self._rewrite(self.size_bytes, check)
            writer.write_at(offset, data, check)
            self._changed()

    def truncate(self, size_bytes: int) -> None:
        """Cut, or extend by zeros."""
        with self.changing():
            if size_bytes == self.size_bytes:
                return
            writer = self._writer or self._rewrite(min(size_bytes, self.size_bytes))
            writer.truncate(size_bytes)
            self._changed()

    def attributes_changed(self, mtime_ns: int | None) -> None:
        """The node's attributes were changed, and are published with the content; `mtime_ns` if it was set."""
        with self.lock:
            self._mtime_ns = self._mtime_ns if mtime_ns is None else mtime_ns
            self._is_dirty = True
            self._num_changes += 1

    def touched(self) -> None:
        """The time of the published file was set here. On places where that makes another version of it, reads go on
        with that one."""
        self._mtime_ns = None  # an earlier one is not to be set again
        if self._read is None:
            return
        with contextlib.suppress(BootseerError):  # the old reader may have all it needs open
            fresh = self._open_version()
            with self.lock:
                if self._read is not None and self._read.size_bytes == fresh.size_bytes:
                    self._read, fresh = fresh, self._read
                    self._node.cached_version = self._read.version
            fresh.close()

    def publish(self, check: Check = no_check) -> None:
        """Make what was written durable, checked, and visible everywhere. May be repeated after an error."""
        with self.changing(check):
            if self._discard_reason is not None:  # other handles have written to it too
                raise self._discard_reason
            writer = self._writer
            while self.is_dirty and writer is not None:
                self._publish_once(writer, check)

    def _publish_once(self, writer: FileWriter, check: Check = no_check) -> None:
        """Publish the current content. Attributes set meanwhile make it dirty again."""
        path, num_changes = self._node.path, self._num_changes
        if path is None:  # closed, replaced elsewhere, and written again through memory or a copy of the descriptor
            raise os_error(errno.ESTALE)
        if folder_of(path) != folder_of(writer.path):  # a file that was opened during the rename, see `filesystem`
            raise PermanentError(f"{path}: its folder was renamed while the file was opened; write it again")
        before, self._published = self._published, writer.sync(check)
        # An older entry of the place may be outdated: attributes were set since, or the file was renamed.
        info = replace(self._node.info, size_bytes=writer.size_bytes)
        with contextlib.suppress(NotFoundError):  # removed or moved elsewhere since it was published
            info = self._apply_attributes(path, None if self._published is before else self._published.entry)
        with self.lock:
            if num_changes == self._num_changes:
                self._node.info = info
                self._is_dirty = False

    def end_writing(self) -> bool:
        """Publish, and let the name lead to the place's version again. Returns whether there was anything to publish.
        After an error the new content is discarded."""
        with self.changing():
            writer, was_dirty = self._writer, self.is_dirty
            if writer is None:
                return False
            try:
                while not self._ended():
                    self._publish_once(writer)
            except BaseException:
                self._drop(writer)
                raise
            writer.abort()
            return was_dirty

    def discard(self, reason: BootseerError) -> None:
        """Discard the new content: the name leads to the place's version. Later attempts to publish raise `reason`."""
        with self.changing():
            if self._writer is not None:
                self._discard_reason = reason
                self._drop(self._writer)

    def _drop(self, writer: FileWriter) -> None:
        self._detach(self._node)
        with self.lock:
            # With the old size, readers would see the end of the file and not an error.
            self._node.info = replace(self._node.info, size_bytes=writer.size_bytes)
            self._writer = None
            self._is_dirty = False
            self._num_changes += 1
        writer.abort()

    def _ended(self) -> bool:
        """End the writer, unless something is left to be published."""
        with self.lock:
            if self.is_dirty:
                return False
            self._writer = None
            self._is_dirty = False
            self._num_changes += 1
            # The page cache holds what was written here; from now on reads return what the place has.
            self._node.cached_version = ""
            return True

    def renamed(self, path: str) -> None:
        """The file, which was published, was renamed in its folder. Called with `changing` held."""
        if self._writer is not None:
            self._writer.path = path

    def removed(self) -> None:
        """The file was unlinked or replaced: its content exists for its open handles only."""
        with self.lock:
            self.is_removed = True

    def close(self) -> None:
        """The last handle was closed: close the version that is read."""
        with self.lock:
            self._end_reading()

    def _changed(self) -> None:
        with self.lock:
            self._is_dirty = True
            self._num_changes += 1
            self._mtime_ns = None
            entry = replace(self._node.info.entry, mtime_ns=time.time_ns())
            self._node.info = replace(self._node.info, entry=entry)

    def _begin(self) -> FileWriter:
        # A file without a name is never published; its parts go where its last name was.
        path = self._node.info.path if self.is_removed else self._node.path
        if path is None:
            raise os_error(errno.ESTALE)
        return self._context.begin(path, stat.S_IMODE(self._node.info.entry.mode))

    def _start(self, writer: FileWriter) -> FileWriter:
        with self.lock:
            self._writer = writer
            self._num_changes += 1
            self._end_reading()
        return writer

    def _rewrite(self, keep_bytes: int, check: Check = no_check) -> FileWriter:
        """Begin new content with the first `keep_bytes` of the published version."""
        self._check_small(keep_bytes)
        if keep_bytes == 0:
            return self._start(self._begin())
        with self.lock:
            held = self._held_reader()
        if held is None:
            held = self._open_version()
            if not self._matches_node(held):
                raise self._stale_version(held)
        try:
            writer = self._begin()
            try:
                for offset in range(0, keep_bytes, _COPY_BYTES):
                    check()
                    writer.write_at(offset, held.read(offset, min(_COPY_BYTES, keep_bytes - offset)), check)
            except BaseException:
                writer.abort()
                raise
        finally:
            held.close()
        return self._start(writer)

    def _check_small(self, keep_bytes: int) -> None:
        if keep_bytes > self._context.rewrite_bytes:
            self._context.on_error(f"{self._node.info.path} is too large to be changed or appended to: write it anew")
            raise os_error(errno.EOPNOTSUPP)

    def _apply_attributes(self, path: str, entry: Entry | None) -> FileInfo:
        """Apply the wanted owner, mode and mtime to the published file; returns its attributes. `entry`: those right
        after publication, if known."""
        files = self._context.files
        with self.lock:
            wanted, mtime_ns = self._node.info.entry, self._mtime_ns
        info = files.stat(path) if entry is None else FileInfo(entry, entry.size_bytes, is_striped=False)
        is_same = True
        owner, group = wanted.owner or info.entry.owner, wanted.group or info.entry.group
        if (owner, group) != (info.entry.owner, info.entry.group):
            with contextlib.suppress(PermanentError):  # only superusers may give files away
                files.set_owner(path, owner, group)
                is_same = False
        if stat.S_IMODE(info.entry.mode) != stat.S_IMODE(wanted.mode):
            files.set_mode(path, stat.S_IMODE(wanted.mode))
            is_same = False
        if mtime_ns is not None:
            files.set_mtime(path, mtime_ns)
            is_same = False
        return info if is_same else files.stat(path)

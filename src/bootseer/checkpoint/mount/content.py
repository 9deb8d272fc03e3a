"""The content of one open file: a published version that is read, or new content that will be published.

A file that is written exists twice: what the place has under its name, which all other machines see, and what was
written here, which every program on this mount sees. `publish` makes the second take the place of the first, in one
step. To change a part of a published file, or to append to it, it is written anew, which is done for small files only.

What changes the content or its name takes turns (`changing`), and a turn lasts as long as the place takes to publish.
`lock` guards what the content consists of and is held for moments: never while the place is asked. So files are opened,
read and looked at while they are published. Turn before lock.
"""

from __future__ import annotations

import contextlib
import errno
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bootseer.checkpoint.files import FileInfo, Files
from bootseer.checkpoint.os_errors import number_of, refusal, stale
from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.checkpoint.writing.publication import Written
from bootseer.checkpoint.writing.writing import FileWriter
from bootseer.errors import BootseerError, NotFoundError, PermanentError
from bootseer.fuse.filesystem import Data, Reply
from bootseer.places.place import Entry

_COPY_BYTES = 4 << 20
_LOOK_S = 0.5
"""Seconds between two checks whether the caller that waits for its turn is being killed."""
Check = Callable[[], None]
"""Raises when the caller does not wait any more."""


def no_check() -> None:
    """For callers that cannot give up."""


class Node:
    """One file or folder as the kernel knows it."""

    __slots__ = ("content", "held", "info", "number", "pages_of", "path")

    def __init__(self, number: int, path: str, info: FileInfo) -> None:
        self.number = number
        self.path: str | None = path
        """None when the name leads elsewhere or nowhere by now."""
        self.info = info
        """The latest that is known."""
        self.content: Content | None = None
        """There while the file is open."""
        self.held = 0
        """The kernel's lookup count: how often it got this node, minus how often it forgot it."""
        self.pages_of: str | None = None
        """The version whose pages the kernel may have; None when it has none, "" when they must go."""

    @property
    def is_folder(self) -> bool:
        return self.info.is_folder

    @property
    def is_live(self) -> bool:
        return self.content is not None and self.content.is_live


class HeldReader:
    """One version of a file, closed when its last holder lets it go. Safe for many threads.

    A file that is opened again is read by a new reader from then on, and so it is after a rename; reads that were about
    to begin go on with the old one, which must not be closed under them.
    """

    def __init__(self, reader: CheckpointFile, path: str) -> None:
        self.reader = reader
        self.path = path
        """Where it was opened; it may open parts there later."""
        self._lock = threading.Lock()
        self._holders = 1

    def hold(self) -> HeldReader:
        """One more holder. Called by one that holds it."""
        with self._lock:
            self._holders += 1
        return self

    def let_go(self) -> None:
        """One of its holders does not need it any more."""
        with self._lock:
            self._holders -= 1
            is_over = not self._holders
        if is_over:
            self.reader.close()


@dataclass(frozen=True, slots=True)
class MountContext:
    """Where content comes from and goes to."""

    files: Files
    open: Callable[[str], CheckpointFile]
    begin: Callable[[str, int], FileWriter]
    """Begins new content for a path, with these permission bits."""
    rewrite_bytes: int
    """The largest published file that is written anew when a part of it changes."""
    on_error: Callable[[str], None]
    on_read: Callable[[str, int, int], None]
    """Called with each read of a published file: path, offset and length."""


class Content:
    """See the module. Made when a file is opened; over when the last one has closed it."""

    def __init__(self, node: Node, context: MountContext, detach: Callable[[Node], None]) -> None:
        """`detach` lets the node's name lead to what the place has."""
        self.lock = threading.RLock()
        self._turn = threading.RLock()
        self.handles: set[int] = set()
        """The open files that lead here; kept by `open_files`."""
        self.num_writers = 0
        """How many of them can write; kept by `open_files`."""
        self._node = node
        self._context = context
        self._detach = detach
        self._read: HeldReader | None = None
        """The version that is read, once it is."""
        self._writer: FileWriter | None = None
        self._is_dirty = False
        self._num_changes = 0
        """Rises with every change of content or attributes, so that code that ran without the lock can detect one."""
        self.is_removed = False
        """Whether the name is gone, or leads to another file, by what was done here."""
        self._mtime_ns: int | None = None
        """The time of the last change that a program has set."""
        self._given_up: BootseerError | None = None
        self._published: Written | None = None
        """What was published last. A writer says the same again when nothing was written since."""

    @property
    def is_live(self) -> bool:
        """Whether this, and not the place, says what the file's name leads to."""
        return self._writer is not None and not self.is_removed and (self._is_dirty or self.num_writers > 0)

    @property
    def is_left(self) -> bool:
        """Whether it is left to readers, after it was published: the place may have another version by now."""
        return self._writer is not None and not self.is_removed and not self.is_live

    @property
    def is_dirty(self) -> bool:
        """Whether something of it is not published, and should be."""
        return self._is_dirty and not self.is_removed

    @property
    def size_bytes(self) -> int:
        writer = self._writer
        return self._node.info.size_bytes if writer is None else writer.size_bytes

    @contextlib.contextmanager
    def changing(self, check: Check = no_check) -> Iterator[None]:
        """Wait for the turn to change the content or its name. `check` is called now and then meanwhile."""
        while not self._turn.acquire(timeout=_LOOK_S):
            check()
        try:
            yield
        finally:
            self._turn.release()

    def begin_reading(self) -> bool:
        """Open what the name leads to now. Whether pages that the kernel has of the node are of that.

        Raises ESTALE when the node is of another version: its name leads to another node from then on.
        """
        while True:
            with self.lock:
                if self._writer is not None:
                    return True
                num_changes = self._num_changes
            fresh = self._open_version()
            reader = fresh.reader
            with self.lock:
                if num_changes == self._num_changes:
                    if not self._is_right(reader):
                        break
                    keep = self._read is not None or self._node.pages_of in (None, reader.version)
                    self._end_reading()  # reads that were begun still end
                    self._read, self._node.pages_of = fresh, reader.version
                    return keep
            fresh.let_go()
        raise self._outdated(fresh)

    def begin_writing(self) -> bool:
        """A handle that writes and does not read. As `begin_reading`."""
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

    def _hold_reader(self) -> HeldReader | None:
        """The published version, to be let go of, or None while there is new content."""
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
            return held  # the old one may have all that it needs
        if held is not None:
            held.let_go()
        with self.lock:
            if not is_moved:
                # What was written has ended, while the file stayed open; the pages are of what was written.
                self._node.pages_of = ""
            return self._held_reader()

    def _held_reader(self) -> HeldReader | None:
        return None if self._read is None or self._writer is not None else self._read.hold()

    def _end_reading(self) -> None:
        held, self._read = self._read, None
        if held is not None:
            held.let_go()

    def _open_version(self) -> HeldReader:
        path = self._node.path
        if path is None:
            raise stale()
        try:
            return HeldReader(self._context.open(path), path)
        except NotFoundError:
            # It may just be getting another name.
            with self.changing():
                moved = self._node.path
                if moved is None or moved == path:
                    raise
                return HeldReader(self._context.open(moved), moved)

    def _is_right(self, reader: CheckpointFile) -> bool:
        """Whether this is the version that the node is of. The kernel would cut off what is longer than it knows."""
        known = self._read is None or reader.version == self._read.reader.version
        return known and reader.size_bytes == self._node.info.size_bytes

    def _outdated(self, fresh: HeldReader) -> OSError:
        """The name leads to another version than the node is of."""
        fresh.let_go()
        self._detach(self._node)
        return stale()

    def read(self, offset: int, length: int, reply: Reply, room: memoryview) -> None:
        """Answer a read: from what was written, or from the node's version. See `FileSystem.read`."""
        # Without the lock: a writer that waits for room must not hold up readers.
        writer = self._writer
        while writer is not None:
            try:
                reply(writer.read_at(offset, length))
                return
            except BootseerError:
                # It may just have ended: then the published version has it all.
                with self.lock:
                    if writer is self._writer:
                        raise
                    writer = self._writer
        held = self._hold_reader()
        if held is None:
            self.read(offset, length, reply, room)
            return
        try:
            self._read_version(held.reader, offset, length, reply, room)
        finally:
            held.let_go()

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
            else:  # which would tell the kernel that the file ends there
                self._context.on_error(f"reading {self._node.info.path}: {len(result)} bytes in place of {wanted}")
                reply(errno.EIO)

        reader.read_async(offset, wanted, done, room[:wanted])

    def begin_empty(self, check: Check = no_check) -> None:
        """New content from nothing. What the place has stays until it is published."""
        with self.changing(check):
            if self._writer is not None:
                self._writer.truncate(0)
            else:
                self._start(self._begin())
            self._changed()

    def write(self, offset: int, data: memoryview, check: Check) -> None:
        """Write anywhere; a published file is written anew first, if it is small."""
        with self.changing(check):
            writer = self._writer or self._rewrite(self.size_bytes, check)
            writer.write_at(offset, data, check)
            self._changed()

    def truncate(self, size_bytes: int) -> None:
        """Cut, or continue by zeros."""
        with self.changing():
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
            self._num_changes += 1

    def publish(self, check: Check = no_check) -> None:
        """Make what was written durable, verified, and visible to all. After an error it may be tried again."""
        with self.changing(check):
            if self._given_up is not None:  # others have written to it, too
                raise self._given_up
            writer = self._writer
            while self.is_dirty and writer is not None:
                self._publish_once(writer, check)

    def publish_at_once(self) -> None:
        """Publish what can be without waiting: where it is another thread's turn, that one publishes all."""
        if self._turn.acquire(blocking=False):
            try:
                self.publish()
            finally:
                self._turn.release()

    def _publish_once(self, writer: FileWriter, check: Check = no_check) -> None:
        """Publish all that is there now. Attributes may be set meanwhile, and then it is not all."""
        num_changes = self._num_changes
        before, self._published = self._published, writer.sync(check)
        # What the place said before may not be so any more: attributes were set since, or the name is another one.
        info = self._settled(None if self._published is before else self._published.entry)
        with self.lock:
            if num_changes == self._num_changes:
                self._node.info = info
                self._is_dirty = False

    def end_writing(self) -> bool:
        """Publish, and let the place say again what the name leads to: whether there was anything to publish. After an
        error what was written is gone.
        """
        with self.changing():
            writer, was_dirty = self._writer, self.is_dirty
            if writer is None:
                return False
            try:
                while not self._ended(writer):
                    self._publish_once(writer)
            except BaseException:
                self._drop(writer)
                raise
            writer.abort()
            return was_dirty

    def give_up(self, reason: BootseerError) -> None:
        """Drop what was written: the name leads to what the place has. A later attempt to publish it raises why."""
        with self.changing():
            if self._writer is not None:
                self._given_up = reason
                self._drop(self._writer)

    def _drop(self, writer: FileWriter) -> None:
        self._detach(self._node)
        with self.lock:
            self._writer = None
            self._is_dirty = False
            self._num_changes += 1
        writer.abort()

    def _ended(self, writer: FileWriter) -> bool:
        """End the writing, if nothing is left to be published."""
        with self.lock:
            if self.is_dirty:
                return False
            self._writer = None
            self._is_dirty = False
            self._num_changes += 1
            # What was written is in the kernel's pages. What is read from now on comes from where others read it.
            self._node.pages_of = ""
            return True

    def renamed(self, path: str) -> None:
        """The file, which was published, has another name in the same folder. Called in a turn."""
        if self._writer is not None:
            self._writer.path = path

    def removed(self) -> None:
        """The name is gone, or leads to another file: what is written is for the handles that have it open."""
        with self.lock:
            self.is_removed = True

    def close(self) -> None:
        """No handle is left and none will come: close the version that is read."""
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
        """New content, which is the file's from `_start` on."""
        # What has no name any more is never published; its new content goes where that of its last name would.
        path = self._node.info.path if self.is_removed else self._node.path
        if path is None:
            raise stale()
        return self._context.begin(path, stat.S_IMODE(self._node.info.entry.mode))

    def _start(self, writer: FileWriter) -> FileWriter:
        with self.lock:
            self._writer = writer
            self._num_changes += 1
            self._end_reading()
        return writer

    def _rewrite(self, keep_bytes: int, check: Check = no_check) -> FileWriter:
        """Begin with the first `keep_bytes` of what is published."""
        self._check_small(keep_bytes)
        if keep_bytes == 0:
            return self._start(self._begin())
        with self.lock:
            held = self._held_reader()
        if held is None:
            held = self._open_version()
            if not self._is_right(held.reader):
                raise self._outdated(held)
        base = held.reader
        try:
            writer = self._begin()
            try:
                for offset in range(0, keep_bytes, _COPY_BYTES):
                    check()
                    writer.write_at(offset, base.read(offset, min(_COPY_BYTES, keep_bytes - offset)), check)
            except BaseException:
                writer.abort()
                raise
        finally:
            held.let_go()
        return self._start(writer)

    def _check_small(self, keep_bytes: int) -> None:
        if keep_bytes > self._context.rewrite_bytes:
            self._context.on_error(f"{self._node.info.path} is too large to be changed or appended to: write it anew")
            raise refusal(errno.EOPNOTSUPP)

    def _settled(self, entry: Entry | None) -> FileInfo:
        """Give what was published the owner, the rights and the time that it should have: what it is then. `entry`:
        what is known of it."""
        path, files = self._node.path, self._context.files
        if path is None:
            raise stale()
        with self.lock:
            wanted, mtime_ns = self._node.info.entry, self._mtime_ns
        info = files.stat(path) if entry is None else FileInfo(entry, entry.size_bytes, is_striped=False)
        is_same = True
        owner, group = wanted.owner or info.entry.owner, wanted.group or info.entry.group
        if (owner, group) != (info.entry.owner, info.entry.group):
            with contextlib.suppress(PermanentError):  # only few may give files away
                files.set_owner(path, owner, group)
                is_same = False
        if stat.S_IMODE(info.entry.mode) != stat.S_IMODE(wanted.mode):
            files.set_mode(path, stat.S_IMODE(wanted.mode))
            is_same = False
        if mtime_ns is not None:
            files.set_mtime(path, mtime_ns)
            is_same = False
        return info if is_same else files.stat(path)

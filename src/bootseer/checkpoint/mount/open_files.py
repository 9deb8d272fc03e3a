"""The mount's tables of open files (handles, which of them write, and which close publishes) and of cached listings.

Lock order: a content's lock before the table's lock. Neither is held while a file is published. Safe to use from many
threads.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from bootseer.checkpoint.files import FileInfo
from bootseer.checkpoint.mount.content import Content, MountContext
from bootseer.checkpoint.mount.nodes import Node, Nodes, is_same
from bootseer.checkpoint.os_errors import os_error
from bootseer.checkpoint.writing.writing import Check, no_check
from bootseer.errors import BootseerError, NotFoundError
from bootseer.fuse.filesystem import Opened
from bootseer.io.proc import num_writers, process_of, was_killed
from bootseer.places.place import folder_of

REMEMBERED_S = 5.0
_MAX_FOLDERS = 64
_SEEN_S = 0.1
"""The kernel looks a name up right before it creates or removes it."""
_MAX_SEEN = 1024


class Listings:
    """Caches the latest listings and lookups."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds, from any origin."""
        self._clock = clock
        self._lock = threading.Lock()
        self._folders: OrderedDict[str, tuple[float, dict[str, FileInfo]]] = OrderedDict()
        self._seen: dict[str, tuple[float, FileInfo | None]] = {}
        """The latest lookups: when, and what was found."""
        self.num_changes = 0
        """Incremented with every change. To be read before a listing begins."""

    def remember(self, folder: str, infos: Iterable[FileInfo], *, since: int) -> None:
        """Cache a complete listing; `since`: `num_changes` before it began. It is dropped if anything has changed
        since."""
        by_path = {info.path: info for info in infos}
        with self._lock:
            if self.num_changes != since:
                return
            self._folders[folder] = (self._clock(), by_path)
            self._folders.move_to_end(folder)
            if len(self._folders) > _MAX_FOLDERS:
                self._folders.popitem(last=False)

    def recall(self, path: str) -> FileInfo | None:
        """The entry of a path in its folder's cached listing; None if there is no fresh one."""
        folder = folder_of(path)
        with self._lock:
            listed_s, by_path = self._folders.get(folder, (0.0, {}))
            if not by_path or not path:
                return None
            if self._clock() - listed_s > REMEMBERED_S:
                del self._folders[folder]
                return None
            if path in by_path:
                self._seen.pop(path, None)
            return by_path.get(path)

    def forget(self, *folders: str) -> None:
        """Something in these folders has changed."""
        with self._lock:
            self.num_changes += 1
            for folder in folders:
                self._folders.pop(folder, None)

    def forget_all(self) -> None:
        """A folder was renamed, with everything below it."""
        with self._lock:
            self.num_changes += 1
            self._folders.clear()

    def removed(self, path: str) -> None:
        with self._lock:
            self.num_changes += 1
            self._folders.get(folder_of(path), (0.0, {}))[1].pop(path, None)

    def looked_up(self, path: str, info: FileInfo | None) -> None:
        """A path was looked up in the place."""
        with self._lock:
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            self._seen[path] = self._clock(), info

    def was_missing(self, path: str) -> bool:
        """Whether a lookup a moment ago found nothing. Forgets the lookup."""
        return self._take_seen(path) == (True, None)

    def was_there(self, path: str) -> FileInfo | None:
        """What a lookup a moment ago found. Forgets the lookup."""
        return self._take_seen(path)[1]

    def _take_seen(self, path: str) -> tuple[bool, FileInfo | None]:
        with self._lock:
            seen_s, info = self._seen.pop(path, (-_SEEN_S, None))
            is_fresh = self._clock() - seen_s < _SEEN_S
        return is_fresh, info if is_fresh else None


class Handle(Struct, eq=False):
    """One open file description, shared by all descriptors that were duplicated from it."""

    number: int
    node: Node
    content: Content
    writes: bool
    opener: int
    """The pid of the opening process; 0 if unknown."""

    @property
    def only_reads(self) -> bool:
        """Whether it cannot write and its file has no unpublished content."""
        return not (self.writes or self.content.is_live or self.content.is_published)

    def write(self, offset: int, data: memoryview, check: Check) -> None:
        self.content.writers.add(self.number)  # its last descriptor only seemed to be closed
        self.content.write(offset, data, check)


class OpenFiles:
    """All open files of a mount."""

    def __init__(self, nodes: Nodes, context: MountContext) -> None:
        self._nodes = nodes
        self._context = context
        self._lock = threading.Lock()
        self._handles: dict[int, Handle] = {}
        self._numbers = itertools.count(1)

    def open(self, node: Node, flags: int, thread: int, check: Check) -> Opened:
        """Open a file as open(2) with these flags; O_TRUNC begins new content.

        `thread` is the caller's; `check` raises when it is being killed.
        """
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        if node.is_published:
            self.check_version(node)
        if flags & os.O_TRUNC and not writes:
            # This handle cannot write, so its close would not report errors: published at once.
            with self.changing(node) as emptied:
                emptied.begin_empty(check)
        handle = self._new_handle(node, writes, thread)
        try:
            content = self._handles[handle].content
            keep_pages = True
            if writes and flags & os.O_TRUNC:
                content.begin_empty(check)
            else:
                is_read = flags & os.O_ACCMODE != os.O_WRONLY
                if not (is_read or content.is_live or content.is_removed):
                    self.check_version(node)
                if writes and flags & os.O_APPEND:
                    content.begin_appending()
                keep_pages = content.begin_reading() if is_read else content.begin_writing()
        except BaseException:
            self.close(handle)
            raise
        return Opened(handle, keep_pages)

    def check_version(self, node: Node) -> None:
        """Raise ESTALE when the node's name leads to another version by now, so that the kernel looks it up again."""
        try:
            is_current = node.path is not None and is_same(self._context.files.stat(node.path), node.info)
        except NotFoundError:
            is_current = False
        if not is_current:
            self._nodes.detach(node)
            raise os_error(errno.ESTALE)

    def _new_handle(self, node: Node, writes: bool, thread: int) -> int:
        opener = process_of(thread) if writes else 0
        number = next(self._numbers)
        with self._lock:
            content = node.content
            if content is None:
                content = node.content = Content(node, self._context, self._nodes.detach)
            content.handles.add(number)
            if writes:
                content.writers.add(number)
            self._handles[number] = Handle(number, node, content, writes, opener)
        return number

    @contextlib.contextmanager
    def changing(self, node: Node) -> Iterator[Content]:
        """The content of a file, open or not, to be changed in the block. Published at the end if the file was not
        open."""
        number = self._new_handle(node, writes=True, thread=0)
        content = self._handles[number].content
        content.writers.discard(number)
        try:
            yield content
            self._publish_if_last(content, discard=True)
        finally:
            self.close(number)

    def get(self, number: int) -> Handle:
        return self._handles[number]

    def flush(self, opened: Handle, thread: int, check: Check) -> None:
        """A descriptor was closed by `thread`: publish, unless another one is left that can write."""
        if not opened.writes:
            return
        if was_killed(thread):
            return  # no program is left to get the error: `close` publishes
        process = process_of(thread)
        with opened.content.lock:
            if opened.content.is_live and self._may_be_written(opened, {opened.opener, process}):
                return
            opened.content.writers.discard(opened.number)
        self._publish_if_last(opened.content, check, discard=True)

    def _may_be_written(self, opened: Handle, processes: set[int]) -> bool:
        """Whether these processes have more writable descriptors of the file than its other open handles explain."""
        with self._lock:
            numbers = opened.content.writers - {opened.number}
            others = sum(self._handles[number].opener in processes for number in numbers)
        return sum(num_writers(process, opened.node.number) for process in processes) > others

    def _publish_if_last(self, content: Content, check: Check = no_check, *, discard: bool = False) -> None:
        """Publish, unless another handle may still write, whose close publishes then. `discard`: drop content that
        could not be published, unless a handle may write by then."""
        if content.writers:
            return
        # Under one `changing`: content written by a program that opens the file meanwhile must not be dropped.
        with content.changing(check):
            if content.writers:
                return
            try:
                content.publish(check)
            except BootseerError as error:
                # The program got the error, and cannot retry: its handle is closed.
                if discard and not content.writers:
                    content.discard(error)
                raise

    def close(self, handle: int) -> None:
        """The last descriptor of a handle was closed. The last writer's close publishes."""
        opened = self.get(handle)
        content = opened.content
        with self._lock:
            del self._handles[handle]
            content.handles.discard(handle)
            content.writers.discard(handle)
            is_last = not content.handles
        if not is_last:
            if opened.writes:
                self._publish_if_last(content)
            return
        try:
            with content.changing():
                if not content.handles:
                    content.end_writing()
                elif opened.writes:  # opened again meanwhile: the same content goes on
                    self._publish_if_last(content)
        finally:
            with self._lock:
                is_over = not content.handles and opened.node.content is content
                if is_over:
                    self._nodes.closed(opened.node)
            if is_over:
                content.close()

    def num_open(self) -> int:
        return len(self._handles)

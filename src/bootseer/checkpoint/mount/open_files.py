"""The files that programs have open: handles, which of them write, and when a close is the one that publishes.

The lock of a content is taken before the lock of the table, never after it; neither is held while a file is published.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from bootseer.checkpoint.mount.content import Check, Content, MountContext, Node, no_check
from bootseer.checkpoint.mount.nodes import Nodes, is_same
from bootseer.checkpoint.os_errors import bad_handle, stale
from bootseer.errors import BootseerError, NotFoundError
from bootseer.fuse.callers import num_writing, process_of, was_killed
from bootseer.fuse.filesystem import Opened, Reply


@dataclass(eq=False, slots=True)
class _Handle:
    """One open file, however many descriptors lead to it."""

    node: Node
    content: Content
    writes: bool
    opener: int
    """The process that opened it; 0 when unknown."""
    is_done: bool = False
    """Whether its last descriptor seems to be closed."""


class OpenFiles:
    """All open files of a mount."""

    def __init__(self, nodes: Nodes, context: MountContext) -> None:
        self._nodes = nodes
        self._context = context
        self._lock = threading.Lock()
        self._handles: dict[int, _Handle] = {}
        self._numbers = itertools.count(1)

    def open(self, node: Node, flags: int, thread: int, check: Check) -> Opened:
        """Open a file as open(2) does with these flags; with O_TRUNC, new content takes the place of what it has.

        `thread` asks; `check` raises when it is being killed.
        """
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        if flags & os.O_TRUNC and not writes:
            # This handle adds nothing, and its close is not reported.
            with self.changing(node) as emptied:
                emptied.begin_empty(check)
        was_left = node.content is not None and node.content.is_left
        handle = self._new_handle(node, writes, thread)
        try:
            content = self._handles[handle].content
            keep_pages = True
            if writes and flags & os.O_TRUNC:
                content.begin_empty(check)
            else:
                if writes and flags & os.O_APPEND:
                    content.begin_appending()
                is_read = flags & os.O_ACCMODE != os.O_WRONLY
                if was_left:
                    self._check_version(node)
                keep_pages = content.begin_reading() if is_read else content.begin_writing()
        except BaseException:
            self.close(handle)
            raise
        return Opened(handle, keep_pages)

    def _check_version(self, node: Node) -> None:
        """Raise ESTALE when the node's name leads to another version by now: the kernel looks for the name again."""
        try:
            is_current = node.path is not None and is_same(self._context.files.stat(node.path), node.info)
        except NotFoundError:
            is_current = False
        if not is_current:
            self._nodes.detach(node)
            raise stale()

    def _new_handle(self, node: Node, writes: bool, thread: int) -> int:
        opener = process_of(thread) if writes else 0
        number = next(self._numbers)
        with self._lock:
            content = node.content
            if content is None:
                content = node.content = Content(node, self._context, self._nodes.detach)
            content.handles.add(number)
            content.num_writers += writes
            self._handles[number] = _Handle(node, content, writes, opener)
        return number

    @contextlib.contextmanager
    def changing(self, node: Node) -> Iterator[Content]:
        """The content of a file that may not be open. If it was not, it is published when the block ends."""
        number = self._new_handle(node, writes=True, thread=0)
        handle = self._handles[number]
        handle.is_done = True
        try:
            yield handle.content
            self._publish_if_last(handle.content)
        finally:
            self.close(number)

    def node(self, handle: int) -> Node:
        """What a handle has open."""
        return self._get(handle).node

    def _get(self, number: int) -> _Handle:
        handle = self._handles.get(number)
        if handle is None:
            raise bad_handle()
        return handle

    def read(self, handle: int, offset: int, length: int, reply: Reply, room: memoryview) -> None:
        self._get(handle).content.read(offset, length, reply, room)

    def write(self, handle: int, offset: int, data: memoryview, check: Check) -> None:
        opened = self._get(handle)
        opened.is_done = False
        opened.content.write(offset, data, check)

    def sync(self, handle: int, check: Check) -> None:
        self._get(handle).content.publish(check)

    def flush(self, handle: int, thread: int, check: Check) -> None:
        """A descriptor was closed by `thread`: publish, if no other one is left that can write."""
        opened = self._get(handle)
        if not opened.writes:
            return
        if was_killed(thread):
            return  # no program is left to be told, and it could not end before: `close` publishes
        process = process_of(thread)
        with opened.content.lock:
            if opened.content.is_live and self._may_be_written(opened, {opened.opener, process}):
                return
            opened.is_done = True
        self._publish_if_last(opened.content, check, give_up=True)

    def _may_be_written(self, opened: _Handle, processes: set[int]) -> bool:
        """Whether these have more descriptors that can write to the file than its other open handles explain."""
        name = (opened.node.path or "").rpartition("/")[2]
        others = sum(
            other is not opened and other.writes and not other.is_done and other.opener in processes
            for other in self._handles_of(opened.content)
        )
        return sum(num_writing(process, name, opened.node.number) for process in processes) > others

    def _handles_of(self, content: Content) -> list[_Handle]:
        with self._lock:
            return [self._handles[number] for number in content.handles]

    def _publish_if_last(self, content: Content, check: Check = no_check, *, give_up: bool = False) -> None:
        """Publish, unless a handle may still write, whose close publishes then. `give_up`: drop what cannot be
        published, unless a handle may write by then."""
        if self._has_writer(content):
            return
        # In one turn: what a program writes that opens it meanwhile must not be dropped behind its back.
        with content.changing(check):
            if self._has_writer(content):
                return
            try:
                content.publish(check)
            except BootseerError as error:
                # The program was told, and has nothing left to try again with.
                if give_up and not self._has_writer(content):
                    content.give_up(error)
                raise

    def _has_writer(self, content: Content) -> bool:
        return any(handle.writes and not handle.is_done for handle in self._handles_of(content))

    def close(self, handle: int) -> None:
        """The last descriptor of a handle is gone; with the last one that writes, what was not published is."""
        opened = self._get(handle)
        content = opened.content
        with self._lock:
            del self._handles[handle]
            content.handles.discard(handle)
            content.num_writers -= opened.writes
            is_last = not content.handles
        if not is_last:
            if opened.writes:
                self._publish_if_last(content)
            return
        try:
            with content.changing():
                if not content.handles:
                    content.end_writing()
                elif opened.writes:  # it was opened again meanwhile, and the same content goes on
                    self._publish_if_last(content)
        finally:
            with self._lock:
                is_over = not content.handles and opened.node.content is content
                if is_over:
                    self._nodes.closed(opened.node)
            if is_over:
                content.close()

    def num_open(self) -> int:
        """How many there are."""
        return len(self._handles)

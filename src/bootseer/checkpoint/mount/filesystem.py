"""Checkpoints as a mounted file system: the kernel's requests about names, folders and open files.

Names and attributes come from `Files`, content from `Content`. docs/semantics.md says what it promises of POSIX.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from msgspec import Struct, field
from msgspec.structs import replace

from bootseer.checkpoint.files import FileInfo
from bootseer.checkpoint.head import is_hidden
from bootseer.checkpoint.mount.content import Content, MountContext
from bootseer.checkpoint.mount.nodes import Node, Nodes, is_same
from bootseer.checkpoint.mount.open_files import Handle, Listings, OpenFiles
from bootseer.checkpoint.os_errors import LoggedOsErrors, os_error
from bootseer.checkpoint.writing.writing import Check
from bootseer.errors import BootseerError, NotFoundError, PermanentError
from bootseer.fuse.filesystem import Attributes, Caller, Changes, FoundNode, Listed, Opened, Reply, Space
from bootseer.io.proc import is_dying
from bootseer.places.local_files import group_of, owner_of, shown_gid, shown_uid
from bootseer.places.place import Entry, exists, folder_of, join

_MAX_NAME = 255
_MAX_NAMES = 100
_RELEASE_S = 2.0
"""A folder's rename waits so long for releases of files that were just closed."""
_UNKNOWN_INODE = 0xFFFF_FFFF
"""For names without a node. Numbers of nodes are larger."""


class _Listing(Struct, eq=False):
    """An open folder. Its entries are read once, at the first request."""

    path: str
    entries: list[FileInfo] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class CheckpointFiles:
    """A `fuse.filesystem.FileSystem` over a place's visible tree."""

    def __init__(self, context: MountContext) -> None:
        """Reads the root's attributes, so that an unreachable place fails here."""
        self._context = context
        self._files = context.files
        self._nodes = Nodes(self._files.stat(""))
        self._listings = Listings(time.monotonic)
        self._open = OpenFiles(self._nodes, context)
        self._folders: dict[int, _Listing] = {}
        self._numbers = itertools.count(1)
        self._lost: deque[str] = deque(maxlen=_MAX_NAMES)
        """Files that could not be published after their last close."""

    # Names

    def lookup(self, parent: int, name: bytes) -> FoundNode | None:
        path = self._child(parent, name)
        if is_hidden(path.rpartition("/")[2]):
            return None
        with self._logging_errors(f"looking for {path}"):
            node = self._nodes.at(path)
            if node is not None and node.is_live:
                return self._acquired(path, node.info)
            # A listing may be older than what was published here a moment ago.
            info = self._listings.recall(path) if node is None or not node.is_published else None
            if info is None:
                before = None if node is None else node.info
                with suppress(NotFoundError):
                    info = self._files.stat(path)
                if node is not None and node.path == path and node.is_published and node.info is not before:
                    info = node.info  # published again meanwhile, perhaps by a process that goes on writing
                self._listings.looked_up(path, info)
            if info is None:
                self._nodes.remove(path)
                return None
            return self._acquired(path, info)

    def _acquired(self, path: str, info: FileInfo) -> FoundNode:
        node = self._nodes.acquire(path, info)
        return FoundNode(node.number, self._attributes(node))

    def forget(self, node: int, count: int) -> None:
        self._nodes.forget(node, count)

    def _child(self, parent: int, name: bytes) -> str:
        folder = self._nodes.get(parent).path
        if folder is None:
            raise os_error(errno.ESTALE)
        if len(name) > _MAX_NAME:
            raise os_error(errno.ENAMETOOLONG)
        try:
            text = name.decode()
        except UnicodeDecodeError:
            # Names in places are text: other names cannot exist, and cannot be created.
            raise os_error(errno.EILSEQ) from None
        return join(folder, text)

    # Attributes

    def attributes(self, node: int) -> Attributes:
        found = self._nodes.get(node)
        path = found.path
        if path is None and found.content is None:
            raise os_error(errno.ESTALE)
        if path is not None and not found.is_live:
            with self._logging_errors(f"looking at {path}"):
                self._refresh(found, path)
        return self._attributes(found)

    def _refresh(self, node: Node, path: str) -> None:
        """Refresh the attributes of a node. An open file keeps its own when another one has its name."""
        info = None
        with suppress(NotFoundError):
            info = self._listings.recall(path) or self._files.stat(path)
        if info is not None and is_same(info, node.info):
            node.info = info
        elif node.content is None:
            raise os_error(errno.ESTALE)

    def _attributes(self, node: Node) -> Attributes:
        info, content = node.info, node.content
        entry = info.entry
        return Attributes(
            inode=node.number,
            mode=(stat.S_IFDIR if info.is_folder else stat.S_IFREG) | stat.S_IMODE(entry.mode),
            size=info.size_bytes if content is None else content.size_bytes,
            nlink=2 if info.is_folder else int(node.path is not None),
            uid=shown_uid(entry.owner),
            gid=shown_gid(entry.group),
            mtime_ns=entry.mtime_ns,
        )

    def change(self, node: int, changes: Changes) -> Attributes:
        found = self._nodes.get(node)
        with self._logging_errors(f"changing {found.info.path}"):
            if changes.size is not None:
                self._resize(found, changes.size)
            content = found.content
            if content is not None:
                with content.lock:
                    if content.is_live or content.is_removed:
                        # Unpublished content gets its attributes when it is published.
                        found.info = _changed(found.info, changes)
                        content.attributes_changed(changes.mtime_ns)
                        return self._attributes(found)
            self._change_published(found, changes)
        return self._attributes(found)

    def _resize(self, node: Node, size_bytes: int) -> None:
        opened = node.content
        if opened is None or not (opened.writers or opened.is_dirty or opened.is_removed):
            self._open.check_version(node)  # readers here may have an older one open
        with self._open.changing(node) as content:
            if size_bytes == 0:
                content.begin_empty()
            else:
                content.truncate(size_bytes)

    def _change_published(self, node: Node, changes: Changes) -> None:
        path = node.path
        if path is None:
            raise os_error(errno.ESTALE)
        if changes.uid is not None or changes.gid is not None:
            owner = None if changes.uid is None else owner_of(changes.uid)
            group = None if changes.gid is None else group_of(changes.gid)
            self._files.set_owner(path, owner, group)
        if changes.mode is not None:
            self._files.set_mode(path, changes.mode)
        if changes.mtime_ns is not None:
            self._files.set_mtime(path, changes.mtime_ns)
            if node.content is not None:
                node.content.touched()
        self._listings.forget(folder_of(path))
        info = self._files.stat(path)
        # Another mtime is another version. It may also be another file, whose size must not be shown to readers of this
        # one.
        is_ours = node.content is None or info.size_bytes == node.info.size_bytes
        node.info = info if is_ours else _changed(node.info, changes)

    # Open files

    def create(self, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[FoundNode, Opened]:
        path = self._new_child(parent, name)
        with self._logging_errors(f"creating {path}"):
            if self._is_there(path):
                if flags & os.O_EXCL:
                    raise os_error(errno.EEXIST)
                found = self._acquired(path, self._files.stat(path))
                try:
                    return found, self.open(found.node, flags, caller)
                except BaseException:
                    self._nodes.forget(found.node, 1)  # the kernel never gets this reference
                    raise
            owner = "" if caller.uid == os.geteuid() else owner_of(caller.uid)
            entry = Entry(path, False, 0, time.time_ns(), mode, owner, self._group_in(parent, caller), "")
            node = self._nodes.acquire_new(path, FileInfo(entry, 0, is_striped=False))
            try:
                opened = self._open.open(node, flags | os.O_TRUNC, caller.thread, _kill_check(caller))
            except BaseException:
                self._nodes.detach(node)
                self._nodes.forget(node.number, 1)
                raise
            return FoundNode(node.number, self._attributes(node)), opened

    def _group_in(self, parent: int, caller: Caller) -> str:
        """The group of a new entry of a folder; "" for the place's default."""
        entry = self._nodes.get(parent).info.entry
        if entry.mode & stat.S_ISGID:
            return entry.group
        return "" if caller.uid == os.geteuid() else group_of(caller.gid)

    def _is_there(self, path: str) -> bool:
        node = self._nodes.at(path)
        if node is not None and node.is_live:
            return True
        if node is None and self._listings.was_missing(path):
            return False
        return exists(self._files.stat, path)

    def open(self, node: int, flags: int, caller: Caller) -> Opened:
        found = self._nodes.get(node)
        if found.is_folder:
            raise os_error(errno.EISDIR)
        path = found.info.path
        with self._logging_errors(f"opening {path}"):
            try:
                return self._open.open(found, flags, caller.thread, _kill_check(caller))
            except (OSError, BootseerError):
                # A stale listing may be the reason, and the kernel will look the name up again.
                self._listings.forget(folder_of(path))
                raise

    def read(self, node: int, handle: int, offset: int, length: int, reply: Reply, room: memoryview) -> None:
        opened = self._open.get(handle)
        with self._logging_errors(f"reading {opened.node.info.path}"):
            opened.content.read(offset, length, reply, room)

    def write(self, node: int, handle: int, offset: int, data: memoryview, caller: Caller) -> None:
        opened = self._open.get(handle)
        with self._logging_errors(f"writing {opened.node.info.path}"):
            opened.write(offset, data, _kill_check(caller))

    def flush(self, node: int, handle: int, caller: Caller) -> None:
        with self._publishing(handle) as opened:
            self._open.flush(opened, caller.thread, _kill_check(caller))

    def sync(self, node: int, handle: int, caller: Caller) -> None:
        with self._publishing(handle) as opened:
            opened.content.publish(_kill_check(caller))

    def release(self, node: int, handle: int) -> None:
        opened = self._open.get(handle)
        path = opened.node.info.path
        try:
            if opened.only_reads:  # leaves the folder's cached listing valid
                with self._logging_errors(f"closing {path}"):
                    self._open.close(handle)
                return
            with self._publishing(handle):
                self._open.close(handle)
        except OSError as error:
            self._context.on_error(f"{path} was not published: {error}")
            self._lost.append(path)
            raise

    @contextmanager
    def _publishing(self, handle: int) -> Iterator[Handle]:
        """An open file, whose entry in its folder's listing the block may change."""
        opened = self._open.get(handle)
        path = opened.node.info.path
        try:
            with self._logging_errors(f"publishing {path}"):
                yield opened
        finally:
            self._listings.forget(folder_of(path))

    # Changes of names

    def unlink(self, parent: int, name: bytes) -> None:
        path = self._child(parent, name)
        with self._logging_errors(f"removing {path}"):
            node = self._nodes.at(path)
            with self._changing(node) as content:
                is_live = node is not None and node.is_live
                seen = self._listings.was_there(path)
                is_known = seen is not None and node is not None and not is_live and is_same(seen, node.info)
                try:
                    self._files.remove(path, seen.entry if seen is not None and is_known else None)
                except NotFoundError:
                    if not is_live:
                        raise
                if content is not None:
                    content.removed()
                self._nodes.remove(path)
            self._listings.removed(path)

    def make_folder(self, parent: int, name: bytes, mode: int, caller: Caller) -> FoundNode:
        path = self._new_child(parent, name)
        with self._logging_errors(f"making {path}"):
            if self._nodes.at(path) is not None and self._is_there(path):
                raise os_error(errno.EEXIST)
            self._files.make_folder(path, mode=mode)
            self._listings.forget(folder_of(path))
            if caller.uid != os.geteuid():
                with suppress(PermanentError):  # only superusers may give folders away
                    self._files.set_owner(path, owner_of(caller.uid), self._group_in(parent, caller))
            return self._acquired(path, self._files.stat(path))

    def remove_folder(self, parent: int, name: bytes) -> None:
        path = self._child(parent, name)
        with self._logging_errors(f"removing {path}"):
            if self._nodes.live_below(path):
                raise os_error(errno.ENOTEMPTY)
            self._files.remove_folder(path)
            self._nodes.remove(path)
            self._listings.forget(folder_of(path), path)

    def rename(self, parent: int, name: bytes, to_parent: int, to_name: bytes, *, replace: bool) -> None:
        source, target = self._child(parent, name), self._new_child(to_parent, to_name)
        with self._logging_errors(f"renaming {source} to {target}"):
            if not replace and self._is_there(target):
                raise os_error(errno.EEXIST)
            node, replaced = self._nodes.at(source), self._nodes.at(target)
            if node is not None and node.is_folder:
                self._end_writing_below(source, target)
            with self._changing(node) as content:
                if content is not None:
                    content.publish()
                    if folder_of(source) != folder_of(target):
                        # Its parts lie in the file's folder. The writer continues there if the file cannot be moved.
                        if self._files.stat(source).is_striped:
                            raise os_error(errno.EXDEV)
                        content.end_writing()
                with self._changing(replaced if replaced is not node else None) as lost:
                    self._files.rename(source, target)
                    if content is not None:
                        content.renamed(target)
                    if lost is not None:
                        lost.removed()
                    self._nodes.rename(source, target)
            if node is None or node.is_folder:
                self._listings.forget_all()
            else:
                self._listings.forget(folder_of(source), folder_of(target))

    @contextmanager
    def _changing(self, node: Node | None) -> Iterator[Content | None]:
        """The content of a file whose name is being changed, None for a folder. It is neither written nor published
        meanwhile, also by those who open it meanwhile."""
        if node is None or node.is_folder:
            yield None
        else:
            with self._open.changing(node) as content, content.changing():
                yield content

    def _end_writing_below(self, source: str, target: str) -> None:
        """Before a folder is renamed: wait until no file there, or below the folder that it replaces, is being written.

        Files being written there would be published under their old path. A killed program's file counts until the
        kernel has released it, shortly after its end.
        """
        until = time.monotonic() + _RELEASE_S
        while self._nodes.live_below(source):
            if time.monotonic() > until:
                raise os_error(errno.EBUSY)
            time.sleep(0.002)
        if self._nodes.live_below(target):
            raise os_error(errno.ENOTEMPTY)
        for node in self._nodes.open_below(source):
            content = node.content  # None if it was closed meanwhile
            if content is not None:  # readers of what was written here would look for its parts at the old path
                content.end_writing()

    def _new_child(self, parent: int, name: bytes) -> str:
        path = self._child(parent, name)
        own_name = path.rpartition("/")[2]
        if is_hidden(own_name):
            raise os_error(errno.EPERM)
        reason = self._files.place.name_problem(own_name)
        if reason:  # fail now, not after the whole file was written
            self._context.on_error(f"{path}: {reason}")
            raise os_error(errno.EINVAL)
        return path

    # Folders

    def open_folder(self, node: int) -> int:
        path = self._nodes.get(node).path
        if path is None:
            raise os_error(errno.ESTALE)
        number = next(self._numbers)
        self._folders[number] = _Listing(path)
        return number

    def entries(self, handle: int, start: int, most: int, *, attributes: bool) -> Sequence[Listed]:
        listing = self._folders[handle]
        with listing.lock:
            if start == 0 or listing.entries is None:
                with self._logging_errors(f"listing {listing.path}"):
                    listing.entries = self._list(listing.path)
            part = listing.entries[start : start + most]
        return [self._listed(info, attributes=attributes) for info in part]

    def _list(self, path: str) -> list[FileInfo]:
        changes, live = self._listings.num_changes, self._nodes.live_in(path)
        infos = {info.path: info for info in self._files.list(path)}
        self._listings.remember(path, infos.values(), since=changes)
        live += self._nodes.live_in(path)  # the first ones may have been published meanwhile, or renamed
        infos |= {node.info.path: node.info for node in live if (at := node.path) and folder_of(at) == path}
        return [infos[key] for key in sorted(infos)]

    def _listed(self, info: FileInfo, *, attributes: bool) -> Listed:
        name = os.fsencode(info.path.rpartition("/")[2])
        mode = stat.S_IFDIR if info.is_folder else stat.S_IFREG
        node = self._nodes.at(info.path)
        # The listing may be older than the node's attributes: then the kernel asks for them.
        if attributes and (node is None or node.is_live or is_same(node.info, info)):
            found = self._acquired(info.path, info)
            return Listed(name, found.attributes.inode, mode, found)
        return Listed(name, _UNKNOWN_INODE if node is None else node.number, mode)

    def release_folder(self, handle: int) -> None:
        self._folders.pop(handle, None)

    # The whole

    def space(self) -> Space:
        with self._logging_errors("asking for room"):
            return Space(*self._files.place.space())

    def unpublished(self) -> list[str]:
        """The first hundred files with unpublished content."""
        live = self._nodes.live_below("")
        names = sorted(node.info.path for node in live if node.content is not None and node.content.is_dirty)
        return names[:_MAX_NAMES]

    def lost(self) -> list[str]:
        """The latest hundred files that could not be published after their last close."""
        return sorted(self._lost)

    def publish_all(self) -> tuple[list[str], list[str]]:
        """Publish all unpublished content; returns the published files, and all that could not be published."""
        done = []
        for node in self._nodes.live_below(""):
            content = node.content
            if content is not None and content.is_dirty:
                try:
                    if content.end_writing():
                        done.append(node.info.path)
                except (BootseerError, OSError) as error:
                    self._context.on_error(f"{node.info.path} was not published: {error}")
                    self._lost.append(node.info.path)
        return done[:_MAX_NAMES], self.lost()

    def facts(self) -> dict[str, int]:
        """Statistics for `status`."""
        return {"open_files": self._open.num_open(), "known_names": self._nodes.num_known()}

    def _logging_errors(self, operation: str) -> LoggedOsErrors:
        return LoggedOsErrors(operation, self._context.on_error)


def _changed(info: FileInfo, changes: Changes) -> FileInfo:
    entry = info.entry
    entry = replace(
        entry,
        mtime_ns=entry.mtime_ns if changes.mtime_ns is None else changes.mtime_ns,
        mode=entry.mode if changes.mode is None else changes.mode,
        owner=entry.owner if changes.uid is None else owner_of(changes.uid),
        group=entry.group if changes.gid is None else group_of(changes.gid),
    )
    return replace(info, entry=entry)


def _kill_check(caller: Caller) -> Check:
    """A `Check` that raises EINTR when the caller is being killed."""

    def check() -> None:
        if is_dying(caller.thread):
            raise os_error(errno.EINTR)

    return check

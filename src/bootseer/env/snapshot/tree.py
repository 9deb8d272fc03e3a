"""Put the paths of a snapshot into the tree of an EROFS image, in the form that overlayfs reads.

A deletion becomes a whiteout, a directory that replaces one is marked opaque for both kinds of overlay mounts. A
directory on the way that did not change itself shows in a mount as the uppermost one that there is: it gets what the
real one has. Called by `write`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from bootseer.env.snapshot.items import Item, mapped, xattrs_of
from bootseer.env.snapshot.times import Times
from bootseer.erofs.format import Attributes
from bootseer.erofs.tree import ROOT
from bootseer.erofs.writer import ErofsWriter, Extent
from bootseer.errors import PermanentError

# Root's mounts obey the first, mounts in a user namespace (`userxattr`) the second; each lets the other be.
OPAQUE_XATTRS: Mapping[bytes, bytes] = {b"trusted.overlay.opaque": b"y", b"user.overlay.opaque": b"y"}
_NOTHING = Extent(0, 0)


class SnapshotTree:
    """The tree in `writer`. `root` is where all directories can be seen as they are now."""

    def __init__(self, writer: ErofsWriter, root: str, times: Times) -> None:
        self._tree = writer.tree
        self._root = os.fsencode(root).rstrip(b"/")
        self._times = times
        self._directories = {b"": ROOT}
        self._whiteout: int | None = None  # one inode with many names
        self._tree.update(ROOT, self._seen(b""))

    def add(self, item: Item, extent: Extent = _NOTHING) -> int:
        """A path whose data, if any, was written to `extent`; its inode. A directory comes before what is in it."""
        if item.kind == "deleted":
            return self.hide(item)
        xattrs = item.xattrs
        if item.change.opaque:
            xattrs = {**xattrs, **OPAQUE_XATTRS}
        attributes = Attributes(item.mode, item.uid, item.gid, self._times.of(item.raw, item.mtime_ns), xattrs=xattrs)
        inode = self._tree.add(attributes, size=extent.size, place=extent.block, target=item.target)
        self.link(item, inode)
        if item.kind == "directory":
            self._directories[item.raw] = inode
        return inode

    def hide(self, item: Item) -> int:
        """A whiteout in the place of the item."""
        if self._whiteout is None:
            self._whiteout = self._tree.add(Attributes(stat.S_IFCHR))
        self.link(item, self._whiteout)
        return self._whiteout

    def link(self, item: Item, inode: int) -> None:
        """Give an inode the name of the item."""
        parent, _, name = item.raw.rpartition(b"/")
        self._tree.link(self._directory(parent), name, inode)

    def _directory(self, path: bytes) -> int:
        found = self._directories.get(path)
        if found is None:
            parent, _, name = path.rpartition(b"/")
            holder = self._directory(parent)
            if self._tree.child(holder, name) is not None:
                raise PermanentError(f"{os.fsdecode(path)} holds changes of the setup and is no directory")
            found = self._directories[path] = self._tree.add(self._seen(path))
            self._tree.link(holder, name, found)
        return found

    def _seen(self, path: bytes) -> Attributes:
        """What a directory is like in the tree that the setup left."""
        where = os.fsdecode(self._root + (path or b"/."))  # the root itself may be named through a link in /proc
        shown = os.fsdecode(path) or "/"
        status = mapped(shown, lambda: os.lstat(where))
        if not stat.S_ISDIR(status.st_mode):
            raise PermanentError(f"{shown} holds changes of the setup and is no directory")
        mtime_ns = self._times.of(path, status.st_mtime_ns)
        xattrs = mapped(shown, lambda: xattrs_of(where))
        return Attributes(status.st_mode, status.st_uid, status.st_gid, mtime_ns, xattrs=xattrs)

"""Build a layer's directory tree from its tar members, such that overlayfs shows what a container runtime would unpack.

- `.wh.NAME` becomes a whiteout (a character device 0:0), `.wh..wh..opq` makes its directory opaque, and other names
  that begin with `.wh..wh.` are internal files of AUFS and are dropped. A file of the layer takes precedence over a
  whiteout of its name; a directory of the layer becomes opaque by it.
- A later member replaces an earlier one of the same name; a directory over a directory changes its attributes.
- A member's parent directory may be missing in the layer. Then it is looked up in the layers below: a directory there
  gives the attributes, and a symbolic link there is followed, as when layers are unpacked one over the other. A hard
  link to a file of a lower layer copies the file into this layer, as link(2) on an overlay does.
- `..` is resolved lexically. A name that leaves the root this way is refused.

A layer without lookups in lower layers has the same result in every image and is converted once. Other layers are
converted once for each stack of layers below them.

No access to the host's file system. Owned by one thread.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from typing import NamedTuple

from bootseer.erofs.format import NO_XATTRS, Attributes, has_prefix
from bootseer.erofs.merged import OPAQUE, WHITEOUT_MODE, MergedLayers, Node, escape_xattr
from bootseer.erofs.writer import ROOT, ErofsWriter, Extent
from bootseer.errors import PermanentError
from bootseer.image.conversion.tar import HARD_LINK, Member, shown

_MAX_PATH = 4095
_MAX_FOLLOWED = 40  # MAXSYMLINKS of the kernel
_WHITEOUT = b".wh."
_AUFS = b".wh..wh."
_OPAQUE_MARKER = b".wh..wh..opq"
_DEFAULT_DIRECTORY = Attributes(stat.S_IFDIR | 0o755)
_EMPTY = Extent(0, 0)
_MAX_OWNER = 2**32 - 2  # the kernel reserves 2**32 - 1 as the invalid ID
_HOST_ONLY = b"security.selinux"  # labels are set by the host that runs the container


class NeedsLowerError(Exception):
    """The member depends on layers below that are not converted yet. The tree was not changed."""


class _Directory(NamedTuple):
    inode: int
    path: tuple[bytes, ...]
    """Without symbolic links."""
    open: bool
    """Whether lower layers may have entries in it: neither it nor a parent is opaque."""


class LayerTree:
    """The tree of one layer, in `writer.tree`.

    Without `whiteouts`, names like `.wh.NAME` are ordinary names. `lower` is None until the layers below are converted;
    `add` raises `NeedsLowerError` for a member that depends on them before.
    """

    def __init__(self, writer: ErofsWriter, *, lower: MergedLayers | None, whiteouts: bool = True) -> None:
        self.lower = lower
        self.depends_on_lower = False
        """Whether something was looked up in the layers below. The first lookup follows from this layer alone, so that
        the answer is the same in every image."""
        self.root: Attributes | None = None
        """Attributes of the root directory, if the layer has an entry for it."""
        self.root_opaque = False
        """Whether the layer hides all layers below it."""
        self._writer = writer
        self._tree = writer.tree
        self._whiteouts = whiteouts
        self._whiteout: int | None = None  # the inode that all whiteouts share
        self._opaque: set[int] = set()
        self._implicit: set[int] = set()  # directories without an entry in the layer so far
        self._new: set[int] = set()  # implicit directories that lower layers do not have either
        self._copied: set[tuple[int, bytes]] = set()  # (directory, name) of files copied up for a hard link alone
        self._last_parent: tuple[Sequence[bytes], _Directory] | None = None  # most members share the previous one's

    def keeps_content(self, member: Member) -> bool:
        """Whether this member is a regular file whose data must be written."""
        if member.kind != stat.S_IFREG:
            return False
        name = member.name.rpartition(b"/")[2]
        return not (self._whiteouts and name.startswith(_WHITEOUT))

    def add(self, member: Member, extent: Extent = _EMPTY) -> None:
        """Add a member whose data was written to `extent`.

        Raises `NeedsLowerError`, and `PermanentError` for a member that Linux or a runtime could not unpack.
        """
        names = _clean(member.name)
        if self._whiteouts and _WHITEOUT in member.name:
            if names and names[-1] == _OPAQUE_MARKER:
                self._make_opaque(names[:-1])
                return
            if any(name.startswith(_AUFS) for name in names):
                return
            if names and names[-1].startswith(_WHITEOUT):
                self._hide(names[:-1], names[-1][len(_WHITEOUT) :])
                return
        if not names:
            if member.kind != stat.S_IFDIR:
                raise PermanentError("it would replace the root directory")
            self.root = attributes_of(member)
            self._tree.update(ROOT, self.root)
        elif member.kind == HARD_LINK:
            self._add_hard_link(names, _clean(member.link))
        elif member.kind == stat.S_IFDIR:
            self._add_directory(names, attributes_of(member))
        else:
            inode = self._tree.add(
                attributes_of(member),
                size=extent.size,
                first_block=extent.block,
                target=member.link if member.kind == stat.S_IFLNK else b"",
            )
            self._put(self._parent(names), names[-1], inode)

    def _add_directory(self, names: list[bytes], attributes: Attributes) -> None:
        parent = self._parent(names)
        existing = self._tree.child(parent.inode, names[-1])
        if existing is not None and self._tree.is_directory(existing):
            self._tree.update(existing, _opaque(attributes) if existing in self._opaque else attributes)
            self._implicit.discard(existing)
            return
        # A file or whiteout that this directory replaces already hid what lower layers have under the name.
        self._put(parent, names[-1], self._new_directory(attributes, opaque=existing is not None))

    def _add_hard_link(self, names: list[bytes], target: list[bytes]) -> None:
        if names == target:
            return
        shown_target = shown(b"/".join(target))
        holder = self._existing(target[:-1]) if target else None
        if holder is None:
            raise PermanentError(f"a hard link to {shown_target}, which does not exist")
        found = self._tree.child(holder.inode, target[-1])
        below = self._below(holder, target[-1]) if found is None else None
        if (found is None and below is None) or (found is not None and found == self._whiteout):
            raise PermanentError(f"a hard link to {shown_target}, which does not exist")
        if below.is_directory if below is not None else found is not None and self._tree.is_directory(found):
            raise PermanentError(f"a hard link to {shown_target}, which is a directory")
        parent = self._parent(names)
        if below is not None:
            found = self._copy_up(below)
            self._tree.link(holder.inode, target[-1], found)
            self._copied.add((holder.inode, target[-1]))
        assert found is not None  # noqa: S101 - checked above
        self._put(parent, names[-1], found)

    def _copy_up(self, below: Node) -> int:
        attributes = below.attributes()
        extent, target = _EMPTY, b""
        if stat.S_ISREG(attributes.mode):
            extent = self._writer.write_file(below.content())
        elif stat.S_ISLNK(attributes.mode):
            target = below.target()
        return self._tree.add(attributes, size=extent.size, first_block=extent.block, target=target)

    def _hide(self, directory: list[bytes], name: bytes) -> None:
        if name in {b"", b".", b".."}:
            raise PermanentError("a whiteout without a name")
        holder = self._existing(directory)
        if holder is None or not holder.open:
            return  # lower layers have nothing there to hide
        existing = self._tree.child(holder.inode, name)
        if existing is None or self._is_no_member(holder.inode, name, existing):
            if self._whiteout is None:
                self._whiteout = self._tree.add(Attributes(WHITEOUT_MODE))
            self._tree.link(holder.inode, name, self._whiteout)
            self._last_parent = None
        elif self._tree.is_directory(existing):
            self._implicit.discard(existing)  # its members stay, so it need not be searched for them again
            if existing not in self._opaque:
                self._hide_lower(existing)

    def _make_opaque(self, directory: list[bytes]) -> None:
        holder = self._existing(directory)
        if holder is not None and holder.open:
            self._hide_lower(holder.inode)

    def _hide_lower(self, directory: int) -> None:
        """Hide what lower layers have in this directory, and what was copied from them into this layer."""
        waiting = [directory]
        while waiting:
            here = waiting.pop()
            for name, inode in list(self._tree.walk_directory(here)):
                if self._is_no_member(here, name, inode):
                    self._tree.unlink(here, name)
                elif self._tree.is_directory(inode) and inode not in self._opaque:
                    waiting.append(inode)
        self._last_parent = None
        if directory == ROOT:
            self.root_opaque = True
        else:
            self._opaque.add(directory)
            self._tree.update(directory, _opaque(self._tree.attributes(directory)))

    def _is_no_member(self, directory: int, name: bytes, inode: int) -> bool:
        """Whether this tree was created for whiteouts and as the target of hard links alone: a whiteout hides it."""
        waiting = [(directory, name, inode)]
        while waiting:
            directory, name, inode = waiting.pop()
            if inode == self._whiteout or (directory, name) in self._copied:
                continue
            if inode not in self._implicit:
                return False
            waiting += [(inode, *child) for child in self._tree.walk_directory(inode)]
        return True

    def _put(self, parent: _Directory, name: bytes, inode: int) -> None:
        if self._tree.child(parent.inode, name) is not None:
            self._last_parent = None  # it may be the replaced file
            self._copied.discard((parent.inode, name))
        self._tree.link(parent.inode, name, inode)

    def _new_directory(self, attributes: Attributes, *, opaque: bool) -> int:
        inode = self._tree.add(_opaque(attributes) if opaque else attributes)
        if opaque:
            self._opaque.add(inode)
        return inode

    def _parent(self, names: list[bytes]) -> _Directory:
        parent = names[:-1]
        if self._last_parent is not None and self._last_parent[0] == parent:
            return self._last_parent[1]
        found = self._walk(parent)
        assert found is not None  # noqa: S101 - missing directories were created
        self._last_parent = parent, found
        return found

    def _existing(self, names: Sequence[bytes]) -> _Directory | None:
        """The directory at a path in this layer, copied up from lower layers if needed; None if no layer has it."""
        copied: list[tuple[int, bytes]] = []
        found = self._walk(names, copied)
        if found is None:
            for parent, name in copied:
                self._tree.unlink(parent, name)
        return found

    def _walk(self, names: Sequence[bytes], copied: list[tuple[int, bytes]] | None = None) -> _Directory | None:
        """The directory at a path in this layer. Directories of lower layers are copied up.

        Without `copied`, missing directories are created and a file in the path is an error. With it, both return
        None, and parent inode and name of each directory that was copied up are appended to it.
        """
        at = [_Directory(ROOT, (), not self.root_opaque)]
        remaining = list(reversed(names))
        followed = 0
        while remaining:
            name = remaining.pop()
            if name == b"..":  # from a symbolic link; the root is its own parent
                del at[max(1, len(at) - 1) :]
                continue
            found = self._enter(at[-1], name, copied)
            if found is None:
                return None
            if isinstance(found, _Directory):
                at.append(found)
                continue
            followed += 1
            if followed > _MAX_FOLLOWED:
                raise PermanentError("too many symbolic links in its path")
            remaining += [part for part in reversed(found.split(b"/")) if part not in {b"", b"."}]
            if found.startswith(b"/"):
                del at[1:]
        return at[-1]

    def _enter(
        self, here: _Directory, name: bytes, copied: list[tuple[int, bytes]] | None
    ) -> _Directory | bytes | None:
        """One step of `_walk`: the directory of this name, or the target of the symbolic link of this name."""
        path = (*here.path, name)
        child = self._tree.child(here.inode, name)
        if child is not None and child != self._whiteout:
            if self._tree.is_directory(child):
                hides_lower = child in self._opaque or child in self._new
                return _Directory(child, path, here.open and not hides_lower)
            target = self._tree.targets.get(child)
        else:
            below = self._below(here, name) if child is None else None
            if (below is None and copied is None) or (below is not None and below.is_directory):
                if copied is not None:
                    copied.append((here.inode, name))
                return self._create(here, name, below, over_whiteout=child is not None)
            if below is None:
                return None
            target = below.target() if stat.S_ISLNK(below.inode.mode) else None
        if target is None and copied is None:
            raise PermanentError(f"{shown(b'/'.join(path))} in its path is not a directory")
        return target

    def _create(self, here: _Directory, name: bytes, below: Node | None, *, over_whiteout: bool) -> _Directory:
        """Create a directory in this layer, with the attributes of the one below, if there is one."""
        inode = self._new_directory(_DEFAULT_DIRECTORY if below is None else below.attributes(), opaque=over_whiteout)
        self._put(here, name, inode)
        self._implicit.add(inode)
        if below is None:
            self._new.add(inode)
        return _Directory(inode, (*here.path, name), below is not None)

    def _below(self, directory: _Directory, name: bytes) -> Node | None:
        """The file of this name in lower layers. Raises `NeedsLowerError`."""
        if not directory.open:
            return None
        self.depends_on_lower = True
        if self.lower is None:
            raise NeedsLowerError
        return self.lower.lookup((*directory.path, name))


def attributes_of(member: Member) -> Attributes:
    """The attributes that a layer keeps of a member. Raises `PermanentError` for an owner that Linux cannot have."""
    if not (0 <= member.uid <= _MAX_OWNER and 0 <= member.gid <= _MAX_OWNER):
        raise PermanentError(f"owner {member.uid}:{member.gid} is outside Linux's range")
    kind = member.kind
    mode = kind | (0o777 if kind == stat.S_IFLNK else member.mode)
    rdev = member.rdev if kind in {stat.S_IFCHR, stat.S_IFBLK} else (0, 0)
    on_all = kind in {stat.S_IFREG, stat.S_IFDIR}
    xattrs = {  # those that a runtime could set on this kind of file
        escape_xattr(name): value
        for name, value in member.xattrs.items()
        if has_prefix(name) and name != _HOST_ONLY and (on_all or not name.startswith(b"user."))
    }
    return Attributes(mode, member.uid, member.gid, member.mtime_ns, rdev, xattrs or NO_XATTRS)


def _clean(path: bytes) -> list[bytes]:
    if len(path) > _MAX_PATH:
        raise PermanentError(f"a path of {len(path)} bytes; Linux allows {_MAX_PATH}")
    names: list[bytes] = []
    for name in path.split(b"/"):
        if name == b"..":
            if not names:
                raise PermanentError(f"{shown(path)} leaves the root directory")
            names.pop()
        elif name not in {b"", b"."}:
            names.append(name)
    return names


def _opaque(attributes: Attributes) -> Attributes:
    xattrs = {**attributes.xattrs, OPAQUE: b"y"}
    return Attributes(attributes.mode, attributes.uid, attributes.gid, attributes.mtime_ns, xattrs=xattrs)

"""What the members of a layer mean: the tree that overlayfs needs to show what a container runtime would unpack.

- `.wh.NAME` becomes a whiteout (a character device 0:0), `.wh..wh..opq` makes its directory opaque, other names that
  begin with `.wh..wh.` are bookkeeping of AUFS and dropped. A file of the same layer beats a whiteout of its name;
  with a directory, the whiteout means that nothing of the layers below shines through.
- A later member replaces an earlier one of the same name; a directory over a directory changes its attributes.
- A member may lie in a directory that the layer does not hold. Then the layers below decide: its attributes come from
  there, and a symbolic link there is followed, as it is when layers are unpacked one over the other. A hard link to a
  file of a lower layer takes a copy of it, as link(2) on an overlay does.
- `..` is resolved in the text. A name that leaves the root this way is refused.

A layer that asks nothing of those below is the same under every image and is converted once. One that does is converted
once for each set of answers (`Lower`): the questions are kept with the layer, and the answers are part of the name of
the result.

Names on the host are never touched. One thread owns a tree.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bootseer.erofs.format import NO_XATTRS, Attributes, has_prefix
from bootseer.erofs.tree import ROOT
from bootseer.erofs.writer import ErofsWriter, Extent
from bootseer.errors import PermanentError
from bootseer.image.conversion.tar import HARD_LINK, Member
from bootseer.image.merged import OPAQUE, WHITEOUT_MODE, MergedTree, Node, escape_xattr

_MAX_PATH = 4095
_MAX_FOLLOWED = 40  # as the kernel has it
_WHITEOUT = b".wh."
_AUFS = b".wh..wh."
_OPAQUE_MARKER = b".wh..wh..opq"
_MADE_UP = Attributes(stat.S_IFDIR | 0o755)
_NOTHING = Extent(0, 0)
_MAX_OWNER = 2**32 - 2  # the last number means "nobody" to the kernel
_HOST_ONLY = b"security.selinux"  # labels belong to the machine that runs the container


Path = tuple[bytes, ...]


class LowerFile:
    """A file that lower layers show."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.mode = node.inode.mode
        self.is_directory = node.is_directory

    def attributes(self) -> Attributes:
        """Without the marks of overlayfs."""
        return self._node.attributes()

    def target(self) -> bytes:
        """Of a symbolic link."""
        return self._node.target()

    def content(self) -> Iterator[bytes]:
        """Of a regular file."""
        return self._node.content()

    def answer(self) -> str:
        """Everything that a layer may take over from this file, as a short text."""
        if not self.is_directory and not stat.S_ISLNK(self.mode):
            return f"file {self._node.identity}"  # its content counts, too
        found = self.attributes()
        facts = [found.mode, found.uid, found.gid, found.mtime_ns, *found.rdev]
        xattrs = [[name.hex(), found.xattrs[name].hex()] for name in sorted(found.xattrs)]
        target = "" if self.is_directory else self.target().hex()
        return json.dumps([facts, xattrs, target])


class Lower:
    """The layers below one layer. Not safe for several threads."""

    def __init__(self, tree: MergedTree) -> None:
        self._tree = tree
        self.asked: dict[Path, str] = {}
        """Every question with its answer; empty for nothing there."""

    def lookup(self, path: Path) -> LowerFile | None:
        """The file at a path without symbolic links."""
        node = self._tree.lookup(path)
        found = LowerFile(node) if node is not None else None
        self.asked[path] = found.answer() if found is not None else ""
        return found


def ask(lower: Lower, questions: Sequence[Path]) -> str:
    """A digest of the questions and of the answers to them."""
    for path in questions:
        lower.lookup(path)
    rows = [[[name.hex() for name in path], lower.asked[path]] for path in sorted(questions)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


class NeedsLowerError(Exception):
    """The member cannot be understood before the layers below are known; nothing was changed."""


class _Directory(NamedTuple):
    """A directory of this layer: inode, path without symbolic links, and whether lower layers show through."""

    inode: int
    path: tuple[bytes, ...]
    open: bool


class LayerTree:
    """The tree of one layer, in `writer.tree`.

    Without `whiteouts` names that look like them are names. `lower` are the layers below, None while they are not
    known; `add` raises `NeedsLowerError` when it needs them then.
    """

    def __init__(self, writer: ErofsWriter, *, lower: Lower | None, whiteouts: bool = True) -> None:
        self.lower = lower
        self.root: Attributes | None = None
        """Attributes of the root directory, if the layer says them."""
        self.root_opaque = False
        """Whether nothing of the layers below is to be seen at all."""
        self._writer = writer
        self._tree = writer.tree
        self._whiteouts = whiteouts
        self._whiteout: int | None = None  # one inode with many names
        self._opaque: set[int] = set()
        self._implicit: set[int] = set()  # directories that the layer does not describe, so far
        self._made_up: set[int] = set()  # those of them that lower layers do not have either
        self._last: tuple[Sequence[bytes], _Directory] | None = None

    def keeps_content(self, member: Member) -> bool:
        """Whether the data of this member becomes a file's."""
        if member.kind != stat.S_IFREG:
            return False
        name = member.name.rpartition(b"/")[2]
        return not (self._whiteouts and name.startswith(_WHITEOUT))

    def add(self, member: Member, extent: Extent = _NOTHING) -> None:
        """Take in a member whose data was written to `extent`. Raises `PermanentError` for what cannot be kept."""
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
            self._set_root(member)
        elif member.kind == HARD_LINK:
            self._add_hard_link(names, _clean(member.link))
        elif member.kind == stat.S_IFDIR:
            self._add_directory(names, attributes_of(member))
        else:
            inode = self._tree.add(
                attributes_of(member),
                size=extent.size,
                place=extent.block,
                target=member.link if member.kind == stat.S_IFLNK else b"",
            )
            self._put(self._parent(names), names[-1], inode)

    def _set_root(self, member: Member) -> None:
        if member.kind != stat.S_IFDIR:
            raise PermanentError("it stands where the root directory is")
        self.root = attributes_of(member)
        self._tree.update(ROOT, self.root)

    def _add_directory(self, names: list[bytes], attributes: Attributes) -> None:
        parent = self._parent(names)
        existing = self._tree.child(parent.inode, names[-1])
        if existing is not None and self._tree.is_directory(existing):
            self._tree.update(existing, _opaque(attributes) if existing in self._opaque else attributes)
            self._implicit.discard(existing)
            return
        # What was there before it in this layer has hidden the lower layers for good.
        self._put(parent, names[-1], self._new_directory(attributes, opaque=existing is not None))

    def _add_hard_link(self, names: list[bytes], target: list[bytes]) -> None:
        if names == target:
            return
        shown_target = _shown(b"/".join(target))
        holder = self._existing(target[:-1]) if target else None
        if holder is None:
            raise PermanentError(f"a hard link to {shown_target}, which is not there")
        found = self._tree.child(holder.inode, target[-1])
        below = self._below(holder, target[-1]) if found is None else None
        if (found is None and below is None) or (found is not None and found == self._whiteout):
            raise PermanentError(f"a hard link to {shown_target}, which is not there")
        if below.is_directory if below is not None else found is not None and self._tree.is_directory(found):
            raise PermanentError(f"a hard link to {shown_target}, which is a directory")
        parent = self._parent(names)
        if below is not None:
            found = self._copy_up(below)
            self._tree.link(holder.inode, target[-1], found)
        assert found is not None  # noqa: S101 - one of both is, see above
        self._put(parent, names[-1], found)

    def _copy_up(self, below: LowerFile) -> int:
        attributes = below.attributes()
        extent, target = _NOTHING, b""
        if stat.S_ISREG(attributes.mode):
            for piece in below.content():
                self._writer.write(piece)
            extent = self._writer.end_file()
        elif stat.S_ISLNK(attributes.mode):
            target = below.target()
        return self._tree.add(attributes, size=extent.size, place=extent.block, target=target)

    def _hide(self, directory: list[bytes], name: bytes) -> None:
        if name in {b"", b".", b".."}:
            raise PermanentError("a whiteout of nothing")
        holder = self._existing(directory)
        if holder is None:
            return  # what is in a directory that does not exist is hidden well enough
        existing = self._tree.child(holder.inode, name)
        if existing is not None and self._holds_nothing(existing):
            self._tree.unlink(holder.inode, name)
            self._last = existing = None
        if existing is None:
            if self._whiteout is None:
                self._whiteout = self._tree.add(Attributes(WHITEOUT_MODE))
            self._tree.link(holder.inode, name, self._whiteout)
        elif self._tree.is_directory(existing):
            self._close(existing)

    def _make_opaque(self, directory: list[bytes]) -> None:
        holder = self._existing(directory)
        if holder is None:
            return
        for name, inode in list(self._tree.walk_directory(holder.inode)):
            if inode != self._whiteout and self._holds_nothing(inode):
                self._tree.unlink(holder.inode, name)
                self._last = None
        if holder.inode == ROOT:
            self.root_opaque = True
            self._last = None
        else:
            self._close(holder.inode)

    def _holds_nothing(self, inode: int) -> bool:
        """Whether it is a directory that is only here for the whiteouts in it."""
        waiting = [inode]
        while waiting:
            inode = waiting.pop()
            if inode not in self._implicit:
                return False
            waiting += [child for _, child in self._tree.walk_directory(inode) if child != self._whiteout]
        return True

    def _close(self, inode: int) -> None:
        if inode not in self._opaque:
            self._opaque.add(inode)
            self._tree.update(inode, _opaque(self._tree.attributes(inode)))
            self._last = None

    def _put(self, parent: _Directory, name: bytes, inode: int) -> None:
        if self._tree.child(parent.inode, name) is not None:
            self._last = None
        self._tree.link(parent.inode, name, inode)

    def _new_directory(self, attributes: Attributes, *, opaque: bool) -> int:
        inode = self._tree.add(_opaque(attributes) if opaque else attributes)
        if opaque:
            self._opaque.add(inode)
        return inode

    def _parent(self, names: list[bytes]) -> _Directory:
        parent = names[:-1]
        if self._last is not None and self._last[0] == parent:
            return self._last[1]
        found = self._walk(parent)
        assert found is not None  # noqa: S101 - what is missing was made
        self._last = parent, found
        return found

    def _existing(self, names: Sequence[bytes]) -> _Directory | None:
        """The directory at a path, put into this layer when it lies below; None when it is nowhere."""
        made: list[tuple[int, bytes]] = []
        found = self._walk(names, made)
        if found is None:
            for parent, name in made:  # the way ended behind them
                self._tree.unlink(parent, name)
        return found

    def _walk(self, names: Sequence[bytes], made: list[tuple[int, bytes]] | None = None) -> _Directory | None:
        """The directory at a path, put into this layer when it lies below, and made when it is nowhere.

        With `made` nothing is made that is nowhere, and the answer is None; what was put into this layer is noted
        there. Otherwise a file on the way is an error.
        """
        at = [_Directory(ROOT, (), not self.root_opaque)]
        waiting = list(reversed(names))
        followed = 0
        while waiting:
            name = waiting.pop()
            if name == b"..":  # from a symbolic link; the root is its own parent
                del at[max(1, len(at) - 1) :]
                continue
            found = self._enter(at[-1], name, made)
            if found is None:
                return None
            if isinstance(found, _Directory):
                at.append(found)
                continue
            followed += 1
            if followed > _MAX_FOLLOWED:
                raise PermanentError("too many symbolic links on the way to it")
            waiting += [part for part in reversed(found.split(b"/")) if part not in {b"", b"."}]
            if found.startswith(b"/"):
                del at[1:]
        return at[-1]

    def _enter(self, here: _Directory, name: bytes, made: list[tuple[int, bytes]] | None) -> _Directory | bytes | None:
        """One step of `_walk`: the directory of this name, or where a symbolic link leads."""
        path = (*here.path, name)
        child = self._tree.child(here.inode, name)
        if child is not None and child != self._whiteout:
            if self._tree.is_directory(child):
                closed = child in self._opaque or child in self._made_up
                return _Directory(child, path, here.open and not closed)
            target = self._tree.targets.get(child)
        else:
            below = self._below(here, name) if child is None else None
            if (below is None and made is None) or (below is not None and below.is_directory):
                if made is not None:
                    made.append((here.inode, name))
                return self._make(here, name, below, over_whiteout=child is not None)
            if below is None:
                return None
            target = below.target() if stat.S_ISLNK(below.mode) else None
        if target is None and made is None:
            raise PermanentError(f"{_shown(b'/'.join(path))} on the way to it is not a directory")
        return target

    def _make(self, here: _Directory, name: bytes, below: LowerFile | None, *, over_whiteout: bool) -> _Directory:
        """A directory of this layer for one that lies below, or for none."""
        inode = self._new_directory(_MADE_UP if below is None else below.attributes(), opaque=over_whiteout)
        self._put(here, name, inode)
        self._implicit.add(inode)
        if below is None:
            self._made_up.add(inode)
        return _Directory(inode, (*here.path, name), below is not None)

    def _below(self, directory: _Directory, name: bytes) -> LowerFile | None:
        """What lower layers show under this name."""
        if not directory.open:
            return None
        if self.lower is None:
            raise NeedsLowerError
        return self.lower.lookup((*directory.path, name))


def attributes_of(member: Member) -> Attributes:
    """The attributes of a member, as far as a layer keeps them. Raises `PermanentError`."""
    if not (0 <= member.uid <= _MAX_OWNER and 0 <= member.gid <= _MAX_OWNER):
        raise PermanentError(f"owner {member.uid}:{member.gid} is outside what Linux can have")
    kind = member.kind
    mode = kind | (0o777 if kind == stat.S_IFLNK else member.mode)
    rdev = member.rdev if kind in {stat.S_IFCHR, stat.S_IFBLK} else (0, 0)
    xattrs = kept_xattrs(kind, member.xattrs) if member.xattrs else NO_XATTRS
    return Attributes(mode, member.uid, member.gid, member.mtime_ns, rdev, xattrs)


def kept_xattrs(kind: int, xattrs: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The extended attributes that Linux would let a runtime set on this kind of file, under the names of a layer."""
    on_all = kind in {stat.S_IFREG, stat.S_IFDIR}
    return {
        escape_xattr(name): value
        for name, value in xattrs.items()
        if has_prefix(name) and name != _HOST_ONLY and (on_all or not name.startswith(b"user."))
    }


def _clean(path: bytes) -> list[bytes]:
    if len(path) > _MAX_PATH:
        raise PermanentError(f"a path of {len(path)} bytes, Linux takes {_MAX_PATH}")
    names: list[bytes] = []
    for name in path.split(b"/"):
        if name == b"..":
            if not names:
                raise PermanentError(f"{_shown(path)} leads out of the root directory")
            names.pop()
        elif name not in {b"", b"."}:
            names.append(name)
    return names


def _opaque(attributes: Attributes) -> Attributes:
    xattrs = {**attributes.xattrs, OPAQUE: b"y"}
    return Attributes(attributes.mode, attributes.uid, attributes.gid, attributes.mtime_ns, xattrs=xattrs)


def _shown(path: bytes) -> str:
    return repr(path[:200].decode("utf-8", "backslashreplace"))

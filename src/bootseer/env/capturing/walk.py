"""Find the changes of a setup in the upper layers of its overlays.

An upper layer holds more than changes: folders that are there only because of a change in them, and files that were
opened for writing and stayed the same. So everything is compared with the lower layer. No symbolic link is followed.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from bootseer.env.capturing.exclude import Exclusions, Kind, Rule
from bootseer.env.changes import Action, Change
from bootseer.env.document import LeftOutPath
from bootseer.env.restoring.roots import is_system, may_be_edited
from bootseer.env.restoring.safe_tree import is_opaque
from bootseer.errors import PermanentError
from bootseer.io.files import open_unfollowed
from bootseer.logs import logger

_PIECE = 1 << 20
_KINDS: Mapping[int, Kind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFSOCK: "socket",
    stat.S_IFIFO: "fifo",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}
_MARKS = ("trusted.overlay.", "user.overlay.")
_PATHS_KEPT = 20
"""For each rule."""
_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class PathState:
    """The file at a path, links not followed."""

    path: str
    status: os.stat_result

    @property
    def kind(self) -> Kind:
        return _KINDS[stat.S_IFMT(self.status.st_mode)]

    @property
    def size(self) -> int:
        return self.status.st_size

    def xattrs(self) -> dict[str, bytes]:
        """Its extended attributes, without those of overlayfs."""
        try:
            names = os.listxattr(self.path, follow_symlinks=False)
        except OSError:  # the file system has none
            return {}
        names = [name for name in names if not name.startswith(_MARKS)]
        return {name: os.getxattr(self.path, name, follow_symlinks=False) for name in names}


def state_at(folder: str, name: str) -> PathState | None:
    """The file of that name in a folder, or the folder itself for an empty name; None if there is none."""
    path = os.path.join(folder, name) if name else folder  # noqa: PTH118
    try:
        # A folder may be given as a link in /proc.
        return PathState(path, os.lstat(path) if name else os.stat(path))  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return None


def metadata_differs(one: PathState, other: PathState) -> bool:
    """Whether kind, permissions, owner or extended attributes differ."""
    first, second = one.status, other.status
    return (first.st_mode, first.st_uid, first.st_gid) != (second.st_mode, second.st_uid, second.st_gid) or (
        one.xattrs() != other.xattrs()
    )


def same_content(one: PathState, other: PathState) -> bool:
    """Whether two files of the same kind have the same content or link target."""
    if one.kind == "symlink":
        return os.readlink(one.path) == os.readlink(other.path)  # noqa: PTH115
    if one.kind != "file":
        return True
    if one.size != other.size:
        return False
    return same_bytes(one.path, other.path)


def same_bytes(one: str, other: str) -> bool:
    """Whether two files have the same content."""
    with open_unfollowed(one) as first, open_unfollowed(other) as second:
        while (piece := first.read(_PIECE)) == second.read(_PIECE):
            if not piece:
                return True
    return False


def records_before(path: str) -> bool:
    """Whether `Change.before` is recorded for a path: in system folders only where people edit files."""
    return not is_system(path) or may_be_edited(path)


def describe_state(found: PathState) -> str:
    """In the form of `Change.before`."""
    if found.kind == "file":
        with open_unfollowed(found.path) as file:
            return f"file:sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    if found.kind == "symlink":
        return f"symlink:{os.readlink(found.path)}"  # noqa: PTH115
    return "directory" if found.kind == "directory" else "other"


@dataclass(frozen=True, slots=True)
class Layer:
    """An upper layer and its lower layer."""

    point: str
    """The mount point of the overlay in the setup's view."""
    upper: str
    lower: str | None
    """Where its lower layer can be read; None if nowhere: then everything counts as changed."""
    root: str | None = None
    """A folder with the attributes that its root had when it was mounted; None: those of `lower` are used."""


@dataclass(slots=True)
class LeftOut:
    """What the rules left out of the changes."""

    exclusions: Exclusions
    paths: dict[str, list[str]] = field(default_factory=dict)
    """By the rule's name. Of a folder only itself is here."""
    warnings: list[str] = field(default_factory=list)
    """Messages about files that a restored start may miss."""
    reasons: dict[str, LeftOutPath] = field(default_factory=dict)
    """The first paths of each rule, by path."""
    withheld: dict[str, Change] = field(default_factory=dict)
    """Secrets by path: the command that follows the setup gets them, but no snapshot does."""

    def add(self, path: str, rule: Rule) -> None:
        """Note that a rule leaves this path out."""
        _log.info("not in the snapshot: %s (%s): it %s", path, rule.name, rule.reason)
        kept = self.paths.setdefault(rule.name, [])
        kept.append(path)
        if rule.secret or len(kept) <= _PATHS_KEPT:
            self.reasons[path] = LeftOutPath(path, rule.name, f"it {rule.reason}", secret=rule.secret)
            if rule.warn:
                self.warnings.append(f"{path} is not kept ({rule.name}): it {rule.reason}")


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder that is still to be walked."""

    path: str
    upper: str
    lower: str | None
    """Empty: there was no such folder. None: unknown."""
    hidden: bool
    """Whether the lower folder is hidden, so that each of its entries was either replaced or deleted."""
    secret: bool = False
    """Whether a rule withholds it with everything in it."""


class Walk:
    """Collects the changes of all layers."""

    def __init__(
        self,
        exclusions: Exclusions,
        *,
        record_before: bool = True,
        always_changed: Collection[str] = (),
        mounted: Collection[str] = (),
    ) -> None:
        """`record_before`: record `Change.before` where people keep or edit files. `always_changed`: files that count
        as changed even if the setup rewrote the same content, because they may not exist on another node and must be in
        the snapshot. `mounted`: former mount points, whose files and folders were made for the mount."""
        self.left_out = LeftOut(exclusions)
        self._exclusions = exclusions
        self._records_before = record_before
        self._always_changed = always_changed
        self._mounted = mounted
        self._changes: dict[str, Change] = {}
        # Unchanged hard links, by inode: they count as changed if another name of the file is new.
        self._unchanged_links: dict[tuple[int, int], list[Change]] = {}
        self._changed_inodes: set[tuple[int, int]] = set()

    def layer(self, layer: Layer) -> None:
        """Walk one layer. Raises `PermanentError` for unreadable files."""
        try:
            top = state_at(layer.upper, "")
            # Not of the lower layer if there is a choice: that disk may have been unmounted since, by its user.
            known = layer.root or layer.lower
            below = state_at(known, "") if known else None
            if top is not None and below is not None and metadata_differs(top, below):
                self._add(Change(layer.point, Action.MODIFIED, layer.upper), below)
            waiting = [_Folder(layer.point, layer.upper, layer.lower, hidden=False)]
            while waiting:
                waiting += self._folder(waiting.pop())
        except OSError as error:
            raise PermanentError(f"read what the setup changed: {error.filename}: {error.strerror}") from error

    def changes(self) -> list[Change]:
        for inode in self._changed_inodes & self._unchanged_links.keys():
            self._changes.update((change.path, change) for change in self._unchanged_links[inode])
        return [self._changes[path] for path in sorted(self._changes)]

    def _folder(self, folder: _Folder) -> Iterator[_Folder]:
        names = set()
        with os.scandir(folder.upper) as entries:
            for entry in entries:
                names.add(entry.name)
                yield from self._entry(folder, entry.name, entry.stat(follow_symlinks=False))
        if not folder.hidden or folder.secret:
            return
        with os.scandir(folder.lower) as entries:  # what was in a folder that was replaced by a new one
            for entry in entries:
                if entry.name not in names:
                    below = PathState(entry.path, entry.stat(follow_symlinks=False))
                    self._add_deleted(join(folder.path, entry.name), below)

    def _entry(self, folder: _Folder, name: str, status: os.stat_result) -> Iterator[_Folder]:
        path, upper = join(folder.path, name), join(folder.upper, name)
        if path in self._mounted:
            return
        below = state_at(folder.lower, name) if folder.lower else None
        unknown = folder.lower is None
        here = PathState(upper, status)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:  # a whiteout
            if below is not None and not folder.secret:
                self._add_deleted(path, below)
            elif unknown and not folder.secret and self._exclusions.rule_for(path) is None:
                self._add(Change(path, Action.DELETED), None)
            return
        rule = None if folder.secret else self._exclusions.rule_for(path, kind=here.kind, size=here.size)
        if rule is not None:
            self.left_out.add(path, rule)
            if not rule.secret:
                return
        secret = folder.secret or rule is not None
        action = Action.ADDED if below is None and not unknown else Action.MODIFIED
        if here.kind != "directory":
            self._add_leaf(Change(path, action, upper), here, below, hidden=folder.hidden, secret=secret)
            return
        was_folder = below is not None and below.kind == "directory"
        # The kernel marks new folders as opaque, too; that matters only for a folder that replaced one.
        opaque = was_folder and (folder.hidden or is_opaque(upper))
        if below is None or not was_folder or opaque or metadata_differs(here, below):
            change = Change(path, action, upper, opaque=opaque or (unknown and is_opaque(upper)))
            self._add(change, below, secret=secret)
        lower = below.path if below is not None and was_folder else None if unknown else ""
        yield _Folder(path, upper, lower, opaque, secret)

    def _add_leaf(
        self, change: Change, here: PathState, below: PathState | None, *, hidden: bool, secret: bool
    ) -> None:
        inode = (here.status.st_dev, here.status.st_ino) if here.status.st_nlink > 1 and not secret else None
        same = below is not None and not hidden and not metadata_differs(here, below) and same_content(here, below)
        if below is not None and same and change.path not in self._always_changed:
            if inode is not None:
                self._unchanged_links.setdefault(inode, []).append(self._with_before(change, below))
            return
        if inode is not None:
            self._changed_inodes.add(inode)
        self._add(change, below, secret=secret)

    def _add_deleted(self, path: str, below: PathState) -> None:
        if self._exclusions.rule_for(path, kind=below.kind, size=below.size) is None:
            self._add(Change(path, Action.DELETED), below)

    def _add(self, change: Change, below: PathState | None, *, secret: bool = False) -> None:
        changes = self.left_out.withheld if secret else self._changes
        changes[change.path] = self._with_before(change, below)

    def _with_before(self, change: Change, below: PathState | None) -> Change:
        if below is None or not self._records_before or not records_before(change.path):
            return change
        return Change(change.path, change.action, change.source, change.opaque, describe_state(below))


def join(folder: str, name: str) -> str:
    """`os.path.join` for a plain name, several times as fast."""
    return f"{folder}{name}" if folder.endswith("/") else f"{folder}/{name}"

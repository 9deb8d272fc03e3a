"""Find what a setup changed, from the upper layers of the overlays that caught it.

An upper layer holds more than changes: folders that are only there because something in them changed, and files that
were opened for writing and are what they were. So everything is compared with what lies below. No symbolic link is
followed anywhere.

Who calls: `capture`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from bootseer.env.capturing.before import Found, difference, found_at, same_content, state_of
from bootseer.env.capturing.exclude import Exclusions, Kind
from bootseer.env.changes import Action, Change
from bootseer.errors import PermanentError

_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
_WHITEOUT = ("trusted.overlay.whiteout", "user.overlay.whiteout")
_PATHS_KEPT = 20
"""Of each rule that left something out."""


@dataclass(frozen=True, slots=True)
class Layer:
    """An upper layer, and what lies below it."""

    point: str
    """The path that the overlay lies over, as the setup saw it."""
    upper: str
    lower: str | None
    """Where its lower layer can be read; None if nowhere: then everything is taken for changed."""


@dataclass(slots=True)
class LeftOut:
    """What the rules kept out: the first paths by the rule's name."""

    paths: dict[str, list[str]] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    """Lines for people about what a start without it may miss."""

    def add(self, path: str, kind: Kind, exclusions: Exclusions, size: int | None = None) -> bool:
        """Whether a rule keeps this path out; then it is noted."""
        rule = exclusions.rule_for(path, kind=kind, size=size)
        if rule is None:
            return False
        kept = self.paths.setdefault(rule.name, [])
        if len(kept) < _PATHS_KEPT:
            kept.append(path)
            if rule.missed:
                self.missed.append(f"{path} is not kept ({rule.name}): it {rule.reason}")
        return True


@dataclass(frozen=True, slots=True)
class _Folder:
    """One that is still to be looked into."""

    path: str
    upper: str
    lower: str | None
    """Empty: there was no such folder. None: nobody knows."""
    hidden: bool
    """Whether nothing of the lower folder shows through, so that all of it is either changed or deleted."""


class Walk:
    """Collects the changes of all layers."""

    def __init__(self, exclusions: Exclusions, *, wants_before: Callable[[str], bool]) -> None:
        self.left_out = LeftOut()
        self._exclusions = exclusions
        self._wants_before = wants_before
        self._changes: dict[str, Change] = {}
        # Files with several names that are what they were, by inode: one of the other names may be new.
        self._same: dict[tuple[int, int], list[Change]] = {}
        self._changed_inodes: set[tuple[int, int]] = set()

    def layer(self, layer: Layer) -> None:
        """Look through one layer. Raises `PermanentError` for what cannot be read."""
        try:
            top = found_at(layer.upper, "")
            below = found_at(layer.lower, "") if layer.lower else None
            if top is not None and below is not None and difference(top, below):
                self._add(Change(layer.point, Action.MODIFIED, layer.upper), below)
            waiting = [_Folder(layer.point, layer.upper, layer.lower, hidden=False)]
            while waiting:
                waiting += self._folder(waiting.pop())
        except OSError as error:
            raise PermanentError(f"read what the setup changed: {error.filename}: {error.strerror}") from error

    def changes(self) -> list[Change]:
        """All of them, sorted by path."""
        for inode in self._changed_inodes & self._same.keys():
            self._changes.update((change.path, change) for change in self._same[inode])
        return [self._changes[path] for path in sorted(self._changes)]

    def _folder(self, folder: _Folder) -> Iterator[_Folder]:
        names = set()
        with os.scandir(folder.upper) as entries:
            for entry in entries:
                names.add(entry.name)
                yield from self._entry(folder, entry.name, entry.stat(follow_symlinks=False))
        if folder.hidden:
            self._gone(folder, names)

    def _entry(self, folder: _Folder, name: str, status: os.stat_result) -> Iterator[_Folder]:
        path, upper = join(folder.path, name), join(folder.upper, name)
        below = found_at(folder.lower, name) if folder.lower else None
        unknown = folder.lower is None
        here = Found(upper, status)
        if _is_whiteout(here):
            if below is not None:
                self._deleted(path, below)
            elif unknown and self._exclusions.rule_for(path) is None:
                self._add(Change(path, Action.DELETED), None)
            return
        if self.left_out.add(path, here.kind, self._exclusions, here.size):
            return
        action = Action.ADDED if below is None and not unknown else Action.MODIFIED
        if here.kind != "directory":
            self._leaf(Change(path, action, upper), here, below, hidden=folder.hidden)
            return
        was_folder = below is not None and below.kind == "directory"
        # The kernel marks new folders as well: only one that replaced a folder hides something.
        opaque = was_folder and (folder.hidden or _is_opaque(here))
        if below is None or not was_folder or opaque or difference(here, below):
            self._add(Change(path, action, upper, opaque=opaque or (unknown and _is_opaque(here))), below)
        lower = below.path if below is not None and was_folder else None if unknown else ""
        yield _Folder(path, upper, lower, hidden=opaque)

    def _leaf(self, change: Change, here: Found, below: Found | None, *, hidden: bool) -> None:
        inode = (here.status.st_dev, here.status.st_ino) if here.status.st_nlink > 1 else None
        if below is not None and not hidden and not difference(here, below) and same_content(here, below):
            if inode is not None:
                self._same.setdefault(inode, []).append(self._with_before(change, below))
            return
        if inode is not None:
            self._changed_inodes.add(inode)
        self._add(change, below)

    def _gone(self, folder: _Folder, names: set[str]) -> None:
        """What was in a folder that another one replaced."""
        with os.scandir(folder.lower) as entries:
            for entry in entries:
                if entry.name not in names:
                    self._deleted(join(folder.path, entry.name), Found(entry.path, entry.stat(follow_symlinks=False)))

    def _deleted(self, path: str, below: Found) -> None:
        if not self.left_out.add(path, below.kind, self._exclusions, below.size):
            self._add(Change(path, Action.DELETED), below)

    def _add(self, change: Change, below: Found | None) -> None:
        self._changes[change.path] = self._with_before(change, below)

    def _with_before(self, change: Change, below: Found | None) -> Change:
        if below is None or not self._wants_before(change.path):
            return change
        return Change(change.path, change.action, change.source, change.opaque, state_of(below))


def join(folder: str, name: str) -> str:
    """`os.path.join` for a plain name, several times as fast."""
    return f"{folder}{name}" if folder.endswith("/") else f"{folder}/{name}"


def _is_whiteout(found: Found) -> bool:
    status = found.status
    if stat.S_ISCHR(status.st_mode):
        return status.st_rdev == 0
    # Tools that may not make devices leave an empty file with a mark.
    return stat.S_ISREG(status.st_mode) and status.st_size == 0 and _has(found, _WHITEOUT)


def _is_opaque(found: Found) -> bool:
    marks = found.marks()
    return any(marks.get(name) == b"y" for name in _OPAQUE)


def _has(found: Found, names: tuple[str, ...]) -> bool:
    marks: Mapping[str, bytes] = found.marks()
    return any(name in marks for name in names)

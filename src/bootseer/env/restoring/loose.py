"""Which paths of a snapshot are written to this machine's own files, and whether a user's work is in their way.

A path is written when nothing is there, or what the setup had found itself (`Entry.before`). What looks as the setup
left it stays. Everything else is a conflict: nothing at all is written then, and the real setup runs. Most of
the system has no `before`: that it is the same is for the request key to say, and it is written over.

Nothing is changed here (`place` does that).
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bootseer.env.changes import lies_in
from bootseer.env.keys.files import Facts, is_settled, stamp_of
from bootseer.env.restoring.inside import Inside
from bootseer.env.restoring.roots import is_checked, is_system
from bootseer.env.snapshot.manifest import Entry
from bootseer.errors import PermanentError
from bootseer.mounts.kernel import is_below, mount_table

Where = Callable[[str], Path]
"""Where the snapshot's version of a path can be read."""
Deed = Literal["make", "replace", "dress", "link", "delete"]
"""`dress`: give it the attributes alone."""
_PIECE = 1 << 20
_SHOWN = 3
_GITS_OWN = re.compile(r".*/\.git/(.*/)?(index|logs/.*|FETCH_HEAD|ORIG_HEAD|packed-refs)", re.DOTALL)
"""Files of a clone that git writes anew while it is only looked at, or to keep house."""
_NEVER = ("/proc", "/sys", "/dev")


class Conflict(PermanentError):  # noqa: N818 - the reason code of the fallback that it leads to
    """Something of another user is in the way."""

    def __init__(self, reasons: Sequence[str]) -> None:
        more = f", and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
        named = "; ".join(reasons[:_SHOWN])
        super().__init__(f"the environment would overwrite or hide files of this machine: {named}{more}")
        self.reasons = tuple(reasons)
        """One for each path."""


@dataclass(frozen=True, slots=True)
class Step:
    """One path to be written."""

    deed: Deed
    entry: Entry


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done, in this order: a folder comes before what is in it, deletions come first."""

    steps: tuple[Step, ...]
    num_present: int
    """Paths that are as they should be."""
    root: str = "/"


def plan(
    entries: Iterable[Entry],
    where: Where,
    *,
    roots: Sequence[str] = (),
    root: str = "/",
    captured: bool = False,
    facts: Path | None = None,
) -> Plan:
    """Plan to write the entries outside of `roots` below the folder `root`. Raises `Conflict`.

    An entry in a root is not written; where people edit files (`is_checked`), the mount must hide nothing but what
    the setup had found: otherwise the job would see the builder's version of this machine's settings.

    `captured`: the setup has just run on this machine. What it deleted or replaced is what is there now, so that whole
    folders go; elsewhere it is unknown what was in them. `facts` is a folder for digests of files.
    """
    wanted: dict[str, Entry] = {}
    mounted: list[Entry] = []
    for entry in entries:
        if lies_in(entry.path, roots):
            mounted.append(entry)
        else:
            wanted[entry.path] = entry
    planning = _Planning(Inside(root), where, wanted, captured, Facts(facts))
    for path in sorted(planning.entries, key=lambda path: path.split("/")):
        planning.add(planning.entries[path])
    planning.check_deletions()
    for entry in mounted:
        planning.check_hidden(entry)
    planning.facts.save()
    if planning.reasons:
        raise Conflict(planning.reasons)
    return Plan((*reversed(planning.deletions), *planning.steps, *planning.links), planning.num_present, root)


@dataclass(slots=True)
class _Planning:
    inside: Inside
    where: Where
    entries: dict[str, Entry]
    captured: bool
    facts: Facts
    steps: list[Step] = field(default_factory=list)
    links: list[Step] = field(default_factory=list)
    deletions: list[Step] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    num_present: int = 0
    _new: set[str] = field(default_factory=set)
    """Folders that are not there yet: what is in them is not, either."""

    def add(self, entry: Entry) -> None:
        """Look at one path. A folder comes before what is in it."""
        if lies_in(entry.path, _NEVER):
            self._refuse(entry, "no snapshot has files there")
            return
        above = entry.path.rpartition("/")[0]
        try:
            found = None if above in self._new else self.inside.status(entry.path)
            action = self._deed(entry, found)
        except OSError as error:
            link = "it is reached through something that is not a folder, or through a symbolic link"
            self._refuse(entry, link if isinstance(error, NotADirectoryError) else error.strerror or str(error))
            return
        if action is None:
            self.num_present += 1
            return
        if action == "make" and above not in self._new and above not in self.entries and not self._is_folder(above):
            self._refuse(entry, "the folder around it is not there")
            return
        if entry.kind == "directory" and action in ("make", "replace"):
            self._new.add(entry.path)
        chosen = self.deletions if action == "delete" else self.links if entry.link in self.entries else self.steps
        chosen.append(Step(action, entry))

    def check_deletions(self) -> None:
        """A folder is not deleted with things in it that the snapshot does not name."""
        for step in self.deletions:
            entry = step.entry
            if entry.before == "directory" and not self._goes(entry.path) and self.inside.names(entry.path):
                self._refuse(entry, "the setup deleted this folder, and here things are in it")

    def check_hidden(self, entry: Entry) -> None:
        """A mount hides nothing that the snapshot does not name."""
        if entry.kind == "directory" or not is_checked(entry.path, entry.before):
            return
        try:
            found = self.inside.status(entry.path)
            if found is None:
                same = not entry.before or entry.kind == "deleted" or self._was_unchanged(entry)
            elif entry.kind != "deleted" and self._is_after(entry, found):
                same = True
            else:
                same = self._is_before(entry, found)
        except OSError:  # a component of the path is not a folder here: the mount shows the snapshot's
            same = not entry.before
        if not same:
            self._refuse(entry, "the setup changed it, and here it is not what the setup found")

    def _goes(self, path: str) -> bool:
        """Whether all that is in a folder may be deleted unseen."""
        return self.captured or is_system(path)

    def _deed(self, entry: Entry, found: os.stat_result | None) -> Deed | None:
        """What is to be done; nothing when all is well, or when it was refused, too."""
        if found is None:
            if entry.before and entry.kind != "deleted" and not self._was_unchanged(entry):
                self._refuse(entry, "the setup changed it, and here it is not there")
                return None
            return None if entry.kind == "deleted" else "make"
        if entry.kind != "deleted" and self._is_after(entry, found):
            if entry.opaque:
                self._check_others(entry)
            return None if _is_dressed(entry, found) else "dress"
        if entry.kind != "deleted" and (_is_bytecode(entry.path) or _GITS_OWN.fullmatch(entry.path)):
            return None  # Python itself looks whether it fits; git goes on from what it wrote itself
        return self._deed_over(entry, found)

    def _deed_over(self, entry: Entry, found: os.stat_result) -> Deed | None:
        """The same for a path where something else is."""
        over: Deed = "delete" if entry.kind == "deleted" else "replace"
        if (is_system(entry.path) and not entry.before) or _is_bytecode(entry.path):
            self._check_mounts(entry)
        elif not self._is_before(entry, found):
            self._refuse(entry, "it is neither what the setup found nor what it left")
        elif stat.S_ISDIR(found.st_mode):
            self._check_mounts(entry)
            if over == "replace" and not self.captured:
                self._refuse(entry, "the setup put something else in the place of this folder")
        return over

    def _check_mounts(self, entry: Entry) -> None:
        if any(is_below(row.path, entry.path) for row in mount_table()):
            self._refuse(entry, "something is mounted in this folder, which the setup deleted")

    def _is_after(self, entry: Entry, found: os.stat_result) -> bool:
        mode = found.st_mode
        if entry.kind == "file":
            return stat.S_ISREG(mode) and found.st_size == entry.size and self._same_content(entry, found)
        if entry.kind == "symlink":
            return stat.S_ISLNK(mode) and self.inside.target(entry.path) == entry.target
        return stat.S_ISFIFO(mode) if entry.kind == "fifo" else stat.S_ISDIR(mode)

    def _is_before(self, entry: Entry, found: os.stat_result) -> bool:
        kind, _, value = entry.before.partition(":")
        if kind == "file":
            return stat.S_ISREG(found.st_mode) and f"sha256:{_sha256(self.inside.read(entry.path))}" == value
        if kind == "symlink":
            return stat.S_ISLNK(found.st_mode) and self.inside.target(entry.path) == value
        return kind == "directory" and stat.S_ISDIR(found.st_mode)

    def _was_unchanged(self, entry: Entry) -> bool:
        """Whether the setup wrote again what had been there: it would have written it here, too."""
        if entry.kind == "symlink":
            return entry.before == f"symlink:{entry.target}"
        if entry.kind != "file" or not entry.before.startswith("file:"):
            return False
        with self.where(entry.path).open("rb") as file:
            return entry.before == f"file:sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"

    def _same_content(self, entry: Entry, found: os.stat_result) -> bool:
        if entry.digest:
            digest = self.facts.get("blake3", entry.path, stamp_of(found))
            if digest is None:
                from bootseer.env.snapshot.contents import digest_of_file  # and all that writes snapshots

                with os.fdopen(self.inside.read(entry.path), "rb") as file:
                    digest = digest_of_file(file)
                if is_settled(found):
                    self.facts.put("blake3", entry.path, stamp_of(found), digest)
            return bool(digest == entry.digest)
        here = self.inside.read(entry.path)
        with os.fdopen(here, "rb") as restored, self.where(entry.path).open("rb") as existing:
            while piece := existing.read(_PIECE):
                if restored.read(len(piece)) != piece:
                    return False
            return not restored.read(1)

    def _check_others(self, entry: Entry) -> None:
        """In a folder that the setup replaced, nothing may be that is not in its new version."""
        for name in self.inside.names(entry.path):
            path = f"{entry.path}/{name}"
            if path in self.entries:
                continue
            if not self._goes(path):
                self._refuse(entry, f"the setup replaced this folder, and here is {name} in it")
                return
            gone = Entry(path, "deleted")
            self._check_mounts(gone)
            self.deletions.append(Step("delete", gone))

    def _is_folder(self, path: str) -> bool:
        if not path:
            return True
        try:
            found = self.inside.status(path)
        except OSError:
            return False
        return found is not None and stat.S_ISDIR(found.st_mode)

    def _refuse(self, entry: Entry, reason: str) -> None:
        self.reasons.append(f"{entry.path}: {reason}")


def _is_dressed(entry: Entry, found: os.stat_result) -> bool:
    """Whether mode and owner are as the setup left them, as far as we may change them."""
    if entry.kind == "symlink":
        return True
    if entry.kind == "directory" and entry.before != "directory":
        # The folder exists; only when it was made by us, in a restore that did not end, its mode is not final.
        return stat.S_IMODE(found.st_mode) != entry.mode | 0o700 or entry.mode & 0o700 == 0o700
    owner = (found.st_uid, found.st_gid) == (entry.uid, entry.gid) or os.geteuid() != 0
    return owner and stat.S_IMODE(found.st_mode) == entry.mode


def _is_bytecode(path: str) -> bool:
    return path.endswith(".pyc") and "/__pycache__/" in path


def _sha256(opened: int) -> str:
    with os.fdopen(opened, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

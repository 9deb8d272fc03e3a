"""Plan which loose paths of a snapshot to write to this machine's files, and detect conflicts with users' files.

A path is written if nothing is there, or the same as the setup had found (`Entry.before`). A path that already is as
the setup left it stays. Anything else is a conflict: then nothing is written, and the setup runs instead. Most system
files have no `before`: the request key covers them, so they are overwritten.

Nothing is changed here: `placement` applies the plan.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from bootseer.env.changes import lies_in
from bootseer.env.keys.files import FactCache, is_settled, stamp_of
from bootseer.env.restoring.roots import is_checked, is_system
from bootseer.env.restoring.safe_tree import SafeTree
from bootseer.env.snapshot.manifest import Entry
from bootseer.errors import PermanentError
from bootseer.mounts.kernel import Mount, is_below, mount_table
from bootseer.units import listed

SourceOf = Callable[[str], Path]
"""Where the snapshot's version of a path can be read."""
Operation = Literal["make", "replace", "set_attributes", "delete"]
"""`set_attributes`: the content is right already."""
_GIT_FILES = re.compile(r".*/\.git/(.*/)?(index|logs/.*|FETCH_HEAD|ORIG_HEAD|packed-refs)", re.DOTALL)
"""Files of a clone that git rewrites at read-only commands or for housekeeping."""
_KERNEL_FOLDERS = ("/proc", "/sys", "/dev")


class Conflict(PermanentError):  # noqa: N818 - the reason code of the fallback that it leads to
    """Files of this machine are in the way."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__(f"the environment would overwrite or hide files of this machine: {listed(reasons)}")
        self.reasons = tuple(reasons)
        """One for each path."""


class Step(Struct, frozen=True):
    """One path to be written."""

    operation: Operation
    entry: Entry


class Plan(Struct, frozen=True):
    """The steps in order: deletions first, and a folder before its entries."""

    steps: tuple[Step, ...]
    root: str = "/"


def plan(
    entries: Iterable[Entry],
    source_of: SourceOf,
    *,
    roots: Sequence[str] = (),
    root: str = "/",
    captured: bool = False,
    facts: Path | None = None,
) -> Plan:
    """Plan to write the entries outside of `roots` below the folder `root`. Raises `Conflict`.

    An entry in a root is not written. Where people edit files (`is_checked`), it must hide nothing but what the setup
    had found: otherwise the job would see the builder's version of this machine's settings.

    `captured`: the setup has just run on this machine, so what it deleted or replaced is still there, and whole folders
    may be deleted; elsewhere their content is unknown. `facts` is a folder where digests of files are remembered.
    """
    wanted: dict[str, Entry] = {}
    mounted: list[Entry] = []
    for entry in entries:
        if lies_in(entry.path, roots):
            mounted.append(entry)
        else:
            wanted[entry.path] = entry
    planner = _Planner(SafeTree(root), source_of, wanted, captured, FactCache(facts), roots)
    for path in sorted(planner.entries, key=lambda path: path.split("/")):
        planner.add(planner.entries[path])
    for entry in mounted:
        planner.check_hidden(entry)
    planner.facts.save()
    if planner.reasons:
        raise Conflict(planner.reasons)
    return Plan((*reversed(planner.deletions), *planner.steps, *planner.links), root)


class _Planner(Struct):
    tree: SafeTree
    source_of: SourceOf
    entries: dict[str, Entry]
    captured: bool
    facts: FactCache
    roots: Sequence[str]
    steps: list[Step] = field(default_factory=list)
    links: list[Step] = field(default_factory=list)
    deletions: list[Step] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    mounts: list[Mount] = field(default_factory=mount_table)
    _new: set[str] = field(default_factory=set)
    """Folders that do not exist yet."""

    def add(self, entry: Entry) -> None:
        """Plan one path. Folders must be added before their entries."""
        if lies_in(entry.path, _KERNEL_FOLDERS):
            self._refuse(entry, "no snapshot has files there")
            return
        above = entry.path.rpartition("/")[0]
        try:
            found = None if above in self._new else self.tree.status(entry.path)
            action = self._operation(entry, found)
        except OSError as error:
            link = "it is reached through something that is not a folder, or through a symbolic link"
            self._refuse(entry, link if isinstance(error, NotADirectoryError) else error.strerror or str(error))
            return
        if action is None:
            return
        if action == "make" and above not in self._new and above not in self.entries and not self._is_folder(above):
            self._refuse(entry, "its parent folder does not exist")
            return
        if entry.kind == "directory" and action in ("make", "replace"):
            self._new.add(entry.path)
        if entry.link not in self.entries:  # the first path is in a root: the folder below the mount has other content
            entry = replace(entry, link="")
        chosen = self.deletions if action == "delete" else self.links if entry.link else self.steps
        chosen.append(Step(action, entry))

    def check_hidden(self, entry: Entry) -> None:
        """Refuse a mount that would hide a file which the setup had not found."""
        if entry.kind == "directory" or not is_checked(entry.path, entry.before):
            return
        try:
            found = self.tree.status(entry.path)
            if found is None:
                same = not entry.before or entry.kind == "deleted" or self._setup_kept_content(entry)
            elif entry.kind != "deleted" and self._is_after(entry, found):
                same = True
            else:
                same = self._is_before(entry, found)
        except OSError:  # a component of the path is not a folder here
            same = not entry.before
        if not same:
            self._refuse(entry, "the setup changed it, and it differs here from what the setup found")

    def _operation(self, entry: Entry, found: os.stat_result | None) -> Operation | None:
        """The operation for a path; None if there is nothing to do, or it was refused."""
        if found is None:
            if entry.before and entry.kind != "deleted" and not self._setup_kept_content(entry):
                self._refuse(entry, "the setup changed it, and it does not exist here")
                return None
            return None if entry.kind == "deleted" else "make"
        if entry.kind != "deleted" and self._is_after(entry, found):
            if entry.opaque:
                self._check_others(entry)
            if self._has_attributes(entry, found):
                return None
            # The other names of the file are not in the snapshot, or get the new file, too.
            return "replace" if stat.S_ISREG(found.st_mode) and found.st_nlink > 1 else "set_attributes"
        if entry.kind != "deleted" and (_is_bytecode(entry.path) or _GIT_FILES.fullmatch(entry.path)):
            return None  # Python checks bytecode itself; git works with its own files
        return self._operation_over(entry, found)

    def _operation_over(self, entry: Entry, found: os.stat_result) -> Operation | None:
        over: Operation = "delete" if entry.kind == "deleted" else "replace"
        if (is_system(entry.path) and not entry.before) or _is_bytecode(entry.path):
            self._check_mounts(entry)
        elif not self._is_before(entry, found):
            self._refuse(entry, "it differs from what the setup found and from what it left")
        elif stat.S_ISDIR(found.st_mode):
            self._check_mounts(entry)
            if over == "replace" and not self.captured:
                self._refuse(entry, "the setup replaced this folder by another file")
            elif not (self.captured or is_system(entry.path)) and self.tree.names(entry.path):
                self._refuse(entry, "the setup deleted this folder, which is not empty here")
        return over

    def _check_mounts(self, entry: Entry) -> None:
        if any(is_below(row.path, entry.path) for row in self.mounts):
            self._refuse(entry, "something is mounted in this folder, which the setup deleted")

    def _is_after(self, entry: Entry, found: os.stat_result) -> bool:
        mode = found.st_mode
        if entry.kind == "file":
            return stat.S_ISREG(mode) and found.st_size == entry.size and self._same_content(entry, found)
        if entry.kind == "symlink":
            return stat.S_ISLNK(mode) and self.tree.target(entry.path) == entry.target
        return stat.S_ISFIFO(mode) if entry.kind == "fifo" else stat.S_ISDIR(mode)

    def _is_before(self, entry: Entry, found: os.stat_result) -> bool:
        kind, _, value = entry.before.partition(":")
        if kind == "file":
            return stat.S_ISREG(found.st_mode) and f"sha256:{_sha256(self.tree.read(entry.path))}" == value
        if kind == "symlink":
            return stat.S_ISLNK(found.st_mode) and self.tree.target(entry.path) == value
        return kind == "directory" and stat.S_ISDIR(found.st_mode)

    def _setup_kept_content(self, entry: Entry) -> bool:
        """Whether the setup rewrote the content that it had found: then the file may be missing here."""
        if entry.kind == "symlink":
            return entry.before == f"symlink:{entry.target}"
        if entry.kind != "file" or not entry.before.startswith("file:"):
            return False
        with self.source_of(entry.path).open("rb") as file:
            return entry.before == f"file:sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"

    def _same_content(self, entry: Entry, found: os.stat_result) -> bool:
        if entry.digest:
            digest = self.facts.get("blake3", entry.path, stamp_of(found))
            if digest is None:
                from bootseer.env.snapshot.contents import digest_of_file  # and all that writes snapshots

                with os.fdopen(self.tree.read(entry.path), "rb") as file:
                    digest = digest_of_file(file)
                if is_settled(found):
                    self.facts.put("blake3", entry.path, stamp_of(found), digest)
            return bool(digest == entry.digest)
        with self.source_of(entry.path).open("rb") as file:
            left = hashlib.file_digest(file, "sha256").hexdigest()
        return _sha256(self.tree.read(entry.path)) == left

    def _has_attributes(self, entry: Entry, found: os.stat_result) -> bool:
        """Whether mode, owner and extended attributes are as the setup left them, as far as this user may change them.
        Other extended attributes may be there."""
        if entry.kind == "directory" and entry.before != "directory":
            # An existing folder keeps its mode, unless an interrupted restore has created it with a preliminary mode.
            return stat.S_IMODE(found.st_mode) != entry.mode | 0o700 or entry.mode & 0o700 == 0o700
        owner = (found.st_uid, found.st_gid) == (entry.uid, entry.gid) or os.geteuid() != 0
        xattrs = all(self.tree.has_xattr(entry.path, name, value) for name, value in entry.xattrs.items())
        return owner and stat.S_IMODE(found.st_mode) == entry.mode and xattrs

    def _check_others(self, entry: Entry) -> None:
        """Delete, or refuse, entries of a replaced folder that are not in its new version."""
        for name in self.tree.names(entry.path):
            path = f"{entry.path}/{name}"
            is_above_root = any(lies_in(root, [path]) for root in self.roots)  # its mount point is there already
            if path in self.entries or is_above_root:
                continue
            if not (self.captured or is_system(path)):
                self._refuse(entry, f"the setup replaced this folder, which contains {name} here")
                return
            gone = Entry(path, "deleted")
            self._check_mounts(gone)
            self.deletions.append(Step("delete", gone))

    def _is_folder(self, path: str) -> bool:
        with contextlib.suppress(OSError), self.tree.folder(path):
            return True
        return False

    def _refuse(self, entry: Entry, reason: str) -> None:
        self.reasons.append(f"{entry.path}: {reason}")


def _is_bytecode(path: str) -> bool:
    return path.endswith(".pyc") and "/__pycache__/" in path


def _sha256(opened: int) -> str:
    with os.fdopen(opened, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

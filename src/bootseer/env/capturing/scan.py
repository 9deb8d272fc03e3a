"""Find the changes of a setup by two walks over the machine's disks: the last resort, which needs no privilege.

A file has changed if its size, permissions, owner, inode or change time (ctime, which programs cannot set) differ. Each
walk takes seconds per million files. Changes by other programs are found, too; without root, files of other owners are
skipped. Extended attributes of folders (access lists) are not compared.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from bootseer.env.capturing.capture_base import Capture, Way
from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.capturing.overlay import takes_overlay
from bootseer.env.capturing.walk import LeftOut, PathState, join, records_before
from bootseer.env.changes import Action, Change, parents
from bootseer.errors import PermanentError
from bootseer.mounts.kernel import mount_table, visible

MAX_ENTRIES = 20_000_000


class ScanCapture(Capture):
    """A capture whose setup changes the machine itself."""

    way: Way = "scan"

    def __init__(self, exclusions: Exclusions, *, roots: tuple[str, ...] = ("/",)) -> None:
        super().__init__(exclusions)
        self._mounts = {row.path: row for row in visible(mount_table())}
        self._roots = roots
        disks = (path for path, row in self._mounts.items() if takes_overlay(row))
        self.points = tuple(path for path in disks if exclusions.rule_on_path(path, kind="directory") is None)
        self.notes = ("what a changed file held before the setup is not known",)
        # Names and fingerprints of each folder's entries, as bytes: there may be millions.
        self._before = {
            path: marshal.dumps({name: _fingerprint(entry.status) for name, entry in found.items()})
            for path, found in self._walk()
        }

    @property
    def root(self) -> Path:
        return Path("/")

    def enter(self) -> None:
        """Nothing: the setup works on the machine itself."""

    def source_of(self, path: str) -> Path:
        return Path(path)

    def close(self) -> None:
        """Drop the first walk."""
        self._before = {}

    def changes(self, *, always_changed: Collection[str] = ()) -> list[Change]:
        """As of all captures, but `before` of modified and deleted files is `other` where it is recorded, as it is no
        longer known. `always_changed` has no effect: a rewritten file has another ctime."""
        self.left_out = LeftOut(self._exclusions)
        changes: list[Change] = []
        euid = os.geteuid()
        for folder, found in self._walk():
            was = marshal.loads(self._before[folder]) if folder in self._before else {}  # noqa: S302 - our own
            for name, entry in found.items():
                path = join(folder, name)
                mark, earlier = _fingerprint(entry.status), was.pop(name, None)
                if mark == earlier or euid not in (0, entry.status.st_uid):
                    continue
                change = self._change(path, Action.MODIFIED if earlier is not None else Action.ADDED)
                rule = self._exclusions.forbidding_rule(path, kind=entry.kind, size=entry.size)
                if rule is None:
                    changes.append(change)
                    continue
                whole = (above for above in parents(path) if self._exclusions.rule_for(above, kind="directory") is rule)
                if (top := next(whole, path)) not in self.left_out.reasons:
                    self.left_out.add(top, rule)
                if rule.secret:
                    self.left_out.withheld[path] = change
            gone = (self._change(join(folder, name), Action.DELETED) for name in was)
            changes += [change for change in gone if self._exclusions.forbidding_rule(change.path) is None]
        return sorted(changes, key=lambda change: change.path)

    @staticmethod
    def _change(path: str, action: Action) -> Change:
        lost = "other" if action is not Action.ADDED and records_before(path) else ""
        return Change(path, action, "" if action is Action.DELETED else path, before=lost)

    def _walk(self) -> Iterator[tuple[str, Mapping[str, PathState]]]:
        waiting = list(self._roots)
        count = 0
        while waiting:
            folder = waiting.pop()
            found = self._list_folder(folder)
            count += len(found)
            if count > MAX_ENTRIES:
                raise PermanentError(f"more than {MAX_ENTRIES} files: too many to look at for what a setup changed")
            yield folder, found
            waiting += [join(folder, name) for name, entry in found.items() if entry.kind == "directory"]

    def _list_folder(self, folder: str) -> dict[str, PathState]:
        found: dict[str, PathState] = {}
        # A folder was deleted meanwhile, or is not readable: then the setup has not written there either.
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                path = join(folder, entry.name)
                if path in self._mounts and not takes_overlay(self._mounts[path]):
                    continue
                try:
                    here = PathState(path, entry.stat(follow_symlinks=False))
                except OSError:  # deleted meanwhile, or another user's FUSE mount, which even root may not read
                    continue
                rule = self._exclusions.rule_for(path, kind=here.kind, size=here.size)
                # Do not enter folders that are left out: /proc alone would take minutes.
                if rule is None or rule.secret or here.kind != "directory":
                    found[entry.name] = here
        return found


def _fingerprint(status: os.stat_result) -> int:
    """A hash of the compared attributes: the same at both walks, and different for two states of a file but with
    negligible probability. A folder's times and size depend only on its entries."""
    of_file = () if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_ctime_ns, status.st_ino)
    return hash((status.st_mode, status.st_uid, status.st_gid, *of_file))

"""Which folders of a snapshot are shown by mounting, and which paths are written to the node as the setup would.

On a host everything that the job writes must stay where it wrote it. A folder that is mounted takes the job's changes
into a layer of its own, so that only folders of installed software are: environments, package folders, the system's
own. All the rest is loose: it is copied to its place. The rule, for each changed path, the first that fits:

1. The innermost environment around it (`Folders.environment`): a folder that is nothing else is a root. One that may
   hold other things as well (`~/.local`, a project folder with a `pyvenv.cfg`) has its `bin`, `include`, `lib` and
   `lib64` as roots; a venv that was there before also its `etc`, `man`, `opt` and `share`.
2. The outermost `site-packages`, `dist-packages` or `node_modules` around it.
3. `/usr`, `/etc`, and `/bin`, `/sbin`, `/lib` and the like where they are folders; `/var/lib/<name>`; below `/opt`
   the outermost folder that is new and holds software: an environment, or one with `bin` or `lib`.

The folder that the job works in, and those around it, are roots only where they are a venv or a conda environment: a
checkpoint must not end with the job. Of a folder of the system around it those beside it are. A root that lies in
another root is not needed. Decides and touches nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from bootseer.env.changes import Action, Change, lies_in

Environment = Literal["", "venv", "conda", "python"]
"""What kind of environment a folder is: it has `pyvenv.cfg`, `conda-meta/`, or just `lib/python3.N/`."""

_TOP_FOLDERS = r"usr|etc|s?bin|lib(?:32|64|x32|exec)?"
_SYSTEM = re.compile(rf"/(?:{_TOP_FOLDERS}|var/lib)(?:/.*)?", re.DOTALL)
_ROOT = re.compile(rf"/(?:{_TOP_FOLDERS}|var/lib/[^/]+)", re.DOTALL)
_PACKAGES = frozenset({"site-packages", "dist-packages", "node_modules"})
_PARTS = frozenset({"bin", "include", "lib", "lib64"})
_MORE_PARTS = _PARTS | {"etc", "man", "opt", "share"}
"""Of an environment that was there before: in a new one they may be folders of the project."""
_EDITED = ("/etc/", "/usr/local/")
_GENERATED = frozenset({"/etc/ld.so.cache", "/etc/mtab"})
_OF_AN_ENVIRONMENT = _PARTS | {"pyvenv.cfg", "conda-meta", "share", "etc", "man", ".gitignore", ".lock", "CACHEDIR.TAG"}


class Folders(Protocol):
    """What is known of folders when the setup has ended."""

    @property
    def working_folder(self) -> str:
        """Where the job will run, by its real name; empty where that does not matter."""

    def environment(self, folder: str) -> Environment:
        """What kind of environment the folder is; empty for none."""

    def is_folder(self, path: str) -> bool:
        """Whether it is a folder itself, and no symbolic link to one."""


@dataclass(frozen=True, slots=True)
class Division:
    """The changed paths, divided. Both are sorted."""

    roots: tuple[str, ...]
    """None lies in another one."""
    loose: tuple[str, ...]

    def is_loose(self, path: str) -> bool:
        """Whether the path lies in no root."""
        return not lies_in(path, self.roots)


def is_system(path: str) -> bool:
    """Whether the path belongs to the system itself, where users keep no files of their own."""
    return _SYSTEM.fullmatch(path) is not None


def may_be_edited(path: str) -> bool:
    """Whether people edit such files by hand: then no list of packages tells what is in them."""
    if path in _GENERATED or path.endswith(".pyc") or not _PACKAGES.isdisjoint(path.split("/")):
        return False
    return not is_system(path) or path.startswith(_EDITED)


def is_checked(path: str, before: str) -> bool:
    """Whether a mount over this path, which had `before` (`Change.before`), may hide what a user wrote on a machine.

    Files that are new count in `/etc` alone: elsewhere they are programs. What a scan did not see is not known.
    """
    return may_be_edited(path) and before != "other" and (bool(before) or path.startswith("/etc/"))


def divide(changes: Iterable[Change], folders: Folders) -> Division:
    """Divide what a setup changed."""
    finding = _Finding(folders)
    for change in changes:
        finding.add(change)
    found = {path: finding.root(path) for path in finding.paths}
    roots: list[str] = []
    # In this order a folder comes directly in front of what lies in it.
    for root in sorted({root for root in found.values() if root}, key=lambda root: root.split("/")):
        if not (roots and lies_in(root, roots[-1:])):
            roots.append(root)
    # A path without a root of its own may still lie in that of another one.
    loose = [path for path, root in found.items() if not root and not _covered(path, set(roots))]
    return Division(tuple(sorted(roots)), tuple(sorted(loose)))


def _covered(path: str, roots: set[str]) -> bool:
    return any(folder in roots for folder in _folders(path))


def _folders(path: str) -> list[str]:
    """The folder and all above it but `/`, the outermost first."""
    ends = [place for place, letter in enumerate(path) if letter == "/"][1:]
    return [path[:end] for end in ends] + [path]


class _Finding:
    """Finds roots; what it finds out of a folder is asked for once."""

    def __init__(self, folders: Folders) -> None:
        self.paths: dict[str, Action] = {}
        self._job = frozenset(_folders(folders.working_folder) if folders.working_folder.strip("/") else ())
        self._system_of_job = tuple(folder for folder in self._job if _ROOT.fullmatch(folder))
        self._folders = folders
        self._new: set[str] = set()
        self._inside: dict[str, set[str]] = {}
        self._roots: dict[str, str] = {}
        self._environments: dict[str, Environment] = {}

    def add(self, change: Change) -> None:
        """One changed path; all of them before the first `root`."""
        self.paths[change.path] = change.action
        above, _, name = change.path.rpartition("/")
        if change.action is not Action.DELETED:
            self._inside.setdefault(above, set()).add(name)
            # Nothing of what was in a folder before is left when it was replaced.
            if change.action is Action.ADDED or change.opaque:
                self._new.add(change.path)

    def root(self, path: str) -> str:
        """The root that this path asks for; empty when it is loose."""
        folder = path.rpartition("/")[0]
        if self.paths[path] is not Action.DELETED and self._folders.is_folder(path):
            folder = path
        return self._of_folder(folder)

    def _of_folder(self, folder: str) -> str:
        found = self._roots.get(folder)
        if found is None:
            found = self._roots[folder] = self._find(_folders(folder)) if folder else ""
        return found

    def _find(self, around: Sequence[str]) -> str:
        for place in range(len(around) - 1, -1, -1):
            folder = around[place]
            if kind := self._environment(folder):
                if self._is_whole(folder, kind) and (kind != "python" or folder not in self._job):
                    return folder
                inner = around[place + 1] if place + 1 < len(around) else ""
                if inner.rpartition("/")[2] in self._parts(folder, kind) and inner not in self._job:
                    return inner
        around = [folder for folder in around if folder not in self._job]
        for folder in around:
            if folder.rpartition("/")[2] in _PACKAGES:
                return folder
        for folder in around:
            if _ROOT.fullmatch(folder) or lies_in(folder, self._system_of_job):
                return folder
            if folder.startswith("/opt/") and self._is_software(folder):
                return folder
        return ""

    def _parts(self, folder: str, kind: Environment) -> frozenset[str]:
        """What belongs to an environment alone in a folder that may hold other things as well."""
        return _MORE_PARTS if kind in ("venv", "conda") and folder not in self._new else _PARTS

    def _is_software(self, folder: str) -> bool:
        """Whether a folder is new and holds programs, not what jobs leave."""
        if folder not in self._new:
            return False
        return any(self._folders.is_folder(f"{folder}/{name}") for name in ("bin", "lib", "lib64"))

    def _environment(self, folder: str) -> Environment:
        found = self._environments.get(folder)
        if found is None:
            found = self._environments[folder] = self._folders.environment(folder)
        return found

    def _is_whole(self, folder: str, kind: Environment) -> bool:
        """Whether the folder holds nothing but the environment."""
        if folder.rpartition("/")[2] == ".local":
            return False
        if kind == "conda" or is_system(folder) or folder.startswith("/opt/"):
            return True
        return folder in self._new and self._inside.get(folder, set()) <= _OF_AN_ENVIRONMENT

"""Divide a snapshot into roots, which are mounted, and loose paths, which are copied to the node.

On a host, files that the job writes must stay where it wrote them. In a mounted folder they go into a private layer, so
only folders of installed software are mounted: environments, package folders, system folders. All other paths are
loose. The root of a changed path is given by the first rule that applies:

1. The innermost environment around it (`Environment`): a folder that is nothing else is a root. One that may
   hold other things as well (`~/.local`, a project folder with a `pyvenv.cfg`) has its `bin`, `include`, `lib` and
   `lib64` as roots; a venv that was there before also its `etc`, `man`, `opt` and `share`.
2. The outermost `site-packages`, `dist-packages` or `node_modules` around it.
3. `/usr`, `/etc`, and `/bin`, `/sbin`, `/lib` and the like where they are folders; `/var/lib/<name>`; below `/opt`
   the outermost folder that is new and holds software: an environment, or one with `bin` or `lib`.

The job's working folder and its parents are roots only if they are a venv or a conda environment: checkpoints written
there must survive the job. If they lie in a system folder, its other subfolders are roots. A root inside another root
is dropped. Does no I/O.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from bootseer.env.changes import Action, Change, lies_in, parents

if TYPE_CHECKING:
    from bootseer.env.restoring.safe_tree import TreeFolders

Environment = Literal["", "venv", "conda", "python"]
"""What kind of environment a folder is: it has `pyvenv.cfg`, `conda-meta/`, or just `lib/python3.N/`."""

_TOP_FOLDERS = r"usr|etc|s?bin|lib(?:32|64|x32|exec)?"
_SYSTEM = re.compile(rf"/(?:{_TOP_FOLDERS}|var/lib)(?:/.*)?", re.DOTALL)
_ROOT = re.compile(rf"/(?:{_TOP_FOLDERS}|var/lib/[^/]+)", re.DOTALL)
_PACKAGES = frozenset({"site-packages", "dist-packages", "node_modules"})
_PARTS = frozenset({"bin", "include", "lib", "lib64"})
_MORE_PARTS = _PARTS | {"etc", "man", "opt", "share"}
"""For an environment that existed before the setup: in a new one these may be folders of the project."""
_EDITED = ("/etc/", "/usr/local/")
_GENERATED = frozenset({"/etc/ld.so.cache", "/etc/mtab"})
_ENVIRONMENT_ENTRIES = (_MORE_PARTS - {"opt"}) | {"pyvenv.cfg", "conda-meta", ".gitignore", ".lock", "CACHEDIR.TAG"}


class Division(Struct, frozen=True):
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
    """Whether people edit such files by hand, so that the list of packages does not determine their content."""
    if path in _GENERATED or path.endswith(".pyc") or not _PACKAGES.isdisjoint(path.split("/")):
        return False
    return not is_system(path) or path.startswith(_EDITED)


def is_checked(path: str, before: str) -> bool:
    """Whether a mount over this path might hide a user's file; `before` is `Change.before`.

    New files count only in `/etc`: elsewhere they are programs. `other`, the unknown state of a scan, does not count.
    """
    return may_be_edited(path) and before != "other" and (bool(before) or path.startswith("/etc/"))


def divide(changes: Iterable[Change], folders: TreeFolders) -> Division:
    finder = _RootFinder(folders)
    for change in changes:
        finder.add(change)
    found = {path: finder.root(path) for path in finder.paths}
    roots: list[str] = []
    # In this order a folder comes right before the folders inside it.
    for root in sorted({root for root in found.values() if root}, key=lambda root: root.split("/")):
        if not (roots and lies_in(root, roots[-1:])):
            roots.append(root)
    # A path without a root of its own may lie in the root of another path.
    loose = [path for path, root in found.items() if not root and not lies_in(path, roots)]
    return Division(tuple(sorted(roots)), tuple(sorted(loose)))


class _RootFinder:
    """Finds roots; queries about a folder are cached."""

    def __init__(self, folders: TreeFolders) -> None:
        self.paths: dict[str, Action] = {}
        job = folders.working_folder
        self._job = frozenset((*parents(job), job) if job.strip("/") else ())
        self._system_of_job = tuple(folder for folder in self._job if _ROOT.fullmatch(folder))
        self._folders = folders
        self._new: set[str] = set()
        self._inside: dict[str, set[str]] = {}
        self._environment = functools.cache(folders.environment)
        self._of_folder = functools.cache(self._find)

    def add(self, change: Change) -> None:
        """One changed path; all of them before the first `root`."""
        self.paths[change.path] = change.action
        above, _, name = change.path.rpartition("/")
        if change.action is not Action.DELETED:
            self._inside.setdefault(above, set()).add(name)
            # A replaced folder is new, too.
            if change.action is Action.ADDED or change.opaque:
                self._new.add(change.path)

    def root(self, path: str) -> str:
        """The root of this path; empty if it is loose."""
        folder = path.rpartition("/")[0]
        if self.paths[path] is not Action.DELETED and self._folders.is_folder(path):
            folder = path
        return self._of_folder(folder)

    def _find(self, folder: str) -> str:
        """The root of a folder; empty for none."""
        around = [*parents(folder), folder] if folder else []
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
        """Subfolders that belong to the environment in a folder that may have other content."""
        return _MORE_PARTS if kind in ("venv", "conda") and folder not in self._new else _PARTS

    def _is_software(self, folder: str) -> bool:
        """Whether a folder is new and contains programs."""
        if folder not in self._new:
            return False
        return any(self._folders.is_folder(f"{folder}/{name}") for name in ("bin", "lib", "lib64"))

    def _is_whole(self, folder: str, kind: Environment) -> bool:
        """Whether the folder contains nothing but the environment."""
        if folder.rpartition("/")[2] == ".local":
            return False
        if kind == "conda" or is_system(folder) or folder.startswith("/opt/"):
            return True
        return folder in self._new and self._inside.get(folder, set()) <= _ENVIRONMENT_ENTRIES

"""Installed packages, read from their metadata on disk without starting a program.

Python distributions by `.dist-info` and `.egg-info`, Debian packages by dpkg's status file.
"""

from __future__ import annotations

import contextlib
import csv
import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bootseer.env.keys.files import open_regular
from bootseer.env.keys.node import dpkg_packages
from bootseer.env.keys.requirement import normalised
from bootseer.errors import PermanentError

_DPKG_STATUS = "var/lib/dpkg/status"
_MAX_STATUS_BYTES = 256 << 20
_MAX_LINKS = 40
"""As in the kernel, against loops."""
_EGG_PYTHON = re.compile(r"-py\d+(\.\d+)*$")
_LIBRARY = re.compile(r"(.*/(?:site|dist)-packages)/[^/]+\.(?:dist|egg)-info(?:/|$)")


@dataclass(frozen=True, slots=True, order=True)
class Distribution:
    """One installed Python distribution."""

    name: str
    """Normalised: lower case, single hyphens."""
    version: str
    record: str
    """Its `.dist-info` or `.egg-info`, absolute, in the job's view."""
    stamp: int
    """When the record was written, in nanoseconds: detects a reinstallation of the same version."""


@dataclass(frozen=True, slots=True)
class Installed:
    """All packages installed at one time."""

    distributions: tuple[Distribution, ...] = ()
    system: Mapping[str, str] | None = None
    """Debian packages: name with architecture to version."""


def installed(folders: Iterable[str], *, root: str = "/") -> Installed:
    """The packages in these folders and on the system; the job's `/` can be read at `root`."""
    system: Mapping[str, str] = {}
    with contextlib.suppress(PermanentError), open_regular(path_in_root(root, _DPKG_STATUS)) as file:
        system = dict(row.split(" ", 1) for row in dpkg_packages(file.read(_MAX_STATUS_BYTES)))
    return Installed(tuple(sorted(_distributions(folders, root))), system)


def new_packages(before: Installed, after: Installed) -> tuple[str, ...]:
    """Packages that are new, sorted: `name==version`, `deb:name==version` for the system's."""
    known = {(each.name, each.version) for each in before.distributions}
    new = {f"{each.name}=={each.version}" for each in after.distributions if (each.name, each.version) not in known}
    old = before.system or {}
    new |= {f"deb:{name}=={version}" for name, version in (after.system or {}).items() if old.get(name) != version}
    return tuple(sorted(new))


def new_distributions(before: Installed, after: Installed) -> tuple[Distribution, ...]:
    """Distributions that a setup installed or reinstalled."""
    known = {(each.record, each.stamp) for each in before.distributions}
    return tuple(each for each in after.distributions if (each.record, each.stamp) not in known)


def library_folders(paths: Iterable[str]) -> set[str]:
    """Folders of Python distributions among changed paths, including environments that the setup created."""
    return {found[1] for path in paths if (found := _LIBRARY.match(path))}


def published_files(paths: Collection[str], read: Callable[[str], bytes]) -> dict[str, tuple[int, str]]:
    """Files listed in records of published distributions, with size and SHA-256 (base64 without padding, as in
    records).

    `paths` are the files of a snapshot, `read` gives their content. Distributions built from a folder, a repository or
    a direct address are not published: they may contain anything.
    """
    found: dict[str, tuple[int, str]] = {}
    for path in paths:
        info, _, name = path.rpartition("/")
        if name != "RECORD" or not info.endswith(".dist-info") or f"{info}/direct_url.json" in paths:
            continue
        folder = info.rpartition("/")[0]
        for row in csv.reader(read(path).decode("utf-8", "replace").splitlines()):
            if len(row) == 3 and row[1].startswith("sha256=") and row[2].isdecimal():
                listed = posixpath.normpath(posixpath.join(folder, row[0]))
                found[listed] = int(row[2]), row[1].removeprefix("sha256=")
    return found


def path_in_root(root: str, path: str) -> Path:
    """Where a path of the job can be read; its `/` is at `root`. Symbolic links in it lead to the job's files, as they
    do for the job: those of an image could lead to this machine's."""
    if root == "/":
        return Path("/", path)
    found: list[str] = []
    waiting, num_links = path.split("/")[::-1], 0
    while waiting:
        name = waiting.pop()
        try:
            target = os.readlink("/".join((root, *found, name)))  # noqa: PTH115 - a name
        except OSError:  # it is no link, or does not exist
            if name == "..":
                found = found[:-1]
            elif name not in ("", "."):
                found.append(name)
            continue
        num_links += 1
        if num_links > _MAX_LINKS:
            return Path(os.devnull, "loop")  # no file
        found = [] if target.startswith("/") else found
        waiting += target.split("/")[::-1]
    return Path(root, *found)


def _distributions(folders: Iterable[str], root: str) -> Iterable[Distribution]:
    for folder in folders:
        try:
            with os.scandir(path_in_root(root, folder)) as entries:
                infos = [entry for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))]
                # An interrupted uninstallation by pip leaves names that begin with a tilde.
                found = [(entry.name, entry.stat().st_mtime_ns) for entry in infos if not entry.name.startswith("~")]
        except OSError:
            continue
        for name, stamp in found:
            record = f"{folder.rstrip('/')}/{name}"
            known = _from_folder_name(name) or _from_metadata(root, record)
            if known is not None:
                yield Distribution(normalised(known[0]), known[1], record, stamp)


def _from_folder_name(folder: str) -> tuple[str, str] | None:
    stem = folder.rpartition(".")[0]
    if folder.endswith(".egg-info"):
        stem = _EGG_PYTHON.sub("", stem)
    name, hyphen, version = stem.partition("-")
    return (name, version) if hyphen and version and "-" not in version else None


def _from_metadata(root: str, record: str) -> tuple[str, str] | None:
    """Name and version from the metadata, for folders with other names."""
    for path in (f"{record}/METADATA", f"{record}/PKG-INFO", record):
        try:
            with open_regular(path_in_root(root, path)) as file:
                head = re.split(r"\r?\n\r?\n", file.read(65536).decode("utf-8", "replace"), maxsplit=1)[0]
        except PermanentError:
            continue
        found = dict(re.findall(r"^(Name|Version):\s*(\S+)", head, re.MULTILINE))
        if len(found) == 2:
            return found["Name"], found["Version"]
    return None

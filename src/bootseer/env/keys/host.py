"""A fingerprint of the node that a setup in host mode starts from: its distribution, the packages that are installed,
and the distributions of the job's Python.

It changes when a package does, and by nothing else: no access time, log, cache or host name is in it. A job that ran
leaves it as it was, since what a setup writes goes into a snapshot, not onto the node. Budget: 50 ms. Called by
`request_key`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bootseer.env.keys.files import NodeFiles
from bootseer.env.keys.key import digest_of
from bootseer.errors import BootseerError, PermanentError

_DPKG = "/var/lib/dpkg/status"
_FIELD = re.compile(rb"^(Package|Version|Architecture|Status): (.*)$", re.MULTILINE)
_DATABASES = (
    "/usr/lib/sysimage/rpm/rpmdb.sqlite", "/var/lib/rpm/rpmdb.sqlite", "/var/lib/rpm/Packages.db",
    "/var/lib/rpm/Packages",    "/lib/apk/db/installed",
)  # fmt: skip
_MAX_DATABASE_BYTES = 64 << 20
_MAX_RECORD_BYTES = 64 << 20
_BESIDE = ("/usr/local/bin", "/usr/local/sbin", "/usr/local/lib")
_TOOLKITS = ("/usr/local/cuda/version.json", "/usr/local/cuda/version.txt")
_DISTRIBUTIONS = (".dist-info", ".egg-info", ".egg-link", ".pth", ".egg")
_MAX_LINES = 2000


class Part(NamedTuple):
    """A part of the fingerprint: a digest, and what is in it."""

    digest: str
    lines: tuple[str, ...]


def system(files: NodeFiles) -> Part:
    """Distribution and packages of the system, and what lies beside them without a package."""
    parts: list[str] = []
    lines: list[str] = []
    for path in ("/etc/os-release", "/usr/lib/os-release"):
        if files.kind(path) == "file":
            parts += ("os-release", files.digest(path)[0])
            name = re.search(r'^PRETTY_NAME="?([^"\n]+)', files.read(path).decode("utf-8", "replace"), re.MULTILINE)
            lines += [f"distribution {name[1]}"] if name else []
            break
    installed = _dpkg()
    parts += ("dpkg", *installed)
    lines += installed[:_MAX_LINES]
    for path in _DATABASES:
        if files.kind(path) == "file":
            parts += (path, files.digest(path)[0])
            lines.append(f"database {path}")
    for folder in _BESIDE:
        found = [f"{folder}/{entry}" for entry in _listed(folder)]
        parts += (folder, *found)
        lines += found[:_MAX_LINES]
    for path in _TOOLKITS:
        if files.kind(path) == "file":
            parts += (path, files.digest(path)[0])
    return Part(digest_of(parts), tuple(lines))


def distributions(folders: Iterable[str]) -> Part:
    """What is installed in folders of distributions: names, versions, and what their records say of their files."""
    parts: list[str] = []
    lines: list[str] = []
    for folder in dict.fromkeys(folders):
        try:
            names = sorted(os.listdir(folder))  # noqa: PTH208 - names are wanted
        except OSError:
            continue
        names = [name for name in names if name.endswith(_DISTRIBUTIONS) and not name.startswith("~")]
        if names:  # an empty folder is as good as none
            parts.append(folder)
        for name in names:
            record = _record(f"{folder}/{name}")
            parts += (name, record)
            lines.append(f"{name} {record[:8]}")
    return Part(digest_of(parts), tuple(lines[:_MAX_LINES]))


def environment(prefix: str, files: NodeFiles) -> Part:
    """A Python environment that a setup names: its configuration and its distributions."""
    parts = [files.digest(f"{prefix}/pyvenv.cfg")[0]] if files.kind(f"{prefix}/pyvenv.cfg") == "file" else []
    libraries = [
        f"{prefix}/lib/{name}/site-packages" for name in files.names(f"{prefix}/lib") if name.startswith("python")
    ]
    conda = [name for name in files.names(f"{prefix}/conda-meta") if name.endswith(".json")]
    found = distributions(libraries)
    return Part(digest_of([*parts, found.digest, *conda]), (*found.lines, *conda))


def _dpkg() -> Sequence[str]:
    """The installed packages, sorted; nothing where there is no dpkg."""
    try:
        with open(_DPKG, "rb") as file:  # noqa: PTH123 - bounded
            data = file.read(_MAX_DATABASE_BYTES + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise PermanentError(f"{_DPKG}: {os.strerror(error.errno or 0)}") from error
    if len(data) > _MAX_DATABASE_BYTES:
        raise PermanentError(f"{_DPKG}: too large to be a list of packages")
    return sorted(packages(data))


def packages(data: bytes) -> Iterator[str]:
    """`name:architecture version` of each package that a status file of dpkg calls installed."""
    for stanza in data.split(b"\n\n"):
        found = {name: value.decode("utf-8", "replace") for name, value in _FIELD.findall(stanza)}
        if b"Package" in found and found.get(b"Status", "").endswith(" installed"):
            yield f"{found[b'Package']}:{found.get(b'Architecture', '')} {found.get(b'Version', '')}"


def _record(path: str) -> str:
    """A digest of what a distribution says of its files. Bytecode is left out: who made it last is not of interest."""
    for name in ("RECORD", "METADATA", "PKG-INFO", "SOURCES.txt", ""):
        whole = f"{path}/{name}" if name else path
        try:
            if name and not os.path.isfile(whole):  # noqa: PTH113 - many calls
                continue
            if not os.path.isfile(whole) or os.path.getsize(whole) > _MAX_RECORD_BYTES:  # noqa: PTH113, PTH202
                break
            with open(whole, "rb") as file:  # noqa: PTH123
                data = file.read(_MAX_RECORD_BYTES)
        except OSError as error:
            raise PermanentError(f"{whole}: {os.strerror(error.errno or 0)}") from error
        if name == "RECORD":
            return digest_of(sorted(line for line in data.splitlines() if b".pyc," not in line))
        return digest_of([data])
    return digest_of(["a folder"])


def _listed(folder: str) -> Iterator[str]:
    """Files and links right in a folder, with size or target: not the time, which a copy changes."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        try:
            if entry.is_symlink():
                yield f"{entry.name} -> {os.readlink(entry.path)}"  # noqa: PTH115 - the text
            elif entry.is_file():
                yield f"{entry.name} {entry.stat().st_size}"
        except OSError:
            continue


def tool(path: str | None, files: NodeFiles) -> str:
    """A digest of a program that the setup uses, empty when there is none."""
    if path is None:
        return ""
    try:
        return files.digest(path)[0]
    except BootseerError:
        return "unreadable"

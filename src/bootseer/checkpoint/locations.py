"""Addresses of checkpoints, and the file systems of this process: each is opened once, so that all readers share
connections, buffers and what is known about slow nodes.

A forked child opens its own: neither connections nor threads survive a fork.
"""

from __future__ import annotations

import os
import posixpath
import re
import threading
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bootseer.artifact.places import blocks_folder, cache_root
from bootseer.cache.cache import Cache
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.latest import LATEST, latest_or_none, read_latest
from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.writing.writing import Writing
from bootseer.errors import BootseerError, PermanentError, UsageError
from bootseer.io import proc
from bootseer.io.fork import after_fork
from bootseer.logs import logger
from bootseer.peers.job import JobPeers
from bootseer.places import BUCKETS, HDFS, check_slashes, open_place
from bootseer.places.place import Place
from bootseer.store.addresses import shown

_LOG = logger(__name__)
_NO_NAME = re.compile("[\0\ud800-\udfff]")
"""What no system call takes in a name, but a JSON file may hold."""
FOLDERS = "file:///"
CACHE = "BOOTSEER_CHECKPOINT_CACHE"
"""Environment variable; `0`: chunks are not kept in the node's cache."""


class FileSystem:
    """An open file system. Its writer is created on first use."""

    def __init__(self, place: Place, reading: Reading) -> None:
        self.place = place
        self.files = Files(place)
        self.reading = reading
        self._lock = threading.Lock()
        self._writing: Writing | None = None

    @property
    def writing(self) -> Writing:
        with self._lock:
            self._writing = self._writing or Writing(self.files)
            return self._writing

    def mode(self, most: int) -> int:
        """The mode of a new file (0o666) or folder (0o777): on this machine less the umask, as of `open`."""
        if not self.place.is_local:
            return most & ~0o022
        # Not `os.umask`, which changes it for a moment, also for other threads.
        return most & ~int(proc.status().get("Umask", "022"), 8)

    def close(self) -> None:
        if self._writing is not None:
            self._writing.close()
        self.reading.close()
        self.place.close()


class Location(Struct, frozen=True):
    """A file or folder of a file system."""

    system: FileSystem
    root: str
    """Address of the file system: `hdfs://namenode/` or `file:///`."""
    path: str
    """Path from the root, without a leading slash."""

    @property
    def uri(self) -> str:
        return self.root + self.path

    def at(self, name: str) -> Location:
        return replace(self, path=posixpath.join(self.path, name))

    def open(self, name: str = "") -> CheckpointFile:
        """Open a file in this folder, or this file itself. Links are followed, as model hubs create them."""
        found = resolve_below(self.root, self.at(name).path) if name else self
        return found.system.reading.open(found.path)

    def read_bytes(self, name: str, limit: int) -> bytes:
        """All of a file in this folder. Raises `PermanentError` if it has more than `limit` bytes."""
        with self.open(name) as file:
            if file.size_bytes > limit:
                raise PermanentError(f"{self.at(name).uri}: {file.size_bytes} bytes are more than the {limit} expected")
            return file.read(0, file.size_bytes)

    def latest(self) -> Location:
        """What this names once the file `latest`, as its last name or the folder of others, is replaced by the
        checkpoint that it names; itself where no such file is."""
        parts = self.path.split("/")
        if LATEST not in parts:
            return self
        at = len(parts) - 1 - parts[::-1].index(LATEST)
        folder, below = "/".join(parts[:at]), parts[at + 1 :]
        chosen = (latest_or_none if below else read_latest)(self.system.place, folder)
        return self if chosen is None else replace(self, path=posixpath.join(folder, chosen, *below))


def is_below(name: object) -> bool:
    """Whether a name that a checkpoint's own files give is a path inside of its folder."""
    is_name = isinstance(name, str) and bool(name) and not _NO_NAME.search(name)
    return is_name and not str(name).startswith("/") and ".." not in str(name).split("/")


class _Process:
    """The file systems that the process has opened."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.systems: dict[str, FileSystem] = {}


_processes = [_Process()]
"""The last one is this process's. Earlier ones are those of its parents before a fork: never closed here, because that
would send data on the parents' connections."""


def resolve(uri: str | os.PathLike[str]) -> Location:
    """Resolve `hdfs://namenode/path`, `s3://bucket/path`, `file:///path` or a path. Raises `UsageError`."""
    root, path = split(os.fspath(uri))
    return resolve_below(root, path)


def resolve_below(root: str, path: str, *, follow: bool = True) -> Location:
    """The location `path` below the root of a file system: `hdfs://namenode/`, `s3://bucket/` or `file:///`.

    `follow=False`: a symbolic link itself instead of its target.
    """
    if root == FOLDERS:
        # Places do not follow links below their root, which here is the machine's root.
        there = Path("/", path)  # not `Path.resolve`, which raises `RuntimeError` for a loop of links up to Python 3.12
        path = os.path.realpath(there) if follow else f"{os.path.realpath(there.parent)}/{there.name}"
    process = _processes[-1]
    with process.lock:
        system = process.systems.get(root)
        if system is None:
            place = open_place(root)
            cache = _node_cache(os.environ)
            system = FileSystem(place, Reading(place, cache=cache, job=job_peers(root, os.environ)))
            process.systems[root] = system
    return Location(system, root, posixpath.normpath("/" + path).strip("/"))


def is_uri(uri: str) -> bool:
    """Whether `resolve` accepts this."""
    try:
        split(uri)
    except UsageError:
        return False
    return True


def split(uri: str) -> tuple[str, str]:
    """Split an address into the root of the file system and the path below it."""
    check_slashes(uri)
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return FOLDERS, str(Path(uri).absolute())
    authority, _, path = rest.partition("/")
    if scheme == "file" and not authority:
        return FOLDERS, "/" + path
    if scheme == "viewfs":
        from bootseer.hdfs.addresses import behind_mount_table  # needs an extra

        return split(behind_mount_table(uri))
    if scheme not in (*HDFS, *BUCKETS):
        raise UsageError(
            f"{shown(uri)} is not a location for checkpoints", hint="hdfs://NAMENODE/PATH, s3://BUCKET/PATH or a path"
        )
    return f"{scheme}://{authority}/", path


def job_peers(uri: str, env: Mapping[str, str]) -> JobPeers | None:
    """The nodes that share chunks of checkpoints in this job; None if they do not. Local folders are not shared: they
    may differ between nodes."""
    if uri.partition("://")[0] not in (*HDFS, *BUCKETS):
        return None
    try:
        return JobPeers.of_environment(env)
    except BootseerError as error:
        _LOG.warning("checkpoints are read without the job's other nodes: %s", error)
        return None


def _node_cache(env: Mapping[str, str]) -> Cache | None:
    """The node's cache of this user; None if it is disabled or unusable."""
    if env.get(CACHE) == "0":
        return None
    try:
        return Cache(blocks_folder(cache_root(env, os.geteuid())))
    except BootseerError:
        return None  # the cache is an optimisation: nothing depends on it


after_fork(lambda: _processes.append(_Process()))

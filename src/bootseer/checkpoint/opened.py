"""File systems that this process reads checkpoints from, each opened once: connections, buffers and what is known of
slow nodes are shared by all readers.

A process that was forked opens its own: neither connections nor threads survive a fork.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from urllib.parse import quote, unquote

from bootseer.artifact.places import blocks_folder, cache_root
from bootseer.cache.cache import Cache
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.latest import LATEST, read_latest
from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.writing.writing import Writing
from bootseer.errors import BootseerError, IsFolderError, PermanentError, UsageError
from bootseer.io.fork import after_fork
from bootseer.logs import logger
from bootseer.peers.job import JobPeers
from bootseer.places import BUCKETS, open_place
from bootseer.places.place import Place

_LOG = logger(__name__)
FOLDERS = "file:///"
CACHE = "BOOTSEER_CHECKPOINT_CACHE"
"""`0` in this variable: what is read is not kept on the node's disk."""


class FileSystem:
    """A file system from its root on. What writes is made when something is written."""

    def __init__(self, place: Place, reading: Reading) -> None:
        self.place = place
        self.reading = reading
        self._lock = threading.Lock()
        self._writing: Writing | None = None

    @cached_property
    def files(self) -> Files:
        return Files(self.place)

    @property
    def writing(self) -> Writing:
        """One for all writers of this process."""
        with self._lock:
            self._writing = self._writing or Writing(self.files)
            return self._writing

    def close(self) -> None:
        if self._writing is not None:
            self._writing.close()
        self.reading.close()
        self.place.close()


@dataclass(frozen=True, slots=True)
class Opened:
    """A file or folder of a file system."""

    system: FileSystem
    root: str
    """Of the file system: `hdfs://namenode/` or `file:///`."""
    path: str
    """From the root on, without a slash in front."""

    @property
    def uri(self) -> str:
        return self.root + (quote(self.path) if self.root == FOLDERS else self.path)

    def at(self, name: str) -> Opened:
        return replace(self, path=posixpath.join(self.path, name))

    def where(self, name: str) -> str:
        """What users would call it."""
        return self.at(name).uri

    def open(self, name: str = "") -> CheckpointFile:
        """Begin to read a file in this folder, or this file."""
        return self.system.reading.open(self.at(name).path if name else self.path)

    def read_bytes(self, name: str, limit: int) -> bytes:
        """All of a file in this folder. Raises `PermanentError` when it has more than `limit` bytes."""
        file = self.open(name)
        try:
            if file.size_bytes > limit:
                raise PermanentError(f"{self.where(name)}: {file.size_bytes} bytes are more than the {limit} expected")
            return file.read(0, file.size_bytes)
        finally:
            file.close()

    def latest(self) -> Opened:
        """The checkpoint that this names: itself, or what the file `latest` says when that is its name."""
        folder, _, name = self.path.rpartition("/")
        if name != LATEST:
            return self
        with contextlib.suppress(IsFolderError):  # a user's own folder of this name
            chosen = read_latest(self.system.place, folder)
            if chosen is not None:
                return replace(self, path=posixpath.join(folder, chosen))
        return self


class _Process:
    """What the process has opened."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.systems: dict[str, FileSystem] = {}


_processes = [_Process()]
"""The last one is this process. Those before it are its parents': they stay as they are, since closing anything of
theirs would speak on their connections."""


def opened(uri: str | os.PathLike[str]) -> Opened:
    """What `hdfs://namenode/path`, `s3://bucket/path`, `file:///path` or a path names. Raises `UsageError` for other
    addresses."""
    root, path = split(os.fspath(uri))
    return opened_below(root, path)


def opened_below(root: str, path: str, *, follow: bool = True) -> Opened:
    """What lies at `path` below the root of a file system: `hdfs://namenode/`, `s3://bucket/` or `file:///`.

    `follow=False`: of a link in a folder, the link itself and not what it leads to.
    """
    if root == FOLDERS:
        # Places follow no links below their root, which here is that of the machine.
        there = Path("/", path)
        path = str(there.resolve() if follow else there.parent.resolve() / there.name)
    process = _processes[-1]
    with process.lock:
        system = process.systems.get(root)
        if system is None:
            place = open_place(root)
            cache = _node_cache(os.environ)
            system = FileSystem(place, Reading(place, cache=cache, job=job_peers(root, os.environ)))
            process.systems[root] = system
    return Opened(system, root, posixpath.normpath("/" + path).strip("/"))


def close_all() -> None:
    """Give back the connections, threads and memory of all that is open; what is opened later begins anew.

    For programs that load once and then run for days. Nothing may be on its way.
    """
    process = _processes[-1]
    with process.lock:
        systems = list(process.systems.values())
        process.systems.clear()
    for system in systems:
        system.close()


def is_uri(uri: str) -> bool:
    """Whether `opened` takes this."""
    try:
        split(uri)
    except UsageError:
        return False
    return True


def split(uri: str) -> tuple[str, str]:
    """The root of a file system, and the path below it."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return FOLDERS, str(Path(uri).absolute())
    authority, _, path = rest.partition("/")
    if scheme == "file" and not authority:
        return FOLDERS, "/" + unquote(path)
    if scheme not in ("hdfs", *BUCKETS):
        raise UsageError(f"{uri} is no place for checkpoints", hint="hdfs://NAMENODE/PATH, s3://BUCKET/PATH or a path")
    return f"{scheme}://{authority}/", path


def job_peers(uri: str, env: Mapping[str, str]) -> JobPeers | None:
    """The nodes that read the same checkpoints in this job; None where they do not share what they read. A folder is
    not asked for over one link by all of them, and may be another one on each."""
    if not uri.startswith(("hdfs://", *(f"{scheme}://" for scheme in BUCKETS))):
        return None
    try:
        return JobPeers.of_environment(env)
    except BootseerError as error:
        _LOG.warning("checkpoints are read without the job's other nodes: %s", error)
        return None


def _node_cache(env: Mapping[str, str]) -> Cache | None:
    """The cache that all processes of this user share on this node, if there can be one."""
    if env.get(CACHE) == "0":
        return None
    try:
        return Cache(blocks_folder(cache_root(env, os.geteuid())))
    except BootseerError:
        return None  # it saves time, and nothing else depends on it


after_fork(lambda: _processes.append(_Process()))

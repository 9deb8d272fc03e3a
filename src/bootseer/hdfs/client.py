"""One HDFS, as the code above needs it: names and folders, writing, reading. The door of this package.

Questions about names and all writing go through hdfs-native (`native`), with deadlines and mapped errors. Reading and
the question where blocks lie go through own connections (`reads`, `namenode`), which choose the DataNode and remember
the bad ones; where those cannot be spoken (Kerberos, encryption, erasure coding), reading goes through hdfs-native too
(`native_reads`), and where blocks lie stays unknown. Used by `store.hdfs` and `checkpoint.places.hdfs`.

Paths are whole paths of the file system, "/a/b". All methods raise `BootseerError`s only. Safe to use from many
threads, and after `fork`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from hdfs_native import Client
from hdfs_native import FileStatus as Found

from bootseer.errors import BootseerError, NotFoundError, TransientError, UsageError
from bootseer.hdfs.addresses import Cluster
from bootseer.hdfs.lease import WriteDefaults, ask_defaults
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.native import Native, NativeSettings, TakenError
from bootseer.hdfs.native_reads import NativeFile, NativeReads
from bootseer.hdfs.placing import Apart, BadNodes, PlacedWriter, PlacingSettings
from bootseer.hdfs.reads import HdfsFile, HdfsReads
from bootseer.hdfs.rpc import NotSpokenError
from bootseer.hdfs.status import FileStatus
from bootseer.hdfs.writer import HdfsWriter

T = TypeVar("T")

_MIB = 1024 * 1024
_MAX_TRIES = 3
_LIST_S = 600.0
"""For a whole folder: nobody knows how long it is, and each page of it comes quickly or never."""


class HdfsClient:
    """A client of the file system `hdfs://AUTHORITY`: host and port of its NameNode, or the name of a service."""

    def __init__(self, authority: str, settings: NativeSettings | None = None) -> None:
        """Connects when it is first used. Raises `UsageError` for an authority that is none."""
        if not authority or "@" in authority or "/" in authority:
            raise UsageError(f"hdfs://{authority} names no file system", hint="use hdfs://host:port or hdfs://service")
        self.uri = f"hdfs://{authority}"
        self.settings = settings or NativeSettings()
        self.cluster = Cluster.of(authority, self.settings.conf_dir)
        self._native = Native(self.uri, self.settings, server=_server(self.cluster))
        self._namenode = NameNode(self.cluster)
        self._bad = BadNodes()
        self._defaults: WriteDefaults | None = None
        self._reads = Reads(self._namenode, self._native)

    def stat(self, path: str) -> FileStatus:
        """What is known of a name. Raises `NotFoundError`."""
        return _status(self._call(path, lambda client: client.get_file_info(path)))

    def list(self, path: str, *, recursive: bool = False) -> Iterator[FileStatus]:
        """What lies in a folder, or with `recursive` below it; a file's list is the file. Raises `NotFoundError`."""
        what = f"{self.uri}{path}"
        for found in self._native.stream(what, lambda client: client.list_status(path, recursive), _LIST_S):
            yield _status(found)

    def make_folder(self, path: str, *, mode: int = 0o755, parents: bool = False) -> None:
        """Make a folder, with `parents` also those above it. Raises `TakenError` for a name that is taken, unless
        `parents` and it is a folder; of two callers at the same time both may succeed, for HDFS does not tell."""

        def make(client: Client) -> None:
            if not parents and _is_there(client, path):
                raise TakenError(f"{self.uri}{path} is there already")
            client.mkdirs(path, mode, parents)

        self._call(path, make)

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Give a name to what has another, in one step. With `overwrite` a file replaces a file and a folder an empty
        folder. Raises `TakenError`, `PermanentError` for what cannot be replaced, `NotFoundError`."""
        self._call(source, lambda client: client.rename(source, target, overwrite=overwrite))

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Remove. Raises `NotFoundError`, and `PermanentError` for a folder that is not empty."""
        if not self._call(path, lambda client: client.delete(path, recursive)):
            raise NotFoundError(f"{self.uri}{path} is not there")

    def set_permission(self, path: str, mode: int) -> None:
        """Set the permission bits."""
        self._call(path, lambda client: client.set_permission(path, mode))

    def set_owner(self, path: str, owner: str | None, group: str | None) -> None:
        """Set owner and group by name; None leaves one as it is. Only HDFS's superuser may give files away."""
        self._call(path, lambda client: client.set_owner(path, owner, group))

    def set_times(self, path: str, mtime_ms: int, atime_ms: int | None = None) -> None:
        """Set the times of the last change and of the last reading; None leaves the latter as it is."""

        def change(client: Client) -> None:
            atime = client.get_file_info(path).access_time if atime_ms is None else atime_ms
            client.set_times(path, mtime_ms, atime)

        self._call(path, change)

    def bytes_below(self, path: str) -> int:
        """How many bytes the files of a folder have together, each counted once whatever its replication."""
        return self._call(path, lambda client: client.get_content_summary(path).length)

    def put(
        self,
        path: str,
        data: bytes,
        *,
        mode: int = 0o644,
        overwrite: bool = False,
        block_size: int | None = None,
        replication: int | None = None,
    ) -> None:
        """Write a small file; durable when this returns. Others see it grow: rename it when that matters.

        Makes its folder when that is missing. Raises `TakenError` for a name that is taken.
        """
        for number in range(_MAX_TRIES):
            writer = self._begin_small(path, len(data), mode, overwrite, block_size, replication)
            try:
                if data:
                    writer.write(data)
                writer.close()
            except TransientError:
                if number + 1 == _MAX_TRIES:
                    raise
            else:
                return
            finally:
                writer.abort()

    def create(
        self,
        path: str,
        *,
        mode: int = 0o644,
        overwrite: bool = False,
        block_size: int | None = None,
        replication: int | None = None,
    ) -> HdfsWriter:
        """Begin a file, and its folder when that is missing. Raises `TakenError` for a name that is taken.

        `block_size` in bytes and `replication` are the cluster's unless told otherwise.
        """
        return HdfsWriter(
            self._native, path, mode=mode, overwrite=overwrite, block_size=block_size, replication=replication
        )

    def begin_apart(
        self,
        paths: Sequence[str],
        *,
        block_size: int,
        mode: int = 0o644,
        replication: int | None = None,
        avoid: frozenset[str] = frozenset(),
        spare: Sequence[str] = (),
    ) -> Sequence[PlacedWriter | HdfsWriter]:
        """Begin files of one block of `block_size` bytes each, on different nodes as far as there are any.

        `avoid`: nodes that are not wanted, if there are others; those that failed lately are not wanted either.
        `spare`: nodes that are taken only before two files would share one, the first of them first.
        """
        block_size = -(-block_size // _MIB) * _MIB  # no less than what clusters take
        try:
            return self._begin_apart(paths, block_size, mode, replication, avoid=avoid, spare=spare).writers
        except NotSpokenError:
            pass
        writers = []
        with contextlib.ExitStack() as begun:
            for path in paths:
                writer = self.create(path, mode=mode, block_size=block_size, replication=replication)
                begun.callback(writer.abort)
                writers.append(writer)
            begun.pop_all()
        return writers

    @property
    def replication(self) -> int | None:
        """How many copies a file has unless told otherwise; None where the NameNode cannot be asked."""
        try:
            return self._write_defaults().replication
        except NotSpokenError:
            return None

    def nodes_of(self, path: str) -> tuple[str, ...]:
        """The DataNodes that have the first block of a file, also while it is written; nothing where nobody knows."""
        try:
            blocks = self._namenode.locate(path).blocks
        except BootseerError:
            return ()
        return tuple(node.host_port for node in blocks[0].nodes) if blocks else ()

    def space(self) -> tuple[int, int]:
        """Bytes of all DataNodes together, and how many of them are free. Raises `NotSpokenError`."""
        return self._namenode.space()

    def reads(self) -> Reads:
        """Reads of many files, which share what they know of the DataNodes; one for the whole client."""
        return self._reads

    def close(self) -> None:
        """Give back connections. The client is not used afterwards."""
        self._reads.close()
        self._namenode.close()
        self._native.close()

    def _begin_small(
        self, path: str, length: int, mode: int, overwrite: bool, block_size: int | None, replication: int | None
    ) -> PlacedWriter | HdfsWriter:
        # hdfs-native waits for half a second at the end of most files, and then for a DataNode that has died.
        try:
            size = block_size or self._write_defaults().block_size
            if length <= size:
                return self._begin_apart([path], size, mode, replication, overwrite=overwrite).writers[0]
        except NotSpokenError:
            pass
        return self.create(path, mode=mode, overwrite=overwrite, block_size=block_size, replication=replication)

    def _begin_apart(
        self,
        paths: Sequence[str],
        block_size: int,
        mode: int,
        replication: int | None,
        *,
        avoid: frozenset[str] = frozenset(),
        spare: Sequence[str] = (),
        overwrite: bool = False,
    ) -> Apart:
        defaults = self._write_defaults()
        settings = PlacingSettings(
            block_size, replication or defaults.replication, mode, avoid, tuple(spare), overwrite
        )
        return Apart(self._namenode, self._native, paths, settings, defaults=defaults, bad=self._bad)

    def _write_defaults(self) -> WriteDefaults:
        if self._defaults is None:
            self._defaults = ask_defaults(self._namenode)
        return self._defaults

    def _call(self, path: str, ask: Callable[[Client], T]) -> T:
        return self._native.call(f"{self.uri}{path}", ask)


class Reads:
    """Reads over own connections, and through hdfs-native what those do not speak. Safe to use from many threads."""

    def __init__(self, namenode: NameNode, native: Native) -> None:
        self._own = HdfsReads(namenode)
        self._fallback = NativeReads(native)

    def open(self, path: str, *, deadline_s: float = 60.0) -> HdfsFile | NativeFile:
        """Begin to read a file as it is now. Raises `NotFoundError` and the like."""
        try:
            return self._own.open(path, deadline_s=deadline_s)
        except NotSpokenError as error:
            self._fallback.reason = str(error)
            return self._fallback.open(path, deadline_s=deadline_s)

    def facts(self) -> Mapping[str, object]:
        """Figures of all reads so far. `fallback` says why hdfs-native read what it read, "" when it read nothing."""
        facts = dict(self._own.facts())
        if self._fallback.reason:
            for key, value in self._fallback.facts().items():
                own = facts.get(key)
                if isinstance(own, dict) and isinstance(value, dict):
                    facts[key] = {**own, **value}
                else:
                    facts[key] = own + value if isinstance(own, int) and isinstance(value, int) else value
        return facts

    def close(self) -> None:
        """End what waits. Nothing is read any more."""
        self._own.close()
        self._fallback.close()


def _is_there(client: Client, path: str) -> bool:
    try:
        client.get_file_info(path)
    except FileNotFoundError:
        return False
    return True


def _status(found: Found) -> FileStatus:
    return FileStatus(
        path=found.path,
        is_folder=found.isdir,
        size_bytes=found.length,
        mtime_ms=found.modification_time,
        atime_ms=found.access_time,
        mode=found.permission & 0o7777,
        owner=found.owner,
        group=found.group,
        replication=found.replication or 0,
        block_size=found.blocksize or 0,
    )


def _server(cluster: Cluster) -> str:
    """The address as hdfs-native wants it: with a port, unless it is a service of the configuration."""
    services = [name.strip() for name in cluster.settings.get("dfs.nameservices", "").split(",")]
    if cluster.authority in services:
        return f"hdfs://{cluster.authority}"
    host, port = cluster.namenodes[0]
    return f"hdfs://[{host}]:{port}" if ":" in host else f"hdfs://{host}:{port}"

"""One HDFS, as the code above needs it: names and folders, writing, reading. The entry point of this package.

Names (`namenode`), reading (`reads`) and writing (`placing`) go over our own connections, which know which
NameNode is active, choose the DataNode and exclude failed ones. What they do not support (encryption zones, erasure
coding) goes through the library hdfs-native (`native`, `native_reads`), and where blocks lie stays unknown.

Paths are whole paths of the file system, "/a/b". All methods raise `BootseerError`s only. Safe to use from many
threads, and after `fork`.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from bootseer.errors import AlreadyExistsError, NotFoundError, PermanentError, TransientError, UsageError
from bootseer.hdfs.addresses import Cluster
from bootseer.hdfs.block_writer import ExcludedNodes
from bootseer.hdfs.lease import WriteDefaults, ask_defaults
from bootseer.hdfs.located import FileStatus
from bootseer.hdfs.namenode import NameNode, Names
from bootseer.hdfs.native import Native, NativeNames, NativeSettings, NativeWriter
from bootseer.hdfs.native_reads import NativeFile, NativeReads
from bootseer.hdfs.placing import Apart, FileSettings, LongWriter, PlacedWriter
from bootseer.hdfs.reads import HdfsFile, HdfsReads
from bootseer.hdfs.rpc import UnsupportedError
from bootseer.logs import logger

_LOG = logger(__name__)
T = TypeVar("T")

_MIB = 1024 * 1024
_LEAST_BLOCK = re.compile(r"minimum value.*: \d+ < (\d{1,15})\b")
"""How a NameNode says how large blocks must be, `dfs.namenode.fs-limits.min-block-size`."""
_MAX_TRIES = 3
_MUCH_BYTES = 1 << 50
_NATIVE_BLOCK_BYTES = 1 << 30
"""hdfs-native's files end in an error when a DataNode tells late of the last block but one: of blocks that take seconds
to write, none is so late."""


class HdfsClient:
    """A client of the file system `hdfs://AUTHORITY`: host and port of its NameNode, or the name of a service."""

    def __init__(self, authority: str, settings: NativeSettings | None = None) -> None:
        """Connects when it is first used. Raises `UsageError` for an invalid authority."""
        if not authority or "@" in authority or "/" in authority:
            raise UsageError(f"hdfs://{authority} names no file system", hint="use hdfs://host:port or hdfs://service")
        self.uri = f"hdfs://{authority}"
        self.settings = settings or NativeSettings()
        self.cluster = Cluster.of(authority, self.settings.conf_dir)
        self._namenode = NameNode(self.cluster, ask_s=self.settings.call_s)
        self._names = Names(self._namenode)
        self._defaults: WriteDefaults | None = None
        self._least_block = 0
        """Bytes that a block must have here, once the NameNode has refused a smaller one."""
        self._reads = Reads(self._namenode, lambda: self._native)
        self.fallback = ""
        """Why hdfs-native had to write or to ask for names, "" when it had not; reads tell theirs in their figures."""

    @cached_property
    def _native(self) -> Native:
        return Native(self.uri, self.settings, server=_server(self.cluster))

    @cached_property
    def _native_names(self) -> NativeNames:
        return NativeNames(self._native)

    @cached_property
    def _excluded(self) -> ExcludedNodes:
        return ExcludedNodes()

    def stat(self, path: str) -> FileStatus:
        return self._ask(lambda names: names.stat(path))

    def list(self, path: str) -> Iterator[FileStatus]:
        """The entries of a folder; for a file, the file itself. Raises `NotFoundError`."""
        try:
            yield from self._names.list(path)
        except UnsupportedError as error:
            self._fall_back(path, error)
            yield from self._native_names.list(path)

    def make_folder(self, path: str, *, mode: int = 0o755, parents: bool = False) -> None:
        """Make a folder, with `parents` also those above it. Raises `AlreadyExistsError` for a taken name, unless
        `parents` and it is a folder. Of two concurrent callers both may succeed: HDFS does not report it."""
        if not parents:
            with contextlib.suppress(NotFoundError):
                self.stat(path)
                raise AlreadyExistsError(f"{self.uri}{path} is there already")
        self._ask(lambda names: names.make_folder(path, mode, parents=parents))

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Give a name to what has another, in one step. With `overwrite` a file replaces a file and a folder an empty
        folder. Raises `AlreadyExistsError`, `PermanentError` for what cannot be replaced, `NotFoundError`."""
        self._ask(lambda names: names.rename(source, target, overwrite=overwrite))

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Remove. Raises `NotFoundError`, and `PermanentError` for a folder that is not empty."""
        if not self._ask(lambda names: names.delete(path, recursive=recursive)):
            raise NotFoundError(f"{self.uri}{path} is not there")

    def set_permission(self, path: str, mode: int) -> None:
        self._ask(lambda names: names.set_permission(path, mode))

    def set_owner(self, path: str, owner: str | None, group: str | None) -> None:
        """Set owner and group by name; None leaves one as it is. Only HDFS's superuser may give files away."""
        self._ask(lambda names: names.set_owner(path, owner, group))

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        """Set the time of the last change."""
        self._ask(lambda names: names.set_mtime(path, mtime_ms))

    def put(
        self,
        path: str,
        data: bytes,
        *,
        mode: int = 0o644,
        block_size: int | None = None,
        replication: int | None = None,
        parents: bool = True,
    ) -> FileStatus:
        """Write a small file; durable when this returns. Others see it grow: rename it when that matters.

        With `parents`, makes its folder when that is missing. Raises `AlreadyExistsError` for a name that is taken.
        """

        def begin(size: int | None) -> PlacedWriter | LongWriter | NativeWriter:
            # hdfs-native waits for half a second at the end of most files, and then for a DataNode that has died.
            with contextlib.suppress(UnsupportedError):
                settings = self._file_settings(size, replication, mode, parents=parents)
                if len(data) <= settings.block_size:
                    return Apart(self._namenode, [path], settings).writers[0]
            return self.create(path, mode=mode, block_size=size, replication=replication, parents=parents)

        problem: TransientError | None = None
        for number in itertools.count(1):
            try:
                writer = self._sized(block_size, begin)
            except AlreadyExistsError:
                # By the try before, which could not be removed.
                if problem is None:
                    raise
                raise problem from None
            try:
                if data:
                    writer.write(data)
                writer.close()
            except TransientError as error:
                problem = error
                if number == _MAX_TRIES:
                    raise
                _LOG.info("writing %s failed, try %d of %d follows: %s", path, number + 1, _MAX_TRIES, error)
            else:
                return writer.status or self.stat(path)
            finally:
                writer.abort()
        raise AssertionError  # the last try returns or raises

    def create(
        self,
        path: str,
        *,
        mode: int = 0o644,
        block_size: int | None = None,
        replication: int | None = None,
        parents: bool = True,
    ) -> LongWriter | NativeWriter:
        """Create a file of any length, and with `parents` its folder. Raises `AlreadyExistsError`.

        `block_size` in bytes and `replication` default to the cluster's.
        """

        def begin(size: int | None) -> LongWriter | NativeWriter:
            try:
                settings = self._file_settings(size, replication, mode, parents=parents)
                return LongWriter(self._namenode, path, settings)
            except UnsupportedError as error:
                self._note_fallback(path, error)
                return NativeWriter(
                    self._native, path, mode=mode, block_size=size or _NATIVE_BLOCK_BYTES,
                    replication=replication, parents=parents,
                )  # fmt: skip

        return self._sized(block_size, begin)

    def begin_apart(
        self,
        paths: Sequence[str],
        *,
        block_size: int,
        mode: int = 0o644,
        replication: int | None = None,
        avoid: frozenset[str] = frozenset(),
        spare: Sequence[str] = (),
    ) -> Sequence[PlacedWriter | LongWriter | NativeWriter]:
        """Begin files of one block of `block_size` bytes each, on different nodes as far as there are any.

        `avoid`: nodes that are not wanted, if there are others; those that failed lately are not wanted either.
        `spare`: nodes that are taken only before two files would share one, the first of them first.
        """

        def begin(size: int | None) -> Sequence[PlacedWriter | LongWriter | NativeWriter]:
            with contextlib.suppress(UnsupportedError):
                settings = self._file_settings(size, replication, mode, parents=True)
                return Apart(self._namenode, paths, settings, avoid=avoid, spare=spare).writers
            writers = []
            with contextlib.ExitStack() as begun:
                for path in paths:
                    writer = self.create(path, mode=mode, block_size=size, replication=replication)
                    begun.callback(writer.abort)
                    writers.append(writer)
                begun.pop_all()
            return writers

        return self._sized(-(-block_size // _MIB) * _MIB, begin)

    @property
    def replication(self) -> int | None:
        """How many copies a file has by default; None where the NameNode cannot be asked."""
        try:
            return self._write_defaults().replication
        except UnsupportedError:
            return None

    def space(self, path: str) -> tuple[int, int]:
        """Bytes in all, and how many of them are free: of all DataNodes together. Where they cannot be asked, of the
        folder's quota, or else so many that no writer waits for room."""
        try:
            return self._namenode.space()
        except UnsupportedError:
            quota, used = self._native_names.room(path)
        if not 0 < quota < _MUCH_BYTES:
            return _MUCH_BYTES, _MUCH_BYTES
        return quota, max(quota - used, 0)

    def reads(self) -> Reads:
        """Reads of many files, which share what they know of the DataNodes; one for the whole client."""
        return self._reads

    def close(self) -> None:
        self._reads.close()
        self._namenode.close()
        if "_native" in self.__dict__:
            self._native.close()

    def _sized(self, block_size: int | None, begin: Callable[[int | None], T]) -> T:
        """What `begin` makes with blocks of this size, or of the smallest that the NameNode takes; None: its own."""
        if block_size is None:
            return begin(None)
        try:
            return begin(max(block_size, self._least_block))
        except PermanentError as error:
            least = _LEAST_BLOCK.search(str(error))
            if least is None or int(least[1]) <= max(block_size, self._least_block):
                raise
            self._least_block = int(least[1])
        return begin(self._least_block)

    def _file_settings(
        self, block_size: int | None, replication: int | None, mode: int, *, parents: bool
    ) -> FileSettings:
        """What is None is the cluster's."""
        defaults = self._write_defaults()
        return FileSettings(
            block_size or defaults.block_size,
            replication or defaults.replication,
            mode,
            parents,
            defaults=defaults,
            excluded=self._excluded,
            close_s=self.settings.close_s,
        )

    def _write_defaults(self) -> WriteDefaults:
        if self._defaults is None:
            self._defaults = ask_defaults(self._namenode)
        return self._defaults

    def _ask(self, function: Callable[[Names | NativeNames], T]) -> T:
        try:
            return function(self._names)
        except UnsupportedError as error:
            self._fall_back("/", error)
            return function(self._native_names)

    def _fall_back(self, path: str, error: UnsupportedError) -> None:
        """Before hdfs-native is asked, which takes its time where nothing answers."""
        self._note_fallback(path, error)
        self._namenode.check_there(path)

    def _note_fallback(self, path: str, error: UnsupportedError) -> None:
        if str(error) != self.fallback:
            _LOG.info("%s%s goes through hdfs-native: %s", self.uri, path, error)
        self.fallback = str(error)


class Reads:
    """Reads over own connections, and through hdfs-native what those do not support. Safe to use from many threads."""

    def __init__(self, namenode: NameNode, native: Callable[[], Native]) -> None:
        """`native` is asked for when something has to be read through it."""
        self._own = HdfsReads(namenode)
        self._native = native
        self._reason = ""

    @cached_property
    def _fallback(self) -> NativeReads:
        return NativeReads(self._native())

    def open(self, path: str, *, deadline_s: float = 60.0) -> HdfsFile | NativeFile:
        try:
            return self._own.open(path, deadline_s=deadline_s)
        except UnsupportedError as error:
            if str(error) != self._reason:
                _LOG.info("%s is read through hdfs-native: %s", path, error)
            self._reason = self._fallback.reason = str(error)
            return self._fallback.open(path, deadline_s=deadline_s)

    def facts(self) -> Mapping[str, object]:
        """Figures of all reads so far. `fallback` says why hdfs-native read what it read, "" when it read nothing."""
        facts = dict(self._own.facts())
        if self._reason:
            for key, value in self._fallback.facts().items():
                own = facts.get(key)
                if isinstance(own, dict) and isinstance(value, dict):
                    facts[key] = {**own, **value}
                else:
                    facts[key] = own + value if isinstance(own, int) and isinstance(value, int) else value
        return facts

    def delay_s(self, nodes: Sequence[str], length: int) -> float:
        return self._own.delay_s(nodes, length)

    def close(self) -> None:
        self._own.close()
        if self._reason:
            self._fallback.close()


def _server(cluster: Cluster) -> str:
    """The address as hdfs-native expects it: with a port, unless it is a service of the configuration."""
    services = [name.strip() for name in cluster.settings.get("dfs.nameservices", "").split(",")]
    if cluster.authority in services:
        return f"hdfs://{cluster.authority}"
    host, port = cluster.namenodes[0]
    return f"hdfs://[{host}]:{port}" if ":" in host else f"hdfs://{host}:{port}"

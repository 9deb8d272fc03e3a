"""The client of one HDFS: names and folders, writing, reading. The entry point of this package.

Names (`namenode`), reading (`reads`) and writing (`placement`) use BootSeer's own connections, which know the active
NameNode, choose DataNodes and exclude failed ones. What they do not support (encryption zones, erasure coding) goes
through the library hdfs-native (`native`); then the DataNodes that serve it are unknown.

Paths are absolute paths of the file system, "/a/b". All methods raise `BootseerError`s only. Safe to use from many
threads, and after `fork`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Unpack

from bootseer.errors import UsageError
from bootseer.hdfs.addresses import ClientSettings, Cluster, FileOptions
from bootseer.hdfs.block_locations import FileStatus
from bootseer.hdfs.errors import UnsupportedError
from bootseer.hdfs.lease import ExcludedDataNodes, FileSettings, WriteDefaults, ask_defaults
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.native import Native, NativeReads, NativeWriter
from bootseer.hdfs.placement import BlockFileWriter, PlacementGroup
from bootseer.hdfs.reads import HdfsReads
from bootseer.logs import logger

_LOG = logger(__name__)

_MIB = 1024 * 1024
_MAX_BLOCK_BYTES = 1 << 30
"""DataNodes copy and check whole blocks: larger files have several."""
_NATIVE_BLOCK_BYTES = 1 << 30
"""hdfs-native fails a file when a DataNode reports the last block but one late; blocks that take seconds to write are
reported in time."""


class HdfsClient(NameNode):
    """A client of the file system `hdfs://AUTHORITY`: host and port of its NameNode, or the name of a service."""

    def __init__(self, authority: str, settings: ClientSettings | None = None) -> None:
        """Connects on first use. Raises `UsageError` for an invalid authority."""
        if not authority or "@" in authority or "/" in authority:
            raise UsageError(f"hdfs://{authority} names no file system", hint="use hdfs://host:port or hdfs://service")
        self.settings = settings or ClientSettings()
        super().__init__(Cluster.of(authority, self.settings.conf_dir), ask_s=self.settings.call_s)
        self._defaults: WriteDefaults | None = None
        self._native = Native(self.uri, self.settings, server=_server(self.cluster))
        self._reads = HdfsReads(self, fallback=NativeReads(self._native))
        self.excluded = ExcludedDataNodes()
        self.fallback = ""
        """Why hdfs-native was used for writing, "" if it was not; reads report theirs in their statistics."""

    def put(self, path: str, data: bytes, **options: Unpack[FileOptions]) -> FileStatus:
        """Write a small file durably. It is visible while it grows: rename it where that matters. Raises
        `AlreadyExistsError`. Removes what an error has left."""
        writer = self.create(path, **options)
        try:
            if data:
                writer.write(data)
            writer.close()
        finally:
            writer.abort()
        return writer.status or self.stat(path)

    def create(self, path: str, **options: Unpack[FileOptions]) -> BlockFileWriter | NativeWriter:
        """Create a file of any length. Raises `AlreadyExistsError`."""
        try:
            return BlockFileWriter(self, path, self._file_settings(options))
        except UnsupportedError as error:
            if str(error) != self.fallback:
                _LOG.info("%s%s is written through hdfs-native: %s", self.uri, path, error)
            self.fallback = str(error)
            block_size = options.get("block_size") or _NATIVE_BLOCK_BYTES
            options["block_size"] = max(block_size, self.least_block_bytes)
            return NativeWriter(self._native, path, **options)

    def create_placed(
        self,
        paths: Sequence[str],
        *,
        block_size: int,
        mode: int = 0o644,
        replication: int | None = None,
        avoid: frozenset[str] = frozenset(),
        last_resort: Sequence[str] = (),
    ) -> Sequence[BlockFileWriter | NativeWriter]:
        """Create files of one block of `block_size` bytes each, on distinct nodes as far as possible. Files of more
        than 1 GiB have several blocks of the cluster's size, placed by the NameNode.

        `avoid`: nodes to use only if there are no others; so are those that failed recently. `last_resort`: nodes to
        use only before two files would share one, in this order.
        """
        options: FileOptions = {"mode": mode, "replication": replication}
        if block_size <= _MAX_BLOCK_BYTES:
            options["block_size"] = -(-block_size // _MIB) * _MIB
            with contextlib.suppress(UnsupportedError):
                settings = self._file_settings(options)
                return PlacementGroup(self, paths, settings, avoid=avoid, last_resort=last_resort).writers
        with contextlib.ExitStack() as begun:
            writers = []
            for path in paths:
                writer = self.create(path, **options)
                begun.callback(writer.abort)
                writers.append(writer)
            begun.pop_all()
        return writers

    @property
    def replication(self) -> int | None:
        """The cluster's default replication; None where files are written through hdfs-native only."""
        try:
            return self._write_defaults().replication
        except UnsupportedError:
            return None

    def reads(self) -> HdfsReads:
        return self._reads

    def close(self) -> None:
        self._reads.close()
        super().close()
        self._native.close()

    def _file_settings(self, options: FileOptions) -> FileSettings:
        defaults = self._write_defaults()
        return FileSettings(
            options.get("block_size") or defaults.block_size,
            options.get("replication") or defaults.replication,
            options.get("mode", 0o644),
            options.get("parents", True),
            defaults=defaults,
            excluded=self.excluded,
            close_s=self.settings.close_s,
        )

    def _write_defaults(self) -> WriteDefaults:
        if self._defaults is None:
            self._defaults = ask_defaults(self)
        return self._defaults


def _server(cluster: Cluster) -> str:
    """The address for hdfs-native: with a port, unless it is a nameservice."""
    services = [name.strip() for name in cluster.settings.get("dfs.nameservices", "").split(",")]
    if cluster.authority in services:
        return f"hdfs://{cluster.authority}"
    host, port = cluster.namenodes[0]
    return f"hdfs://[{host}]:{port}" if ":" in host else f"hdfs://{host}:{port}"

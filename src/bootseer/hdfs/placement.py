"""New files on chosen DataNodes. A `PlacementGroup` spreads files of one block over distinct DataNodes, so that reading
them together uses all of these nodes; other files have any length, and the NameNode places their blocks.

Placement. The NameNode chooses where a block lies, but accepts a list of nodes to exclude, and a block without data can
be abandoned. With one replica, files exclude the nodes of their siblings. With more replicas, it must not happen that
all nodes of a file also serve siblings: blocks are allocated and abandoned until each file can have a node for itself.
With fewer nodes than files, files share nodes evenly. A node that does not accept a block is excluded, for a minute
also for the client's other files (`ExcludedDataNodes`). After `_MAX_ALLOCATIONS` any block is accepted: a bad placement
only costs speed. A block is allocated at a file's first `write`; siblings may be written by different threads.

Recovery. A DataNode that fails in the middle of a block ends a file of a group: the caller writes it again. Of other
files the block is restarted on other nodes; for that, its bytes are kept on the local disk until it is complete.

Writers are used by one thread at a time, in the process that created them.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Final

from msgspec.structs import replace

from bootseer.errors import BootseerError, TransientError, UsageError, os_errors_as
from bootseer.hdfs.block_locations import Block, FileStatus, has_distinct_nodes
from bootseer.hdfs.block_writer import BlockWriter, PipelineError
from bootseer.hdfs.lease import FileSettings, Lease, NewBlock, NoNodesError
from bootseer.hdfs.namenode import NameNode
from bootseer.io.files import write_all
from bootseer.logs import logger

_LOG = logger(__name__)
Nodes = frozenset[str]

SETUP_S: Final = 3.0
STALL_S: Final = 8.0
"""Longer than busy disks block their readers during write-back."""
MAX_FAILURES: Final = 4
"""Failed attempts in a row before the cluster counts as unable to write."""
_IDLE_S: Final = 30.0
"""A connection lost after a longer pause is not counted as a failure: DataNodes close silent ones after 60 s."""
_RESEND_BYTES: Final = 1 << 20
_SPOOL: Final = "/var/tmp"  # noqa: S108 - files without names; /tmp is memory on many machines
_MAX_ALLOCATIONS = 24
_ALLOCATIONS_PER_SHARE = 12
"""With 4 nodes and 2 replicas, 12 allocations fail to give distinct nodes less than once in 1000 times."""


class BlockFileWriter:
    """A file that is created, given blocks and completed: one of a group, of one block, or else of any length. It is
    visible under its name from the beginning, and complete after `close`."""

    def __init__(
        self, namenode: NameNode, path: str, settings: FileSettings, apart: PlacementGroup | None = None
    ) -> None:
        """Create the file. Raises `AlreadyExistsError`, `UnsupportedError` and other `BootseerError`s."""
        self.path = path
        self.nodes: tuple[str, ...] = ()
        """The nodes that store it; of a file of a group, from the first `write` on."""
        self.size_bytes = 0
        """Bytes written so far."""
        self.status: FileStatus | None = None
        """The file's status after `close`."""
        self._uri = f"hdfs://{namenode.cluster.authority}{path}"
        self._namenode = namenode
        self._settings = settings
        self._excluded = settings.excluded
        self._apart = apart
        self._spool = None if apart is not None else _BlockSpool()
        self._failures = 0
        """Of the current block."""
        namenode.protection.check_key()
        self._lease = Lease(namenode, path, settings)
        self._new: NewBlock | None = None
        self._block: BlockWriter | None = None
        self._last: Block | None = None
        """The last complete block."""
        self._at = 0
        """Bytes written to the current block."""
        self._used_s = time.monotonic()
        """When the block was last written to."""
        self._is_usable = True
        self._is_over = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append. Blocks while HDFS is slower. The first bytes of a block allocate it. After an error the file cannot
        be used."""
        self._check_usable()
        if self._apart is not None and self.size_bytes + len(data) > self._lease.block_size:
            raise UsageError(f"{self._uri}: more than one block", hint="begin it with a larger block size")
        view = memoryview(data).cast("B")
        try:
            while view:
                piece = view[: self._lease.block_size - self._at]
                self._append(piece)
                view = view[len(piece) :]
        except BaseException:
            self._is_usable = False
            raise
        self._lease.renew()

    def close(self) -> tuple[str, ...]:
        """Complete the file: acknowledged by all DataNodes, and of the length that was written. Returns its `nodes`."""
        self._check_usable()
        self._is_usable = False
        if self._at:
            self._end_block()
        self.status = self._lease.complete(self._last, self.size_bytes, self._settings.close_s)
        self._is_over = True
        if self._spool is not None:
            self._spool.close()
        return self.nodes

    def abort(self) -> None:
        """Discard the file. Never raises; does nothing after `close`. A file that cannot be removed stays."""
        if self._is_over:
            return
        self._is_over = True
        self._is_usable = False
        if self._apart is not None:
            self._apart.give_back(self.path)
        if self._spool is not None:
            self._spool.close()
        if self._block is not None:
            self._block.close()
        # A file that stays has a hidden name; `clean` removes it.
        with contextlib.suppress(BootseerError):
            self._lease.remove()

    def _check_usable(self) -> None:
        if not self._is_usable:
            raise UsageError(f"{self._uri}: this file was closed or has failed", hint="begin another one")

    def _allocate(self, failed: Nodes) -> NewBlock:
        """A block from the NameNode, if possible not on nodes that failed recently, or else just now."""
        if self._apart is not None:
            return self._apart.add_block(self._lease, failed)
        for excluded in (self._excluded.names() | failed, failed):
            with contextlib.suppress(NoNodesError):
                new = self._lease.add_block(self._excluded.ids_of(excluded), self._last)
                self._excluded.remember(new)
                return new
        return self._lease.add_block([], self._last)

    def _append(self, piece: memoryview) -> None:
        """Append bytes to the current block, or to a new one."""
        if self._spool is not None:
            self._spool.write(self._at, piece)
        block = self._block or self._begin_block()
        self._at += len(piece)
        self.size_bytes += len(piece)
        try:
            block.write(piece)
        except PipelineError as error:
            self._recover(error)
        self._used_s = time.monotonic()
        # Not with the next write: DataNodes close idle connections.
        if self._apart is None and self._at == self._lease.block_size:
            self._end_block()

    def _end_block(self) -> None:
        while True:
            block, new = self._block, self._new
            assert block is not None and new is not None  # noqa: S101 - it has bytes
            try:
                block.finish()
                break
            except PipelineError as error:
                self._recover(error)
        block.close()
        self._last = replace(new.block, length=self._at)
        self._block, self._at, self._failures = None, 0, 0
        self._used_s = time.monotonic()

    def _recover(self, error: PipelineError) -> None:
        """A node has failed: restart the block on other nodes, and write its bytes so far there, or raise
        `TransientError`."""
        while True:
            _LOG.info("%s: DataNode %s has failed: %s", self._uri, error.node or "unknown", error)
            if self._spool is None or time.monotonic() - self._used_s < _IDLE_S:
                self._excluded.exclude([error.node])
                self._failures += 1
            if self._block is not None:
                self._block.close()
            if self._spool is None or self._failures == MAX_FAILURES or not self._spool.is_whole:
                raise TransientError(f"{self._uri}: {error}") from error
            if self._new is not None:
                self._lease.abandon(self._new.block)
            self._used_s = math.inf  # a failure of the new pipeline counts, however long the pause was
            block = self._begin_block()
            try:
                for start in range(0, self._at, _RESEND_BYTES):
                    block.write(memoryview(self._spool.read(start, min(_RESEND_BYTES, self._at - start))))
                return
            except PipelineError as another:
                error = another

    def _begin_block(self) -> BlockWriter:
        """Start a block on nodes that accept it."""
        failed: set[str] = set()
        failures = 0
        while True:
            new = self._allocate(frozenset(failed))
            try:
                self._block = BlockWriter(
                    new, self._settings.defaults, self._lease.holder, by_hostname=self._namenode.cluster.by_hostname,
                    setup_s=SETUP_S, stall_s=STALL_S, protection=self._namenode.protection,
                )  # fmt: skip
            except PipelineError as error:
                node = error.node or "unknown"
                _LOG.info("%s: DataNode %s does not accept a block and is excluded: %s", self.path, node, error)
                self._excluded.exclude([error.node])
                failed.add(error.node)
                failures += 1
                self._lease.abandon(new.block)
                if failures == MAX_FAILURES:
                    raise TransientError(f"{self._uri}: no DataNode accepts it: {error}") from error
            else:
                self._new = new
                if self._apart is not None:
                    self.nodes = tuple(node.host_port for node in new.block.nodes)
                return self._block


class PlacementGroup:
    """Files to be placed on distinct nodes. `writers` has one for each path."""

    def __init__(
        self,
        namenode: NameNode,
        paths: Sequence[str],
        settings: FileSettings,
        *,
        avoid: Nodes = frozenset(),
        last_resort: Sequence[str] = (),
    ) -> None:
        """Creates the files, not their blocks; each has at most one. Raises as `BlockFileWriter`.

        `avoid`: nodes to use only if there are no others. `last_resort`: nodes to use only before two files would share
        one, in this order.
        """
        self.settings = settings
        self.excluded = settings.excluded
        self._avoid = avoid
        self._last_resort = tuple(last_resort)
        self._lock = threading.Lock()
        self._taken: dict[str, Nodes] = {}
        self.writers: list[BlockFileWriter] = []
        try:
            for path in paths:
                self.writers.append(BlockFileWriter(namenode, path, settings, self))
        except BaseException:
            for writer in self.writers:
                writer.abort()
            raise

    def add_block(self, lease: Lease, failed: Nodes) -> NewBlock:
        """Allocate a block for one of the files, not on `failed` nodes.

        One file at a time allocates, so that none takes a node that another one is about to take.
        """
        last_resort, share, allocate = self._last_resort, 1, 1
        is_unwanted = True
        with self._lock:
            self._taken.pop(lease.path, None)
            while True:
                others = list(self._taken.values())
                unwanted = self._avoid | self.excluded.names() | failed if is_unwanted else failed
                used = nodes_at_capacity(others, share) if self.settings.replication == 1 else frozenset()
                last = allocate == _MAX_ALLOCATIONS
                excluded = [] if last else self.excluded.ids_of((unwanted | used).union(last_resort))
                try:
                    new = lease.add_block(excluded)
                except NoNodesError:
                    if not excluded:
                        raise
                    # All others are excluded: relax the exclusions step by step. An avoided node is better than none;
                    # one that failed just now is the last resort.
                    if last_resort:
                        last_resort = last_resort[(len(last_resort) + 1) // 2 :]
                    elif share <= len(others):
                        share += 1
                    elif is_unwanted:
                        is_unwanted, share = False, 1
                    else:
                        failed, share = frozenset(), 1
                    allocate += 1
                    continue
                self.excluded.remember(new)
                nodes = frozenset(node.host_port for node in new.block.nodes)
                if last or has_distinct_nodes([*others, nodes - unwanted], share):
                    self._taken[lease.path] = nodes
                    return new
                lease.abandon(new.block)
                if allocate % _ALLOCATIONS_PER_SHARE == 0:
                    share += 1
                allocate += 1

    def give_back(self, path: str) -> None:
        with self._lock:
            self._taken.pop(path, None)


def nodes_at_capacity(files: Sequence[Nodes], share: int) -> Nodes:
    counts = collections.Counter(node for nodes in files for node in nodes)
    return frozenset(node for node, count in counts.items() if count >= share)


class _BlockSpool:
    """The bytes of one block in an unnamed local file. If the disk is full, the block cannot be restarted, and nothing
    else fails."""

    def __init__(self) -> None:
        self.is_whole = True
        """Whether all bytes could be stored."""
        self._file: IO[bytes] | None = None

    def write(self, offset: int, data: memoryview) -> None:
        """Store bytes; offset 0 begins another block."""
        if not self.is_whole and offset:
            return
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=os.environ.get("TMPDIR") or _SPOOL, buffering=0)  # noqa: SIM115
            write_all(self._file.fileno(), data, offset)
            self.is_whole = True
        except OSError:
            self.is_whole = False

    def read(self, offset: int, length: int) -> bytes:
        """Read stored bytes. Raises `TransientError` if the disk cannot read them."""
        with os_errors_as(TransientError, "the local disk"):
            data = os.pread(self._file.fileno(), length, offset) if self._file is not None else b""
        if len(data) != length:
            raise TransientError("the local disk has lost what was just written")
        return data

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

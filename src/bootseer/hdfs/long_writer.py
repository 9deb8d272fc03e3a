"""One new file of any number of blocks, written from its beginning to its end over our own connections.

hdfs-native ends a file when a DataNode tells the NameNode late of an earlier block: it asks for the next one once. Here
that is waited for (`lease`), and a block whose DataNode fails is begun again elsewhere, for which its bytes are kept
on the local disk until it is safe.

Belongs to one thread at a time, and to the process that made it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from dataclasses import replace
from typing import IO, Final

from bootseer.errors import BootseerError, TransientError, UsageError
from bootseer.hdfs.block_writer import MAX_FAILURES, BlockWriter, ExcludedNodes, Nodes, PipelineError, begin_block
from bootseer.hdfs.lease import Lease, NewBlock, NoNodesError, WriteDefaults
from bootseer.hdfs.located import Block, FileStatus
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.native import Native

_IDLE_S: Final = 30.0
"""DataNodes hang up on writers that say nothing for longer, and are not to blame for it."""
_AGAIN_BYTES: Final = 1 << 20
_SPOOL: Final = "/var/tmp"  # noqa: S108 - files without names; /tmp is memory on many machines


class LongWriter:
    """A file that is being written: visible under its name from the beginning, complete after `close`."""

    def __init__(
        self,
        namenode: NameNode,
        native: Native,
        path: str,
        *,
        block_size: int,
        replication: int,
        mode: int,
        overwrite: bool,
        parents: bool = True,
        defaults: WriteDefaults,
        excluded: ExcludedNodes,
    ) -> None:
        """Begin the file, and its folder when that is missing. Raises `TakenError`, `UnsupportedError` and the like."""
        self.path = path
        self.nodes: tuple[str, ...] = ()
        """Each block has its own."""
        self.size_bytes = 0
        """What was written so far."""
        self._what = f"{native.uri}{path}"
        self._namenode = namenode
        self._native = native
        self._block_size = block_size
        self._defaults = defaults
        self._excluded = excluded
        self._lease = Lease(
            namenode, path, block_size=block_size, replication=replication, mode=mode, overwrite=overwrite,
            parents=parents,
        )  # fmt: skip
        self.status: FileStatus | None = None
        """What the NameNode says of it, after `close`."""
        self._last: Block | None = None
        """The last one that is complete."""
        self._new: NewBlock | None = None
        self._block: BlockWriter | None = None
        self._at = 0
        """Bytes of the block that is being written."""
        self._failures = 0
        self._used_s = time.monotonic()
        self._kept = _Kept()
        self._is_usable = True
        self._is_over = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append. Blocks while HDFS is slower. After an error the file is lost."""
        self._check_usable()
        view = memoryview(data).cast("B")
        try:
            while view:
                piece = view[: self._block_size - self._at]
                self._write(piece)
                view = view[len(piece) :]
                if self._at == self._block_size:
                    self._end_block()
        except BaseException:
            self._is_usable = False
            raise
        self._lease.renew()

    def close(self) -> tuple[str, ...]:
        """End the file: confirmed by all its DataNodes, and of the length that was written."""
        self._check_usable()
        self._is_usable = False
        if self._at:
            self._end_block()
        self.status = self._lease.complete(self._last, self.size_bytes, self._native.settings.close_s)
        self._is_over = True
        self._kept.close()
        return ()

    def abort(self) -> None:
        """Drop the file. Never raises, and does nothing after `close`; what cannot be removed stays."""
        if self._is_over:
            return
        self._is_over = True
        self._is_usable = False
        self._kept.close()
        if self._block is not None:
            self._block.close()
        with contextlib.suppress(BootseerError):
            self._lease.remove()

    def _write(self, piece: memoryview) -> None:
        """Append what fits into the block."""
        block = self._block or self._begin()
        self._kept.write(self._at, piece)
        self._at += len(piece)
        self.size_bytes += len(piece)
        try:
            block.write(piece)
        except PipelineError as error:
            self._again(error)
        self._used_s = time.monotonic()

    def _end_block(self) -> None:
        while True:
            block, new = self._block, self._new
            assert block is not None and new is not None  # noqa: S101 - it has bytes
            try:
                block.finish()
                break
            except PipelineError as error:
                self._again(error)
        block.close()
        self._last = replace(new.block, length=self._at)
        self._block, self._at, self._failures = None, 0, 0
        self._used_s = time.monotonic()

    def _begin(self) -> BlockWriter:
        self._new, self._block = begin_block(self._namenode, self._lease, self._defaults, self._excluded, self._draw)
        return self._block

    def _draw(self, failed: Nodes) -> NewBlock:
        """A block that is not on nodes that failed lately, or else not on those that failed just now."""
        for excluded in (self._excluded.names() | failed, failed):
            with contextlib.suppress(NoNodesError):
                new = self._lease.add_block(self._excluded.known(excluded), self._last)
                self._excluded.remember(new)
                return new
        return self._lease.add_block([], self._last)

    def _again(self, error: PipelineError) -> None:
        """Begin the block again elsewhere, and write there what it has so far."""
        while True:
            if time.monotonic() - self._used_s < _IDLE_S:
                self._excluded.exclude(error.node)
            self._failures += 1
            if self._block is not None:
                self._block.close()
            if self._failures == MAX_FAILURES or not self._kept.is_whole:
                raise TransientError(f"{self._what}: {error}") from error
            if self._new is not None:
                self._lease.abandon(self._new.block)
            self._used_s = time.monotonic()
            block = self._begin()
            try:
                for start in range(0, self._at, _AGAIN_BYTES):
                    block.write(memoryview(self._kept.read(start, min(_AGAIN_BYTES, self._at - start))))
                return
            except PipelineError as another:
                error = another

    def _check_usable(self) -> None:
        if not self._is_usable:
            raise UsageError(f"{self._what}: this file is not written any more", hint="begin another one")


class _Kept:
    """The bytes of one block, in a local file without a name. A disk without room costs the second try, no more."""

    def __init__(self) -> None:
        self.is_whole = True
        """Whether all that was written can be read."""
        self._file: IO[bytes] | None = None

    def write(self, offset: int, data: memoryview) -> None:
        """Put bytes there; at 0 another block begins."""
        if not self.is_whole and offset:
            return
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=os.environ.get("TMPDIR") or _SPOOL, buffering=0)  # noqa: SIM115
            while data:
                count = os.pwrite(self._file.fileno(), data, offset)
                data, offset = data[count:], offset + count
            self.is_whole = True
        except OSError:
            self.is_whole = False

    def read(self, offset: int, length: int) -> bytes:
        """The bytes there. Raises `TransientError` for a disk that cannot read them."""
        try:
            data = os.pread(self._file.fileno(), length, offset) if self._file is not None else b""
        except OSError as error:
            raise TransientError(f"the local disk: {error.strerror}") from error
        if len(data) != length:
            raise TransientError("the local disk has lost what was just written")
        return data

    def close(self) -> None:
        """Forget them."""
        if self._file is not None:
            self._file.close()
            self._file = None

"""New files of one block, on different DataNodes, so that reading them together is as fast as the nodes together.

The NameNode chooses where a block lies, but can be told which nodes not to choose, and a block without data can be
given back. So files with one replica exclude the nodes of their siblings; with more replicas, what must not happen is
that all nodes of a file serve siblings too, and blocks are drawn until each file has a node for itself. When there are
fewer nodes than files, they are shared evenly; a node that the NameNode holds for too busy is waited for before. A node
that does not take a block is excluded from then on, for a minute also by the other files of the same client
(`ExcludedNodes`). After `_MAX_DRAWS` a block is taken where it is: a bad placement costs speed and nothing else.

A block is begun by a file's first `write`; siblings may be written by threads of their own.

One new file of any number of blocks, written from its beginning to its end over our own connections.

hdfs-native ends a file when a DataNode tells the NameNode late of an earlier block: it asks for the next one once. Here
that is waited for (`lease`), and a block whose DataNode fails is begun again elsewhere, for which its bytes are kept
on the local disk until it is safe.

Belongs to one thread at a time, and to the process that made it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Final

from bootseer.errors import BootseerError, NoSpaceError, TransientError, UsageError
from bootseer.hdfs.block_writer import MAX_FAILURES, BlockWriter, ExcludedNodes, Nodes, PipelineError, begin_block
from bootseer.hdfs.lease import Lease, NewBlock, NoNodesError, WriteDefaults
from bootseer.hdfs.located import Block, FileStatus
from bootseer.hdfs.namenode import NameNode
from bootseer.logs import logger

_LOG = logger(__name__)

BUSY_S = 7.0
"""So long a node that is not chosen is waited for before two files share one: two of the heartbeats that tell how busy
a DataNode is (`dfs.namenode.redundancy.considerLoad`), and some."""
_BUSY_PAUSE_S = 0.5
_MAX_DRAWS = 24
_DRAWS_PER_SHARE = 12
"""With 4 nodes and 2 replicas, 12 draws miss what is wanted less than once in 1000 times."""


@dataclass(frozen=True, slots=True)
class FileSettings:
    """How a new file is written."""

    block_size: int
    """Bytes."""
    replication: int
    mode: int
    parents: bool
    """Whether a missing folder is made."""
    defaults: WriteDefaults
    excluded: ExcludedNodes
    close_s: float
    """For the end of a file: the last bytes, all confirmations, and the NameNode's own wait for them."""


class BlockFileWriter:
    """What new files of one block and of many have in common. Belongs to one thread at a time, and to the process that
    made it."""

    def __init__(self, namenode: NameNode, path: str, settings: FileSettings) -> None:
        """Create the file. Raises `AlreadyExistsError`, `UnsupportedError` and other `BootseerError`s."""
        self.path = path
        self.nodes: tuple[str, ...] = ()
        """Where its bytes go, if that is known."""
        self.size_bytes = 0
        """What was written so far."""
        self.status: FileStatus | None = None
        """What the NameNode says of it, after `close`."""
        self._what = f"hdfs://{namenode.cluster.authority}{path}"
        self._namenode = namenode
        self._settings = settings
        self._excluded = settings.excluded
        self._lease = Lease(
            namenode, path, block_size=settings.block_size, replication=settings.replication, mode=settings.mode,
            parents=settings.parents,
        )  # fmt: skip
        self._new: NewBlock | None = None
        self._block: BlockWriter | None = None
        self._is_usable = True
        self._is_over = False

    def abort(self) -> None:
        """Drop the file. Never raises, and does nothing after `close`; what cannot be removed stays."""
        if self._is_over:
            return
        self._is_over = True
        self._is_usable = False
        self._release()
        if self._block is not None:
            self._block.close()
        # What stays is invisible, and `clean` will find it.
        with contextlib.suppress(BootseerError):
            self._lease.remove()

    def _release(self) -> None:
        """Give back what the file has besides."""

    def _begin_block(self, draw: Callable[[Nodes], NewBlock]) -> BlockWriter:
        self._new, self._block = begin_block(self._namenode, self._lease, self._settings.defaults, self._excluded, draw)
        return self._block

    def _complete(self, last: Block | None) -> None:
        """End the file: confirmed by all its DataNodes, and of the length that was written."""
        self._is_usable = False
        self.status = self._lease.complete(last, self.size_bytes, self._settings.close_s)
        self._is_over = True

    def _check_usable(self) -> None:
        if not self._is_usable:
            raise UsageError(f"{self._what}: this file is not written any more", hint="begin another one")


class Apart:
    """Files that are to lie on different nodes. `writers` has one for each path."""

    def __init__(
        self,
        namenode: NameNode,
        paths: Sequence[str],
        settings: FileSettings,
        *,
        avoid: Nodes = frozenset(),
        spare: Sequence[str] = (),
    ) -> None:
        """Creates the files, not their blocks; each has at most one. Raises as `BlockFileWriter`.

        `avoid`: nodes that are not taken as long as there are others. `spare`: nodes that are taken only before two
        files would share one, the first of them first.
        """
        self.settings = settings
        self.excluded = settings.excluded
        self._avoid = avoid
        self._spare = tuple(spare)
        self._change = threading.Condition()
        self._taken: dict[str, Nodes] = {}
        self.writers: list[PlacedWriter] = []
        try:
            for path in paths:
                self.writers.append(PlacedWriter(self, namenode, path))
        except BaseException:
            for writer in self.writers:
                writer.abort()
            raise

    def add_block(self, lease: Lease, failed: Nodes) -> tuple[NewBlock, int]:
        """A block for one of the files, and how many were drawn; `failed` nodes are not wanted again.

        One file at a time draws, so that none takes what another is about to take.
        """
        spare, share, draw = self._spare, 1, 1
        is_unwanted = True
        busy_until = None
        with self._change:
            self._taken.pop(lease.path, None)
            while True:
                others = list(self._taken.values())
                unwanted = self._avoid | self.excluded.names() | failed if is_unwanted else failed
                used = full_nodes(others, share) if self.settings.replication == 1 else frozenset()
                last = draw == _MAX_DRAWS
                excluded = [] if last else self.excluded.known((unwanted | used).union(spare))
                try:
                    new = lease.add_block(excluded)
                except NoNodesError as error:
                    if not excluded:
                        raise
                    # All the others are excluded: an unwanted node is better than none, one that failed just now is
                    # not.
                    if spare:
                        spare = spare[(len(spare) + 1) // 2 :]
                    elif error.num_running > len(excluded) and self.excluded.may_wait:
                        busy_until = self._wait_for_busy(lease, error, busy_until)
                        continue
                    elif share <= len(others):
                        share += 1
                    elif is_unwanted:
                        is_unwanted, share = False, 1
                    else:
                        failed, share = frozenset(), 1
                    draw += 1
                    continue
                self.excluded.remember(new)
                nodes = frozenset(node.host_port for node in new.block.nodes)
                if last or has_own_nodes([*others, nodes - unwanted], share):
                    self._taken[lease.path] = nodes
                    return new, draw
                lease.abandon(new.block)
                if draw % _DRAWS_PER_SHARE == 0:
                    share += 1
                draw += 1

    def _wait_for_busy(self, lease: Lease, error: NoNodesError, until: float | None) -> float:
        """Wait a moment for nodes that the NameNode did not choose: at most until what is returned."""
        if until is None:
            reason = lease.explained(error)
            if isinstance(reason, NoSpaceError):
                raise reason from error
            # Those that are nearly full are not waited for.
            until = time.monotonic() + (BUSY_S if reason is error else 0.0)
        # Siblings may draw meanwhile, and end: then the node of one is free.
        self._change.wait(min(_BUSY_PAUSE_S, max(until - time.monotonic(), 0.0)))
        if time.monotonic() >= until:
            self.excluded.waited_in_vain()
        return until

    def give_back(self, path: str) -> None:
        with self._change:
            self._taken.pop(path, None)
            self._change.notify_all()


class PlacedWriter(BlockFileWriter):
    """One of the files. `nodes` are known from the first `write` on."""

    def __init__(self, apart: Apart, namenode: NameNode, path: str) -> None:
        super().__init__(namenode, path, apart.settings)
        self.draws = 0
        """How many blocks the NameNode gave until one could stay."""
        self._apart = apart

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append; the first call chooses the node. Blocks while HDFS is slower. After an error the file is lost."""
        self._check_usable()
        if self.size_bytes + len(data) > self._settings.block_size:
            raise UsageError(f"{self._what}: more than one block", hint="begin it with a larger block size")
        view = memoryview(data)
        if not view:
            return
        block = self._block or self._begin()
        self.size_bytes += len(view)
        with self._guard():
            block.write(view)
        self._lease.renew()

    def close(self) -> tuple[str, ...]:
        """End the file: confirmed by all its DataNodes, and of the length that was written. Returns where it lies."""
        self._check_usable()
        if self._block is not None:
            with self._guard():
                self._block.finish()
            self._block.close()
        self._complete(replace(self._new.block, length=self.size_bytes) if self._new else None)
        return self.nodes

    def _release(self) -> None:
        self._apart.give_back(self.path)

    def _begin(self) -> BlockWriter:
        def draw(failed: Nodes) -> NewBlock:
            new, draws = self._apart.add_block(self._lease, failed)
            self.draws += draws
            return new

        block = self._begin_block(draw)
        assert self._new is not None  # noqa: S101 - it was drawn
        self.nodes = tuple(node.host_port for node in self._new.block.nodes)
        return block

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except PipelineError as error:
            _LOG.info("%s: DataNode %s is excluded: %s", self._what, error.node or "unknown", error)
            self._is_usable = False
            self._excluded.exclude(error.node)
            raise TransientError(f"{self._what}: {error}") from error


def full_nodes(files: Sequence[Nodes], share: int) -> Nodes:
    """The nodes that have as many of the files as each may have."""
    counts = collections.Counter(node for nodes in files for node in nodes)
    return frozenset(node for node, count in counts.items() if count >= share)


def has_own_nodes(files: Sequence[Nodes], share: int) -> bool:
    """Whether each file can have one of its nodes for itself, or with at most `share - 1` others."""
    held: dict[str, list[int]] = collections.defaultdict(list)

    def settle(file: int, seen: set[str]) -> bool:
        for node in files[file] - seen:
            seen.add(node)
            holders = held[node]
            if len(holders) < share:
                holders.append(file)
                return True
            for place, holder in enumerate(holders):
                if settle(holder, seen):
                    holders[place] = file
                    return True
        return False

    return all(settle(file, set()) for file in range(len(files)))


_IDLE_S: Final = 30.0
"""DataNodes hang up on writers that say nothing for longer, and are not to blame for it."""
_AGAIN_BYTES: Final = 1 << 20
_SPOOL: Final = "/var/tmp"  # noqa: S108 - files without names; /tmp is memory on many machines


class LongWriter(BlockFileWriter):
    """A file of any length: visible under its name from the beginning, complete after `close`. Each block has its own
    nodes."""

    def __init__(self, namenode: NameNode, path: str, settings: FileSettings) -> None:
        super().__init__(namenode, path, settings)
        self._last: Block | None = None
        """The last one that is complete."""
        self._at = 0
        """Bytes of the block that is being written."""
        self._failures = 0
        self._used_s = time.monotonic()
        self._kept = _Kept()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append. Blocks while HDFS is slower. After an error the file is lost."""
        self._check_usable()
        view = memoryview(data).cast("B")
        try:
            while view:
                piece = view[: self._settings.block_size - self._at]
                self._write(piece)
                view = view[len(piece) :]
                if self._at == self._settings.block_size:
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
        self._complete(self._last)
        self._kept.close()
        return ()

    def _release(self) -> None:
        self._kept.close()

    def _write(self, piece: memoryview) -> None:
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
        return self._begin_block(self._draw)

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
            _LOG.info(
                "%s: block %d is begun again, after %s", self._what, self.size_bytes // self._settings.block_size, error
            )
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
        if self._file is not None:
            self._file.close()
            self._file = None

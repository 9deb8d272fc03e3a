"""New files of one block, on different DataNodes, so that reading them together is as fast as the nodes together.

The NameNode chooses where a block lies, but can be told which nodes not to choose, and a block without data can be
given back. So files with one replica exclude the nodes of their siblings; with more replicas, what must not happen is
that all nodes of a file serve siblings too, and blocks are drawn until each file has a node for itself. When there are
fewer nodes than files, they are shared evenly. A node that does not take a block is excluded from then on, for a minute
also by the other files of the same client (`BadNodes`). After `_MAX_DRAWS` a block is taken where it is: a bad place
costs speed and nothing else.

Made by `client`. A file is begun by its first `write`; siblings may be written by threads of their own.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bootseer.errors import BootseerError, TransientError, UsageError
from bootseer.hdfs.block_writer import PACKET_BYTES, BlockWriter, PipelineError
from bootseer.hdfs.lease import Lease, NewBlock, NoNodesError, WriteDefaults
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.native import Native

Nodes = frozenset[str]

_SETUP_S = 3.0
_STALL_S = 8.0
"""Longer than disks that are busy writing back, which make their readers wait for seconds."""
_COMPLETE_S = 60.0
_REMOVE_S = 10.0
_BAD_S = 60.0
_MAX_DRAWS = 24
_DRAWS_PER_SHARE = 12
"""With 4 nodes and 2 replicas, 12 draws miss what is wanted less than once in 1000 times."""
_MAX_FAILURES = 4
"""Blocks that may find no node in a row before the cluster counts as unable to write."""
_MAX_KNOWN = 10_000


@dataclass(frozen=True, slots=True)
class PlacingSettings:
    """What all files of an `Apart` have in common."""

    block_size: int
    """Bytes; a file is at most one block."""
    replication: int
    mode: int = 0o644
    avoid: Nodes = frozenset()
    """Nodes that are not taken as long as there are others."""
    spare: tuple[str, ...] = ()
    """Nodes that are taken only before two files would share one, the first of them first."""
    overwrite: bool = False


class BadNodes:
    """The DataNodes that failed to take a block lately, and what the NameNode calls the nodes. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bad: dict[str, float] = {}
        self._known: dict[str, bytes] = {}

    def met(self, new: NewBlock) -> None:
        """The NameNode has named these nodes."""
        with self._lock:
            if len(self._known) > _MAX_KNOWN:
                self._known.clear()
            self._known.update(zip((node.host_port for node in new.block.nodes), new.told, strict=True))

    def failed(self, node: str) -> None:
        """This one did not take a block; "" is nobody."""
        if node:
            with self._lock:
                self._bad[node] = time.monotonic() + _BAD_S

    def names(self) -> Nodes:
        """Those that failed within the last minute."""
        with self._lock:
            now_s = time.monotonic()
            self._bad = {node: until_s for node, until_s in self._bad.items() if until_s > now_s}
            return frozenset(self._bad)

    def known(self, names: Iterable[str]) -> list[bytes]:
        """What the NameNode calls these nodes; those that it has not named yet cannot be excluded."""
        with self._lock:
            return [self._known[name] for name in names if name in self._known]


class Apart:
    """Files that are to lie on different nodes. `writers` has one for each path."""

    def __init__(
        self,
        namenode: NameNode,
        native: Native,
        paths: Sequence[str],
        settings: PlacingSettings,
        *,
        defaults: WriteDefaults,
        bad: BadNodes,
    ) -> None:
        """Begins the files, not their blocks. Raises `TakenError`, `NotSpokenError` and the like."""
        self.namenode = namenode
        self.native = native
        self.settings = settings
        self.defaults = defaults
        self.bad = bad
        self._lock = threading.Lock()
        self._taken: dict[str, Nodes] = {}
        self.writers: list[PlacedWriter] = []
        try:
            for path in paths:
                self.writers.append(PlacedWriter(self, path))
        except BaseException:
            for writer in self.writers:
                writer.abort()
            raise

    def add_block(self, lease: Lease, failed: Nodes) -> tuple[NewBlock, int]:
        """A block for one of the files, and how many were drawn; `failed` nodes are not wanted again.

        One file at a time draws, so that none takes what another is about to take.
        """
        settings = self.settings
        with self._lock:
            self._taken.pop(lease.path, None)
            others = list(self._taken.values())
            unwanted = settings.avoid | self.bad.names() | failed
            spare = settings.spare
            share = 1
            for draw in range(1, _MAX_DRAWS + 1):
                used = full_nodes(others, share) if settings.replication == 1 else frozenset()
                excluded = unwanted | used
                last = draw == _MAX_DRAWS
                told = [] if last else self.bad.known(excluded.union(spare))
                try:
                    new = lease.add_block(told)
                except NoNodesError:
                    if not told:
                        raise
                    # All the others are: who was only unwanted is better than nobody, who failed just now is not.
                    if spare:
                        spare = spare[(len(spare) + 1) // 2 :]
                    elif share <= len(others):
                        share += 1
                    else:
                        unwanted, share = (failed, 1) if unwanted != failed else (frozenset(), 1)
                    continue
                self.bad.met(new)
                nodes = frozenset(node.host_port for node in new.block.nodes)
                if last or has_own_nodes([*others, nodes - unwanted], share):
                    self._taken[lease.path] = nodes
                    return new, draw
                lease.abandon(new.block)
                if draw % _DRAWS_PER_SHARE == 0:
                    share += 1
        raise AssertionError("the last draw is taken or raises")

    def give_back(self, path: str) -> None:
        """This file is not written any more."""
        with self._lock:
            self._taken.pop(path, None)


class PlacedWriter:
    """One of the files. Belongs to one thread at a time, and to the process that made it."""

    def __init__(self, apart: Apart, path: str) -> None:
        self.path = path
        self.nodes: tuple[str, ...] = ()
        """Where its bytes go; known from the first `write` on."""
        self.draws = 0
        """How many blocks the NameNode gave until one could stay."""
        self.size_bytes = 0
        """What was written so far."""
        self._apart = apart
        self._what = f"{apart.native.uri}{path}"
        settings = apart.settings
        self._lease = Lease(
            apart.namenode,
            path,
            block_size=settings.block_size,
            replication=settings.replication,
            mode=settings.mode,
            overwrite=settings.overwrite,
        )
        self._new: NewBlock | None = None
        self._block: BlockWriter | None = None
        self._rest = bytearray()
        self._is_usable = True
        self._is_kept = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append; the first call chooses the node. Blocks while HDFS is slower. After an error the file is lost."""
        self._check_usable()
        if self.size_bytes + len(data) > self._apart.settings.block_size:
            raise UsageError(f"{self._what}: more than one block", hint="begin it with a larger block size")
        view = memoryview(data)
        if not view:
            return
        block = self._block = self._block or self._begin()
        self.size_bytes += len(view)
        if self._rest:
            missing = PACKET_BYTES - len(self._rest)
            self._rest += view[:missing]
            view = view[missing:]
            if len(self._rest) == PACKET_BYTES:
                full, self._rest = self._rest, bytearray()
                self._send(block, memoryview(full))
        # Only the last packet of a block may be cut, as checksums are.
        whole = len(view) - len(view) % PACKET_BYTES
        if whole:
            self._send(block, view[:whole])
        self._rest += view[whole:]

    def close(self) -> tuple[str, ...]:
        """End the file: confirmed by all its DataNodes, and of the length that was written. Returns where it lies."""
        self._check_usable()
        if self._block is not None:
            if self._rest:
                self._send(self._block, memoryview(self._rest))
            with self._guard():
                self._block.finish()
            self._block.close()
        self._is_usable = False
        self._lease.complete(self._new.block if self._new else None, self.size_bytes, _COMPLETE_S)
        self._is_kept = True
        return self.nodes

    def abort(self) -> None:
        """Drop the file. Never raises, and does nothing after `close`; what cannot be removed stays."""
        if self._is_kept:
            return
        self._is_kept = True
        self._is_usable = False
        self._apart.give_back(self.path)
        if self._block is not None:
            self._block.close()
        # What stays is invisible, and whoever clears away will find it.
        with contextlib.suppress(BootseerError):
            self._apart.native.call(self._what, lambda client: client.delete(self.path), _REMOVE_S)

    def _begin(self) -> BlockWriter:
        """Begin the block, on nodes that take it."""
        apart = self._apart
        failed: set[str] = set()
        failures = 0
        while True:
            self._new, draws = apart.add_block(self._lease, frozenset(failed))
            self.draws += draws
            try:
                block = BlockWriter(
                    self._new,
                    apart.defaults,
                    self._lease.holder,
                    by_hostname=apart.namenode.cluster.by_hostname,
                    setup_s=_SETUP_S,
                    stall_s=_STALL_S,
                )
            except PipelineError as error:
                apart.bad.failed(error.node)
                failed.add(error.node)
                failures += 1
                self._lease.abandon(self._new.block)
                if failures == _MAX_FAILURES:
                    raise TransientError(f"{self._what}: no DataNode takes it: {error}") from error
                continue
            self.nodes = tuple(node.host_port for node in self._new.block.nodes)
            return block

    def _send(self, block: BlockWriter, data: memoryview) -> None:
        with self._guard():
            block.write(data)
        self._lease.renew()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except PipelineError as error:
            self._is_usable = False
            self._apart.bad.failed(error.node)
            raise TransientError(f"{self._what}: {error}") from error

    def _check_usable(self) -> None:
        if not self._is_usable:
            raise UsageError(f"{self._what}: this file is not written any more", hint="begin another one")


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

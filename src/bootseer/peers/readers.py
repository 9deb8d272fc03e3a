"""Chunks read by one node of a job and passed on to others: which node has each chunk, and the serving of chunks.

Blocks of images and environments are needed by all nodes, so each has an owner that fetches it for the others. Chunks
of checkpoints may not be: in a sharded checkpoint each chunk is read by one node only, and would cross the network
twice if an owner fetched it. So the owner of a unit of chunks fetches nothing and only records which nodes read them
(`Readers`): the first node that asks reads a chunk from the place, later ones get it from earlier ones. A chunk read by
a single node costs its share of one question.

Why there are no deadlocks and no hot spots: a node is only sent to nodes that asked before it, so waits cannot form a
cycle. Among these it is sent to the later half, varied by unit and node, so no node sends much more than it receives,
and an object of one unit passes through few nodes. (With a binary tree, the node ahead of all others would be the root
of every unit and send each of them twice.)
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Final
from zlib import crc32

from bootseer.cache.cache import Cache
from bootseer.cache.cached_file import CachedFile
from bootseer.errors import NotFoundError
from bootseer.peers.choice import Level
from bootseer.peers.job import JobPeers
from bootseer.peers.protocol import Question

CHECKPOINT: Final = "checkpoint"
"""The kind of files whose cached chunks are served: segments of checkpoints."""
UNIT_BLOCKS: Final = 16
"""Blocks per question; each starts at a multiple of it."""
_MAX_UNITS: Final = 1 << 17
"""Units of 16 MiB: 2 TiB of checkpoints per node."""
_MAX_READERS: Final = 64
"""How many nodes serve each chunk of a unit (more when chunks are requested singly); later ones are sent to these."""
_MAX_LEASES: Final = 64
_POLL_S: Final = 0.02
_STILL_S: Final = 2.0
"""A node that fetches nothing of a file for this long has given up reading it."""


class Readers:
    """Which nodes read which chunks, in the order of their first questions. Safe for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._units: OrderedDict[tuple[str, int], defaultdict[int, dict[str, bool]]] = OrderedDict()

    def answer(self, question: Question, own: int, name: str) -> dict[str, int]:
        """The nodes to get blocks from, as bits; the asking node reads the other blocks itself.

        `own`: the blocks that this node, called `name`, has.
        """
        found: dict[str, int] = {}
        with self._lock:
            unit = self._units.setdefault((question.file, question.first), defaultdict(dict))
            self._units.move_to_end((question.file, question.first))
            if len(self._units) > _MAX_UNITS:
                self._units.popitem(last=False)
            for block in bits(question.blocks):
                chosen = self._choose(unit[block], question)
                if not chosen and own >> block & 1 and name not in (question.sender, question.without):
                    chosen = name
                if chosen:
                    found[chosen] = found.get(chosen, 0) | 1 << block
        return found

    @staticmethod
    def _choose(nodes: dict[str, bool], question: Question) -> str:
        """`nodes`: whether each still serves the block. None is removed, so that the order is stable."""
        if question.without in nodes:
            nodes[question.without] = False
        before = [name for name in takewhile(lambda name: name != question.sender, nodes) if nodes[name]]
        if question.keeps and len(nodes) < _MAX_READERS * UNIT_BLOCKS // question.blocks.bit_count():
            nodes.setdefault(question.sender, True)
        late = max(len(before) // 2, 1)
        start = question.first // UNIT_BLOCKS + crc32(question.sender.encode())
        return before[-1 - start % late] if before else ""


def bits(mask: int) -> Iterator[int]:
    """The indexes of the set bits."""
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


class CachedBlocks:
    """A file in the node's cache, as `server.Content`."""

    @property
    def cached(self) -> CachedFile:
        raise NotImplementedError

    @property
    def num_ready(self) -> int:
        return self.cached.num_ready

    @contextmanager
    def opened(self) -> Iterator[int]:
        cached = self.cached  # kept, and so the descriptor: a copy would cost a fifth of the server's CPU
        yield cached.descriptor()

    def here(self, first: int, blocks: int) -> int:
        cached = self.cached  # once: it may have to be looked up, under a lock
        num_blocks = cached.index.num_blocks - first
        return sum(1 << bit for bit in bits(blocks) if bit < num_blocks and cached.ready(first + bit))


class CachedFiles:
    """Opens cached files that local processes read; fetches nothing for other nodes."""

    def __init__(self, idle_limit_s: float = _STILL_S) -> None:
        """`idle_limit_s`: how long local processes may fetch nothing of a file before waiting requests fail."""
        self.idle_limit_s = idle_limit_s
        self._lock = threading.Lock()
        self._leases: OrderedDict[str, CachedFile] = OrderedDict()

    def open(self, job: JobPeers, identity: str) -> CachedContent | None:
        """The content of a file registered as `CHECKPOINT`. Raises `BootseerError`."""
        root = (job.registered(identity) or {}).get("cache")
        return CachedContent(self, Path(root), identity) if isinstance(root, str) else None

    def lease(self, root: Path, identity: str) -> CachedFile:
        """The file, kept open while it is among the most recently used. Raises `BootseerError`."""
        with self._lock:
            if (cached := self._leases.get(identity)) is None:
                cached = self._leases[identity] = Cache(root).open_existing(identity)
            self._leases.move_to_end(identity)
            evicted = self._leases.popitem(last=False)[1] if len(self._leases) > _MAX_LEASES else None
        if evicted is not None:
            evicted.close()
        return cached

    def release_all(self) -> None:
        """Close all files; they are reopened on request."""
        with self._lock:
            leases = list(self._leases.values())
            self._leases.clear()
        for cached in leases:
            cached.close()


class CachedContent(CachedBlocks):
    """Requests for missing blocks wait as long as local processes fetch any of the file: they proceed in their own
    order, and may wait for a slow store."""

    def __init__(self, files: CachedFiles, root: Path, identity: str) -> None:
        """Raises `BootseerError` where the cache has no such file."""
        self._files = files
        self._root = root
        self._identity = identity
        self._unavailable: set[int] = set()
        self.size_bytes = self.cached.index.size_bytes

    @property
    def cached(self) -> CachedFile:
        return self._files.lease(self._root, self._identity)

    def mark_unavailable(self, first: int, blocks: int) -> None:
        """These blocks were read but did not fit into the cache: other nodes need not wait for them."""
        self._unavailable.update(first + bit for bit in bits(blocks))

    def wait_for(self, start: int, length: int, level: Level) -> Iterator[None]:
        until_s = time.monotonic() + self._files.idle_limit_s
        while missing := self.cached.missing(start, length):
            if level is Level.HELD or not self._files.idle_limit_s:
                raise NotFoundError("this node does not have all of it")
            now_s = time.monotonic()
            if self.cached.is_claimed():  # a local process fetches some block
                until_s = now_s + self._files.idle_limit_s
            if now_s >= until_s or not self._unavailable.isdisjoint(missing):
                raise NotFoundError("this node does not read it any more")
            yield
            time.sleep(_POLL_S)

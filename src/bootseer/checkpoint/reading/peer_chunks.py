"""Chunks from other nodes of the job, so that the place is asked once for what several nodes read.

The chunks of one unit that are wanted together are looked up together: the unit's owner says which node has or reads
each of them, and from then on directs other nodes here for the chunks that this node was told to read itself
(`peers.readers`). A chunk that no other node needs costs one sixteenth of a lookup.

A peer that says that it is still waiting for the chunk is waited for, as long as anything arrives from it. One that is
silent, gone, or does not have the chunk is replaced by another peer, or by the place. So is one that is much slower
than the others and the place; if it is the only one known, one chunk is read elsewhere for comparison. So each read
ends whatever peers do, and falls back to the place with its full deadline. Chunks are compared with their digests as
usual; a peer that sends a wrong one is not asked again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import Struct

from bootseer.blocks.index import Index
from bootseer.checkpoint.reading.transfer import Counters
from bootseer.errors import BootseerError, NotFoundError, TransientError
from bootseer.io.executor import Executor
from bootseer.logs import logger
from bootseer.peers.choice import Level
from bootseer.peers.job import JobPeers
from bootseer.peers.origins import ANSWER_S, PeerGroup
from bootseer.peers.protocol import Question, Request
from bootseer.peers.readers import CHECKPOINT, UNIT_BLOCKS, bits

_LOG = logger(__name__)
_ASKING: Final = 4
_RECEIVING: Final = 16
_PER_PEER: Final = 2
_MAX_SOURCES: Final = 3
_STALL_S: Final = 20.0
"""A peer that promised chunks is given up after so long without any. Less than `stall_s` of a read."""


class PeerRead(Struct, eq=False):
    """One chunk that a peer may have."""

    block: int
    into: memoryview
    is_right: Callable[[memoryview], bool]
    is_stopped: Callable[[], bool]
    done: Callable[[bool], object]
    """Called once, from any thread, when no thread of this module writes into `into` any more, with whether the chunk
    was received. If not, it must be read from the place."""
    num_sources: int = 0


class PeerChunks:
    """Reads of chunks from the job's other nodes. For one process; safe to use from many threads."""

    def __init__(self, job: JobPeers, cache: Path, facts: Counters) -> None:
        """`cache`: root of the node's cache, from which the node's peer service serves what was read here."""
        self._group = PeerGroup(JobPeers(job.folder, job.secret))  # the given one's lock may be held at a fork
        self._job = self._group.job
        self._cache = cache
        self._facts = facts
        self.asking = Executor("bootseer-ask-peers", _ASKING)
        self._receiving: defaultdict[str, Executor] = defaultdict(partial(Executor, "bootseer-from-peer", _PER_PEER))
        """The threads that receive from each peer."""
        self._slots = threading.Semaphore(_RECEIVING)
        self._registered: set[str] = set()
        self._received_s: dict[str, float] = {}
        self.place_sent = self._group.store_sent
        """To be told of each chunk that was read from the place: peers are compared with that."""

    @property
    def position(self) -> float:
        """Where this node starts within long reads, as a fraction: nodes that read the same data start at different
        places, so that each reads another part of it first."""
        return self._job.members().turn

    def facts(self) -> dict[str, dict[str, float]]:
        """What each peer sent, as of `PeerGroup.stats`."""
        return self._group.stats()

    def close(self) -> None:
        self._group.close()

    def ask(self, unit: Unit, blocks: int, *, shareable: bool, without: str = "") -> dict[int, str]:
        """The peers to read chunks from; this node reads all others itself. Blocks for the answers."""
        group, members, file = self._group, self._job.members(), unit.index.identity
        if self._job.training or all(peer.name == members.own for peer in members.peers):
            return {}
        if shareable and file not in self._registered:
            try:
                self._job.register(file, CHECKPOINT, {"cache": str(self._cache)})
            except OSError as error:  # the job's start may be over, and its folder removed
                _LOG.debug("no peers are asked: %s", error)
                return {}
            self._registered.add(file)
        question = Question(file, unit.first, blocks, members.own or "-", shareable and bool(members.own), without)
        found = group.ask(question)
        return {block: name for name, mask in found.items() for block in bits(mask & blocks)}

    def not_kept(self, index: Index, block: int) -> None:
        """A chunk that was read here was not cached, so peers must not wait for it: tell this node's peer service."""
        members = self._job.members()
        own = next((peer for peer in members.peers if peer.name == members.own), None)
        if own is None or index.identity not in self._registered:
            return
        first = block // UNIT_BLOCKS * UNIT_BLOCKS
        question = Question(index.identity, first, 1 << (block - first), own.name, False, own.name)

        def tell() -> None:
            with contextlib.suppress(BootseerError):
                self._group.client.ask(own.addresses[0], question, ANSWER_S)

        with contextlib.suppress(TransientError):
            self.asking.submit(tell, urgent=False)

    def read_from(self, peer: str, unit: Unit, read: PeerRead) -> None:
        """Queue the read of a chunk from this peer."""
        with self._group.lock:
            threads = self._receiving[peer]
        try:
            threads.submit(partial(self._read, peer, unit, read))
        except TransientError:
            read.done(False)

    def _read(self, peer: str, unit: Unit, read: PeerRead) -> None:
        was_received = False
        try:
            with self._slots:
                was_received = self._receive(peer, unit, read)
        finally:
            if was_received:
                self._facts.add("peer_bytes", len(read.into))
                read.done(True)
            else:
                unit.failed(read, peer)

    def _receive(self, peer: str, unit: Unit, read: PeerRead) -> bool:
        """Returns whether the chunk was received and is right."""
        group, members, file = self._group, self._job.members(), unit.index.identity
        found = next((one for one in members.peers if one.name == peer and one.addresses), None)
        with group.lock:
            is_absent = peer in group.health.absent(time.monotonic())
        if found is None or is_absent or read.is_stopped() or group.must_compare(peer, len(read.into)):
            return False
        watch, sent, address = group.begin(found, len(read.into))

        def on_progress(num_bytes: int) -> float:
            if read.is_stopped():
                raise NotFoundError("cancelled")
            left_s, now_s = watch.progress(num_bytes), time.monotonic()
            still_s = max(watch.begun_s, self._received_s.get(peer, 0.0)) + _STALL_S - now_s
            if still_s <= 0:
                raise watch.late(now_s)
            return min(left_s, still_s)

        request = Request(file, read.block * unit.index.block_size, len(read.into), Level.GLOBAL)
        problem: BootseerError | None = None
        try:
            group.client.read(address, request, read.into, on_progress=on_progress)
        except BootseerError as error:
            problem = error
            _LOG.debug("chunk %d does not come from %s: %s", read.block, peer, error)
        is_gone = isinstance(problem, NotFoundError)  # evicted there: the file's other chunks may still be there
        group.ended(watch, sent, None if is_gone else problem, file)
        if problem is None and not read.is_right(read.into):
            self._facts.add("wrong_chunks")
            group.sent_wrong(peer, f"chunk {read.block} of {file[:12]}: wrong bytes")
            return False
        if problem is None:
            self._received_s[peer] = time.monotonic()
        return problem is None


class Unit:
    """Chunks of one unit of a segment that are wanted together. The first one that is read looks up all of them."""

    def __init__(self, peers: PeerChunks, index: Index, first: int) -> None:
        """`first`: block of the index, a multiple of `UNIT_BLOCKS`."""
        self.index = index
        self.first = first
        self.peers = peers
        self._blocks = 0
        self._lock = threading.Lock()
        self._shareable: bool | None = None
        self._sources: Future[dict[int, str]] = Future()

    def add(self, block: int) -> None:
        """Add a wanted chunk, before any of them is read."""
        self._blocks |= 1 << (block - self.first)

    def read(self, read: PeerRead, *, shareable: bool) -> None:
        """Read a chunk from a peer, or have it read from the place: see `PeerRead.done`. `shareable`: whether this node
        will be able to serve what it reads."""
        with self._lock:
            is_first = self._shareable is None
            if is_first:
                self._shareable = shareable
        if is_first:
            try:
                self.peers.asking.submit(partial(self._ask, shareable))
            except TransientError:
                self._sources.set_result({})
        self._sources.add_done_callback(lambda sources: self._go_on(read, sources.result()))

    def failed(self, read: PeerRead, peer: str) -> None:
        """A peer did not deliver this chunk. Blocks for the answers of the next lookup."""
        read.num_sources += 1
        sources: dict[int, str] = {}
        if read.num_sources < _MAX_SOURCES and not read.is_stopped():
            blocks = 1 << (read.block - self.first)
            sources = self.peers.ask(self, blocks, shareable=bool(self._shareable), without=peer)
        self._go_on(read, {block: source for block, source in sources.items() if source != peer})

    def _ask(self, shareable: bool) -> None:
        sources: dict[int, str] = {}
        answered: Future[dict[int, str]] = Future()
        try:
            sources = self.peers.ask(self, self._blocks, shareable=shareable)
        finally:
            answered.set_result(sources)
            # The first one is not kept: it still refers to its callbacks, and these to this unit and chunks in memory.
            asked, self._sources = self._sources, answered
            asked.set_result(sources)

    def _go_on(self, read: PeerRead, sources: dict[int, str]) -> None:
        source = sources.get(read.block - self.first)
        if source is None:
            read.done(False)
        else:
            self.peers.read_from(source, self, read)

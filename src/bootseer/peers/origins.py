"""The other nodes of a job as origins of the block files that this process reads.

`choice` knows which node owns a block, `fetch.scheduler` which one is asked and when, `health` which are late. This
module transfers the blocks over `client`, reports outcomes to `health`, and counts what each node sent.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Final

from bootseer.blocks.codec import Buffer
from bootseer.blocks.index import Index
from bootseer.errors import BootseerError, CorruptError, TransientError
from bootseer.logs import logger
from bootseer.peers.choice import RUN_BYTES, Level, Peer, Route, Step
from bootseer.peers.client import Client, Watch
from bootseer.peers.health import Health
from bootseer.peers.job import JobPeers
from bootseer.peers.protocol import MAX_RANGE, Question, Request
from bootseer.peers.readers import UNIT_BLOCKS

_LOG = logger(__name__)
_MIN_RUN_BYTES: Final = 1 << 20
_RUNS: Final = 1024
_ROUTES_S: Final = 0.1
"""How long routes are cached: changes of members and `ahead` are noticed within half a second anyway."""
_TRIES: Final = 4
ANSWER_S: Final = 1.0
"""Questions are answered from memory."""
_RANDOM: Final = random.SystemRandom()


@dataclass(slots=True)
class Sent:
    """What one node sent to this process."""

    bytes: int = 0
    requests: int = 0
    late: int = 0
    """Requests given up as late, or broken off."""
    seconds: float = 0.0
    """Total duration of the requests, including waiting for the store."""
    wrong: int = 0
    """Blocks with a wrong digest: the node is excluded."""


class PeerGroup:
    """The job's other nodes, as seen by one process. Safe for many threads."""

    def __init__(self, job: JobPeers) -> None:
        self.job = job
        self.lock = threading.Lock()
        self.client = Client(job.secret, job.pace, tls=job.tls)
        self.health = Health()
        self.sent: dict[str, Sent] = {}

    @classmethod
    def of_environment(cls, on_problem: Callable[[str], None]) -> PeerGroup | None:
        """For the job that this process belongs to; None without peers, or if they cannot be used."""
        try:
            job = JobPeers.of_environment()
        except BootseerError as error:
            on_problem(f"without peers: {error}")
            return None
        return None if job is None else cls(job)

    def file(self, index: Index, store: str, plain_http: bool, cache: Path) -> FilePeers:
        """A file whose blocks the nodes have; also registers it to be served by this node (`register_blocks`)."""
        try:
            self.job.register_blocks(index.identity, store, plain_http, cache)
        except OSError as error:
            _LOG.warning("this node does not serve %s: %s", index.identity[:16], error)
        return FilePeers(self, index)

    def begin(self, peer: Peer, length: int) -> tuple[Watch, Sent, str]:
        """A request begins: who watches it, what counts it, and its address. Concurrent requests are spread over the
        peer's interfaces."""
        with self.lock:
            watch = Watch(self.health, self.lock, peer.name, length)
            sent = self.sent.setdefault(peer.name, Sent())
            sent.requests += 1
        return watch, sent, peer.addresses[sent.requests % len(peer.addresses)]

    def must_compare(self, peer: str, length: int) -> bool:
        """As of `Health`."""
        with self.lock:
            return self.health.must_compare(peer, length)

    def store_sent(self, num_bytes: int, seconds: float) -> None:
        """The store has sent this to one request: peers are compared with it."""
        with self.lock:
            self.health.store_sent(num_bytes, seconds)

    def ended(self, watch: Watch, sent: Sent, problem: BootseerError | None, file: str) -> None:
        is_late = watch.ended(problem, file)
        with self.lock:
            sent.bytes += watch.num_bytes
            sent.late += is_late
            sent.wrong += isinstance(problem, CorruptError)
            sent.seconds += time.monotonic() - watch.begun_s

    def ask(self, question: Question) -> dict[str, int]:
        """The nodes to get blocks of a unit from, by name, and the blocks as bits, as its owner says; empty if none
        answers. Blocks for the answer."""
        silent: frozenset[str] = frozenset()
        for _ in range(_TRIES):
            with self.lock:
                absent = self.health.absent(time.monotonic()) | silent
            owner = self.job.members().owner(question.file, question.first // UNIT_BLOCKS, absent)
            if owner is None:
                break
            with self.lock:
                watch = Watch(self.health, self.lock, owner.name, 0)
            problem: BootseerError | None = None
            try:
                return self.client.ask(owner.addresses[0], question, ANSWER_S).readers
            except BootseerError as error:
                problem = error
                _LOG.debug("%s does not say which nodes have blocks: %s", owner.name, error)
            finally:
                watch.ended(problem, question.file)
            if isinstance(problem, TransientError) and problem.retry_after_s is not None:  # all nodes ask at once
                time.sleep(_RANDOM.uniform(0, problem.retry_after_s))
            else:
                silent |= {owner.name}
        return {}

    def sent_wrong(self, peer: str, problem: str) -> None:
        """What a peer has sent does not have its digest."""
        with self.lock:
            self.sent.setdefault(peer, Sent()).wrong += 1
            self.health.sent_wrong(peer)
        _LOG.warning("%s is no longer used: %s", peer, problem)

    def stats(self) -> dict[str, dict[str, float]]:
        """What each node sent, by name: the fields of `Sent`."""
        with self.lock:
            return {name: asdict(sent) | {"seconds": round(sent.seconds, 3)} for name, sent in self.sent.items()}

    def close(self) -> None:
        self.client.close()


class FilePeers:
    """The nodes as origins of one file: `fetch.block_request.Peers`."""

    def __init__(self, group: PeerGroup, index: Index, asked: Level | None = None) -> None:
        """`asked`: as of `Members.route`."""
        self._group = group
        self.store_sent = group.store_sent
        self._asked = asked
        self._identity = index.identity
        self.run_blocks = max(run_bytes(index.size_bytes) // index.block_size, 1)
        self._routes: dict[int, Route] = {}
        """Cached per run: hundreds of blocks are looked up whenever a request ends."""
        self._absent: frozenset[str] = frozenset()
        self._routes_until_s = float("-inf")

    @property
    def turn(self) -> float:
        return self._group.job.members().turn

    def route(self, block: int, now: float) -> Route:
        run, group = block // self.run_blocks, self._group
        with group.lock:
            absent = group.health.absent(now, self._identity)
        if absent is not self._absent or now >= self._routes_until_s:
            self._routes, self._absent, self._routes_until_s = {}, absent, now + _ROUTES_S
        if run not in self._routes:
            members, ahead = group.job.members(), group.job.ahead(self._identity)
            self._routes[run] = members.route(self._identity, run, absent, ahead, self._asked)
        return self._routes[run]

    def at(self, step: Step) -> PeerOrigin:
        return PeerOrigin(self._group, step)

    def sent_wrong(self, step: Step, error: CorruptError) -> None:
        self._group.sent_wrong(step.peer.name, str(error))


def run_bytes(file_bytes: int) -> int:
    """The size of a run: a file has some hundred runs, so that owners share the work also for small files."""
    return min(max(1 << (file_bytes // _RUNS - 1).bit_length(), _MIN_RUN_BYTES), RUN_BYTES)


@dataclass(frozen=True, slots=True)
class PeerOrigin:
    """One node: `fetch.block_request.Origin`."""

    sends_plain: ClassVar[bool] = True
    group: PeerGroup
    step: Step

    @property
    def uri(self) -> str:
        return f"peer {self.step.peer.name}"

    def read(self, index: Index, blocks: range, timeout_s: float) -> Generator[tuple[int, Buffer], None, None]:
        """`timeout_s` is unused: an owner reports that it waits for the store, and when it gives up; silence and low
        rates have their own limits. Raises only `TransientError`: another node may serve what this one refuses."""
        # A range is sent or refused as a whole, and at level HELD only some of its blocks may be present.
        max_blocks = 1 if self.step.level is Level.HELD else max(MAX_RANGE // index.block_size, 1)
        for first in range(0, len(blocks), max_blocks):
            yield from self._request(index, blocks[first : first + max_blocks])

    def _request(self, index: Index, blocks: range) -> Generator[tuple[int, Buffer], None, None]:
        start = blocks[0] * index.block_size
        length = min((blocks[-1] + 1) * index.block_size, index.size_bytes) - start
        group = self.group
        if group.must_compare(self.step.peer.name, length):
            raise TransientError(f"{self.uri}: read elsewhere, for comparison")
        request = Request(index.identity, start, length, self.step.level, group.job.members().own)
        watch, sent, address = group.begin(self.step.peer, length)
        parts = (memoryview(bytearray(index.length(block))) for block in blocks)
        numbers = iter(blocks)
        problem: BootseerError | None = None
        try:
            with contextlib.closing(group.client.stream(address, request, parts, on_progress=watch.progress)) as answer:
                for part in answer:
                    yield next(numbers), part
        except BootseerError as error:
            problem = error
            if isinstance(error, TransientError) and error.retry_after_s is not None:
                raise
            raise TransientError(f"{self.uri}: {error}") from error
        finally:
            group.ended(watch, sent, problem, index.identity)

"""The peer service of one job on one node: serves what the job reads here to its other nodes, and tracks these.

One process, which `bootseer run` starts before anything is mounted and which ends with it. It shares a folder (`job`)
with the local processes of the job: they register the files that they read, it publishes the job's nodes.

It serves from the node's cache. Missing blocks are fetched from the store into the same cache; claims keep the service
and local readers from fetching a block twice.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from bootseer.blocks.index import is_identity
from bootseer.cache.cache import Cache
from bootseer.cache.cached_file import CachedFile
from bootseer.errors import BootseerError, NotFoundError, TransientError
from bootseer.fetch.fetch_settings import WITHOUT_READ_AHEAD
from bootseer.fetch.fetcher import Fetcher
from bootseer.logs import logger
from bootseer.peers.choice import Level
from bootseer.peers.client import Client
from bootseer.peers.interfaces import name_of
from bootseer.peers.job import BLOCKS, JobPeers
from bootseer.peers.members import Membership, Source
from bootseer.peers.names import HostsFile
from bootseer.peers.origins import ANSWER_S, FilePeers, PeerGroup
from bootseer.peers.protocol import Question
from bootseer.peers.readers import CHECKPOINT, CachedBlocks, CachedFiles
from bootseer.peers.readiness import READY, StartReport
from bootseer.peers.server import FILLING_EVERY_S, Content, Server
from bootseer.peers.shared_objects import OBJECT, open_object
from bootseer.store.open import open_store
from bootseer.store.store import Store

_LOG = logger(__name__)
_LOOK_EVERY_S: Final = 0.25
_STATE_EVERY_S: Final = 1.0
_TRAINING_SHARE: Final = 0.05
_RANDOM: Final = random.SystemRandom()
_HOLDERS: Final = 8
"""How many nodes are asked whether they have a file from an earlier job."""
_FULL_S: Final = 5.0
"""A node without disk space fetches nothing for others for this long: it would have to fetch each block repeatedly."""
_READINESS_S, _READINESS_PER_NODE_S = 0.2, 0.001
_READY_SELDOM: Final = 10
"""A ready node reports less often, but not never: another node may become the collector and need its report."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Upload limits in bytes per second; None: unlimited."""

    before: int | None = 1 << 30
    """Until training begins."""
    after: int | None = None
    """Afterwards; None: a twentieth of the links' speed, or `before` if that is less; 0: nothing is served."""


class BlockFiles:
    """Opens block files of images and environments: kind `blocks`."""

    def __init__(self) -> None:
        self._fetcher = Fetcher(WITHOUT_READ_AHEAD, on_problem=lambda problem: _LOG.warning("%s", problem))
        self._stores: dict[tuple[str, bool], Store] = {}
        self._cached: list[CachedFile] = []
        self._group: PeerGroup | None = None

    def open(self, job: JobPeers, identity: str) -> Content | None:
        match job.registered(identity):
            case {"store": str(uri), "plain_http": bool(plain_http), "cache": str(root)}:
                pass
            case _:
                return None
        if (uri, plain_http) not in self._stores:
            self._stores[uri, plain_http] = open_store(uri, plain_http=plain_http, mirrored=True)
        cached = Cache(Path(root)).open_existing(identity)
        cached.is_use = True  # by this job's other nodes
        self._cached.append(cached)
        group = self._group = self._group or PeerGroup(job)
        add = partial(self._fetcher.add, cached.index, self._stores[uri, plain_http], cached)
        levels = (Level.GLOBAL, Level.RACK)
        numbers = {level: add(peers=FilePeers(group, cached.index, level)) for level in levels}
        return _BlockFile(cached, self._fetcher, numbers)

    def figures(self) -> dict[str, object]:
        """What was fetched from stores for other nodes."""
        stats = self._fetcher.stats()
        return {"filled_bytes": sum(stats.bytes_by_purpose.values()) - stats.peer_bytes}

    def close(self) -> None:
        self._fetcher.close(1.0)
        if self._group is not None:
            self._group.close()
        for cached in self._cached:
            cached.close()
        for store in self._stores.values():
            store.close()


class _BlockFile(CachedBlocks):
    def __init__(self, cached: CachedFile, fetcher: Fetcher, numbers: Mapping[Level, int]) -> None:
        self.size_bytes = cached.index.size_bytes
        self._cached = cached
        self._fetcher = fetcher
        self._numbers = numbers
        self._full_until_s = float("-inf")

    @property
    def cached(self) -> CachedFile:
        return self._cached

    def sample(self) -> tuple[int, int]:
        """A sample of the missing blocks, as first block and bits; empty if few are missing."""
        index = self._cached.index
        first = _RANDOM.randrange(max(index.num_blocks - 31, 1))
        blocks = range(first, min(first + 32, index.num_blocks))
        missing = sum(1 << (n - first) for n in blocks if index.place(n).length and not self._cached.ready(n))
        return first, missing

    def wait_for(self, start: int, length: int, level: Level) -> Iterator[None]:
        if not self._cached.missing(start, length):
            return
        if level not in self._numbers:
            raise TransientError("it is not here")
        if time.monotonic() < self._full_until_s:
            raise NotFoundError("there is no room for it")
        answer: Future[object] = Future()
        self._fetcher.read(self._numbers[level], start, length, answer.set_result)
        yield
        while not wait([answer], FILLING_EVERY_S).done:
            yield
        if isinstance(problem := answer.result(), BootseerError):
            raise problem
        if self._cached.missing(start, length):
            self._full_until_s = time.monotonic() + _FULL_S
            raise NotFoundError("it does not fit into the cache of this node")


class Service:
    """What one node does for its job's other nodes. `run` belongs to the process's main thread."""

    def __init__(
        self,
        folder: Path,
        source: Source,
        limits: Limits,
        *,
        tls: bool = False,
        name: str = "",
    ) -> None:
        """`tls`: whether connections between nodes are encrypted. `name`: the name of a node that serves nothing in
        reports of readiness; empty: none are made."""
        self._source = source
        self._limits = limits
        self._began_s = time.time()
        self._secret = source.secret()
        self._client = Client(self._secret, tls=tls)
        self._blocks = BlockFiles()
        self._chunks = CachedFiles()
        self._openers = {BLOCKS: self._blocks.open, CHECKPOINT: self._chunks.open, OBJECT: open_object}
        """By kind of file: each returns its content, or None if its record is damaged. Raises `BootseerError`."""
        self._contents: dict[str, Content] = {}
        self._opening = threading.Lock()
        self._server: Server | None = None
        self._membership = Membership(source, self._client.probe)
        self._seen: set[str] = set()
        """Names of all nodes that have served so far."""
        self._rate = limits.before
        """Bytes per second that this node may send, and each of its processes receive."""
        self._training = False
        self._is_written = False
        """Whether the published list of members is up to date."""
        self._stopped = threading.Event()
        self._name = name
        self._written: dict[str, Any] = {}
        self._job = JobPeers.create(folder, self._secret, tls=tls)
        self._hosts = HostsFile(folder)
        with contextlib.suppress(NotFoundError):  # a headless service has no address before a pod runs
            self._serve()
        self._write_members()

    def run(self, ready: Callable[[], None], *, wait_for: int = 0, wait_s: float = 0.0) -> None:
        """Serve until a signal handler raises. `ready` is called once, when `wait_for` nodes are known, including this
        one, or `wait_s` have passed."""
        until = time.monotonic() + wait_s
        threading.Thread(target=self._follow_members, name="bootseer-members", daemon=True).start()
        if self._name:
            threading.Thread(target=self._report_readiness, name="bootseer-readiness", daemon=True).start()
        is_ready, state_at = False, 0.0
        opened: set[str] = set()
        while True:
            now = time.monotonic()
            # Opened in advance: that takes up to a second on busy processors, during which peers would get no answer.
            for identity in self._job.identities() - opened:
                content = self._find(identity)
                with contextlib.suppress(RuntimeError):  # no thread can be started now: the next look tries again
                    if isinstance(content, _BlockFile):
                        ask = partial(self._ask_holders, identity, content)
                        threading.Thread(target=ask, name="bootseer-holders", daemon=True).start()
                    opened.add(identity)
            if not is_ready and (len(self._membership.peers) >= wait_for or now >= until):
                is_ready = True
                ready()
            if not self._training and self._job.training:
                self._training_began()
            if now >= state_at:
                state_at = now + _STATE_EVERY_S
                with contextlib.suppress(OSError):  # the disk may be full temporarily
                    self._write_state()
            time.sleep(_LOOK_EVERY_S if is_ready else 0.02)

    def close(self) -> None:
        """Leave the job's other nodes, and write the final statistics."""
        self._stopped.set()
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(BootseerError):
            self._source.leave()
        self._client.close()
        with contextlib.suppress(OSError):  # the folder may be gone
            self._write_state()
        self._blocks.close()
        self._chunks.release_all()

    def state_for_agent(self) -> dict[str, Any] | None:
        """What the node's agent needs to continue serving; None if nothing is to be served after training began."""
        own, rate = self._source.own, self._default_after if self._limits.after is None else self._limits.after
        known = {identity: self._job.registered(identity) for identity in self._job.identities()}
        files = {
            identity: document["cache"] for identity, document in known.items() if document and "cache" in document
        }
        if own is None or not rate or not files:
            return None
        document = {"name": own.name, "addresses": own.addresses, "rate": rate, "files": files}
        return {"secret": self._secret.hex(), "tls": self._job.tls, **document}

    def _serve(self) -> None:
        """Start to serve, unless this node does not serve (yet)."""
        listening = self._source.listen()
        if listening:
            own = self._source.own
            self._server = Server(
                listening,
                self._secret,
                self._find,
                name=own.name if own else "",
                max_rate=self._limits.before,
                on_unknown=self._job.note_ahead,
                tls=self._job.tls,
            )

    def _follow_members(self) -> None:
        while not self._stopped.is_set():
            try:
                if self._server is None and not self._training:
                    self._serve()
                if self._membership.refresh() or not self._is_written:
                    self._write_members()
            except BootseerError as error:
                _LOG.warning("cannot list the job's nodes: %s", error)
            except OSError as error:
                _LOG.warning("%s: %s", self._job.folder, error)
            self._stopped.wait(self._membership.pause_s())

    def _report_readiness(self) -> None:
        """Report this node's stage to the collector, and the readiness of all nodes to the launcher."""
        while not self._stopped.is_set() and not self._training:
            first, own, stage = next(iter(self._membership.peers), None), self._source.own, self._job.stage
            report = StartReport(own.name if own else self._name, stage)
            listed = self._membership.listed
            pause_s = max(_READINESS_S, len(listed) * _READINESS_PER_NODE_S)
            try:
                if first is not None:
                    if own is not None and first.name == own.name and self._server is not None:
                        # Not over the network: the interface of its first address may be down.
                        self._server.listed = listed
                        readiness = self._server.answer_readiness(report)
                    else:
                        readiness = self._client.ask(first.addresses[0], report, ANSWER_S).readiness
                    self._job.write_readiness(replace(readiness, nodes=len(listed)))
                    if not readiness.others and stage == READY:
                        pause_s *= _READY_SELDOM
            except (BootseerError, OSError) as error:
                _LOG.info("the readiness of the job's nodes is unknown: %s", error)
            self._stopped.wait(pause_s)

    def _ask_holders(self, identity: str, content: _BlockFile) -> None:
        """Find nodes that have most of a file from an earlier job."""
        own, (first, sample) = self._source.own, content.sample()
        if own is None or not sample:
            return
        others = [peer for peer in self._membership.peers if peer.name != own.name]
        for peer in _RANDOM.sample(others, min(_HOLDERS, len(others))):
            question = Question(identity, first, sample, own.name, keeps=False)
            with contextlib.suppress(BootseerError):
                found = self._client.ask(peer.addresses[0], question, ANSWER_S).readers
                if 2 * found.get(peer.name, 0).bit_count() >= sample.bit_count():
                    self._job.note_ahead(identity, peer.name)

    def _find(self, identity: str) -> Content | None:
        content = self._contents.get(identity)
        if content is not None or not is_identity(identity):
            return content
        with self._opening:
            if identity not in self._contents and (opened := self._opened(identity)) is not None:
                self._contents[identity] = opened
            return self._contents.get(identity)

    def _opened(self, identity: str) -> Content | None:
        described = self._job.registered(identity)
        opener = self._openers.get(described["kind"]) if described is not None else None
        try:
            return opener(self._job, identity) if opener is not None else None
        except (BootseerError, OSError) as error:
            _warn_once(f"{identity} is not served: {error}")
            return None

    @property
    def _default_after(self) -> int:
        share = int(self._source.link_bytes_s * _TRAINING_SHARE)
        return share if self._limits.before is None else min(share, self._limits.before)

    def _training_began(self) -> None:
        self._training = True
        # If uploads are off, the default limits the downloads of this node's processes.
        self._rate = self._limits.after or self._default_after
        _LOG.info("training began: at most %d bytes/s from now on", self._rate)
        with contextlib.suppress(OSError):
            self._write_members()
        if self._server is not None and self._limits.after != 0:
            self._server.limit(self._rate)
        elif self._server is not None:
            self._server.close()
            with contextlib.suppress(BootseerError):
                self._source.leave()
        self._chunks.release_all()  # their readers have what they need; the cache may evict them

    def _write_members(self) -> None:
        own = self._source.own
        self._is_written = False
        self._seen.update(peer.name for peer in self._membership.peers)
        self._job.write_members(own.name if own else "", self._membership.peers, self._rate)
        self._hosts.add(self._membership.peers)  # last: it may look up many names
        self._is_written = True

    def _write_state(self) -> None:
        own, served = self._source.own, self._server.served if self._server is not None else None
        by_interface: dict[str, int] = {}
        for address, count in list(served.by_interface.items()) if served else ():
            name = name_of(address)
            by_interface[name] = by_interface.get(name, 0) + count
        state: dict[str, Any] = {
            "pid": os.getpid(),
            "began_s": self._began_s,
            "name": own.name if own else "",
            "addresses": own.addresses if own else (),
            "peers": sorted(self._seen),
            # Not those that only ended earlier: of the others the report says that ports may be closed.
            "unreachable": [name for name in self._membership.unreachable if name not in self._seen],
            "training": self._training,
            "sent_bytes": served.bytes_sent if served else 0,
            "requests": served.requests if served else 0,
            "refused": served.refused if served else 0,
            "by_interface": by_interface,
            **self._blocks.figures(),
        }
        if state != self._written:
            self._written = state
            self._job.write_state(state)


@lru_cache
def _warn_once(problem: str) -> None:
    """Each request of a peer tries again to open the file."""
    _LOG.warning("%s", problem)

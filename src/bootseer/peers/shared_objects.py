"""Objects of stores that all nodes of a job read whole: indexes of block files, process snapshots.

A node needs an index before it knows any block of its file, so an index itself cannot be transferred in blocks. It is
named by its content, and that name is in the (signed) document: the first node that asks reads it from the store, the
others get it from a node that asked before (`readers`), which sends it once it is complete, and verify its name. If
that node fails, the store is asked.

A large object passes through up to 26 nodes (of 1,000). If each waited until the one before has all of it, the last one
would have it after the time of 55 transfers. So it may be sent while it arrives, each part once it is verified: then it
takes that of 11 (simulated, see ADR 33).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bootseer.errors import BootseerError, NotFoundError, TransientError
from bootseer.logs import logger
from bootseer.peers.choice import Level, Peer
from bootseer.peers.client import Client
from bootseer.peers.job import JobPeers
from bootseer.peers.origins import PeerGroup
from bootseer.peers.protocol import MAX_RANGE, Question, Request

_LOG = logger(__name__)
OBJECT: Final = "object"
"""The kind of whole objects: served once the file exists."""
_SILENT_S: Final = 2.0
_WAIT_S: Final = 60.0
_COPY_S: Final = 30.0
"""For a large object. If other nodes have not sent all of it by then, enough time is left for the store."""
_NODES: Final = 3
"""So many nodes are asked for a large object."""
_POLL_S: Final = 0.02
_RANDOM: Final = random.SystemRandom()


@dataclass(slots=True)
class OfferedObject:
    """An object that this node has or is about to get, offered to the job's other nodes.

    As `server.Content` it has one block, ready once the file is complete. Nothing is fetched for other nodes.
    """

    job: JobPeers
    digest: str
    size_bytes: int
    path: Path
    growing: Path | None = None
    """The file until it is complete. All bytes in it are verified, and are sent."""

    @classmethod
    def of_environment(
        cls, name: str, size_bytes: int, path: Path, growing: Path | None = None
    ) -> OfferedObject | None:
        """For this process's job; None without peers. `name`: by content; `path`: its file, once it exists."""
        try:
            job = JobPeers.of_environment()
            if job is None or job.training:
                return None
            offered = cls(job, name.removeprefix("sha256:"), size_bytes, path, growing)
            fields = {"path": str(path), "size_bytes": size_bytes, "growing": str(growing or "")}
            job.register(offered.digest, OBJECT, fields)
        except (BootseerError, OSError) as error:
            _LOG.debug("%s is not shared: %s", name, error)
            return None
        return offered

    def withdraw(self) -> None:
        """It will not arrive: nodes that wait for it here must ask others."""
        self.job.unregister(self.digest)

    @property
    def num_ready(self) -> int:
        return int(self._num_bytes >= self.size_bytes)

    @property
    def _num_bytes(self) -> int:
        """How many bytes can be sent."""
        if self.growing is not None:
            with contextlib.suppress(OSError):
                return self.growing.stat().st_size
        with contextlib.suppress(OSError):
            if self.path.stat().st_size == self.size_bytes:  # else it was replaced by another one
                return self.size_bytes
        return 0

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(self.growing or self.path, flags)
        except FileNotFoundError:  # it has got its name
            fd = os.open(self.path, flags)
        try:
            yield fd
        finally:
            os.close(fd)

    def here(self, first: int, blocks: int) -> int:
        return self.num_ready & blocks

    def wait_for(self, start: int, length: int, level: Level) -> Iterator[None]:
        until_s = time.monotonic() + _WAIT_S
        while self._num_bytes < start + length:
            if time.monotonic() > until_s or self.job.registered(self.digest) is None:
                raise NotFoundError("this node did not get it")
            yield
            time.sleep(_POLL_S)

    def get(self, on_wrong: Callable[[str], None]) -> bytes | None:
        """Its bytes from another node, within little more than `_WAIT_S`; None if this node must read it from its
        store. `on_wrong` is called with a message when a node sent wrong bytes."""
        until_s = time.monotonic() + _WAIT_S
        with contextlib.closing(PeerGroup(self.job)) as group:
            peer = self._ask(group)
            if peer is None:
                return None
            try:
                data = b"".join(self._read(group.client, peer, 0, until_s))
            except BootseerError as error:
                _LOG.info("%s does not come from %s: %s", self.digest[:16], peer.name, error)
                return None
        if hashlib.sha256(data).hexdigest() == self.digest:
            return data
        on_wrong(f"{peer.name} sent wrong bytes of {self.digest[:16]}")
        return None

    def copy(self, start: int, keep: Callable[[memoryview], bool], on_wrong: Callable[[str], None]) -> None:
        """Pass what other nodes send from `start` on to `keep`, in parts of `MAX_RANGE`, until all of it has come,
        within little more than `_COPY_S`. The rest must be read from the store.

        `keep` returns whether a part is right. If not, `on_wrong` gets a message.
        """
        until_s, without = time.monotonic() + _COPY_S, ""
        with contextlib.closing(PeerGroup(self.job)) as group:
            for _ in range(_NODES):
                peer = self._ask(group, without) if start < self.size_bytes else None
                if peer is None:
                    return
                without = peer.name
                try:
                    for part in self._read(group.client, peer, start, until_s):
                        if not keep(part):
                            on_wrong(f"{peer.name} sent wrong bytes of {self.digest[:16]}")
                            break
                        start += len(part)
                except BootseerError as error:
                    _LOG.info("%s does not come from %s: %s", self.digest[:16], peer.name, error)

    def _ask(self, group: PeerGroup, without: str = "") -> Peer | None:
        """A node that reads or has it, other than `without`."""
        members = self.job.members()
        if all(peer.name == members.own for peer in members.peers):
            return None
        name = next(iter(group.ask(Question(self.digest, 0, 1, members.own or "-", bool(members.own), without))), "")
        return next((peer for peer in members.peers if peer.name == name), None)

    def _read(self, client: Client, peer: Peer, start: int, until_s: float) -> Iterator[memoryview]:
        def on_progress(num_bytes: int) -> float:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TransientError("not in time")
            return min(left_s, _SILENT_S)

        for at in range(start, self.size_bytes, MAX_RANGE):
            part = memoryview(bytearray(min(MAX_RANGE, self.size_bytes - at)))
            request = Request(self.digest, at, len(part), Level.GLOBAL)
            client.read(_RANDOM.choice(peer.addresses), request, part, on_progress=on_progress)
            yield part


def open_object(job: JobPeers, identity: str) -> OfferedObject | None:
    """The content of an object registered as `OBJECT`."""
    match job.registered(identity):
        case {"path": str(path), "size_bytes": int(size_bytes), "growing": str(growing)} if size_bytes >= 0:
            return OfferedObject(job, identity, size_bytes, Path(path), Path(growing) if growing else None)
    return None

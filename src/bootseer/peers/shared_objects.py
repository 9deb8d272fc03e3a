"""Small objects of stores that all nodes of a job read whole, such as indexes of block files.

A node needs an index before it knows any block of its file, so an index itself cannot be transferred in blocks. It is
named by its content, and that name is in the (signed) document: the first node that asks reads it from the store, the
others get it from a node that asked before (`readers`), which sends it once it is complete, and verify its name. If
that node fails, the store is asked.
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
from bootseer.peers.choice import Level
from bootseer.peers.client import Client
from bootseer.peers.job import JobPeers
from bootseer.peers.origins import PeerGroup
from bootseer.peers.protocol import MAX_RANGE, Question, Request

_LOG = logger(__name__)
OBJECT: Final = "object"
"""The kind of whole objects: served once the file exists."""
_SILENT_S: Final = 2.0
_WAIT_S: Final = 60.0
_POLL_S: Final = 0.02
_RANDOM: Final = random.SystemRandom()


@dataclass(slots=True)
class OfferedObject:
    """An object that this node has or is about to get, offered to the job's other nodes.

    As `server.Content` it has one block, ready once the file exists. Nothing is fetched for other nodes.
    """

    job: JobPeers
    digest: str
    size_bytes: int
    path: Path

    @classmethod
    def of_environment(cls, name: str, size_bytes: int, path: Path) -> OfferedObject | None:
        """For this process's job; None without peers. `name`: by content; `path`: its file, once it exists."""
        try:
            job = JobPeers.of_environment()
            if job is None or job.training:
                return None
            offered = cls(job, name.removeprefix("sha256:"), size_bytes, path)
            job.register(offered.digest, OBJECT, {"path": str(path), "size_bytes": size_bytes})
        except (BootseerError, OSError) as error:
            _LOG.debug("%s is not shared: %s", name, error)
            return None
        return offered

    def withdraw(self) -> None:
        """It will not arrive: nodes that wait for it here must ask others."""
        self.job.unregister(self.digest)

    @property
    def num_ready(self) -> int:
        return int(self.path.exists())

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            yield fd
        finally:
            os.close(fd)

    def here(self, first: int, blocks: int) -> int:
        return self.num_ready & blocks

    def wait_for(self, start: int, length: int, level: Level) -> Iterator[None]:
        until_s = time.monotonic() + _WAIT_S
        while not self.num_ready:
            if time.monotonic() > until_s or self.job.registered(self.digest) is None:
                raise NotFoundError("this node did not get it")
            yield
            time.sleep(_POLL_S)

    def get(self, on_wrong: Callable[[str], None]) -> bytes | None:
        """Its bytes from another node, within little more than `_WAIT_S`; None if this node must read it from its
        store. `on_wrong` is called with a message when a node sent wrong bytes."""
        members, until_s = self.job.members(), time.monotonic() + _WAIT_S
        if all(peer.name == members.own for peer in members.peers):
            return None
        with contextlib.closing(PeerGroup(self.job)) as group:
            question = Question(self.digest, 0, 1, members.own or "-", bool(members.own))
            name = next(iter(group.ask(question)), "")  # of a node that reads or has it
            peer = next((peer for peer in members.peers if peer.name == name), None)
            if peer is None:
                return None
            try:
                data = self._read(group.client, _RANDOM.choice(peer.addresses), until_s)
            except BootseerError as error:
                _LOG.info("%s does not come from %s: %s", self.digest[:16], name, error)
                return None
        if hashlib.sha256(data).hexdigest() == self.digest:
            return data
        on_wrong(f"{name} sent wrong bytes of {self.digest[:16]}")
        return None

    def _read(self, client: Client, address: str, until_s: float) -> bytes:
        def on_progress(num_bytes: int) -> float:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TransientError(f"not in {_WAIT_S:g} s")
            return min(left_s, _SILENT_S)

        data = bytearray(self.size_bytes)
        for start in range(0, self.size_bytes, MAX_RANGE):
            part = memoryview(data)[start : start + MAX_RANGE]
            client.read(address, Request(self.digest, start, len(part), Level.GLOBAL), part, on_progress=on_progress)
        return bytes(data)


def open_object(job: JobPeers, identity: str) -> OfferedObject | None:
    """The content of an object registered as `OBJECT`."""
    match job.registered(identity):
        case {"path": str(path), "size_bytes": int(size_bytes)} if size_bytes >= 0:
            return OfferedObject(job, identity, size_bytes, Path(path))
    return None

"""Which of a job's nodes owns a run of blocks, and in which order a node asks the others for it.

Rendezvous hashing (Thaler and Ravishankar, 1998): the owner of a run is the node with the highest hash of (node, run).
All nodes with the same list agree without a message, and a node that comes or goes moves only its own runs. Where racks
are known there are two levels: a node asks the owner within its own rack, and the racks' owners ask one global owner,
so that a run crosses the network once per rack rather than once per node.

An owner never forwards a request of another owner (`Level` says what it may do), so that two nodes whose lists differ
cannot wait for each other: a wrong list costs another read of the origin, never a wait. One that begins a file later
than others asks these before the origin: they have had to do without it. Decides and touches nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b, sha256
from heapq import nlargest
from math import log
from typing import Final, NamedTuple

RUN_BYTES: Final = 4 << 20
"""Blocks are owned in runs of at most this size: to rank 1,440 nodes for each block of 28 GB would take minutes."""
RACK: Final = re.compile(r"[A-Za-z0-9_.:/-]{0,255}")
"""What a rack may be called."""
_MIN_RACK: Final = 8
"""A rack with fewer of the job's nodes is not worth a level of its own."""
_RANKED: Final = 2


class Level(StrEnum):
    """What the receiver of a request may do for a block that it does not have."""

    RACK = "rack"
    """Get it from the global owner, or from the origin."""
    GLOBAL = "global"
    """Get it from a node that was ahead of it in this file, or from the origin."""
    HELD = "held"
    """Nothing: it is sent if it is here. To wait for it could be to wait for each other."""


@dataclass(frozen=True, slots=True, order=True)
class Peer:
    """One node of the job."""

    name: str
    """Tells it from others; the node's own announcement, or its address."""
    addresses: tuple[str, ...]
    """`host:port` of each interface that it serves on, the fastest first."""
    rack: str = ""
    hosts: tuple[str, ...] = ()
    """All addresses that it announces, the one it is known by first: the job's connections come from any of them."""


class Step(NamedTuple):
    """A peer to ask, and what it may do for the answer."""

    peer: Peer
    level: Level


@dataclass(frozen=True, slots=True)
class Route:
    """Where a node gets the blocks of one run."""

    steps: tuple[Step, ...]
    """At most two peers in the order in which they are asked; none where this node asks the origin at once."""
    may_ask_origin: bool
    """Whether this node asks the origin when the peers fail: only the first two in rank do."""


class Members:
    """The nodes of a job as one node sees them. Two with the same peers have the same `digest`."""

    def __init__(self, peers: Iterable[Peer], own: str) -> None:
        """`own` is this node's name. A node that serves nothing is not among the peers: it is a client only."""
        self.peers: tuple[Peer, ...] = tuple(sorted({peer.name: peer for peer in peers}.values()))
        self.own = own
        listed = "\n".join(f"{peer.name}\t{' '.join(peer.addresses)}\t{peer.rack}" for peer in self.peers)
        self.digest = sha256(listed.encode()).hexdigest()[:16]
        self._groups = _groups(self.peers)
        rack = next((peer.rack for peer in self.peers if peer.name == own), "")
        self._neighbours = self._groups.get(rack, ()) if rack else ()
        self._route = lru_cache(maxsize=1 << 14)(self._find_route)

    @property
    def index(self) -> int:
        """This node's position in the list; 0 where it is not in it."""
        return next((at for at, peer in enumerate(self.peers) if peer.name == self.own), 0)

    def route(
        self, file: str, run: int, absent: frozenset[str] = frozenset(), ahead: frozenset[str] = frozenset()
    ) -> Route:
        """Where this node gets a run of a file (the identity of its index).

        `absent` are the names of peers that are not asked for now: the next in rank take their place, so that no more
        than two nodes ask the origin for a run whatever happens to its owners. `ahead` read the file before this node
        did, and have what it would have been asked for: the two of them that had it in its stead are asked first.
        """
        return self._route(file, run, absent, ahead)

    def owner(self, file: str, unit: int, absent: frozenset[str] = frozenset()) -> Peer | None:
        """The node that records which nodes read a unit of a file, in any rack; None if all are excluded."""
        return next(iter(self._first(f"{file}/{unit}".encode(), absent)), None)

    def _find_route(self, file: str, run: int, absent: frozenset[str], ahead: frozenset[str]) -> Route:
        key = f"{file}/{run}".encode()
        first = self._first(key, absent)
        is_first = [peer.name == self.own for peer in first]
        steps = (
            () if is_first[:1] == [True] else tuple(Step(peer, Level.GLOBAL) for peer in first if peer.name != self.own)
        )
        local = _ranked(key, [peer for peer in self._neighbours if peer.name not in absent])
        if local and local[0].name != self.own:
            to_owner = Step(local[0], Level.RACK)
            # The second in the rack does not ask itself: it goes where the owner would have gone.
            if local[-1].name == self.own:
                second = tuple(step for step in steps if step.peer != local[0])[:1]
            else:
                second = tuple(Step(peer, Level.RACK) for peer in local[1:])
            steps = (to_owner, *second)
        return Route(steps or self.holders(file, run, ahead - absent), any(is_first))

    def holders(self, file: str, run: int, ahead: frozenset[str]) -> tuple[Step, ...]:
        """Which of the nodes that have parts of a file are asked for a run before the origin."""
        others = [peer for peer in self.peers if peer.name in ahead and peer.name != self.own]
        return tuple(Step(peer, Level.HELD) for peer in _ranked(f"{file}/{run}".encode(), others)) if others else ()

    def _first(self, key: bytes, absent: frozenset[str]) -> tuple[Peer, ...]:
        """The first two in rank of all nodes. With racks they are the owners within the first two racks in rank."""
        if not self._groups:
            return _ranked(key, [peer for peer in self.peers if peer.name not in absent])
        ranked = sorted(self._groups, key=lambda rack: _weighted(key, rack, len(self._groups[rack])), reverse=True)
        owners: list[Peer] = []
        for rack in ranked:
            owners += _ranked(key, [peer for peer in self._groups[rack] if peer.name not in absent])[:1]
            if len(owners) == _RANKED:
                break
        return tuple(owners)


def _groups(peers: Sequence[Peer]) -> dict[str, tuple[Peer, ...]]:
    """The peers of each rack of some size, all others together under no name; empty where one group would have all."""
    sizes = Counter(peer.rack for peer in peers)
    groups: dict[str, list[Peer]] = {}
    for peer in peers:
        groups.setdefault(peer.rack if sizes[peer.rack] >= _MIN_RACK else "", []).append(peer)
    return {rack: tuple(members) for rack, members in groups.items()} if len(groups) > 1 else {}


def _ranked(key: bytes, peers: Sequence[Peer]) -> tuple[Peer, ...]:
    """The first in rank for this key."""
    return tuple(nlargest(_RANKED, peers, key=lambda peer: _score(key, peer.name)))


def _weighted(key: bytes, rack: str, size: int) -> float:
    """A rack's score; a rack of twice the nodes comes first for twice the runs."""
    return size / -log((int.from_bytes(_score(key, rack)) + 1) / (2**64 + 1))


def _score(key: bytes, name: str) -> bytes:
    hashed = _keyed(name).copy()
    hashed.update(key)
    return hashed.digest()


@lru_cache(maxsize=1 << 14)
def _keyed(name: str) -> blake2b:
    return blake2b(digest_size=8, key=blake2b(name.encode(), digest_size=32).digest())

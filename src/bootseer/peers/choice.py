"""Which of a job's nodes owns a run of blocks, and in which order a node asks the others for it.

Rendezvous hashing (Thaler and Ravishankar, 1998): the owner of a run is the node with the highest hash of (node, run).
All nodes with the same list agree without communication, and a joining or leaving node moves only its own runs. Where
racks are known there are two levels: a node asks the owner within its rack, and the racks' owners ask one global owner,
so that a run crosses the network once per rack rather than once per node.

Why an owner never forwards a request to another owner (`Level`): two nodes with different lists could otherwise wait
for each other. With this rule a wrong list costs one more read of the store, never a deadlock. A node that starts to
read a file later than others asks these before the store: they had to fetch its runs without it. Decides and touches
nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from heapq import nlargest
from math import log
from typing import Final, NamedTuple

from msgspec import Struct

RUN_BYTES: Final = 4 << 20
"""Maximum size of a run, the unit of ownership: ranking 1,440 nodes for each block of 28 GB would take minutes."""
RACK: Final = re.compile(r"[A-Za-z0-9_.:/-]{0,255}")
"""Valid rack names."""
_MIN_RACK: Final = 8
"""Smaller racks do not get their own level."""
_RANKED: Final = 2


class Level(StrEnum):
    """What the receiver of a request may do for a block that it does not have."""

    RACK = "rack"
    """Get it from the global owner, or from the store."""
    GLOBAL = "global"
    """Get it from a node that started to read the file before it, or from the store."""
    HELD = "held"
    """Nothing: the block is sent if it is present. Waiting for it could be a deadlock."""


class Peer(Struct, frozen=True, order=True):
    """One node of the job."""

    name: str
    """Unique: from the node's own announcement, or its address."""
    addresses: tuple[str, ...]
    """`host:port` of each interface that it serves on, the fastest first."""
    rack: str = ""
    hosts: tuple[str, ...] = ()
    """All its announced addresses, the primary one first: the job's connections may come from any of them."""


class Step(NamedTuple):
    """A peer to ask, and what it may do to answer."""

    peer: Peer
    level: Level


class Route(Struct, frozen=True):
    """Where a node gets the blocks of one run."""

    steps: tuple[Step, ...]
    """At most two peers in the order in which they are asked; empty if this node asks the store at once."""
    may_ask_store: bool
    """Whether this node asks the store after the peers failed: only the first two in rank do."""

    @property
    def may_read_ahead(self) -> bool:
        """See `fetch.routed.Route`."""
        return all(step.level is not Level.HELD for step in self.steps)


class Members:
    """The nodes of a job as seen by one node."""

    def __init__(self, peers: Iterable[Peer], own: str) -> None:
        """`own` is this node's name. A node that serves nothing is not among the peers: it is only a client."""
        self.peers: tuple[Peer, ...] = tuple(sorted({peer.name: peer for peer in peers}.values()))
        self.own = own
        self._groups = _groups(self.peers)
        rack = next((peer.rack for peer in self.peers if peer.name == own), "")
        self._neighbours = self._groups.get(rack, ()) if rack else ()
        self._route = lru_cache(maxsize=1 << 14)(self._find_route)

    @property
    def turn(self) -> float:
        """Where this node begins what all read, as a fraction: its position in the list; 0 if it is not in it."""
        return next((at / len(self.peers) for at, peer in enumerate(self.peers) if peer.name == self.own), 0.0)

    def route(
        self,
        file: str,
        run: int,
        absent: frozenset[str] = frozenset(),
        ahead: frozenset[str] = frozenset(),
        asked: Level | None = None,
    ) -> Route:
        """Where this node gets a run of a file (identified by its index).

        `absent`: peers that are excluded now; the next in rank replace them, so that at most two nodes ask the store
        for a run whatever happens to its owners. `ahead`: nodes that started to read the file before this one; the two
        of them that fetched the run in its place are asked first. `asked`: the level at which another node asked this
        one for the run, if it does not read the file itself: an owner in a rack asks only the global owners, and these
        no owners.
        """
        return self._route(file, run, absent, ahead, asked)

    def owner(self, file: str, unit: int, absent: frozenset[str] = frozenset()) -> Peer | None:
        """The node that records which nodes read a unit of a file, in any rack; None if all are excluded."""
        return next(iter(self._first(f"{file}/{unit}".encode(), absent)), None)

    def _find_route(
        self, file: str, run: int, absent: frozenset[str], ahead: frozenset[str], asked: Level | None
    ) -> Route:
        key = f"{file}/{run}".encode()
        # Without racks: the first in rank has no steps and asks the store at once; the second asks the first, then the
        # store; all others ask these two. So the store sends a run twice at most, as long as one of the two is alive.
        # With racks, `first` are the owners in two racks, and a node asks the owner in its own rack, which asks them.
        first = self._first(key, absent)
        is_first = [peer.name == self.own for peer in first]
        steps = (
            () if is_first[:1] == [True] else tuple(Step(peer, Level.GLOBAL) for peer in first if peer.name != self.own)
        )
        local = _ranked(key, [peer for peer in self._neighbours if peer.name not in absent])
        if local and local[0].name != self.own:
            to_owner = Step(local[0], Level.RACK)
            # The second in the rack does not ask itself: it asks where the owner would have asked.
            if local[-1].name == self.own:
                second = tuple(step for step in steps if step.peer != local[0])[:1]
            else:
                second = tuple(Step(peer, Level.RACK) for peer in local[1:])
            steps = (to_owner, *second)
        if asked is not None:
            steps = tuple(step for step in steps if (asked, step.level) == (Level.RACK, Level.GLOBAL))
        if not steps:
            others = [peer for peer in self.peers if peer.name in ahead - absent and peer.name != self.own]
            steps = tuple(Step(peer, Level.HELD) for peer in _ranked(key, others))
            # A node asked as an owner may ask the store, whatever its own list says.
            return Route(steps, any(is_first) or asked is not None)
        return Route(steps, any(is_first))

    def _first(self, key: bytes, absent: frozenset[str]) -> tuple[Peer, ...]:
        """The two highest-ranked nodes; with racks, the owners within the two highest-ranked racks."""
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
    """The peers of each large enough rack, all others under ""; empty if that makes a single group."""
    sizes = Counter(peer.rack for peer in peers)
    groups: dict[str, list[Peer]] = {}
    for peer in peers:
        groups.setdefault(peer.rack if sizes[peer.rack] >= _MIN_RACK else "", []).append(peer)
    return {rack: tuple(members) for rack, members in groups.items()} if len(groups) > 1 else {}


def _ranked(key: bytes, peers: Sequence[Peer]) -> tuple[Peer, ...]:
    return tuple(nlargest(_RANKED, peers, key=lambda peer: _score(key, peer.name)))


def _weighted(key: bytes, rack: str, size: int) -> float:
    """A rack's score, weighted by size: a rack with twice the nodes is first for twice the runs."""
    return size / -log((int.from_bytes(_score(key, rack)) + 1) / (2**64 + 1))


def _score(key: bytes, name: str) -> bytes:
    hashed = _keyed(name).copy()
    hashed.update(key)
    return hashed.digest()


@lru_cache(maxsize=1 << 14)
def _keyed(name: str) -> blake2b:
    return blake2b(digest_size=8, key=blake2b(name.encode(), digest_size=32).digest())

"""Why blocks are fetched, and the numbers of the scheduler, each with its reason: docs/adr/0008-fetching.md.

Decides and touches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

_MIB = 1 << 20


class Purpose(IntEnum):
    """Why a block is fetched. A higher purpose goes before all lower ones; a block has the highest one asked for."""

    COLD = 1
    """The rest of the file, in the background, so that the origin is not needed any more."""
    HOT = 2
    """An earlier startup needed it."""
    DEMAND = 3
    """A reader waits for it now."""


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """How much to read at once, how long to wait, how often to try. Bytes are stored (compressed) bytes."""

    request_bytes: int = 4 * _MIB
    """Largest prefetch request: beyond this, the time to first byte no longer shows in the throughput."""
    demand_bytes: int = _MIB
    """Largest demand request. The kernel asks for at most 1 MiB at once; more would keep a slot from others."""
    inflight_bytes: int = 64 * _MIB
    """Bound of what all running requests together may still bring: it bounds memory."""
    reserved_bytes: int = 8 * _MIB
    """The part of `inflight_bytes` that prefetch must leave to demand."""
    first_requests: int = 8
    """Prefetch requests at once before anything was measured."""
    max_requests: int = 24
    """Prefetch requests at once, to all origins together, however well it goes."""
    reserved_requests: int = 8
    """Requests beyond those, for demand alone: a reader never waits for a prefetch to end."""
    place_requests: int = 2
    """Prefetch requests at once to one of many places (`fetch.routed`), and one more for demand: two keep it busy."""
    place_requests_in_all: int = 16
    """Requests at once to all of them together, among those above; all nodes of a job begin at the same moment."""
    reserved_place_requests: int = 4
    """The part of them that prefetch must leave to demand."""
    window_s: float = 0.25
    """Prefetch has this many seconds of the measured throughput in flight: more than any usual round trip, so that the
    line is full, and little enough that a reader's block is not long behind it."""
    min_window_bytes: int = 4 * _MIB
    """What prefetch may have in flight before the throughput is known, and always: 1 Gbit/s over 30 ms."""

    judged_needs: int = 24
    """After so many needs, a hot set that covers less than half of them is suspended."""
    judged_window: int = 32
    """Only so many latest needs count: workloads often share a beginning and then part."""
    parted_needs: int = 6
    """So many uncovered needs in a row end the trust that earlier ones have earned: where 98 of 100 are covered, chance
    alone does that once in 15 billion needs."""
    suspend_score: int = -8
    """Suspended earlier when uncovered needs outnumber covered ones by so many."""
    trust_score: int = 4
    """Full speed, or again allowed, when covered needs outnumber uncovered ones by so many."""
    silence_s: float = 5.0
    """The rest is fetched when no reader has needed a new block for so long."""

    deadline_s: float = 30.0
    """What a reader waits at most, all attempts together. An origin that has failed for so long costs each further
    reader one attempt: a program that reads a hundred files must not wait a hundred times."""
    stall_s: float = 120.0
    """A full pull fails when no block has come for so long."""
    claim_s: float = 60.0
    """Another process that has not brought a block by then hangs: it could have tried six times."""
    demand_timeout_s: float = 10.0
    """One demand request. Two more fit into a reader's deadline."""
    hot_timeout_s: float = 30.0
    cold_timeout_s: float = 60.0
    hot_attempts: int = 3
    """A block that fails as often comes when a reader asks for it."""
    cold_attempts: int = 30
    """Origins come back: with pauses of up to a minute, this is half an hour."""
    corrupt_attempts: int = 3
    """Wrong bytes may be a fault of the way, not of the object; three times in a row they are the object's."""
    backoff_s: float = 0.1
    """Pause before the second attempt of a block; doubles with each, half of it is random."""
    max_backoff_s: float = 5.0
    max_pause_s: float = 60.0
    """Longest pause of prefetch at an origin that fails."""
    max_retry_after_s: float = 300.0
    """The most of a Retry-After that is believed to be meant."""

    hedge_s: float = 0.2
    """Never ask a second time earlier: reading 256 KiB over a thin line takes as long."""
    hedge_factor: float = 3.0
    """... nor before this many times what 9 of 10 recent requests took to their first block."""
    max_hedges: int = 2
    """Second requests per block."""
    hedge_credit: float = 0.25
    """Each block that came for a reader earns this part of a hedge, so that hedges cannot flood a slow origin."""
    first_hedge_credit: float = 2.0
    max_hedge_credit: float = 8.0
    shared_hedge_s: float = 5.0
    """Where other nodes wait for the same origin, never ask it a second time earlier than this: what is late there is
    late because all nodes ask at once, and a second request makes all of them wait longer."""
    shared_hedge_credit: float = 0.05
    """... and each block that came from there for a reader earns this part of a hedge."""

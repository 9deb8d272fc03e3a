"""Purposes of fetches, and the scheduler's constants, each with its reason: docs/adr/0008-fetching.md.

Decides and touches nothing.
"""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct

_MIB = 1 << 20


class Purpose(IntEnum):
    """Why a block is fetched. Higher purposes go first; a block has the highest purpose requested for it."""

    COLD = 1
    """The rest of the file, in the background, so that the origin is no longer needed."""
    HOT = 2
    """An earlier startup needed it."""
    DEMAND = 3
    """A reader waits for it."""


class FetchSettings(Struct, frozen=True):
    """Request sizes, time limits and retries. Bytes are stored (compressed) bytes."""

    request_bytes: int = 4 * _MIB
    """Largest prefetch request: beyond this, the time to first byte does not affect throughput any more."""
    demand_bytes: int = _MIB
    """Largest demand request. The kernel reads at most 1 MiB at once; a larger one would occupy a slot for too long."""
    request_cost_s: float = 0.002
    """What a request costs client and store besides its bytes. Hot blocks with a gap between them that transfers faster
    are fetched in one request."""
    gap_bytes: int = 256 << 10
    """Largest such gap."""
    ahead_s: float = 0.004
    """A reader's request reads ahead what transfers in this time, which is what another request would take. On slow
    links it is nothing."""
    first_ahead_bytes: int = 128 << 10
    """... and this much until that is known."""
    max_ahead_bytes: int = 512 << 10
    inflight_bytes: int = 64 * _MIB
    """Limit of outstanding bytes of all running requests, which bounds memory."""
    reserved_bytes: int = 8 * _MIB
    """The part of `inflight_bytes` reserved for demand."""
    first_requests: int = 8
    """Concurrent prefetch requests before anything was measured."""
    max_requests: int = 24
    """Concurrent prefetch requests to all origins together, however fast they are."""
    reserved_requests: int = 8
    """Additional requests reserved for demand: a reader never waits for a prefetch to end."""
    peer_requests: int = 2
    """Concurrent prefetch requests to one peer (`fetch.routed`), plus one for demand: two keep it busy."""
    total_peer_requests: int = 16
    """Concurrent requests to all peers, included in those above; all nodes of a job start at the same time."""
    reserved_peer_requests: int = 4
    """The part of them reserved for demand."""
    window_s: float = 0.25
    """The prefetch window in seconds of the measured throughput: longer than usual round trips, so that the link is
    full, and short enough not to delay a reader's block much."""
    min_window_bytes: int = 4 * _MIB
    """Minimum prefetch window, also while the throughput is unknown: 1 Gbit/s over 30 ms."""

    judged_needs: int = 24
    """After this many needs, a hot set that covers less than half of them is suspended."""
    judged_window: int = 32
    """Only this many recent needs count: workloads often share a beginning and then diverge."""
    diverged_needs: int = 6
    """This many uncovered needs in a row end the trust earned before: with 98 of 100 covered, this happens by chance
    once in 15 billion needs."""
    suspend_score: int = -8
    """Suspended earlier when uncovered needs outnumber covered ones by this many."""
    trust_score: int = 4
    """Full speed, and the end of a suspension, when covered needs outnumber uncovered ones by this many."""
    silence_s: float = 5.0
    """Cold blocks are fetched when no reader has needed a new block for this long."""

    deadline_s: float = 30.0
    """The longest wait of a reader over all attempts. If an origin has failed for that long, each further reader costs
    one attempt only: a program that reads a hundred files must not wait a hundred times."""
    stall_s: float = 120.0
    """A full pull fails when no block has arrived for this long."""
    claim_s: float = 60.0
    """A claim of another process is ignored after this time, in which it could have tried six times; if a reader waits
    for the block, after half of `deadline_s`."""
    demand_timeout_s: float = 10.0
    """Limit of one demand request. Two more fit into a reader's deadline."""
    hot_timeout_s: float = 30.0
    cold_timeout_s: float = 60.0
    hot_attempts: int = 3
    """A block that fails this often is fetched again when a reader asks for it."""
    cold_attempts: int = 30
    """With pauses of up to a minute this is half an hour, in which origins recover."""
    corrupt_attempts: int = 3
    """Wrong bytes may be a transmission error; after three in a row the object itself is wrong."""
    backoff_s: float = 0.1
    """Pause before the second attempt of a block; doubles with each, half of it is random."""
    max_backoff_s: float = 5.0
    max_pause_s: float = 60.0
    """Longest prefetch pause for a failing origin."""
    max_retry_after_s: float = 300.0
    """Upper limit of a Retry-After."""

    hedge_s: float = 0.2
    """Minimum time before a hedge: reading 256 KiB over a slow link takes as long."""
    hedge_factor: float = 3.0
    """... and this many times the 90th percentile of recent times to the first block."""
    max_hedges: int = 2
    """Hedges per block."""
    hedge_credit: float = 0.25
    """Each block that arrived for a reader earns this part of a hedge, so hedges cannot flood a slow origin."""
    first_hedge_credit: float = 2.0
    max_hedge_credit: float = 8.0


WITHOUT_READ_AHEAD = FetchSettings(first_ahead_bytes=0, max_ahead_bytes=0)
"""For a process that fetches for other nodes: these have read ahead already."""

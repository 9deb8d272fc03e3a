"""Leases: their content, and whether the holder is alive, as concluded by a waiter from repeated observations.

A holder is alive as long as its heartbeat number changes. The waiter measures silence by its own clock and only while
it can read the lease, so neither the holder's clock nor an outage of the store makes a living holder look dead. Decides
and touches nothing; `lease` reads and writes.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from bootseer.artifact.document import decode, encode, printable, readable
from bootseer.errors import CorruptError

SCHEMA = "bootseer.environment-lease/1"
MAX_BYTES = 16 << 10
TTL_S = 30.0
"""A holder silent for this long is taken for dead."""
_MIN_TTL_S, _MAX_TTL_S = 1.0, 300.0
"""Upper limit, so that a forged lease cannot block a start for longer."""
BEATS_PER_TTL = 3
_FIRST_LOOK_S = 0.25
_LAST_LOOK_S = 3.0
"""The longest interval: a thousand waiters then make a few hundred small requests per second."""
_SLOWER = 1.5
_MAX_NODE = 256
_MAX = 10**15


@readable
class LeaseRecord(Struct, frozen=True):
    """The content of a lease."""

    nonce: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    """Unique per holder: 32 hex digits."""
    node: str
    pid: Annotated[int, Meta(ge=0, lt=_MAX)]
    since_s: Annotated[float, Meta(ge=0, lt=_MAX)]
    """When it was acquired: seconds since 1970 by the holder's clock, for messages only."""
    ttl_s: Annotated[float, Meta(ge=0, lt=_MAX)] = TTL_S
    beat: Annotated[int, Meta(ge=0, lt=_MAX)] = 0
    released: bool = False
    """Given back by a holder that cannot delete."""
    taken: bool = False
    """Taken over from a dead holder, which did not release it."""

    @property
    def silence_s(self) -> float:
        """How long the holder may be silent, within the limits."""
        return min(max(self.ttl_s, _MIN_TTL_S), _MAX_TTL_S)

    @property
    def interval_s(self) -> float:
        """Between two heartbeats."""
        return self.silence_s / BEATS_PER_TTL

    def next(self) -> LeaseRecord:
        """The record with the next heartbeat number."""
        return replace(self, beat=self.beat + 1)

    def words(self, now_s: float) -> str:
        """The holder, for messages."""
        return f"{self.node} (process {self.pid}) has been building it for {max(now_s - self.since_s, 0):.0f} s"

    def encode(self) -> bytes:
        return encode(self, SCHEMA)

    @classmethod
    def parse(cls, data: bytes) -> LeaseRecord:
        """Parse a lease. Raises `CorruptError`."""
        found = decode(data, cls, "lease", limit=MAX_BYTES, schema=SCHEMA, other_version=CorruptError)
        return replace(found, node=printable(found.node[:_MAX_NODE]))


class LeaseObservation(Struct, frozen=True):
    """One observation of a lease."""

    kind: Literal["free", "held", "unknown"]
    """`free` includes released ones; `unknown`: the store did not respond."""
    mark: str = ""
    """Changes with every heartbeat; without a record, a digest of the malformed bytes."""
    record: LeaseRecord | None = None
    why: str = ""
    """For `unknown`: the error."""


class Next(Enum):
    """What a waiter does next."""

    LOOK = "look"
    """Observe again after `Watch.pause_s`."""
    FREE = "free"
    """It is not held any more."""
    LEFT = "left"
    """The holder released it, and another one holds it already."""
    DEAD = "dead"
    """The holder is dead: take the lease over."""
    OVER = "over"
    """The waiting time is over."""


class Watch:
    """The state of one waiter. All times are of its own monotonic clock."""

    def __init__(self, until_s: float, *, ttl_s: float = TTL_S) -> None:
        """`ttl_s` applies to a lease that cannot be parsed."""
        self._until_s = until_s
        self._ttl_s = ttl_s
        self._mark = ""
        self._nonce = ""
        self._silent_s = 0.0
        self._looked_s: float | None = None
        self._pause_s = _FIRST_LOOK_S / _SLOWER

    def see(self, seen: LeaseObservation, now_s: float) -> Next:
        """Evaluate an observation made now."""
        if seen.kind == "free":
            return Next.FREE
        if seen.record is not None:
            before, self._nonce = self._nonce, seen.record.nonce
            if before not in ("", self._nonce) and not seen.record.taken:
                return Next.LEFT
        before_s, self._looked_s = self._looked_s, None if seen.kind == "unknown" else now_s
        if seen.kind != "unknown":
            if seen.mark != self._mark:
                self._mark, self._silent_s = seen.mark, 0.0
            elif before_s is not None:
                # A waiter that was suspended has not observed the lease meanwhile: count at most the usual interval.
                self._silent_s += min(now_s - before_s, 2 * self._pause_s + 1.0)
            if self._silent_s > (seen.record.silence_s if seen.record is not None else self._ttl_s):
                return Next.DEAD
        return Next.OVER if now_s >= self._until_s else Next.LOOK

    def pause_s(self, now_s: float, chance: float) -> float:
        """How long to wait before the next observation. `chance`: random, 0 to 1, to spread the waiters."""
        self._pause_s = min(self._pause_s * _SLOWER, _LAST_LOOK_S)
        return min(self._pause_s * (0.75 + chance / 2), max(self._until_s - now_s, 0.0))

"""Leases: what one says, and whether its holder is alive, as a waiter concludes from looking at it.

A holder is alive as long as its beat number changes. The waiter measures silence by its own clock and only while it
could look, so that neither the holder's clock nor a store that was away for a while makes a living holder dead. Decides
and touches nothing; `lease` does the looking and writing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Literal

from msgspec import Meta

from bootseer.artifact.document import decode, encode, printable
from bootseer.errors import CorruptError

SCHEMA = "bootseer.environment-lease/1"
MAX_BYTES = 16 << 10
TTL_S = 30.0
"""A holder that is silent for so long is taken for dead."""
_MIN_TTL_S, _MAX_TTL_S = 1.0, 300.0
"""A forged lease must not hold a start up for longer."""
BEATS_PER_TTL = 3
_FIRST_LOOK_S = 0.25
_LAST_LOOK_S = 3.0
"""Looks become this rare: a thousand waiters are then some hundred small requests a second."""
_SLOWER = 1.5
_MAX_NODE = 256
_MAX = 10**15


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What a lease says."""

    nonce: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    """Of this one holder: 32 hex digits."""
    node: str
    pid: Annotated[int, Meta(ge=0, lt=_MAX)]
    since_s: Annotated[float, Meta(ge=0, lt=_MAX)]
    """When it was acquired: seconds since 1970, by the holder's clock. For people only."""
    ttl_s: Annotated[float, Meta(ge=0, lt=_MAX)] = TTL_S
    beat: Annotated[int, Meta(ge=0, lt=_MAX)] = 0
    released: bool = False
    """Given back by a holder that may not delete."""
    taken: bool = False
    """The holder before was dead, and did not give up."""

    @property
    def silence_s(self) -> float:
        """How long it may be silent."""
        return min(max(self.ttl_s, _MIN_TTL_S), _MAX_TTL_S)

    @property
    def interval_s(self) -> float:
        """Between two beats."""
        return self.silence_s / BEATS_PER_TTL

    def next(self) -> LeaseRecord:
        """With the next beat."""
        return replace(self, beat=self.beat + 1)

    def words(self, now_s: float) -> str:
        """The holder, for people."""
        return f"{self.node} (process {self.pid}) has been building it for {max(now_s - self.since_s, 0):.0f} s"

    @property
    def last_beat_s(self) -> float:
        """When it beat last, at the earliest: seconds since 1970, by the holder's clock."""
        return self.since_s + self.beat * self.interval_s

    def encode(self) -> bytes:
        """JSON."""
        return encode(self, SCHEMA)

    @classmethod
    def parse(cls, data: bytes) -> LeaseRecord:
        """Read a lease. Raises `CorruptError`."""
        found = decode(data, cls, "lease", limit=MAX_BYTES, schema=SCHEMA, other_version=CorruptError)
        return replace(found, node=printable(found.node[:_MAX_NODE]))


@dataclass(frozen=True, slots=True)
class LeaseObservation:
    """What one look at a lease showed."""

    kind: Literal["free", "held", "broken", "unknown"]
    """`free` is also what was released; `unknown`: the store did not say."""
    mark: str = ""
    """Differs between two looks at a holder that is alive; for a broken lease it is that of its bytes."""
    record: LeaseRecord | None = None
    why: str = ""
    """Of `unknown`: the error."""


class Next(Enum):
    """What a waiter does next."""

    LOOK = "look"
    """After `Watch.pause_s`."""
    FREE = "free"
    """It is not held (any more)."""
    LEFT = "left"
    """Its holder gave it back, and another one has it already."""
    DEAD = "dead"
    """Its holder is dead: it may be taken over."""
    OVER = "over"
    """The time to wait is over."""


class Watch:
    """One waiter. All times are of one clock that never goes back: the waiter's own."""

    def __init__(self, until_s: float, *, ttl_s: float = TTL_S) -> None:
        """`ttl_s` holds for a lease that cannot be read."""
        self._until_s = until_s
        self._ttl_s = ttl_s
        self._mark = ""
        self._nonce = ""
        self._silent_s = 0.0
        self._looked_s: float | None = None
        self._pause_s = _FIRST_LOOK_S / _SLOWER

    def see(self, seen: LeaseObservation, now_s: float) -> Next:
        """What a look that was made now means."""
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
                # A waiter that was stopped for an hour has not watched for an hour.
                self._silent_s += min(now_s - before_s, 2 * self._pause_s + 1.0)
            if self._silent_s > (seen.record.silence_s if seen.record is not None else self._ttl_s):
                return Next.DEAD
        return Next.OVER if now_s >= self._until_s else Next.LOOK

    def pause_s(self, now_s: float, chance: float) -> float:
        """How long to wait before the next look. `chance` is random, from 0 to 1: waiters shall not march in step."""
        self._pause_s = min(self._pause_s * _SLOWER, _LAST_LOOK_S)
        return min(self._pause_s * (0.75 + chance / 2), max(self._until_s - now_s, 0.0))

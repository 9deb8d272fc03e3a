"""Which peers are asked: which are late, when a second one is asked, and which are excluded for a while.

An owner that waits for the origin is not late: it says so at once and again (`filling`), and to take that for
silence would send the whole job to the origin, since all wait for the origin at the beginning of a start. Late is
silence, or bytes that come at less than an eighth of the median peer's rate; and a peer that promises for ever, which
is left alone where others send meanwhile: then it is not the origin that hangs.

Three bounds keep trouble small: hedged requests are at most 5 % of all, a peer that was late 2 times of its last 8 is
not asked for 5 s (a circuit breaker), and one that sent a wrong block is not asked again by this job.

A slow peer need not be late: of many small answers each is here soon, and the start waits for their sum. So a peer that
has sent at less than an eighth of the median for two seconds, all its answers together, is left alone for 5 s too.
Times are seconds of any one clock. Decides and touches nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

_SILENCE_S: Final = 0.5
"""Owners that wait say so every 0.1 s: five of these missed. Longer where answers usually begin late: at the start of a
job, processors are busy, and a node that is no slower than the others is not late."""
_USUAL: Final = 4
"""... by so many times what nine of ten answers took to begin."""
_LONG_SILENCE_S: Final = 2.0
"""No owner that lives is silent for so long. Counts while little is known, and where no hedge is left."""
_MIN_SAMPLES: Final = 8
_SAMPLES: Final = 64
_MIN_SECONDS: Final = 1.0
"""A rate over less time says more about the network's queues than about the peer: many nodes ask one owner at once."""
_USUAL_TIMES: Final = 4
"""... nor one over less than so many times what an answer of this length usually takes."""
_WORTH_S: Final = 2.0
"""An answer that will be whole in less time, as it goes, is waited for: another node would need as long."""
_SLOWER: Final = 8
_SLOW_S: Final = 2.0
"""Of answers in a row: one alone says more about the network's queues than about the peer."""
_HEDGED: Final = 0.05
_FIRST_HEDGES: Final = 2
"""Before twenty requests were made, so many may be hedged all the same."""
STILL_S: Final = 20.0
"""A peer that promises bytes, and for so long has neither sent any nor got any itself, is given up: a reader waits for
30 s in all, and has the second in rank or the origin still before it."""
_MOST_STILL: Final = 3
"""Whatever it says, after so many times as long; one that is sound says after 30 s that it did not get them."""
_FLOOR: Final = 1 << 14
"""Bytes in a second that an answer brings in the long run, whatever is known of other peers."""
_REST: Final = 2
"""A peer that is left alone is so for at least so many times what was lost with it."""
_LATE: Final = 2
_LAST: Final = 8
_OUT_S: Final = 5.0
_ABSENT_S: Final = 2.0
"""A node that does not listen yet, or has not opened the file yet, is about to: nodes of a job start within seconds."""


@dataclass(slots=True)
class Asked:
    """A request to a peer that is under way."""

    peer: str
    length: int
    """Bytes asked for."""
    since_s: float
    heard_s: float
    """Of the latest sign of life: that it fills, or bytes."""
    sent_s: float
    moved_s: float
    """Since when its peer has got nothing, as far as it says."""
    answered: bool = False
    body_s: float | None = None
    """Since when bytes come."""
    num_bytes: int = 0


@dataclass(slots=True)
class _Known:
    rate: float = 0.0
    """Bytes in a second, of its latest answers; 0 while unknown."""
    slow_s: float = 0.0
    """What answers took at less than an eighth of the usual rate, since one that was faster."""
    late: deque[bool] = field(default_factory=lambda: deque(maxlen=_LAST))
    late_s: float = float("-inf")
    """When it was late most recently. Requests that were under way then belong to the same trouble."""
    sent_s: float = float("-inf")
    """When it sent bytes most recently."""
    refused_s: float | None = None
    """Since when it has too many connections."""
    lied: str = ""


class Health:
    """What one node knows of its peers, by name. Used under its owner's lock."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._out: dict[tuple[str, str], float] = {}
        """Peers that are not asked, all in all or for one file, and until when."""
        self._absent: dict[str, frozenset[str]] = {}
        self._known_until_s = float("-inf")
        self._begins: deque[float] = deque(maxlen=_SAMPLES)
        """What recent answers took to their first sign."""
        self._silence_s = _LONG_SILENCE_S
        self.requests = 0
        self.hedges = 0

    def asked(self, peer: str, now_s: float, length: int = 1 << 20) -> Asked:
        """A request begins."""
        self.requests += 1
        return Asked(peer, length, now_s, now_s, now_s, now_s)

    def connected(self, asked: Asked, now_s: float) -> None:
        """There is a connection: the request is sent now."""
        asked.sent_s = asked.heard_s = now_s

    def filling(self, asked: Asked, now_s: float, *, moves: bool = True) -> None:
        """The peer says that it waits for the origin. `moves`: and that something has come there meanwhile."""
        self._heard(asked, now_s)
        if moves:
            asked.moved_s = now_s

    def received(self, asked: Asked, num_bytes: int, now_s: float) -> None:
        """Bytes of the answer came."""
        self._heard(asked, now_s)
        if asked.body_s is None:
            asked.body_s = now_s
        asked.num_bytes += num_bytes
        self._known.setdefault(asked.peer, _Known()).sent_s = now_s
        if now_s >= self._slow_at(asked):  # without a hedge left it goes on, but its peer counts as late
            self._note_late(asked, now_s)

    def late_at(self, asked: Asked) -> float:
        """When this request is late if nothing more comes. Where no hedge is left, only long silence is, and what one
        asked of a peer before it was known to be late."""
        still_at = self._still_at(asked)
        if self._has_hedged_enough and asked.heard_s >= self._out.get((asked.peer, ""), asked.heard_s):
            return min(asked.heard_s + _LONG_SILENCE_S, still_at)
        return min(asked.heard_s + self._silence_s, self._slow_at(asked), still_at)

    def _still_at(self, asked: Asked) -> float:
        if asked.body_s is not None:
            return asked.body_s + STILL_S + asked.num_bytes / _FLOOR
        sent_s = self._known[asked.peer].sent_s if asked.peer in self._known else float("-inf")
        return min(max(asked.moved_s, sent_s) + STILL_S, max(asked.since_s, sent_s) + _MOST_STILL * STILL_S)

    def _usual_rate(self) -> float:
        return median([known.rate for known in self._known.values() if known.rate] or [0.0])

    def _slow_at(self, asked: Asked) -> float:
        usual = self._usual_rate()
        if asked.body_s is None or not usual:
            return float("inf")
        slow_s = asked.num_bytes / (usual / _SLOWER)
        worth_s = _WORTH_S * asked.num_bytes / max(asked.length - asked.num_bytes, 1)
        usual_s = _USUAL_TIMES * asked.length / usual
        return asked.body_s + max(slow_s, worth_s, usual_s, _MIN_SECONDS)

    def ended(self, asked: Asked, *, late: bool, now_s: float) -> None:
        """The request is over: answered whole, or given up as late (a failed connection is late, too)."""
        known = self._known.setdefault(asked.peer, _Known())
        if late:
            self._note_late(asked, now_s)
        else:
            known.late.append(False)
        if asked.body_s is not None and now_s > asked.body_s:
            rate = asked.num_bytes / (now_s - asked.body_s)
            known.slow_s = known.slow_s + now_s - asked.body_s if rate < self._usual_rate() / _SLOWER else 0.0
            if known.slow_s >= _SLOW_S:
                known.slow_s /= 2  # after the pause half as much is enough
                self._leave_alone(asked.peer, "", now_s + _OUT_S)
            known.rate = 0.7 * known.rate + 0.3 * rate if known.rate else rate

    def not_there(self, peer: str, now_s: float, file: str = "") -> None:
        """The peer does not listen, or does not serve this file."""
        self._leave_alone(peer, file, now_s + _ABSENT_S)

    def refused(self, peer: str, now_s: float) -> None:
        """The peer has too many connections. It is to be asked again; not for ever."""
        known = self._known.setdefault(peer, _Known())
        since_s = max(known.refused_s or now_s, known.sent_s)
        known.refused_s = since_s
        if now_s >= since_s + STILL_S:
            known.refused_s = None
            self._leave_alone(peer, "", now_s + _REST * STILL_S)

    def lied(self, peer: str, what: str) -> None:
        """The peer sent a block that is not what its digest says: it is not asked again."""
        self._known.setdefault(peer, _Known()).lied = what
        self._leave_alone(peer, "", float("inf"))

    def hedged(self) -> None:
        """A late request is made again elsewhere."""
        if not self._has_hedged_enough:
            self.hedges += 1

    @property
    def _has_hedged_enough(self) -> bool:
        return self.hedges >= max(_FIRST_HEDGES, self.requests * _HEDGED)

    def absent(self, now_s: float, file: str = "") -> frozenset[str]:
        """The peers that are not asked now, for this file. The same object until that changes."""
        if now_s >= self._known_until_s:
            self._out = {key: until for key, until in self._out.items() if now_s < until}
            self._known_until_s = min(self._out.values(), default=float("inf"))
            out = frozenset(peer for peer, where in self._out if not where)
            self._absent = {"": out}
            for peer, where in self._out:
                self._absent[where] = self._absent.get(where, out) | {peer}
        return self._absent.get(file, self._absent[""])

    @property
    def liars(self) -> dict[str, str]:
        """Peers that sent wrong blocks, each with what it was."""
        return {name: known.lied for name, known in self._known.items() if known.lied}

    def _heard(self, asked: Asked, now_s: float) -> None:
        asked.heard_s = now_s
        if not asked.answered:
            asked.answered = True
            self._begins.append(now_s - asked.sent_s)
            if len(self._begins) >= _MIN_SAMPLES:
                usual = sorted(self._begins)[int(0.9 * (len(self._begins) - 1))]
                self._silence_s = min(max(_SILENCE_S, _USUAL * usual), _LONG_SILENCE_S)

    def _note_late(self, asked: Asked, now_s: float) -> None:
        known = self._known.setdefault(asked.peer, _Known())
        if asked.since_s <= known.late_s:
            return
        known.late_s = now_s
        if asked.answered and asked.body_s is None and now_s >= self._still_at(asked):
            others = [other.sent_s for name, other in self._known.items() if name != asked.peer]
            if not others or max(others) > asked.since_s:
                self._leave_alone(asked.peer, "", now_s + _REST * (now_s - asked.since_s))
            return
        known.late.append(True)
        if sum(known.late) >= _LATE:
            known.late.clear()
            known.late.append(True)  # the next late answer is enough
            self._leave_alone(asked.peer, "", now_s + _OUT_S)

    def _leave_alone(self, peer: str, file: str, until_s: float) -> None:
        self._out[peer, file] = max(until_s, self._out.get((peer, file), until_s))
        self._known_until_s = float("-inf")

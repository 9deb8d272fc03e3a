"""The health of peers: which are late, when a request is given up, and which peers are excluded for a while.

An owner that waits for the store is not late: it reports `filling` at once and repeatedly. Taking that for a timeout
would send the whole job to the store, since all wait for the store at the beginning of a start. A request is late
when its peer is silent, or sends at less than an eighth of the median peer's rate. A peer that reports `filling` too
long is excluded if others send meanwhile: then the store does not hang.

Three limits: at most 5 % of all requests are given up and made to another peer, a peer that was late 2 times of its
last 8 is excluded for 5 s (a circuit breaker), and one that sent a wrong block is excluded for the rest of the job.

A slow peer need not be late: each of many small responses arrives soon, but the start waits for their sum. So a peer
that has sent at less than an eighth of the median for two seconds, over all its responses, is excluded for 5 s too.
The store counts in the median like a peer if its rate is known: where there is one other node only, that node would
otherwise be compared with nothing but itself.
Times are seconds of any one clock. Pure decisions, no I/O.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from msgspec import Struct, field

_SILENCE_S: Final = 0.5
"""Five missed reports of a waiting owner, one each 0.1 s. Longer where responses usually begin late: at the start of
a job, processors are busy, and a node that is no slower than the others is not late."""
_USUAL: Final = 4
"""... this many times the 90th percentile of the time to the first byte."""
_LONG_SILENCE_S: Final = 2.0
"""Limit while there are few samples, and where enough requests were given up."""
_MIN_SAMPLES: Final = 8
_SAMPLES: Final = 64
_MIN_SECONDS: Final = 1.0
"""A rate over less time depends more on the network's queues than on the peer: many nodes ask one owner at once."""
_USUAL_TIMES: Final = 4
"""... nor one over less than this many times the usual duration of a response of this length."""
_WORTH_S: Final = 2.0
"""A response that will be complete sooner is waited for: another node would need as long."""
_SLOWER: Final = 8
_SLOW_S: Final = 2.0
_MIN_SLOW: Final = 2
"""Responses in a row: a single one, however long, depends more on the network's queues than on the peer. Where four
healthy nodes shared full links, exclusion after one response of 2.8 s made others fetch again what the peer had."""
_MAX_GIVEN_UP: Final = 0.05
_FIRST_GIVEN_UP: Final = 2
"""This many requests may be given up at the beginning."""
STILL_S: Final = 20.0
"""A peer that reports `filling`, and for so long has neither sent nor received bytes, is given up: a reader waits for
30 s in all, and must still try the second in rank or the store."""
_MOST_STILL: Final = 3
"""In any case after this many times as long; a sound peer reports after 30 s that it did not get them."""
_UNSURE_S: Final = 0.1
"""Responses of a megabyte that take longer are worth a comparison with another peer, or the store."""
_FLOOR: Final = 1 << 14
"""Minimum rate of a response in bytes per second, independent of other peers."""
_REST: Final = 2
"""A peer is excluded for at least this many times the time that was lost with it."""
_MAX_LATE: Final = 2
_RECENT: Final = 8
_EXCLUDED_S: Final = 5.0
_ABSENT_S: Final = 2.0
"""A node that does not listen yet, or has not opened the file yet, is about to: nodes of a job start within seconds."""


class PeerRequest(Struct):
    """A request to a peer that is under way."""

    peer: str
    length: int
    """Bytes requested."""
    begun_s: float
    active_s: float
    """When it last reported `filling` or sent bytes."""
    sent_s: float
    moved_s: float
    """When its peer last received bytes itself, as far as it reports."""
    answered: bool = False
    body_s: float | None = None
    """When the first byte arrived."""
    num_bytes: int = 0


class _Known(Struct):
    rate: float = 0.0
    """Bytes in a second, of its latest answers; 0 while unknown."""
    slow_s: float = 0.0
    """Total duration of responses below an eighth of the usual rate, since the last faster one."""
    num_slow: int = 0
    """Their number."""
    late: deque[bool] = field(default_factory=lambda: deque(maxlen=_RECENT))
    late_s: float = float("-inf")
    """When it was late most recently. Requests that were under way then belong to the same trouble."""
    sent_s: float = float("-inf")
    """When it sent bytes most recently."""
    refused_s: float | None = None
    """Since when it has too many connections; None when it has answered since."""
    compared: bool = False
    """Whether `must_compare` was true for it."""


class Health:
    """One node's view of its peers, by name. Used under its owner's lock."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._excluded: dict[tuple[str, str], float] = {}
        """Excluded peers, for all files or for one, and until when."""
        self._absent: dict[str, frozenset[str]] = {}
        self._known_until_s = float("-inf")
        self._begins: deque[float] = deque(maxlen=_SAMPLES)
        """Recent times to the first byte or report."""
        self._silence_s = _LONG_SILENCE_S
        self._store_rate = 0.0
        """As `_Known.rate`."""
        self.requests = 0
        self.num_given_up = 0

    def begin(self, peer: str, now_s: float, length: int = 1 << 20) -> PeerRequest:
        self.requests += 1
        return PeerRequest(peer, length, now_s, now_s, now_s, now_s)

    def connected(self, request: PeerRequest, now_s: float) -> None:
        request.sent_s = request.active_s = now_s

    def filling(self, request: PeerRequest, now_s: float, *, moves: bool = True) -> None:
        """The peer reports that it waits for the store. `moves`: it has received bytes since its last report."""
        self._note_active(request, now_s)
        if moves:
            request.moved_s = now_s

    def received(self, request: PeerRequest, num_bytes: int, now_s: float) -> None:
        self._note_active(request, now_s)
        if request.body_s is None:
            request.body_s = now_s
        request.num_bytes += num_bytes
        self._known.setdefault(request.peer, _Known()).sent_s = now_s
        if now_s >= self._slow_at(request):  # it may not be given up any more, but its peer counts as late
            self._note_late(request, now_s)

    def late_at(self, request: PeerRequest) -> float:
        """When this request is late if nothing more arrives. Where enough were given up, only long silence is late, and
        requests sent before the peer was known to be late."""
        still_at = self._idle_at(request)
        if self._has_given_up_enough and request.active_s >= self._excluded.get((request.peer, ""), request.active_s):
            return min(request.active_s + _LONG_SILENCE_S, still_at)
        return min(request.active_s + self._silence_s, self._slow_at(request), still_at)

    def _idle_at(self, request: PeerRequest) -> float:
        """When a request is given up although its peer is alive. Before the body: when the peer has received and sent
        nothing for `STILL_S`, and in any case some time after it last sent something here, as what it receives may be
        other blocks. Afterwards: when the body is slower than `_FLOOR`."""
        if request.body_s is not None:
            return request.body_s + STILL_S + request.num_bytes / _FLOOR
        sent_s = self._known[request.peer].sent_s if request.peer in self._known else float("-inf")
        return min(max(request.moved_s, sent_s) + STILL_S, max(request.begun_s, sent_s) + _MOST_STILL * STILL_S)

    def store_sent(self, num_bytes: int, seconds: float) -> None:
        """The store has sent this to one request."""
        if seconds > 0:
            self._store_rate = _averaged(self._store_rate, num_bytes / seconds)

    def is_unsure(self, peer: str, length: int) -> bool:
        """Whether this peer needs long for `length` bytes, and there is nothing to compare it with."""
        rates = self._rates()
        known = self._known.get(peer)
        return known is not None and rates == [known.rate] and length > known.rate * _UNSURE_S

    def must_compare(self, peer: str, length: int) -> bool:
        """Whether `length` bytes must be read from another peer, or the store, to have a rate with which this slow
        peer can be compared. True once for each peer."""
        if not self.is_unsure(peer, length) or self._known[peer].compared:
            return False
        self._known[peer].compared = True
        return True

    def _rates(self) -> list[float]:
        return [rate for rate in (*(known.rate for known in self._known.values()), self._store_rate) if rate]

    def _usual_rate(self) -> float:
        return median(self._rates() or [0.0])

    def _slow_at(self, request: PeerRequest) -> float:
        typical = self._usual_rate()
        if request.body_s is None or not typical:
            return float("inf")
        # The latest of four times: a request is not slow while it keeps an eighth of the usual rate, while its rest
        # will arrive within two seconds, within a few times the usual duration of a response, or in its first second.
        slow_s = request.num_bytes / (typical / _SLOWER)
        worth_s = _WORTH_S * request.num_bytes / max(request.length - request.num_bytes, 1)
        usual_s = _USUAL_TIMES * request.length / typical
        return request.body_s + max(slow_s, worth_s, usual_s, _MIN_SECONDS)

    def ended(self, request: PeerRequest, *, late: bool, now_s: float) -> None:
        """The request is over: complete, or given up as late (a failed connection is late, too)."""
        known = self._known.setdefault(request.peer, _Known())
        if late:
            self._note_late(request, now_s)
        else:
            known.late.append(False)
        if request.body_s is not None and now_s > request.body_s:
            rate = request.num_bytes / (now_s - request.body_s)
            is_slow = rate < self._usual_rate() / _SLOWER
            known.slow_s = known.slow_s + now_s - request.body_s if is_slow else 0.0
            known.num_slow = known.num_slow + 1 if is_slow else 0
            if known.slow_s >= _SLOW_S and known.num_slow >= _MIN_SLOW:
                known.slow_s /= 2  # after the pause half as much is enough
                self._exclude(request.peer, "", now_s + _EXCLUDED_S)
            known.rate = _averaged(known.rate, rate)

    def mark_absent(self, peer: str, now_s: float, file: str = "") -> None:
        """The peer does not listen, or does not serve this file."""
        self._exclude(peer, file, now_s + _ABSENT_S)

    def refused(self, peer: str, now_s: float) -> None:
        """The peer has too many connections. It is retried, but not forever."""
        known = self._known.setdefault(peer, _Known())
        since_s = max(known.refused_s or now_s, known.sent_s)
        known.refused_s = since_s
        if now_s >= since_s + STILL_S:
            known.refused_s = None
            self._exclude(peer, "", now_s + _REST * STILL_S)

    def sent_wrong(self, peer: str) -> None:
        """The peer sent a block whose digest is wrong: it is excluded for good."""
        self._exclude(peer, "", float("inf"))

    def gave_up(self) -> None:
        """A late request ended without its blocks, which are requested from another peer."""
        if not self._has_given_up_enough:
            self.num_given_up += 1

    @property
    def _has_given_up_enough(self) -> bool:
        return self.num_given_up >= max(_FIRST_GIVEN_UP, self.requests * _MAX_GIVEN_UP)

    def absent(self, now_s: float, file: str = "") -> frozenset[str]:
        """The peers excluded now, for this file. The same object until that changes."""
        if now_s >= self._known_until_s:
            self._excluded = {key: until for key, until in self._excluded.items() if now_s < until}
            self._known_until_s = min(self._excluded.values(), default=float("inf"))
            out = frozenset(peer for peer, file_name in self._excluded if not file_name)
            self._absent = {"": out}
            for peer, file_name in self._excluded:
                self._absent[file_name] = self._absent.get(file_name, out) | {peer}
        return self._absent.get(file, self._absent[""])

    def _note_active(self, request: PeerRequest, now_s: float) -> None:
        request.active_s = now_s
        if not request.answered:
            request.answered = True
            if request.peer in self._known:
                self._known[request.peer].refused_s = None
            self._begins.append(now_s - request.sent_s)
            if len(self._begins) >= _MIN_SAMPLES:
                typical = sorted(self._begins)[int(0.9 * (len(self._begins) - 1))]
                self._silence_s = min(max(_SILENCE_S, _USUAL * typical), _LONG_SILENCE_S)

    def _note_late(self, request: PeerRequest, now_s: float) -> None:
        known = self._known.setdefault(request.peer, _Known())
        if request.begun_s <= known.late_s:
            return
        known.late_s = now_s
        if request.answered and request.body_s is None and now_s >= self._idle_at(request):
            others = [other.sent_s for name, other in self._known.items() if name != request.peer]
            if not others or max(others) > request.begun_s:
                self._exclude(request.peer, "", now_s + _REST * (now_s - request.begun_s))
            return
        known.late.append(True)
        if sum(known.late) >= _MAX_LATE:
            known.late.clear()
            known.late.append(True)  # the next late answer is enough
            self._exclude(request.peer, "", now_s + _EXCLUDED_S)

    def _exclude(self, peer: str, file: str, until_s: float) -> None:
        self._excluded[peer, file] = max(until_s, self._excluded.get((peer, file), until_s))
        self._known_until_s = float("-inf")


def _averaged(rate: float, latest: float) -> float:
    return 0.7 * rate + 0.3 * latest if rate else latest

"""Which DataNode to ask: what each has shown so far, as a rate, as failures, and as times that were usual.

A node that hangs or fails is left alone until a probe has succeeded (a circuit breaker): one silence is enough, because
each further one would cost a reader the same time again. A node that is slow is not: it gets what the fast ones would
not finish earlier. What was measured long ago is believed less and less, so that a node that has recovered is tried.
What is underway counts too: a request that has brought little in some time shows that its node is no faster than that.

Called by `schedule`. Decides and touches nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

_MIN_SAMPLE_BYTES: Final = 256 << 10
"""Less says more about latency than about the rate."""
_FAILURES: Final = 2
"""In a row, then a node is left alone."""
_FIRST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 30.0
_SLOWER: Final = 3.0
"""Rates of healthy nodes differ by less, also while they are measured on a busy machine."""
_STALE_S: Final = 5.0
_RUN_S: Final = 0.25
"""One request takes about so long: the way there and back is little against it, and little is lost with it."""
_UNKNOWN_RUN_BYTES: Final = 1 << 20
_RECEPTION_S: Final = 0.05
"""What is received at once takes about so long: memory that nobody wants filled any more is free after it, and a node
that is slow is told from one that hangs."""
_PACKET_BYTES: Final = 64 << 10
_UNKNOWN_PACKETS: Final = 4
_GUESS_RATE: Final = 100e6
"""Of nodes while nothing is known of any: what waits for them counts from the beginning."""
_NUM_TIMES: Final = 256
_NEW: Final = 0.3
"""How much a new sample of a rate counts."""


@dataclass(slots=True)
class _Shown:
    rate: float = 0.0
    """Bytes in a second, over all its connections; 0 while nothing is known."""
    measured_s: float = 0.0
    failures: int = 0
    is_open: bool = False
    probe_s: float = 0.0
    """When it may be probed again, while it is left alone."""
    pause_s: float = _FIRST_PAUSE_S


class NodeChoice:
    """What is known of the DataNodes that were asked. `least_late_s`, `most_late_s` bound `late_s`."""

    def __init__(self, *, least_late_s: float = 0.25, most_late_s: float = 1.0) -> None:
        self._least_late_s = least_late_s
        self._most_late_s = most_late_s
        self._shown: dict[str, _Shown] = {}
        self._open: set[str] = set()
        self._mean_rate = 0.0
        self._times: deque[float] = deque(maxlen=_NUM_TIMES)
        self._num_times = 0
        self._late_s = most_late_s
        self.at_most: Callable[[str, float], float] = _anything
        """The rate that what is underway at a node allows for, by now."""

    def is_open(self, node: str) -> bool:
        """Whether it is left alone."""
        return node in self._open

    def rate(self, node: str, now_s: float) -> float:
        """Bytes in a second, by estimate; 0 where nothing is known."""
        at_most = self.at_most(node, now_s)
        shown = self._shown.get(node)
        if shown is None or not shown.rate:
            return at_most if at_most < math.inf else 0.0
        rate = shown.rate
        age_s = now_s - shown.measured_s
        if rate < self._mean_rate and age_s > _STALE_S:
            rate = min(self._mean_rate, rate * math.pow(2.0, min(age_s / _STALE_S - 1, 60.0)))
        return min(rate, at_most)

    def expected_s(self, node: str, num_bytes: int, now_s: float) -> float:
        """How long this many bytes take, by what is known of the node, or else of others."""
        return num_bytes / (self.rate(node, now_s) or self._mean_rate or _GUESS_RATE)

    def order(self, nodes: Iterable[str], num_bytes: int, backlog: Callable[[str], int], now_s: float) -> list[str]:
        """The node that would finish this first comes first; those that are left alone come last."""
        return sorted(
            nodes, key=lambda node: (self.is_open(node), self.expected_s(node, backlog(node) + num_bytes, now_s))
        )

    def leaves(
        self, node: str, num_bytes: int, others: Iterable[str], backlog: Callable[[str], int], now_s: float
    ) -> bool:
        """Whether a much faster node with this to do, too, finishes it before `node` would."""
        rate = self.rate(node, now_s)
        if not rate:
            return False
        for other in others:
            faster = self.rate(other, now_s)
            if faster > rate * _SLOWER and not self.is_open(other) and backlog(other) / faster < num_bytes / rate:
                return True
        return False

    def run_bytes(self, node: str, most: int, now_s: float) -> int:
        """How much to ask a node for at once."""
        rate = self.rate(node, now_s)
        return min(int(rate * _RUN_S) if rate else _UNKNOWN_RUN_BYTES, most)

    def packets(self, node: str, connections: int, most: int, now_s: float) -> int:
        """How many packets to receive at once from a node that serves several connections."""
        rate = self.rate(node, now_s)
        wanted = int(rate / connections * _RECEPTION_S) // _PACKET_BYTES if rate else _UNKNOWN_PACKETS
        return max(1, min(wanted, most))

    def late_s(self) -> float:
        """After how long without progress a read is late: four times what nineteen of twenty take."""
        return self._late_s

    def took(self, seconds: float) -> None:
        """What was received at once took this long."""
        self._times.append(seconds)
        self._num_times += 1
        if self._num_times % 32 == 0:
            usual_s = sorted(self._times)[len(self._times) * 19 // 20]
            self._late_s = min(max(4 * usual_s, self._least_late_s), self._most_late_s)

    def served(self, node: str, asked_bytes: int, num_bytes: int, seconds: float, now_s: float) -> None:
        """A request for `asked_bytes` has ended well, perhaps early, during which the node gave `num_bytes` on all its
        connections."""
        shown = self._shown.setdefault(node, _Shown())
        shown.failures = 0
        # One that is called off early, because it is slow, says how slow.
        if max(asked_bytes, num_bytes) < _MIN_SAMPLE_BYTES or not num_bytes or seconds <= 0:
            return
        shown.pause_s = _FIRST_PAUSE_S
        rate = num_bytes / seconds
        shown.rate = rate if not shown.rate else shown.rate + _NEW * (rate - shown.rate)
        shown.measured_s = now_s
        self._mean_rate = rate if not self._mean_rate else self._mean_rate + _NEW * (rate - self._mean_rate)

    def failed(self, node: str, now_s: float, *, at_once: bool) -> bool:
        """It failed; whether it is left alone from now on. `at_once`: as what it did would cost others as much."""
        shown = self._shown.setdefault(node, _Shown())
        shown.failures += 1
        if shown.is_open or (shown.failures < _FAILURES and not at_once):
            return False
        shown.is_open = True
        shown.probe_s = now_s + shown.pause_s
        self._open.add(node)
        return True

    def due(self, now_s: float) -> list[str]:
        """Nodes to be probed now. Each is named once until its probe has ended or a pause is over."""
        due = [node for node in self._open if self._shown[node].probe_s <= now_s]
        for node in due:
            shown = self._shown[node]
            shown.pause_s = min(2 * shown.pause_s, _MAX_PAUSE_S)
            shown.probe_s = now_s + shown.pause_s
        return due

    def works(self, node: str) -> None:
        """A probe has succeeded: it is asked again. How fast it was says nothing of how fast it is now.

        Its pause stays: a node that answers probes but serves nothing is tried less and less often.
        """
        shown = self._shown.setdefault(node, _Shown())
        self._shown[node] = _Shown(pause_s=shown.pause_s)
        self._open.discard(node)


def _anything(node: str, now_s: float) -> float:
    """Nothing is underway."""
    return math.inf

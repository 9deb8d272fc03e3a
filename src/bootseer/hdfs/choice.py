"""The choice of DataNodes for reads: estimates of their rates, and their queues.

Circuit breaker: a node that fails repeatedly, or is silent once, is excluded for a while; one silence is enough,
because each further one would cost a reader the same time. A slow node is not excluded: it gets what faster ones would
not finish earlier. Old measurements count less and less, so that a recovered node is tried again. Requests in flight
count too: one that has brought little so far bounds the node's current rate.

A piece is queued at all DataNodes that store it. Queues take turns, so that no DataNode waits for a thread while
another one has two. Used under the lock of `schedule`. Decides and touches nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bootseer.hdfs.block_locations import Node
from bootseer.hdfs.requests import NodeQueue, Piece, ReadSettings, State

_MIN_SAMPLE_BYTES: Final = 256 << 10
"""Smaller requests measure latency rather than the rate."""
_FAILURES: Final = 2
"""Failures in a row that open a node's circuit."""
_FIRST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 30.0
_SLOWER: Final = 3.0
"""Rates of healthy nodes differ by less, even if measured on a busy machine."""
_STALE_S: Final = 5.0
_RUN_S: Final = 0.25
"""Target duration of one request: long against the round trip, short enough to lose little with it."""
_UNKNOWN_RUN_BYTES: Final = 1 << 20
_RECEPTION_S: Final = 0.05
"""Target duration of one reception: memory that no read needs any more is free after it, and slow nodes can be told
from hung ones."""
_PACKET_BYTES: Final = 64 << 10
_UNKNOWN_PACKETS: Final = 4
_GUESS_RATE: Final = 100e6
"""Assumed rate while no node is known, so that backlogs count from the beginning."""
_NUM_TIMES: Final = 256
_NEW: Final = 0.3
"""Weight of a new sample of a rate."""


@dataclass(slots=True)
class _NodeStats:
    rate: float = 0.0
    """Bytes per second over all its connections; 0 while unknown."""
    measured_s: float = 0.0
    failures: int = 0
    probe_s: float = 0.0
    """The next probe of an excluded node."""
    pause_s: float = _FIRST_PAUSE_S


class NodeChoice:
    """Statistics of DataNodes. `min_late_s` and `max_late_s` bound `late_s`."""

    def __init__(self, *, min_late_s: float = 0.25, max_late_s: float = 1.0) -> None:
        self._min_late_s = min_late_s
        self._max_late_s = max_late_s
        self._stats: dict[str, _NodeStats] = {}
        self._open: set[str] = set()
        self._mean_rate = 0.0
        self._times: deque[float] = deque(maxlen=_NUM_TIMES)
        self._num_times = 0
        self._late_s = max_late_s
        self.rate_limit: Callable[[str, float], float] = lambda _node, _now_s: math.inf
        """The upper bound of a node's rate by its requests in flight."""

    def is_open(self, node: str) -> bool:
        return node in self._open

    def rate(self, node: str, now_s: float) -> float:
        """Estimated bytes per second; 0 if unknown."""
        rate_limit = self.rate_limit(node, now_s)
        stats = self._stats.get(node)
        if stats is None or not stats.rate:
            return rate_limit if rate_limit < math.inf else 0.0
        rate = stats.rate
        age_s = now_s - stats.measured_s
        if rate < self._mean_rate and age_s > _STALE_S:
            rate = min(self._mean_rate, rate * math.pow(2.0, min(age_s / _STALE_S - 1, 60.0)))
        return min(rate, rate_limit)

    def expected_s(self, node: str, num_bytes: int, now_s: float) -> float:
        """Estimated time for this many bytes, by the rate of the node, or else of others."""
        return num_bytes / (self.rate(node, now_s) or self._mean_rate or _GUESS_RATE)

    def run_bytes(self, node: str, most: int, now_s: float) -> int:
        """How many bytes to request from a node at once."""
        rate = self.rate(node, now_s)
        return min(int(rate * _RUN_S) if rate else _UNKNOWN_RUN_BYTES, most)

    def packets(self, node: str, connections: int, most: int, now_s: float) -> int:
        """How many packets to receive at once from a node with several connections."""
        rate = self.rate(node, now_s)
        wanted = int(rate / connections * _RECEPTION_S) // _PACKET_BYTES if rate else _UNKNOWN_PACKETS
        return max(1, min(wanted, most))

    def late_s(self) -> float:
        """A read without progress for so long is late: four times the 95th percentile."""
        return self._late_s

    def note_latency(self, seconds: float) -> None:
        """One reception took this long."""
        self._times.append(seconds)
        self._num_times += 1
        if self._num_times % 32 == 0:
            usual_s = sorted(self._times)[len(self._times) * 19 // 20]
            self._late_s = min(max(4 * usual_s, self._min_late_s), self._max_late_s)

    def note_served(self, node: str, asked_bytes: int, num_bytes: int, seconds: float, now_s: float) -> None:
        """A request for `asked_bytes` has succeeded, maybe early; meanwhile the node sent `num_bytes` in all."""
        stats = self._stats.setdefault(node, _NodeStats())
        stats.failures = 0
        # A request that was ended early, because it is slow, still measures the rate.
        if max(asked_bytes, num_bytes) < _MIN_SAMPLE_BYTES or not num_bytes or seconds <= 0:
            return
        stats.pause_s = _FIRST_PAUSE_S
        rate = num_bytes / seconds
        stats.rate = rate if not stats.rate else stats.rate + _NEW * (rate - stats.rate)
        stats.measured_s = now_s
        self._mean_rate = rate if not self._mean_rate else self._mean_rate + _NEW * (rate - self._mean_rate)

    def note_failure(self, node: str, now_s: float, *, at_once: bool) -> bool:
        """A request failed. Returns whether the circuit opens. `at_once`: without waiting for a second failure."""
        stats = self._stats.setdefault(node, _NodeStats())
        stats.failures += 1
        if node in self._open or (stats.failures < _FAILURES and not at_once):
            return False
        stats.probe_s = now_s + stats.pause_s
        self._open.add(node)
        return True

    def due_probes(self, now_s: float) -> list[str]:
        """Excluded nodes to be probed now. Each is returned once per pause."""
        due = [node for node in self._open if self._stats[node].probe_s <= now_s]
        for node in due:
            stats = self._stats[node]
            stats.pause_s = min(2 * stats.pause_s, _MAX_PAUSE_S)
            stats.probe_s = now_s + stats.pause_s
        return due

    def probe_succeeded(self, node: str) -> None:
        """A probe has succeeded: the node is used again, with an unknown rate.

        Its pause stays: a node that answers probes but serves nothing is retried less and less often.
        """
        self._stats[node] = _NodeStats(pause_s=self._stats[node].pause_s)
        self._open.discard(node)


class NodeQueues:
    """The queues of all DataNodes."""

    def __init__(self, choice: NodeChoice, settings: ReadSettings) -> None:
        self.by_node: dict[str, NodeQueue] = {}
        self._choice = choice
        choice.rate_limit = self._rate_limit
        self._settings = settings
        self._waiting: dict[NodeQueue, None] = {}
        self._ready: deque[NodeQueue] = deque()

    @property
    def num_ready(self) -> int:
        """How many threads could take something. A piece that is taken from one queue leaves all others."""
        return sum(queue in self._waiting for queue in self._ready)

    def add(self, piece: Piece, nodes: Sequence[Node], *, first: bool = False) -> None:
        """Queue a piece at these DataNodes; `first`: before all others."""
        piece.state = State.QUEUED
        for node in nodes:
            queue = self.queue(node)
            queue.add(piece, first=first)
            self._waiting[queue] = None
            self.notify(queue)

    def queue(self, node: Node) -> NodeQueue:
        queue = self.by_node.get(node.host_port)
        if queue is None:
            queue = self.by_node[node.host_port] = NodeQueue(node)
        return queue

    def remove(self, piece: Piece, queue: NodeQueue | None = None) -> None:
        """Remove a piece from this queue, or from all."""
        for one in list(piece.queues) if queue is None else [queue]:
            one.remove(piece)
            if not one.num_queued:
                self._waiting.pop(one, None)

    def take(self, now_s: float) -> tuple[NodeQueue, list[Piece]] | None:
        """Dequeue the pieces of the next request for a free thread."""
        for _ in range(len(self._ready)):
            queue = self._ready.popleft()
            queue.is_ready = False
            if not self._has_room(queue):
                continue
            # Near the end of a queue, a long request would leave other connections and nodes idle.
            most = min(self._settings.max_run_bytes, queue.queued_bytes // 3)
            pieces = queue.next_pieces(
                self._choice.run_bytes(queue.name, most, now_s),
                lambda piece, queue=queue: self._waits_s(piece, queue, now_s),  # type: ignore[misc]
            )
            if pieces:  # otherwise `poke_all` looks again
                for piece in pieces:
                    self.remove(piece)
                return queue, pieces
        return None

    def notify(self, queue: NodeQueue) -> None:
        """The queue may have become servable."""
        if not queue.is_ready and self._has_room(queue):
            queue.is_ready = True
            self._ready.append(queue)

    def poke_all(self) -> None:
        """Check all queues again: what a slow DataNode has left to a faster one may be its own after all."""
        for queue in self._waiting:
            self.notify(queue)

    def is_full(self, queue: NodeQueue) -> bool:
        """Whether the DataNode has its maximum of threads: one if excluded, so that hung nodes cannot block all."""
        return len(queue.runs) >= (1 if self._choice.is_open(queue.name) else self._settings.connections_per_node)

    def backlog_bytes(self, node: str) -> int:
        """Bytes that a DataNode has to send before it could begin another request."""
        queue = self.by_node.get(node)
        return queue.queued_bytes + queue.running_bytes if queue else 0

    def expected_s(self, node: str, num_bytes: int, now_s: float) -> float:
        """Estimated seconds until a DataNode would have sent so much more; infinity while it is excluded."""
        if self._choice.is_open(node):
            return math.inf
        return self._choice.expected_s(node, self.backlog_bytes(node) + num_bytes, now_s)

    def remaining_s(self, piece: Piece, now_s: float) -> float:
        """Estimated seconds until a piece arrives; 0 if unknown."""
        run = piece.run
        if run is not None and piece.state in (State.TAKEN, State.HELD):
            queue, num_bytes = run.queue, piece.offset + piece.length - run.pieces[0].offset - run.received
            # The node's rate is shared by its connections.
            num_bytes *= len(queue.runs)
            if self._choice.is_open(queue.name):
                return math.inf
            return self._choice.expected_s(queue.name, num_bytes, now_s)
        if piece.state is not State.QUEUED:
            is_waiting = piece.state is State.PARKED and (piece.num_pauses or not piece.block.nodes)
            return math.inf if is_waiting else 0.0
        if len(piece.queues) > 1:
            return min(self.expected_s(queue.name, 0, now_s) for queue in piece.queues)
        (queue,) = piece.queues
        if self._choice.is_open(queue.name):
            return math.inf
        return self._choice.expected_s(queue.name, queue.ahead_bytes(piece) + piece.length, now_s)

    def _rate_limit(self, node: str, now_s: float) -> float:
        queue = self.by_node.get(node)
        return math.inf if queue is None else queue.rate_limit(now_s)

    def _has_room(self, queue: NodeQueue) -> bool:
        return queue.num_queued > 0 and not self.is_full(queue)

    def _waits_s(self, piece: Piece, queue: NodeQueue, now_s: float) -> float:
        """When another DataNode would begin a piece; negative if the piece is better left to it."""
        choice, rate, num_bytes = self._choice, self._choice.rate(queue.name, now_s), queue.running_bytes + piece.length
        waits_s = math.inf
        for other in [other.name for other in piece.queues if other is not queue]:
            faster = choice.rate(other, now_s)
            is_much_faster = rate and faster > rate * _SLOWER and not choice.is_open(other)
            if is_much_faster and self.backlog_bytes(other) / faster < num_bytes / rate:
                return -1.0
            waits_s = min(waits_s, self.expected_s(other, 0, now_s))
        return waits_s

"""Which DataNode is asked: estimates of their rates, and the queues of all of them.

A node that fails, or says nothing, is not asked for a while (a circuit breaker): one silence is enough, because
each further one would cost a reader the same time again. A node that is slow is not: it gets what the fast ones would
not finish earlier. What was measured long ago counts less and less, so that a node that has recovered is tried.
What is underway counts too: a request that has brought little in some time shows that its node is no faster than that.

A piece waits in the queues of all DataNodes that may give it. Queues take turns, so that no DataNode waits for a
thread while another one has two. Used under the lock of `schedule`. Decides and touches nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bootseer.hdfs.located import Node
from bootseer.hdfs.requests import NodeQueue, Piece, State

_MIN_SAMPLE_BYTES: Final = 256 << 10
"""Less says more about latency than about the rate."""
_FAILURES: Final = 2
"""In a row, then a node is not asked."""
_FIRST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 30.0
_SLOWER: Final = 3.0
"""Rates of healthy nodes differ by less, also while they are measured on a busy machine."""
_STALE_S: Final = 5.0
_RUN_S: Final = 0.25
"""One request takes about so long: the way there and back is little against it, and little is lost with it."""
_UNKNOWN_RUN_BYTES: Final = 1 << 20
_RECEPTION_S: Final = 0.05
"""What is received at once takes about so long: memory that no read wants filled any more is free after it, and a node
that is slow is distinguished from one that hangs."""
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
    """When it may be probed again, while it is not asked."""
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
        self.at_most: Callable[[str, float], float] = lambda _node, _now_s: math.inf
        """The rate that what is underway at a node allows for, by now."""

    def is_open(self, node: str) -> bool:
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
        """The node that would finish this first comes first; those that are not asked (circuit open) come last."""
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
        """It failed; whether its circuit opens. `at_once`: as what it did would cost others as much."""
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


_MAX_REPLICAS: Final = 4
"""A piece stands in the queues of so many DataNodes at once."""


class NodeQueues:
    """The queues of all DataNodes. `connections_per_node` and `max_run_bytes`: see `ReadSettings`."""

    def __init__(self, choice: NodeChoice, *, connections_per_node: int, max_run_bytes: int) -> None:
        self.by_node: dict[str, NodeQueue] = {}
        self._choice = choice
        choice.at_most = self._at_most
        self._connections_per_node = connections_per_node
        self._max_run_bytes = max_run_bytes
        self._waiting: dict[NodeQueue, None] = {}
        self._ready: deque[NodeQueue] = deque()

    @property
    def num_ready(self) -> int:
        """How many threads could take something. A piece that was taken from one queue is removed from the queues of
        all other DataNodes that have it."""
        return sum(queue in self._waiting for queue in self._ready)

    def add(self, piece: Piece, nodes: Sequence[Node], now_s: float, *, first: bool = False) -> None:
        """Queue a piece for these DataNodes; `first`: before all others."""
        if len(nodes) > _MAX_REPLICAS:
            names = [node.host_port for node in nodes]
            best = self._choice.order(names, piece.length, self.backlog_bytes, now_s)[:_MAX_REPLICAS]
            nodes = [node for node in nodes if node.host_port in best]
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
        """It does not wait any more: in this queue, or in any."""
        for one in list(piece.queues) if queue is None else [queue]:
            one.remove(piece)
            if not one.num_queued:
                self._waiting.pop(one, None)

    def take(self, now_s: float) -> tuple[NodeQueue, list[Piece]] | None:
        """The pieces that a free thread is to read now, which do not wait any more."""
        for _ in range(len(self._ready)):
            queue = self._ready.popleft()
            queue.is_ready = False
            if not self._has_room(queue):
                continue
            # Near the end, a long request would leave the other connection and the other nodes without work.
            most = min(self._max_run_bytes, queue.queued_bytes // 3)
            pieces = queue.next_pieces(
                self._choice.run_bytes(queue.name, most, now_s),
                lambda piece, queue=queue: self._waits_s(piece, queue, now_s),  # type: ignore[misc]
            )
            if pieces:  # else `poke_all` looks again
                for piece in pieces:
                    self.remove(piece)
                return queue, pieces
        return None

    def notify(self, queue: NodeQueue) -> None:
        """It may have become possible to serve this queue."""
        if not queue.is_ready and self._has_room(queue):
            queue.is_ready = True
            self._ready.append(queue)

    def poke_all(self) -> None:
        """Look at all queues again: what a slow DataNode has left to a fast one may be for it after all."""
        for queue in self._waiting:
            self.notify(queue)

    def is_full(self, queue: NodeQueue) -> bool:
        """Whether as many threads talk to this DataNode as may: one, when it hangs, so that many of them leave some."""
        return len(queue.runs) >= (1 if self._choice.is_open(queue.name) else self._connections_per_node)

    def backlog_bytes(self, node: str) -> int:
        """What a DataNode has to send before it could begin with another request."""
        queue = self.by_node.get(node)
        return queue.queued_bytes + queue.running_bytes if queue else 0

    def expected_s(self, node: str, num_bytes: int, now_s: float) -> float:
        """Seconds until a DataNode would have sent so much more; infinity while it is not asked."""
        if self._choice.is_open(node):
            return math.inf
        return self._choice.expected_s(node, self.backlog_bytes(node) + num_bytes, now_s)

    def left_s(self, piece: Piece, now_s: float) -> float:
        """Seconds until a piece will be there, by estimate; 0 where nothing is known."""
        run = piece.run
        if run is not None and piece.state in (State.TAKEN, State.HELD):
            queue, num_bytes = run.queue, piece.offset + piece.length - run.pieces[0].offset - run.received
            # Its other connections have their share of the node.
            num_bytes *= len(queue.runs)
            if self._choice.is_open(queue.name):
                return math.inf
            return self._choice.expected_s(queue.name, num_bytes, now_s)
        if piece.state is not State.QUEUED:
            return 0.0
        if len(piece.queues) > 1:
            return min(self.expected_s(queue.name, 0, now_s) for queue in piece.queues)
        (queue,) = piece.queues
        if self._choice.is_open(queue.name):
            return math.inf
        return self._choice.expected_s(queue.name, queue.ahead_bytes(piece) + piece.length, now_s)

    def _at_most(self, node: str, now_s: float) -> float:
        queue = self.by_node.get(node)
        return math.inf if queue is None else queue.at_most(now_s)

    def _has_room(self, queue: NodeQueue) -> bool:
        return queue.num_queued > 0 and not self.is_full(queue)

    def _waits_s(self, piece: Piece, queue: NodeQueue, now_s: float) -> float:
        """When another DataNode would begin with a piece; below zero, when it is better left to that one."""
        others = [other.name for other in piece.queues if other is not queue]
        if not others:
            return math.inf
        if self._choice.leaves(queue.name, queue.running_bytes + piece.length, others, self.backlog_bytes, now_s):
            return -1.0
        return min(self.expected_s(other, 0, now_s) for other in others)

"""A discrete-event engine with virtual time, and links over which bytes flow.

Links are shared max-min fairly by progressive filling (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2): the
link with the smallest share per flow saturates first, its flows are fixed at that rate, and the remaining capacity of
all links is divided again. A processor is modelled as a link: the bytes that it decompresses and verifies per second.

Deterministic: the same calls in the same order give the same events.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from typing import Final

_REST: Final = 1e-6
"""Bytes; a smaller rest is a rounding error."""


class Link:
    """One direction of a link, or a processor."""

    __slots__ = ("bytes_per_s", "carried", "flows", "free", "number", "unfixed")

    def __init__(self, bytes_per_s: float, number: int) -> None:
        self.bytes_per_s = bytes_per_s
        self.carried = 0.0
        """Bytes so far."""
        self.number = number
        self.flows: dict[Flow, None] = {}
        self.free = 0.0
        self.unfixed = 0


class Flow:
    """A transfer of bytes over some links."""

    __slots__ = ("done", "left", "links", "rate")

    def __init__(self, links: Sequence[Link], num_bytes: float, done: Callable[[], None]) -> None:
        self.links = links
        self.left = num_bytes
        self.rate = 0.0
        self.done = done


class Engine:
    """Calls functions at their times, in order, and advances flows in between."""

    def __init__(self, quantum_s: float = 0.0) -> None:
        """`quantum_s`: minimum length of a step. Flows that end within a step are completed together, slightly late.
        Rates are computed once per step, which dominates the cost of a simulation of many nodes."""
        self.now = 0.0
        self._quantum_s = quantum_s
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._link_numbers = count()
        self._flows: dict[Flow, None] = {}
        self._busy: dict[Link, None] = {}
        """Links with flows."""
        self._soon: dict[Callable[[], None], None] = {}
        self._changed = False
        self._halted = False

    def link(self, bytes_per_s: float) -> Link:
        return Link(bytes_per_s, next(self._link_numbers))

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (max(time_s, self.now), next(self._numbers), call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.at(self.now + delay_s, call)

    def soon(self, call: Callable[[], None]) -> None:
        """Call it once after all other events of this moment."""
        self._soon[call] = None

    def start(self, links: Sequence[Link], num_bytes: float, done: Callable[[], None]) -> Flow:
        """Start a flow; `done` is called when all bytes have arrived."""
        flow = Flow(links, num_bytes, done)
        self._flows[flow] = None
        for link in links:
            link.flows[flow] = None
            self._busy[link] = None
        self._changed = True
        return flow

    def stop(self, flow: Flow) -> None:
        if self._flows.pop(flow, flow) is None:
            for link in flow.links:
                del link.flows[flow]
                if not link.flows:
                    del self._busy[link]
            self._changed = True

    def halt(self) -> None:
        """Make `run` return, without the remaining events."""
        self._halted = True

    def run(self, until_s: float = inf) -> None:
        """Run until there are no more events, or until this time."""
        self._settle()
        while not self._halted:
            if self._changed:
                self._share()
            ends_s = min((flow.left / flow.rate for flow in self._flows if flow.rate), default=inf) + self.now
            next_s = min(ends_s, self._calls[0][0] if self._calls else inf)
            if next_s == inf or next_s > until_s:
                self._advance(until_s if until_s < inf else self.now)
                return
            self._advance(max(next_s, self.now + self._quantum_s))
            for flow in [flow for flow in self._flows if flow.left <= max(_REST, flow.rate * 1e-9)]:
                self.stop(flow)
                flow.left = 0.0
                flow.done()
            while self._calls and self._calls[0][0] <= self.now:
                heapq.heappop(self._calls)[2]()
            self._settle()

    def _settle(self) -> None:
        while self._soon:
            calls, self._soon = self._soon, {}
            for call in calls:
                call()

    def _advance(self, time_s: float) -> None:
        passed_s = time_s - self.now
        self.now = time_s
        for flow in self._flows:
            moved = min(flow.rate * passed_s, flow.left)
            flow.left -= moved
            for link in flow.links:
                link.carried += moved

    def _share(self) -> None:
        self._changed = False
        queue: list[tuple[float, int, Link]] = []
        for link in self._busy:
            link.free, link.unfixed = link.bytes_per_s, len(link.flows)
            queue.append((link.free / link.unfixed, link.number, link))
        heapq.heapify(queue)
        for flow in self._flows:
            flow.rate = -1.0
        while queue:
            share, _, link = heapq.heappop(queue)
            if not link.unfixed:
                continue
            if share < (least := link.free / link.unfixed) * (1 - 1e-12):  # stale entry: its share has grown since
                heapq.heappush(queue, (least, link.number, link))
                continue
            for flow in link.flows:
                if flow.rate < 0.0:
                    flow.rate = max(least, 0.0)
                    for other in flow.links:
                        other.free -= flow.rate
                        other.unfixed -= 1

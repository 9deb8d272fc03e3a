"""Simulated DataNodes with links of given rates, in virtual time: durations of reads without any other delays.

The real schedule runs, and the code that a test adds to it; sockets, threads and clocks are replaced by an event loop.
So results are the same on every machine.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bootseer.errors import PermanentError
from bootseer.hdfs.block_locations import Block, LocatedFile, Node
from bootseer.hdfs.errors import SilentError
from bootseer.hdfs.reads import HdfsFile
from bootseer.hdfs.requests import HdfsSource, ReadSettings, Run
from bootseer.hdfs.requests import Ticket as Asked
from bootseer.hdfs.schedule import Schedule
from bootseer.io.pooled_reads import ReadOutcome

MIB = 1 << 20
PACKET = 64 << 10
_REQUEST_S = 0.001
_TICK_S = 0.1


def node_of(name: str) -> Node:
    return Node(name, name)


@dataclass(eq=False)
class _Transfer:
    """The execution of a run."""

    run: Run
    left: float = 0.0
    """Bytes left of the current reception."""
    views: list[memoryview] = field(default_factory=list)
    ready_s: float = 0.0
    """When its DataNode begins to send."""
    progress_s: float = 0.0
    judged_s: float = 0.0


class Links:
    """A cluster. `rates`: MiB/s by DataNode; with 0 it hangs. `blocks`: the data by block id."""

    def __init__(self, rates: dict[str, float], settings: ReadSettings | None = None) -> None:
        self.now_s = 0.0
        self.rates = rates
        self.settings = settings or ReadSettings()
        self.schedule = Schedule(self.settings)
        self.blocks: dict[int, bytes] = {}
        self.served: dict[str, int] = dict.fromkeys(rates, 0)
        """Bytes sent by each DataNode, whether they were used or not."""
        self._transfers: list[_Transfer] = []
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._next_tick_s = _TICK_S
        self._depth = 0

    def store(self, path: str, blocks: Sequence[tuple[bytes, Sequence[str]]]) -> File:
        """Store a file of blocks, each given with its DataNodes."""
        made, start = [], 0
        for data, nodes in blocks:
            number = len(self.blocks) + 1
            self.blocks[number] = data
            made.append(Block(start, len(data), "pool", number, 1, b"", tuple(map(node_of, nodes))))
            start += len(data)
        return File(self, LocatedFile(path, start, tuple(made), path, True))

    # The interface of `Timer`.

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (self.now_s + delay_s, next(self._order), call))

    # In place of `ReadThreads`.

    @contextmanager
    def locked(self) -> Iterator[Schedule]:
        """Like `ReadThreads.schedule`."""
        yield self.schedule
        ended, self.schedule.ended = self.schedule.ended, deque()
        for ticket in ended:
            ticket.done(ReadOutcome(ticket.error, ticket.node))

    def run(self, until: Callable[[], bool], limit_s: float = 600.0) -> float:
        """Advance the time until a condition holds; returns the duration."""
        began_s = self.now_s
        while not until():
            self._begin()
            self._step()
            assert self.now_s - began_s < limit_s, "it does not end"
        return self.now_s - began_s

    def _begin(self) -> None:
        while len(self._transfers) < self.settings.max_threads:
            with self.locked() as schedule:
                while schedule.to_locate:
                    source = schedule.to_locate.popleft()
                    schedule.located(source, source.located, self.now_s)
                run = schedule.take(self.now_s)
            if run is None:
                return
            transfer = _Transfer(run, ready_s=self.now_s + _REQUEST_S, progress_s=self.now_s, judged_s=self.now_s)
            self._transfers.append(transfer)
            self._claim(transfer)

    def _claim(self, transfer: _Transfer) -> None:
        run = transfer.run
        length = min(run.packets * PACKET, run.length - run.received)
        views = self.schedule.claim(run, length) if length else None
        if views is None:
            self._end(transfer, None)
        else:
            transfer.views, transfer.left = views, length

    def _end(self, transfer: _Transfer, error: SilentError | None) -> None:
        self._transfers.remove(transfer)
        with self.locked() as schedule:
            schedule.finished(transfer.run, error, self.now_s)

    def _step(self) -> None:
        """Advance to the next event."""
        active = [one for one in self._transfers if one.ready_s <= self.now_s]
        shares: dict[str, int] = {}
        for one in active:
            shares[one.run.queue.name] = shares.get(one.run.queue.name, 0) + 1
        speeds = {name: self.rates[name] * MIB / number for name, number in shares.items()}
        at_s = min(
            [self._next_tick_s]
            + [call[0] for call in self._calls[:1]]
            + [one.ready_s for one in self._transfers if one.ready_s > self.now_s]
            + [self.now_s + one.left / speeds[one.run.queue.name] for one in active if speeds[one.run.queue.name]]
        )
        elapsed_s, self.now_s = at_s - self.now_s, max(at_s, self.now_s)
        for one in active:
            one.left -= speeds[one.run.queue.name] * elapsed_s
        for one in [one for one in active if one.left < 1]:
            self._receive(one)
        for one in [one for one in self._transfers if one.run.stopped]:
            self._end(one, None)
        while self._calls and self._calls[0][0] <= self.now_s:
            heapq.heappop(self._calls)[2]()
        if self.now_s >= self._next_tick_s:
            self._next_tick_s += _TICK_S
            self._tick()

    def _receive(self, transfer: _Transfer) -> None:
        run = transfer.run
        at = run.pieces[0].offset + run.received
        length = sum(map(len, transfer.views))
        data = memoryview(self.blocks[run.pieces[0].block.id])
        for view in transfer.views:
            view[:] = data[at : at + len(view)]
            at += len(view)
        self.served[run.queue.name] += length
        transfer.progress_s = transfer.judged_s = self.now_s
        with self.locked() as schedule:
            schedule.received(run, length, self.now_s)
        self._claim(transfer)

    def _tick(self) -> None:
        with self.locked() as schedule:
            schedule.tick(self.now_s)
            for name in schedule.choice.due_probes(self.now_s):
                if self.rates[name]:
                    schedule.choice.probe_succeeded(name)
        for one in list(self._transfers):
            if self.now_s - one.judged_s >= self.settings.silent_s:
                one.judged_s = self.now_s
                with self.locked() as schedule:
                    gives_up = schedule.should_give_up(one.run, self.now_s - one.progress_s)
                if gives_up:
                    self._end(one, SilentError("it said nothing"))


class File:
    """In place of `HdfsFile`."""

    def __init__(self, links: Links, located: LocatedFile) -> None:
        self.size_bytes = located.size_bytes
        self.version = located.version
        self._links = links
        self._source = HdfsSource(located, located.path)

    nodes = HdfsFile.nodes

    def delay_s(self, offset: int, length: int) -> float:
        return self._links.schedule.delay_s(self._source, offset, length, self._links.now_s)

    def read_into(
        self,
        offset: int,
        into: memoryview,
        done: Callable[[ReadOutcome], None],
        *,
        check: bool = True,
        urgent: bool = True,
        avoid: frozenset[str] = frozenset(),
        deadline_s: float = 60.0,
        inline: bool = False,
    ) -> Ticket:
        asked = Asked(self._source, offset, into, done, check, urgent, avoid, deadline_s)
        with self._links.locked() as schedule:
            schedule.submit(asked, self._links.now_s)
        return Ticket(self._links, asked)

    def read(self) -> float:
        """Read and check the whole file at once; returns the duration."""
        links, memory, ends = self._links, bytearray(self.size_bytes), []
        self.read_into(0, memoryview(memory), ends.append)
        seconds = links.run(lambda: bool(ends))
        assert ends[0].error is None
        assert memory == b"".join(links.blocks[block.id] for block in self._source.located.blocks)
        return seconds

    def close(self) -> None:
        pass


class Ticket:
    """In place of `ReadTicket`."""

    def __init__(self, links: Links, asked: Asked) -> None:
        self._links = links
        self._asked = asked

    def cancel(self) -> None:
        with self._links.locked() as schedule:
            schedule.cancel(self._asked, PermanentError("called off"), self._links.now_s)

    def prioritize(self) -> None:
        with self._links.locked() as schedule:
            schedule.prioritize(self._asked)

    def remaining_s(self) -> float:
        return self._links.schedule.remaining_s(self._asked, self._links.now_s)


def rate(size_bytes: int, seconds: float) -> float:
    """The rate in MiB/s."""
    return size_bytes / MIB / seconds if seconds else math.inf

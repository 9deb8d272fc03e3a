"""Reads of checkpoints from HDFS. The real code makes the decisions: `hdfs.schedule`, `hdfs.choice`, `hdfs.placement`
and `checkpoint.reading.settings` about DataNodes and parity, `checkpoint.read_ahead` about read-ahead, and
`peers.readers` about the node that passes on shared data. DataNodes and links are models.

A reader has `direct_bytes` of a striped file in flight, like a rank that loads its shard, or reads one row after the
other, as through the mount. Progress is reported to the schedule ten times a second and at the end of a request; in
reality, with each packet.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import Final

from bootseer.checkpoint.layout import Policy, part_size
from bootseer.checkpoint.read_ahead import ReadAhead, ReadAheadSettings
from bootseer.checkpoint.reading.settings import (
    ReadingSettings,
    chunk_to_replace,
    chunk_to_skip,
)
from bootseer.errors import TransientError
from bootseer.hdfs.block_locations import Block, LocatedFile, Node, has_distinct_nodes
from bootseer.hdfs.errors import DataNodeError, SilentError
from bootseer.hdfs.requests import HdfsSource, ReadSettings, Run, Ticket
from bootseer.hdfs.schedule import Schedule
from bootseer.io.pooled_reads import ReadOutcome
from bootseer.peers.protocol import Question
from bootseer.peers.readers import UNIT_BLOCKS, Readers
from bootseer.sim.engine import Engine, Flow, Link

_TICK_S: Final = 0.1
_REQUEST_S: Final = 0.001
_PACKET_BYTES: Final = 64 << 10
_BLOCK_BYTES: Final = 128 << 20
_DRAWS: Final = 24
_UNITS: Final = 1024
"""Maximum number of units of shared data."""
_UNIT_BYTES: Final = UNIT_BLOCKS << 20
"""Minimum size of a unit, as in reality: 16 chunks."""
_SETTINGS: Final = ReadingSettings()
Way = Callable[[Link], tuple[Link, ...]]
"""The links from a DataNode to a node."""


class Cluster:
    """DataNodes, and the placement of files on them."""

    def __init__(self, engine: Engine, num: int, bytes_per_s: float, seed: int, replicas: int = 3) -> None:
        self.engine = engine
        self.links = {f"datanode{at}": engine.link(bytes_per_s) for at in range(num)}
        self.hung: set[str] = set()
        self.memory = memoryview(mmap.mmap(-1, _SETTINGS.direct_bytes))
        """The buffer for reads; it is never touched, so it costs no memory."""
        self._nodes = [Node(name, name) for name in self.links]
        self._random = Random(f"{seed}/hdfs")  # noqa: S311
        self._replicas = min(replicas, num)
        self._num_blocks = 0

    def file(self, num_bytes: int, nodes: Sequence[Node]) -> HdfsSource:
        self._num_blocks += 1
        block = Block(0, num_bytes, "pool", self._num_blocks, 1, b"", tuple(nodes))
        path = f"/{self._num_blocks}"
        return HdfsSource(LocatedFile(path, num_bytes, (block,), path, True), path)

    def draw(self) -> list[Node]:
        """The DataNodes that a NameNode chooses for a block."""
        return self._random.sample(self._nodes, self._replicas)

    def segment(self, policy: Policy, num_bytes: int) -> list[HdfsSource]:
        """The parts of a segment, parity last, placed like the real writer does."""
        stripes = min(policy.stripes, max(num_bytes // policy.min_bytes_per_stripe, 1))
        sizes = [part_size(num_bytes, stripes, part) for part in range(stripes)]
        sizes += [sizes[0]] * policy.parity
        share = -(-len(sizes) // len(self._nodes))
        placed = [self.draw() for _ in sizes]
        for _ in range(_DRAWS):
            if has_distinct_nodes([frozenset(node.host_port for node in nodes) for nodes in placed], share):
                break
            placed[self._random.randrange(len(placed))] = self.draw()
        return [self.file(size, nodes) for size, nodes in zip(sizes, placed, strict=True)]

    def plain(self, num_bytes: float, way: Way, pace: Link, done: Callable[[], None]) -> None:
        """Read an ordinary file like the standard client: block after block, each from one of its DataNodes."""

        def step(left: float) -> None:
            if left <= 0:
                done()
                return
            nodes = [node.host_port for node in self.draw() if node.host_port not in self.hung]
            link = self.links[self._random.choice(nodes or list(self.links))]
            length = min(left, _BLOCK_BYTES)
            self.engine.start((*way(link), pace), length, partial(step, left - length))

        step(num_bytes)


class _Transfer:
    """A request in flight; the connection of a run for `Schedule`."""

    def __init__(self, reads: Reads, run: Run) -> None:
        self.reads, self.run = reads, run
        self.flow: Flow | None = None
        self.over = False

    def stop(self) -> None:
        self.reads.engine.soon(partial(self.reads.end, self, None))

    close = stop


class Reads:
    """The reads of one node: its schedule and its connections."""

    def __init__(
        self, cluster: Cluster, way: Way, stream_bytes_per_s: float, policy: Policy, piece_bytes: int = 1 << 20
    ) -> None:
        """`piece_bytes`: larger pieces than in reality are faster to simulate, but coarser for parity."""
        self.engine = cluster.engine
        self.schedule = Schedule(ReadSettings(piece_bytes=piece_bytes))
        self._piece_bytes = piece_bytes
        self._cluster, self._way, self._policy = cluster, way, policy
        self._stream_bytes_per_s = stream_bytes_per_s
        self._transfers: dict[_Transfer, None] = {}
        self._ticking = False

    def read(self, num_bytes: int, done: Callable[[], None], *, in_order: bool = False) -> None:
        """Read a striped file completely, with `direct_bytes` in flight; `in_order`: row after row, with read-ahead."""
        segment_bytes = self._policy.stripes * self._policy.part_bytes
        row_bytes = min(self._policy.stripes * self._piece_bytes, _SETTINGS.direct_bytes)
        rows = [
            (start, at)
            for start in range(0, num_bytes, segment_bytes)
            for at in range(0, min(segment_bytes, num_bytes - start), row_bytes)
        ]
        parts: dict[int, list[HdfsSource]] = {}

        def ask(number: int, here: Callable[[], None]) -> None:
            start, at = rows[number]
            if start not in parts:
                parts[start] = self._cluster.segment(self._policy, min(segment_bytes, num_bytes - start))
            _Row(self, parts[start], at, row_bytes, self._policy.parity, here)

        if in_order:
            _InOrder(len(rows), row_bytes, ask, done)
            return
        _in_parallel(range(len(rows)), max(_SETTINGS.direct_bytes // row_bytes, 1), ask, done)

    def ask(self, source: HdfsSource, offset: int, length: int, done: Callable[[ReadOutcome], None]) -> Ticket:
        into = self._cluster.memory[:length]
        ticket = Ticket(source, offset, into, done, False, True, frozenset(), _SETTINGS.deadline_s)
        self.schedule.submit(ticket, self.engine.now)
        self.engine.soon(self._serve)
        if not self._ticking:
            self._ticking = True
            self.engine.after(_TICK_S, self._tick)
        return ticket

    def _serve(self) -> None:
        schedule, now = self.schedule, self.engine.now
        while schedule.to_locate:
            source = schedule.to_locate.popleft()
            schedule.located(source, source.located, now)
        while len(self._transfers) < ReadSettings().max_threads and (run := schedule.take(now)) is not None:
            transfer = _Transfer(self, run)
            run.connection = transfer
            self._transfers[transfer] = None
            if schedule.claim(run, min(_PACKET_BYTES, run.length)) is None:
                self.end(transfer, None)
            else:
                self.engine.after(_REQUEST_S, partial(self._begin, transfer))
        while schedule.ended:
            ticket = schedule.ended.popleft()
            ticket.done(ReadOutcome(ticket.error, ticket.node))

    def _begin(self, transfer: _Transfer) -> None:
        name = transfer.run.queue.name
        if not transfer.over and name not in self._cluster.hung:
            way = (*self._way(self._cluster.links[name]), self.engine.link(self._stream_bytes_per_s))
            transfer.flow = self.engine.start(way, transfer.run.length, partial(self._arrived, transfer))

    def _arrived(self, transfer: _Transfer) -> None:
        self._report_progress(transfer, 0.0)
        self.end(transfer, None)

    def _report_progress(self, transfer: _Transfer, left: float) -> bool:
        """Report the progress of a request to the schedule. Returns whether it continues."""
        run = transfer.run
        moved = run.length - int(left) - run.received
        if moved <= 0:
            return True
        if self.schedule.claim(run, moved) is None:
            return False
        self.schedule.received(run, moved, self.engine.now)
        rest = min(_PACKET_BYTES, run.length - run.received)
        return not rest or self.schedule.claim(run, rest) is not None

    def end(self, transfer: _Transfer, error: DataNodeError | None) -> None:
        if transfer.over:
            return
        transfer.over, transfer.run.connection = True, None
        if transfer.flow is not None:
            self.engine.stop(transfer.flow)
        del self._transfers[transfer]
        self.schedule.finished(transfer.run, error, self.engine.now)
        self.engine.soon(self._serve)

    def _tick(self) -> None:
        schedule, now = self.schedule, self.engine.now
        self._ticking = schedule.num_pieces > 0
        if not self._ticking:
            return
        self.engine.after(_TICK_S, self._tick)
        for transfer in list(self._transfers):
            if transfer.flow is not None and not self._report_progress(transfer, transfer.flow.left):
                self.end(transfer, None)
            silent_s = now - transfer.run.progress_s
            if silent_s >= ReadSettings().silent_s and schedule.should_give_up(transfer.run, silent_s):
                self.end(transfer, SilentError(f"no data for {silent_s:.1f} s"))
        schedule.tick(now)
        for name in schedule.choice.due_probes(now):
            if name not in self._cluster.hung:
                schedule.choice.probe_succeeded(name)
        self._serve()


class _Row:
    """A parallel read of all parts of a segment, one of which may be replaced by parity."""

    def __init__(
        self,
        reads: Reads,
        parts: Sequence[HdfsSource],
        at: int,
        row_bytes: int,
        parity: bool,
        done: Callable[[], None],
    ) -> None:
        self._reads, self._parts, self._done = reads, parts, done
        stripes = len(parts) - parity
        self._offset, self._most = at // stripes, row_bytes // stripes
        self._tickets: dict[int, Ticket] = {}
        self._over = False
        self._spare: int | None = None
        """The part that is not read: parity, or the part that parity replaces."""
        wanted = [part for part in range(stripes) if self._length(part) > 0]
        self._num_wanted = len(wanted)
        if parity:
            delays = {part: self._delay_s(part) for part in wanted}
            skipped = chunk_to_skip(delays, frozenset(wanted), self._delay_s(stripes))
            self._spare = stripes if skipped is None else skipped
            wanted = [part for part in (*wanted, stripes) if part != self._spare]
            reads.engine.after(_SETTINGS.row_check_s, self._look)
        for part in wanted:
            self._ask(part)

    def _length(self, part: int) -> int:
        return min(self._most, self._parts[part].located.size_bytes - self._offset)

    def _delay_s(self, part: int) -> float:
        length = self._length(part)
        return self._reads.schedule.delay_s(self._parts[part], self._offset, length, self._reads.engine.now)

    def _ask(self, part: int) -> None:
        self._tickets[part] = self._reads.ask(self._parts[part], self._offset, self._length(part), self._ended)

    def _look(self) -> None:
        """Read the spare part if it is expected to arrive before a late one."""
        if self._over or self._spare is None:
            return
        now, schedule = self._reads.engine.now, self._reads.schedule
        left = {part: schedule.remaining_s(ticket, now) for part, ticket in self._tickets.items() if ticket.num_left}
        if chunk_to_replace(left, 0.0, self._delay_s(self._spare), alone=False) is not None:
            self._ask(self._spare)
            self._spare = None
        else:
            self._reads.engine.after(_SETTINGS.row_check_s, self._look)

    def _ended(self, outcome: ReadOutcome) -> None:
        if self._over:
            return
        if outcome.error is not None:
            raise outcome.error
        missing = [ticket for ticket in self._tickets.values() if ticket.num_left]
        if len(missing) <= len(self._tickets) - self._num_wanted:
            self._over = True
            for ticket in missing:
                self._reads.schedule.cancel(ticket, TransientError("no longer needed"), self._reads.engine.now)
            self._done()


class _InOrder:
    """A sequential reader of rows, with the read-ahead of `checkpoint.read_ahead`."""

    def __init__(
        self, num_rows: int, row_bytes: int, ask: Callable[[int, Callable[[], None]], None], done: Callable[[], None]
    ) -> None:
        self._num_rows, self._row_bytes, self._ask, self._done = num_rows, row_bytes, ask, done
        self._ahead = ReadAhead(num_rows * row_bytes, row_bytes=row_bytes)
        self._here: dict[int, bool] = {}
        """Whether each requested row has arrived."""
        self._wanted = -1
        self._next()

    def _next(self) -> None:
        while self._here.get(self._wanted, True):
            self._wanted += 1
            if self._wanted == self._num_rows:
                self._done()
                return
            at = self._wanted * self._row_bytes
            advice = self._ahead.on_read(at, self._row_bytes, ReadAheadSettings().max_bytes)
            for row in (self._wanted, *range(advice.start // self._row_bytes, advice.end // self._row_bytes)):
                if row not in self._here:
                    self._here[row] = False
                    self._ask(row, partial(self._arrived, row))

    def _arrived(self, row: int) -> None:
        self._here[row] = True
        if row == self._wanted:
            self._next()


class Shared:
    """Data that all nodes of a job read: once from its origin, then from each other, as decided by `peers.readers`."""

    def __init__(self, engine: Engine, num_bytes: float, latency_s: float) -> None:
        """`latency_s`: of a query to the unit's owner, which records the nodes that have read it."""
        self._engine, self._latency_s = engine, latency_s
        self._readers = Readers()
        self._num = min(_UNITS, max(int(num_bytes) // _UNIT_BYTES, 1))
        self._unit_bytes = int(num_bytes / self._num)
        self._waiting: dict[tuple[str, int], list[Callable[[], None]] | None] = {}
        """Reads that wait until a node has a unit; None once it has."""

    def read(
        self, name: str, turn: float, width: int, read_first: Callable[[int, Callable[[], None]], object],
        way: Callable[[str], Sequence[Link]], done: Callable[[], None],
    ) -> None:  # fmt: skip
        """Read everything on the node `name`, starting at the fraction `turn`, with `width` units in flight.
        `read_first` reads bytes from the origin; `way`: the links from another node."""

        def ask(unit: int, here: Callable[[], None]) -> None:
            def arrived() -> None:
                waiting = self._waiting.get((name, unit)) or []
                self._waiting[name, unit] = None
                for begin in waiting:
                    begin()
                here()

            question = Question("checkpoint", unit * UNIT_BLOCKS, 1, name, True)
            node = next(iter(self._readers.answer(question, 0, "")), None)
            if node is None:
                read_first(self._unit_bytes, arrived)
                return

            def begin() -> None:
                self._engine.start(way(node), self._unit_bytes, arrived)

            waiting = self._waiting.setdefault((node, unit), [])
            if waiting is None:
                begin()
            else:
                waiting.append(begin)

        def ask_owner(unit: int, here: Callable[[], None]) -> None:
            self._engine.after(self._latency_s, partial(ask, unit, here))

        first = int(turn * self._num)
        _in_parallel([*range(first, self._num), *range(first)], width, ask_owner, done)


def _in_parallel(
    numbers: Iterable[int], width: int, ask: Callable[[int, Callable[[], None]], None], done: Callable[[], None]
) -> None:
    """Ask for these numbers in order, `width` of them at a time; `ask` calls its argument when one has arrived."""
    rest, left = iter(numbers), [width]

    def step() -> None:
        number = next(rest, None)
        if number is not None:
            ask(number, step)
            return
        left[0] -= 1
        if not left[0]:
            done()

    for _ in range(width):
        step()

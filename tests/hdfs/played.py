"""A schedule with a simulated clock, DataNodes and NameNode, controlled by the test: without threads and sockets."""

from __future__ import annotations

import random

from bootseer.errors import BootseerError
from bootseer.hdfs.block_locations import Block, LocatedFile, Node
from bootseer.hdfs.errors import DataNodeError
from bootseer.hdfs.requests import HdfsSource, ReadSettings, Run, Ticket
from bootseer.hdfs.schedule import Schedule
from bootseer.io.pooled_reads import ReadOutcome

PIECE = 100
BLOCK = 1000
SMALL = ReadSettings(piece_bytes=PIECE, max_run_bytes=400, max_hedges=4)
NODES = {name: Node(name, name) for name in ("a:1", "b:1", "c:1", "slow:1", "fast:1")}


def located(replicas: list[tuple[str, ...]], *, generation: int = 1) -> LocatedFile:
    blocks = tuple(
        Block(number * BLOCK, BLOCK, "pool", number + 1, generation, b"", tuple(NODES[name] for name in names))
        for number, names in enumerate(replicas)
    )
    return LocatedFile("/f", len(blocks) * BLOCK, blocks, "1", True)


class Played:
    """A schedule, its clock, and a file with known content."""

    def __init__(self, *replicas: tuple[str, ...], options: ReadSettings = SMALL) -> None:
        self.now_s = 0.0
        self.schedule = Schedule(options)
        self.source = HdfsSource(located(list(replicas)), "hdfs://nn/f")
        self.data = random.Random(1).randbytes(self.source.located.size_bytes)
        self.ended: list[Ticket] = []
        self.memory: dict[Ticket, bytearray] = {}
        self.claimed: dict[Run, list[memoryview]] = {}

    def read(
        self, offset: int, length: int, *, urgent: bool = True, deadline_s: float = 60.0, avoid: tuple[str, ...] = ()
    ) -> Ticket:
        """Request a range."""
        memory = bytearray(length)
        ticket = Ticket(self.source, offset, memoryview(memory), self._done, True, urgent, frozenset(avoid), deadline_s)
        self.memory[ticket] = memory
        self.schedule.submit(ticket, self.now_s)
        self.look()
        return ticket

    def take(self) -> Run | None:
        return self.schedule.take(self.now_s)

    def must_take(self, node: str) -> Run:
        """The next run, which must be for this node."""
        run = self.take()
        assert run is not None
        assert run.queue.name == node
        return run

    def claim(self, run: Run, length: int) -> bool:
        """Begin to receive; returns False if the run ends."""
        views = self.schedule.claim(run, length)
        if views is None:
            return False
        assert sum(map(len, views)) == length
        self.claimed[run] = views
        return True

    def receive(self, run: Run, *, right: bool = True) -> None:
        """The claimed bytes arrive."""
        at = run.pieces[0].block.start + run.pieces[0].offset + run.received
        views = self.claimed.pop(run)
        for view in views:
            view[:] = self.data[at : at + len(view)] if right else bytes(len(view))
            at += len(view)
        if right:
            self.schedule.received(run, sum(map(len, views)), self.now_s)
        self.look()

    def finish(self, run: Run, error: DataNodeError | None = None) -> None:
        self.claimed.pop(run, None)
        self.schedule.finished(run, error, self.now_s)
        self.look()

    def serve(self, run: Run) -> None:
        """Serve the run like a healthy node."""
        while run.received < run.length and self.claim(run, min(PIECE, run.length - run.received)):
            self.receive(run)
        self.finish(run)

    def serve_all(self) -> None:
        while (run := self.take()) is not None:
            self.serve(run)

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.schedule.tick(self.now_s)
        self.look()

    def look(self) -> None:
        """Record the tickets that have ended, and check them."""
        for ticket in self.schedule.ended:
            assert ticket not in self.ended, "it ended twice"
            for views in self.claimed.values():
                for view in views:
                    assert view.obj is not self.memory[ticket], "a run still writes to it"
            if ticket.error is None:
                length = len(self.memory[ticket])
                assert self.memory[ticket] == self.data[ticket.offset : ticket.offset + length]
            self.ended.append(ticket)
        self.schedule.ended.clear()

    def error(self) -> BootseerError:
        """The error of the only ticket, which has ended."""
        (ticket,) = self.ended
        assert ticket.error is not None
        return ticket.error

    def _done(self, outcome: ReadOutcome) -> None:
        raise AssertionError("the schedule must not call back")

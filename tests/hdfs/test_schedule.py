"""The schedule with a clock, nodes and a NameNode that the test plays: no thread, no socket."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.errors import BootseerError, CorruptError, PermanentError, TransientError
from bootseer.hdfs.faults import DataNodeError, RefusedError, SilentError, UnevenError, WrongBytesError
from bootseer.hdfs.located import Block, LocatedFile, Node
from bootseer.hdfs.outcome import ReadOutcome
from bootseer.hdfs.pieces import Source, Ticket
from bootseer.hdfs.runs import Run
from bootseer.hdfs.schedule import Schedule
from bootseer.hdfs.settings import ReadSettings

PIECE = 100
BLOCK = 1000
SMALL = ReadSettings(piece_bytes=PIECE, max_run_bytes=400, max_hedges=4)
NODES = {name: Node(name, name, name) for name in ("a:1", "b:1", "c:1")}


def located(replicas: list[tuple[str, ...]], *, generation: int = 1) -> LocatedFile:
    blocks = tuple(
        Block(number * BLOCK, BLOCK, "pool", number + 1, generation, b"", tuple(NODES[name] for name in names))
        for number, names in enumerate(replicas)
    )
    return LocatedFile("/f", len(blocks) * BLOCK, blocks, "1", False, True)


class Played:
    """A schedule, its time, and a file whose bytes are known."""

    def __init__(self, *replicas: tuple[str, ...], options: ReadSettings = SMALL) -> None:
        self.now_s = 0.0
        self.schedule = Schedule(options)
        self.source = Source(located(list(replicas)), "hdfs://nn/f")
        self.data = random.Random(1).randbytes(self.source.located.size_bytes)
        self.ended: list[Ticket] = []
        self.memory: dict[Ticket, bytearray] = {}
        self.claimed: dict[Run, list[memoryview]] = {}

    def read(
        self, offset: int, length: int, *, urgent: bool = True, deadline_s: float = 60.0, avoid: tuple[str, ...] = ()
    ) -> Ticket:
        """Ask for a range."""
        memory = bytearray(length)
        ticket = Ticket(self.source, offset, memoryview(memory), self._done, True, urgent, frozenset(avoid), deadline_s)
        self.memory[ticket] = memory
        self.schedule.submit(ticket, self.now_s)
        self.look()
        return ticket

    def take(self) -> Run | None:
        return self.schedule.take(self.now_s)

    def must_take(self, node: str) -> Run:
        """The next run, which must be of this node."""
        run = self.take()
        assert run is not None
        assert run.line.name == node
        return run

    def claim(self, run: Run, length: int) -> bool:
        """Begin to receive; whether the run goes on."""
        views = self.schedule.claim(run, length)
        if views is None:
            return False
        assert sum(map(len, views)) == length
        self.claimed[run] = views
        return True

    def receive(self, run: Run, *, right: bool = True) -> None:
        """What was claimed arrives."""
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
        """A node that is well."""
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
        """Take note of the tickets that have ended."""
        for ticket in self.schedule.ended:
            assert ticket not in self.ended, "told twice"
            for views in self.claimed.values():
                for view in views:
                    assert view.obj is not self.memory[ticket], "somebody still writes to it"
            if ticket.error is None:
                length = len(self.memory[ticket])
                assert self.memory[ticket] == self.data[ticket.offset : ticket.offset + length]
            self.ended.append(ticket)
        self.schedule.ended = []

    def error(self) -> BootseerError:
        """Of the only ticket, which has ended."""
        (ticket,) = self.ended
        assert ticket.error is not None
        return ticket.error

    def _done(self, outcome: ReadOutcome) -> None:
        raise AssertionError("the schedule tells nobody")


def test_a_range_over_several_blocks_is_read_from_their_nodes() -> None:
    played = Played(("a:1",), ("b:1",))
    ticket = played.read(950, 100)
    played.serve(played.must_take("a:1"))
    assert played.ended == []
    played.serve(played.must_take("b:1"))
    assert played.ended == [ticket]
    assert ticket.node == "b:1"


def test_neighbours_are_read_by_one_request_and_end_one_by_one() -> None:
    played = Played(("a:1",))
    tickets = [played.read(number * 100, 100) for number in range(9)]
    run = played.must_take("a:1")
    assert len(run.pieces) == 3
    played.claim(run, 150)
    played.receive(run)
    assert played.ended == tickets[:1]
    played.claim(run, 150)
    played.receive(run)
    assert played.ended == tickets[:3]


def test_no_node_has_more_requests_than_it_may() -> None:
    played = Played(("a:1",))
    for number in range(10):
        played.read(number * 100, 100)
    assert [played.take() is not None for _ in range(3)] == [True, True, False]


def test_what_somebody_waits_for_comes_first() -> None:
    played = Played(("a:1",))
    played.read(0, 100, urgent=False)
    prefetched = played.read(200, 100, urgent=False)
    urgent = played.read(400, 100)
    assert played.must_take("a:1").pieces[0].ticket is urgent
    played.schedule.hurry(prefetched)
    assert played.must_take("a:1").pieces[0].ticket is prefetched


def test_a_request_that_nobody_waits_for_makes_room_at_its_next_piece() -> None:
    played = Played(("a:1",), options=ReadSettings(piece_bytes=PIECE, max_run_bytes=400, connections_per_node=1))
    played.read(0, 1000, urgent=False)
    run = played.must_take("a:1")
    assert len(run.pieces) == 3
    played.claim(run, 100)
    urgent = played.read(900, 50)
    played.receive(run)
    assert not played.claim(run, 100)
    played.finish(run)
    assert played.must_take("a:1").pieces[0].ticket is urgent


@pytest.mark.parametrize("error", [DataNodeError("broke"), RefusedError("no block", token=False), WrongBytesError("x")])
def test_a_piece_that_one_node_cannot_give_is_taken_by_another(error: DataNodeError) -> None:
    played = Played(("a:1", "b:1"))
    ticket = played.read(0, 100)
    run = played.must_take("a:1")
    played.claim(run, 100)
    played.finish(run, error)
    played.serve(played.must_take("b:1"))
    assert played.ended == [ticket]
    assert ticket.error is None


def test_a_node_to_avoid_is_asked_when_there_is_no_other() -> None:
    played = Played(("a:1", "b:1"), ("a:1",))
    played.read(0, 100, avoid=("a:1",))
    played.serve(played.must_take("b:1"))
    played.read(1000, 100, avoid=("a:1",))
    played.serve(played.must_take("a:1"))
    assert len(played.ended) == 2


def refused_everywhere(played: Played) -> None:
    while (run := played.take()) is not None:
        played.finish(run, RefusedError("no such block", token=False))


def test_when_nobody_has_it_the_namenode_is_asked_once() -> None:
    played = Played(("a:1", "b:1"))
    played.read(0, 100)
    refused_everywhere(played)
    assert played.schedule.asking.popleft() is played.source
    played.schedule.located(played.source, located([("c:1",)]), 0.0)
    played.serve(played.must_take("c:1"))
    assert played.ended[0].error is None


def test_when_nobody_has_it_after_that_the_error_says_who_was_asked() -> None:
    played = Played(("a:1", "b:1"))
    played.read(0, 100)
    refused_everywhere(played)
    played.schedule.located(played.schedule.asking.popleft(), located([("a:1", "b:1")]), 0.0)
    refused_everywhere(played)
    played.look()
    assert isinstance(played.error(), TransientError)
    assert "blk_1 cannot be read: a:1: no such block; b:1: no such block" in str(played.error())


def test_wrong_bytes_everywhere_are_corrupt() -> None:
    played = Played(("a:1", "b:1"))
    played.read(0, 100)
    for _ in range(2):
        while (run := played.take()) is not None:
            played.claim(run, 100)
            played.finish(run, WrongBytesError("wrong bytes at 0"))
        if played.schedule.asking:
            played.schedule.located(played.schedule.asking.popleft(), located([("a:1", "b:1")]), 0.0)
    assert isinstance(played.error(), CorruptError)


def test_another_version_is_never_mixed_in() -> None:
    played = Played(("a:1",), ("a:1",))
    played.read(900, 200)
    run = played.must_take("a:1")
    played.serve(run)
    refused_everywhere(played)
    played.schedule.located(played.schedule.asking.popleft(), located([("a:1",)] * 2, generation=2), 0.0)
    played.look()
    assert isinstance(played.error(), PermanentError)
    assert "was replaced while it was read" in str(played.error())


def test_a_late_request_gives_back_what_it_has_not_begun_and_hedges_what_it_has() -> None:
    played = Played(("a:1", "b:1"))
    played.read(0, 900)
    run = played.must_take("a:1")
    played.claim(run, 100)
    other = played.must_take("b:1")
    played.serve(other)
    played.tick(1.0)
    assert [piece.run is run for piece in run.pieces] == [True, False, False]
    assert played.schedule.counts["hedges"] == 1
    while not played.ended:
        late = played.take()
        if late is None:
            assert run.stopped
            played.finish(run, DataNodeError("stopped"))
        elif late.line.name == "b:1":
            played.serve(late)
        else:
            played.finish(late, None)
    assert played.ended[0].error is None
    assert played.schedule.counts["hedges_won"] == 1


def test_memory_is_given_back_only_when_the_late_thread_has_let_go() -> None:
    played = Played(("a:1", "b:1"))
    ticket = played.read(0, 100)
    run = played.must_take("a:1")
    played.claim(run, 100)
    played.tick(1.0)
    played.serve(played.must_take("b:1"))
    assert played.ended == []
    assert run.stopped
    played.finish(run, DataNodeError("stopped"))
    assert played.ended == [ticket]


def test_one_silence_keeps_all_others_away_from_a_node() -> None:
    played = Played(("a:1", "b:1"), ("a:1", "b:1"))
    played.read(0, 100)
    run = played.must_take("a:1")
    played.claim(run, 100)
    assert played.schedule.silent(run, 1.0)
    played.finish(run, SilentError("silent"))
    for number in range(10):
        played.read(1000 + number * 100, 100)
    while (run := played.take()) is not None:  # type: ignore[assignment]
        assert run.line.name == "b:1"
        played.serve(run)
    assert len(played.ended) == 11


def test_a_silent_node_that_is_alone_is_waited_for_and_connected_to_anew() -> None:
    played = Played(("a:1",))
    played.read(0, 100)
    run = played.must_take("a:1")
    played.claim(run, 100)
    assert not played.schedule.silent(run, 1.0)
    assert played.schedule.silent(run, 5.0)
    played.finish(run, SilentError("silent"))
    played.schedule.located(played.schedule.asking.popleft(), TransientError("no NameNode"), 0.0)
    played.serve(played.must_take("a:1"))
    assert played.ended[0].error is None


def test_what_takes_too_long_ends_with_its_nodes_named() -> None:
    played = Played(("a:1",))
    played.read(0, 100, deadline_s=5.0)
    run = played.must_take("a:1")
    played.claim(run, 100)
    played.tick(6.0)
    assert run.stopped
    assert played.ended == []
    played.finish(run, DataNodeError("stopped"))
    assert "blk_1 at a:1 was not read within 5.0 s" in str(played.error())


def test_what_was_called_off_ends_at_once_unless_it_is_being_written() -> None:
    played = Played(("a:1",))
    ticket, held = played.read(0, 100), played.read(500, 100)
    played.schedule.hurry(held)
    run = played.must_take("a:1")
    played.claim(run, 100)
    for one in (held, ticket):
        played.schedule.fail(one, PermanentError("called off"), at_once=False)
    played.look()
    assert len(played.ended) == 1
    played.receive(run)
    assert len(played.ended) == 2


def test_packets_that_cannot_be_foretold_are_nobodys_fault() -> None:
    played = Played(("a:1",))
    played.read(0, 100)
    run = played.must_take("a:1")
    played.claim(run, 100)
    played.finish(run, UnevenError("uneven"))
    run = played.must_take("a:1")
    assert run.line.uneven
    played.serve(run)
    assert played.ended[0].error is None
    assert run.line.failures == 0


def test_nothing_is_remembered_of_what_has_ended() -> None:
    played = Played(("a:1", "b:1", "c:1"))
    for _ in range(2000):
        played.read(0, 100)
        played.serve_all()
    schedule = played.schedule
    assert schedule.num_pieces == 0
    assert len(schedule._deadlines._until) < 600
    lines = schedule.queueing.lines.values()
    assert sum(len(line._urgent) + len(line._later) for line in lines) < 600
    assert all(not line._by_start and not line.queued_bytes and not line.running_bytes for line in lines)


ERRORS = st.sampled_from(
    [
        DataNodeError("broke"),
        SilentError("silent"),
        WrongBytesError("wrong"),
        RefusedError("refused", token=False),
        RefusedError("token", token=True),
        UnevenError("uneven"),
    ]
)
REPLICAS = st.lists(st.sampled_from(sorted(NODES)), min_size=1, max_size=3, unique=True).map(tuple)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.lists(REPLICAS, min_size=1, max_size=3))
def test_whatever_happens_each_read_ends_once_with_its_own_bytes(  # noqa: PLR0912 - one branch for each event
    data: st.DataObject, replicas: list[tuple[str, ...]]
) -> None:
    played = Played(*replicas)
    runs: list[Run] = []
    tickets: list[Ticket] = []
    size = played.source.located.size_bytes
    for _ in range(data.draw(st.integers(1, 60))):
        step = data.draw(st.integers(0, 11))
        run = data.draw(st.sampled_from(runs)) if runs else None
        if step <= 1:
            offset = data.draw(st.integers(0, size - 1))
            length = data.draw(st.integers(1, min(size - offset, 700)))
            tickets.append(played.read(offset, length, urgent=data.draw(st.booleans()), deadline_s=20.0))
        elif step <= 4:
            if (taken := played.take()) is not None:
                runs.append(taken)
        elif step <= 7 and run is not None:
            if run in played.claimed:
                played.receive(run)
            elif run.received == run.length or not played.claim(
                run, data.draw(st.integers(1, run.length - run.received))
            ):
                played.finish(run)
                runs.remove(run)
        elif step == 8 and run is not None and run.received < run.length:
            played.finish(run, data.draw(ERRORS))
            runs.remove(run)
        elif step == 9:
            played.tick(data.draw(st.sampled_from([0.1, 0.5, 2.0, 25.0])))
        elif step == 10 and tickets:
            ticket = data.draw(st.sampled_from(tickets))
            if data.draw(st.booleans()):
                played.schedule.hurry(ticket)
            else:
                played.schedule.fail(ticket, PermanentError("called off"), at_once=data.draw(st.booleans()))
                played.look()
        elif step == 11 and played.schedule.asking:
            answer: LocatedFile | BootseerError = located(replicas)
            if data.draw(st.booleans()):
                answer = TransientError("no NameNode")
            played.schedule.located(played.schedule.asking.popleft(), answer, played.now_s)
            played.look()
    snapshots = {ticket: bytes(played.memory[ticket]) for ticket in played.ended}
    for run in runs:
        if run in played.claimed and not run.stopped:
            played.receive(run)
        played.finish(run, DataNodeError("stopped") if run.stopped else None)
    for _ in range(200):
        if len(played.ended) == len(tickets):
            break
        played.serve_all()
        while played.schedule.asking:
            played.schedule.located(played.schedule.asking.popleft(), located(replicas), played.now_s)
        played.tick(0.5)
    assert set(played.ended) == set(tickets)
    played.serve_all()
    assert played.schedule.num_pieces == 0
    assert not played.schedule.runs
    for ticket, before in snapshots.items():
        assert played.memory[ticket] == before, "it was written to after its end"

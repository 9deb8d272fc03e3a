"""Invariants of the schedule for any sequence of events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.errors import BootseerError, PermanentError, TransientError
from bootseer.hdfs.block_locations import LocatedFile
from bootseer.hdfs.errors import (
    DataNodeError,
    LostConnectionError,
    RefusedError,
    SilentError,
    UnevenError,
    WrongBytesError,
)
from bootseer.hdfs.requests import NO_CHECKSUMS, Run, Ticket
from hdfs.played import NODES, Played, located

ERRORS = st.sampled_from(
    [
        DataNodeError("broke"),
        LostConnectionError("reset"),
        SilentError("silent"),
        WrongBytesError("wrong"),
        RefusedError("refused", token=False),
        RefusedError("token", token=True),
        UnevenError("uneven"),
        RefusedError(NO_CHECKSUMS, token=False),
    ]
)
REPLICAS = st.lists(st.sampled_from(sorted(NODES)), min_size=1, max_size=3, unique=True).map(tuple)


@settings(max_examples=600, deadline=None)
@given(st.data(), st.lists(REPLICAS, min_size=1, max_size=3))
def test_after_any_events_each_read_ends_once_with_its_own_bytes(  # noqa: PLR0912 - one branch for each event
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
                played.schedule.prioritize(ticket)
            else:
                played.schedule.fail(ticket, PermanentError("called off"), at_once=data.draw(st.booleans()))
                played.look()
        elif step == 11 and played.schedule.to_locate:
            answer: LocatedFile | BootseerError = located(replicas)
            if data.draw(st.booleans()):
                answer = TransientError("no NameNode")
            played.schedule.located(played.schedule.to_locate.popleft(), answer, played.now_s)
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
        while played.schedule.to_locate:
            played.schedule.located(played.schedule.to_locate.popleft(), located(replicas), played.now_s)
        played.tick(0.5)
    assert set(played.ended) == set(tickets)
    played.serve_all()
    assert played.schedule.num_pieces == 0
    assert not played.schedule.runs
    for ticket, before in snapshots.items():
        assert played.memory[ticket] == before, "it was written to after its end"


def test_a_request_of_one_node_leaves_no_ready_work_for_the_others() -> None:
    played = Played(("a:1", "b:1", "c:1"))
    played.read(0, 10)
    assert played.schedule.num_ready
    assert played.take() is not None
    assert played.schedule.num_ready == 0

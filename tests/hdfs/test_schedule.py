"""The schedule's reaction to sequences of events."""

from __future__ import annotations

from math import inf

import pytest

from bootseer.errors import CorruptError, PermanentError, TransientError
from bootseer.hdfs.errors import (
    DataNodeError,
    RefusedError,
    SilentError,
    UnevenError,
    WrongBytesError,
)
from bootseer.hdfs.requests import NO_CHECKSUMS, ReadSettings
from hdfs.played import PIECE, Played, located


def test_a_range_over_several_blocks_is_read_from_their_nodes() -> None:
    played = Played(("a:1",), ("b:1",))
    ticket = played.read(950, 100)
    played.serve(played.must_take("a:1"))
    assert played.ended == []
    played.serve(played.must_take("b:1"))
    assert played.ended == [ticket]
    assert ticket.node == "b:1"


def test_adjacent_pieces_are_read_by_one_request_and_end_one_by_one() -> None:
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


def test_the_number_of_requests_per_node_is_limited() -> None:
    played = Played(("a:1",))
    for number in range(10):
        played.read(number * 100, 100)
    assert [played.take() is not None for _ in range(3)] == [True, True, False]


def test_urgent_pieces_are_first() -> None:
    played = Played(("a:1",))
    played.read(0, 100, urgent=False)
    prefetched = played.read(200, 100, urgent=False)
    urgent = played.read(400, 100)
    assert played.must_take("a:1").pieces[0].ticket is urgent
    played.schedule.prioritize(prefetched)
    assert played.must_take("a:1").pieces[0].ticket is prefetched


@pytest.mark.parametrize("error", [DataNodeError("broke"), RefusedError("no block", token=False), WrongBytesError("x")])
def test_a_piece_that_one_node_cannot_serve_is_read_from_another(error: DataNodeError) -> None:
    played = Played(("a:1", "b:1"))
    ticket = played.read(0, 100)
    run = played.must_take("a:1")
    played.claim(run, 100)
    played.finish(run, error)
    played.serve(played.must_take("b:1"))
    assert played.ended == [ticket]
    assert ticket.error is None


def test_an_avoided_node_is_used_if_there_is_no_other() -> None:
    played = Played(("a:1", "b:1"), ("a:1",))
    played.read(0, 100, avoid=("a:1",))
    played.serve(played.must_take("b:1"))
    played.read(1000, 100, avoid=("a:1",))
    played.serve(played.must_take("a:1"))
    assert len(played.ended) == 2


def refused_everywhere(played: Played) -> None:
    while (run := played.take()) is not None:
        played.finish(run, RefusedError("no such block", token=False))


def test_if_no_replica_is_left_the_namenode_is_queried_once() -> None:
    played = Played(("a:1", "b:1"))
    played.read(0, 100)
    refused_everywhere(played)
    assert played.schedule.to_locate.popleft() is played.source
    played.schedule.located(played.source, located([("c:1",)]), 0.0)
    played.serve(played.must_take("c:1"))
    assert played.ended[0].error is None


def test_the_error_of_a_lost_block_names_the_nodes_tried() -> None:
    played = Played(("a:1", "b:1"))
    played.read(0, 100)
    refused_everywhere(played)
    played.schedule.located(played.schedule.to_locate.popleft(), located([("a:1", "b:1")]), 0.0)
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
        if played.schedule.to_locate:
            played.schedule.located(played.schedule.to_locate.popleft(), located([("a:1", "b:1")]), 0.0)
    assert isinstance(played.error(), CorruptError)


def without_checksums(played: Played, *nodes: str) -> None:
    """Serve all requests, as if these DataNodes had no checksums."""
    while (run := played.take()) is not None:
        if run.queue.name in nodes and run.pieces[0].check:
            played.finish(run, RefusedError(NO_CHECKSUMS, token=False))
        else:
            played.serve(run)


def test_bytes_without_checksums_are_not_used_if_a_replica_has_checksums() -> None:
    played = Played(("a:1", "b:1"))
    for number in range(9):
        ticket = played.read(number * 100, 100)
        without_checksums(played, "a:1")
        assert ticket.node == "b:1"
    assert not played.schedule.counts["unchecked"]


def test_bytes_without_checksums_are_used_if_no_replica_has_any() -> None:
    played = Played(("a:1", "b:1"))
    tickets = [played.read(0, 100)]
    without_checksums(played, "a:1", "b:1")
    played.schedule.located(played.schedule.to_locate.popleft(), located([("a:1", "b:1")]), 0.0)
    without_checksums(played, "a:1", "b:1")
    tickets.append(played.read(300, 100))
    assert not played.take().pieces[0].check  # type: ignore[union-attr]
    assert played.ended == tickets[:1]
    assert played.schedule.counts["unchecked"] == 1


def test_a_corrupt_replica_is_not_retried_if_the_other_has_no_checksums() -> None:
    played = Played(("a:1", "b:1"))
    for number in range(2):
        ticket = played.read(number * 100, 100)
        played.now_s += 2.0
        while ticket not in played.ended:
            run = played.take()
            if run is None:
                played.schedule.located(played.schedule.to_locate.popleft(), located([("a:1", "b:1")]), played.now_s)
            elif run.queue.name == "a:1":
                assert run.pieces[0].check
                played.claim(run, 100)
                played.receive(run, right=False)
                played.finish(run, WrongBytesError("wrong"))
            elif run.pieces[0].check:
                played.finish(run, RefusedError(NO_CHECKSUMS, token=False))
            else:
                played.serve(run)
        assert (ticket.error, ticket.node) == (None, "b:1")


def test_another_version_is_never_mixed_in() -> None:
    played = Played(("a:1",), ("a:1",))
    played.read(900, 200)
    run = played.must_take("a:1")
    played.serve(run)
    refused_everywhere(played)
    played.schedule.located(played.schedule.to_locate.popleft(), located([("a:1",)] * 2, generation=2), 0.0)
    played.look()
    assert isinstance(played.error(), PermanentError)
    assert "was replaced while it was read" in str(played.error())


def test_a_late_request_returns_its_unstarted_pieces_and_the_current_one_is_hedged() -> None:
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
        elif late.queue.name == "b:1":
            played.serve(late)
        else:
            played.finish(late, None)
    assert played.ended[0].error is None
    assert played.schedule.counts["hedges_won"] == 1


def test_memory_is_returned_only_when_the_late_thread_has_released_it() -> None:
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


def test_one_timeout_suspends_a_node_for_all_reads() -> None:
    played = Played(("a:1", "b:1"), ("a:1", "b:1"))
    played.read(0, 100)
    run = played.must_take("a:1")
    played.claim(run, 100)
    assert played.schedule.should_give_up(run, 1.0)
    played.finish(run, SilentError("silent"))
    for number in range(10):
        played.read(1000 + number * 100, 100)
    while (run := played.take()) is not None:  # type: ignore[assignment]
        assert run.queue.name == "b:1"
        played.serve(run)
    assert len(played.ended) == 11


def test_a_silent_node_with_the_only_replica_is_waited_for_and_reconnected() -> None:
    played = Played(("a:1",))
    played.read(0, 100)
    run = played.must_take("a:1")
    played.claim(run, 100)
    assert not played.schedule.should_give_up(run, 1.0)
    assert played.schedule.should_give_up(run, 5.0)
    played.finish(run, SilentError("silent"))
    played.schedule.located(played.schedule.to_locate.popleft(), TransientError("no NameNode"), 0.0)
    played.serve(played.must_take("a:1"))
    assert played.ended[0].error is None


def test_a_cancelled_read_ends_at_once_unless_its_memory_is_being_written() -> None:
    played = Played(("a:1",))
    ticket, held = played.read(0, 100), played.read(500, 100)
    played.schedule.prioritize(held)
    run = played.must_take("a:1")
    played.claim(run, 100)
    for one in (held, ticket):
        played.schedule.fail(one, PermanentError("called off"), at_once=False)
    played.look()
    assert len(played.ended) == 1
    played.receive(run)
    assert len(played.ended) == 2


def test_a_read_that_fails_with_several_pieces_of_one_request_ends_once() -> None:
    played = Played(("a:1",))
    failed = played.read(0, 300)
    others = [played.read(300 + number * 100, 100) for number in range(6)]
    run = played.must_take("a:1")
    assert len(run.pieces) == 3
    played.finish(run, RefusedError("no such block", token=False))
    played.schedule.located(played.schedule.to_locate.popleft(), located([("a:1",)]), 0.0)
    while played.ended == []:
        run = played.must_take("a:1")
        if run.pieces[0].ticket is failed:
            played.finish(run, RefusedError("no such block", token=False))
        else:
            played.serve(run)
            others.remove(played.ended.pop())
    assert played.ended == [failed]
    played.serve_all()
    assert played.schedule.num_pieces == 0


def test_memory_of_a_read_cancelled_between_two_receptions_is_not_written_to() -> None:
    played = Played(("a:1",))
    ticket = played.read(0, 100)
    run = played.must_take("a:1")
    played.claim(run, 50)
    played.receive(run)
    played.schedule.fail(ticket, PermanentError("called off"), at_once=False)
    assert not played.claim(run, 50)
    played.finish(run)
    assert played.ended == [ticket]


def test_a_hedged_piece_is_not_requested_a_third_time() -> None:
    played = Played(("a:1", "b:1", "c:1"))
    played.read(0, 100)
    late = played.must_take("a:1")
    played.claim(late, 100)
    played.tick(1.0)
    hedge = played.take()
    assert hedge is not None
    played.finish(late, DataNodeError("broke"))
    assert played.take() is None
    played.serve(hedge)
    assert played.ended[0].error is None


def test_a_hedge_that_is_late_is_not_sent_to_the_node_of_its_original() -> None:
    played = Played(("a:1", "b:1"))
    played.read(0, 100)
    late = played.must_take("a:1")
    played.claim(late, 100)
    played.tick(1.0)
    hedge = played.must_take("b:1")
    played.tick(1.0)
    assert played.take() is None
    played.serve(hedge)
    played.finish(late, DataNodeError("stopped"))
    assert [ticket.error for ticket in played.ended] == [None]


def test_a_piece_whose_hedge_fails_is_read_from_the_other_replicas() -> None:
    played = Played(("a:1", "b:1", "c:1"))
    played.read(0, 100)
    late = played.must_take("a:1")
    played.claim(late, 100)
    played.tick(1.0)
    for _ in range(2):
        hedge = played.take()
        assert hedge is not None
        assert hedge.queue.name != "a:1", "it would be queued after the late request"
        played.finish(hedge, RefusedError("no such block", token=False))
    assert played.take() is None
    played.finish(late, DataNodeError("broke"))
    played.serve_all()
    assert played.ended[0].error is None


def test_an_idle_node_gets_hedges_sooner() -> None:
    played = Played(("a:1", "b:1"))
    for _ in range(32):
        played.schedule.choice.note_latency(0.2)
    played.read(0, 100)
    run = played.must_take("a:1")
    played.claim(run, 100)
    played.tick(0.2)
    assert played.take() is None
    played.tick(0.1)
    assert played.must_take("b:1").pieces[0].original is not None


def test_a_suspended_node_has_one_request_at_a_time() -> None:
    played = Played(("a:1",))
    for number in range(9):
        played.read(number * 100, 100)
    played.schedule.choice.note_failure("a:1", 0.0, at_once=True)
    assert played.take() is not None
    assert played.take() is None


def test_packets_of_uneven_size_are_not_a_failure_of_the_node() -> None:
    played = Played(("a:1",))
    played.read(0, 100)
    run = played.must_take("a:1")
    played.claim(run, 100)
    played.finish(run, UnevenError("uneven"))
    run = played.must_take("a:1")
    assert (run.queue.uneven, run.packets) == (True, 1)
    played.serve(run)
    assert played.ended[0].error is None
    assert run.queue.failures == 0


def test_no_state_of_ended_reads_is_kept() -> None:
    played = Played(("a:1", "b:1", "c:1"))
    for _ in range(2000):
        played.read(0, 100)
        played.serve_all()
    played.schedule.cancel(played.read(0, 100), called_off(), 0.0)  # while it waits
    schedule = played.schedule
    assert schedule.num_pieces == 0
    assert not schedule.tickets()
    queues = schedule.queues.by_node.values()
    assert sum(len(queue._urgent) + len(queue._later) for queue in queues) < 600
    assert all(not queue._by_start and not queue.queued_bytes and not queue.running_bytes for queue in queues)


def called_off() -> PermanentError:
    return PermanentError("called off")


def test_a_node_that_was_silent_until_its_read_was_cancelled_is_suspended() -> None:
    played = Played(("a:1",), ("b:1",))
    ticket, other = played.read(0, 100), played.read(500, 100)
    run = played.must_take("a:1")
    played.claim(run, 100)
    played.now_s = 1.0
    assert played.schedule.delay_s(played.source, 0, 100, played.now_s) < inf
    played.schedule.cancel(ticket, called_off(), played.now_s)
    assert run.stopped, "its memory would be held for as long as the node hangs"
    played.finish(run, DataNodeError("stopped"))
    assert played.ended == [ticket]
    assert played.schedule.delay_s(played.source, 0, 100, played.now_s) == inf
    assert played.schedule.delay_s(played.source, 1000, 100, played.now_s) < inf
    assert played.schedule.remaining_s(other, played.now_s) == inf
    played.schedule.choice.probe_succeeded("a:1")
    assert played.schedule.delay_s(played.source, 0, 100, played.now_s) < inf


def test_a_serving_node_is_not_suspended_because_of_a_cancelled_read() -> None:
    played = Played(("a:1",))
    ticket = played.read(0, 300)
    run = played.must_take("a:1")
    played.claim(run, 50)
    played.now_s = 2.0
    played.receive(run)
    played.claim(run, 50)
    played.schedule.cancel(ticket, called_off(), played.now_s)
    assert not run.stopped
    assert not played.schedule.choice.is_open("a:1")
    played.receive(run)
    played.finish(run)
    assert played.ended == [ticket]


def test_a_block_without_replicas_has_an_infinite_delay_after_a_refresh() -> None:
    played = Played(())
    assert played.schedule.delay_s(played.source, 0, 100, 0.0) == 0.0, "a read will query its nodes"
    played.read(0, 100)
    played.schedule.located(played.schedule.to_locate.popleft(), located([()]), 0.0)
    played.look()
    assert played.schedule.delay_s(played.source, 0, 100, 1.0) == inf
    assert played.schedule.delay_s(played.source, 0, 100, 100.0) == 0.0


def test_unstarted_pieces_are_taken_from_a_slow_node_even_if_it_is_not_silent() -> None:
    played = Played(("a:1", "b:1"))
    ticket = played.read(0, 900)
    slow = played.must_take("a:1")
    played.serve(played.must_take("b:1"))
    for _ in range(6):
        played.claim(slow, 10)
        played.now_s += 0.1
        played.receive(slow)
    played.claim(slow, 10)
    played.tick(0.05)
    assert [piece.run is slow for piece in slow.pieces] == [True, False, False]
    while (run := played.take()) is not None:
        played.serve(run)
    played.finish(slow, DataNodeError("stopped"))
    assert played.ended == [ticket]
    assert slow.queue.failures == 0, "it is slow, not broken"


def test_the_estimated_duration_of_a_read_follows_the_progress_of_its_node() -> None:
    played = Played(("a:1",), options=ReadSettings(piece_bytes=PIECE, max_run_bytes=100, connections_per_node=1))
    first, last = played.read(0, 100), played.read(900, 100)
    played.serve(played.must_take("a:1"))
    run = played.must_take("a:1")
    played.claim(run, 10)
    played.now_s = 1.0
    assert played.schedule.remaining_s(first, played.now_s) == 0.0
    early_s = played.schedule.remaining_s(last, 1.0)
    played.now_s = 2.0
    assert played.schedule.remaining_s(last, 2.0) > early_s > 5.0
    played = Played(("a:1", "b:1"))  # the first free node takes it
    assert 0.0 < played.schedule.remaining_s(played.read(0, 100), 0.0) < 0.1


def test_a_node_takes_pieces_that_other_nodes_would_read_last() -> None:
    played = Played(("a:1", "b:1"), ("a:1", "c:1"), ("c:1",))
    played.read(0, 100)
    played.read(1000, 100)
    played.read(2000, 900)  # keeps c:1 busy
    run = played.must_take("a:1")
    assert run.pieces[0].block.id == 2

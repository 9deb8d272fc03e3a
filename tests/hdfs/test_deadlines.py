"""Deadlines and retries of reads."""

from __future__ import annotations

import math

import pytest

from bootseer.hdfs.errors import DataNodeError, LostConnectionError, RefusedError, WrongBytesError
from bootseer.hdfs.requests import ReadSettings
from hdfs.played import BLOCK, PIECE, Played, located


def test_a_read_that_takes_too_long_fails_with_its_nodes_named() -> None:
    played = Played(("a:1",))
    played.read(0, 100, deadline_s=5.0)
    run = played.must_take("a:1")
    played.claim(run, 100)
    played.tick(6.0)
    assert run.stopped
    assert played.ended == []
    played.finish(run, DataNodeError("stopped"))
    said = "blk_1 was not read within 5.0 s; its only copy is on a:1 (a:1 has sent 0 of 100 bytes)"
    assert said in str(played.error())


def test_a_deadline_is_extended_while_earlier_reads_make_progress() -> None:
    played = Played(("a:1",), options=ReadSettings(piece_bytes=PIECE, connections_per_node=1))
    played.read(0, 300)
    last = played.read(900, 100, deadline_s=5.0)
    run = played.must_take("a:1")
    played.tick(4.0)
    played.claim(run, 100)
    played.receive(run)
    played.tick(2.0)
    assert last.error is None
    played.tick(6.0)  # nothing has arrived for eight seconds
    assert "others are read first" in str(last.error)


def test_a_deadline_is_not_extended_indefinitely() -> None:
    played = Played(("a:1",))
    ticket = played.read(0, 900, deadline_s=5.0)
    run = played.must_take("a:1")
    for _ in range(24):
        played.tick(1.0)
        assert ticket.error is None
        played.claim(run, 1)
        played.receive(run)
    played.tick(1.0)
    assert "was not read within 5.0 s" in str(ticket.error)


def _locate(played: Played) -> None:
    while played.schedule.to_locate:
        played.schedule.located(played.schedule.to_locate.popleft(), played.source.located, played.now_s)
    played.look()


def _fail(played: Played, error: DataNodeError) -> None:
    played.finish(played.must_take("a:1"), error)
    _locate(played)


def test_a_piece_whose_nodes_all_lost_the_connection_is_requested_again_after_pauses_and_then_fails() -> None:
    played = Played(("a:1",), options=ReadSettings(piece_bytes=PIECE, retry_s=(1.0, 3.0)))
    ticket = played.read(0, 100)
    _fail(played, LostConnectionError("reset"))  # then the NameNode is asked
    for pause_s in (1.0, 3.0):
        _fail(played, LostConnectionError("reset"))
        assert played.take() is None
        assert played.schedule.remaining_s(ticket, played.now_s) == math.inf  # parity is better
        played.tick(pause_s - 0.5)
        assert not played.schedule.to_locate
        played.tick(0.5)
        _locate(played)
    assert not played.ended
    _fail(played, LostConnectionError("reset"))
    assert "a:1: reset" in str(played.error())


def test_a_piece_is_delivered_by_a_node_that_recovers_during_a_pause() -> None:
    played = Played(("a:1",))
    played.read(0, 100)
    _fail(played, LostConnectionError("reset"))
    _fail(played, LostConnectionError("reset"))
    played.tick(1.0)
    _locate(played)
    played.serve_all()
    assert len(played.ended) == 1


@pytest.mark.parametrize("error", [RefusedError("no block", token=False), WrongBytesError("wrong"), DataNodeError("?")])
def test_other_errors_and_pauses_beyond_the_deadline_fail_at_once(error: DataNodeError) -> None:
    played = Played(("a:1",))
    played.read(0, 100)
    _fail(played, error)
    _fail(played, error)
    assert played.ended
    late = Played(("a:1",))
    late.read(0, 100, deadline_s=0.9)
    _fail(late, LostConnectionError("reset"))
    _fail(late, LostConnectionError("reset"))
    assert "a:1: reset" in str(late.error())


def _report(played: Played, *replicas: tuple[str, ...]) -> None:
    """Let the NameNode answer with these DataNodes."""
    while played.schedule.to_locate:
        played.schedule.located(played.schedule.to_locate.popleft(), located(list(replicas)), played.now_s)
    played.look()


def test_a_block_that_no_datanode_has_reported_yet_is_waited_for_like_after_a_failover() -> None:
    played = Played(())
    ticket = played.read(0, 100)
    _report(played, ())
    assert not played.ended
    assert played.schedule.remaining_s(ticket, played.now_s) == math.inf  # parity is better
    played.tick(1.0)
    _report(played, ())
    assert not played.ended
    played.tick(3.0)
    _report(played, ("a:1",))
    played.serve_all()
    assert played.ended == [ticket]
    assert ticket.error is None


def test_only_the_first_lost_block_is_waited_for() -> None:
    played = Played((), (), options=ReadSettings(piece_bytes=PIECE, retry_s=(1.0, 3.0)))
    first = played.read(0, 100)
    _report(played, (), ())
    for pause_s in (1.0, 3.0):
        assert not played.ended
        played.tick(pause_s)
        _report(played, (), ())
    assert played.ended == [first]
    assert "no DataNode has it" in str(first.error)
    played.tick(2.0)
    second = played.read(BLOCK, 100)
    _report(played, (), ())
    assert played.ended == [first, second]
    played.tick(400.0)
    third = played.read(0, 100)
    _report(played, (), ())
    played.tick(1.0)
    _report(played, ("a:1",), ("a:1",))
    played.serve_all()
    assert played.ended == [first, second, third]
    assert third.error is None

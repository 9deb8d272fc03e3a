"""When a read is given up, and when it may go on for longer."""

from __future__ import annotations

from bootseer.hdfs.errors import DataNodeError
from bootseer.hdfs.requests import ReadSettings
from hdfs.played import PIECE, Played


def test_what_takes_too_long_ends_with_its_nodes_named() -> None:
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


def test_a_deadline_is_put_off_while_what_is_read_before_comes() -> None:
    played = Played(("a:1",), options=ReadSettings(piece_bytes=PIECE, connections_per_node=1))
    played.read(0, 300)
    last = played.read(900, 100, deadline_s=5.0)
    run = played.must_take("a:1")
    played.tick(4.0)
    played.claim(run, 100)
    played.receive(run)
    played.tick(2.0)
    assert last.error is None
    played.tick(6.0)  # nothing has come for eight seconds
    assert "others are read first" in str(last.error)


def test_a_deadline_is_not_put_off_for_ever() -> None:
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

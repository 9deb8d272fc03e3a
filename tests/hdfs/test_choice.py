from __future__ import annotations

import pytest

from bootseer.hdfs.choice import NodeChoice
from bootseer.hdfs.errors import SilentError
from bootseer.hdfs.requests import ReadSettings
from hdfs.played import PIECE, Played

MIB = 1 << 20


@pytest.fixture
def choice() -> NodeChoice:
    """With samples of a fast and a slow node."""
    known = NodeChoice()
    known.note_served("fast", 100 * MIB, 100 * MIB, 1.0, 0.0)
    known.note_served("slow", 10 * MIB, 10 * MIB, 1.0, 0.0)
    return known


def test_one_timeout_suspends_a_node_and_one_failure_does_not() -> None:
    choice = NodeChoice()
    assert choice.note_failure("a", 0.0, at_once=True)
    assert not choice.note_failure("b", 0.0, at_once=False)
    assert (choice.is_open("a"), choice.is_open("b")) == (True, False)
    assert choice.note_failure("b", 0.0, at_once=False)
    assert not choice.note_failure("b", 0.0, at_once=False), "it is reported once"


def test_failures_with_successes_between_them_do_not_add_up() -> None:
    choice = NodeChoice()
    for _ in range(10):
        assert not choice.note_failure("a", 0.0, at_once=False)
        choice.note_served("a", 10, 10, 1.0, 0.0)


def test_pauses_between_probes_grow_until_one_succeeds() -> None:
    choice = NodeChoice()
    choice.note_failure("a", 0.0, at_once=True)
    due = [tenth / 10 for tenth in range(2000) if choice.due_probes(tenth / 10)]
    assert due[:4] == [1.0, 3.0, 7.0, 15.0]
    assert due[-1] - due[-2] == pytest.approx(30.0)
    choice.probe_succeeded("a")
    assert not choice.is_open("a")
    assert choice.due_probes(1000.0) == []


def test_pauses_grow_for_a_node_that_answers_probes_but_serves_nothing() -> None:
    choice = NodeChoice()
    pauses = []
    now_s = 0.0
    for _ in range(4):
        began_s = now_s
        choice.note_failure("a", now_s, at_once=True)
        while not choice.due_probes(now_s):
            now_s += 0.25
        pauses.append(now_s - began_s)
        choice.probe_succeeded("a")
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 8.0
    choice.note_served("a", MIB, MIB, 0.1, now_s)
    choice.note_failure("a", now_s, at_once=True)
    assert choice.due_probes(now_s + 1.0) == ["a"]


def test_a_slow_node_leaves_requests_to_a_fast_one_that_would_finish_earlier() -> None:
    one = ReadSettings(piece_bytes=PIECE, max_run_bytes=100, connections_per_node=1)
    played = Played(("slow:1", "fast:1"), ("fast:1",), options=one)
    played.read(0, 100)
    assert played.must_take("slow:1"), "nothing is known of it yet"
    played = Played(("slow:1", "fast:1"), ("fast:1",), options=one)
    played.schedule.choice.note_served("fast:1", 100 * MIB, 100 * MIB, 1.0, 0.0)
    played.schedule.choice.note_served("slow:1", 10 * MIB, 10 * MIB, 1.0, 0.0)
    played.read(0, 100)
    assert played.must_take("fast:1")
    played.read(200, 100)
    assert played.take() is None
    played.read(1000, 1000)
    played.schedule.queues.poke_all()
    assert played.must_take("slow:1"), "the fast one is busy"
    played = Played(("slow:1", "fast:1"), options=one)
    played.schedule.choice.note_served("fast:1", 100 * MIB, 100 * MIB, 1.0, 0.0)
    played.schedule.choice.note_served("slow:1", 10 * MIB, 10 * MIB, 1.0, 0.0)
    played.schedule.choice.note_failure("fast:1", 0.0, at_once=True)
    played.read(0, 100)
    assert played.must_take("slow:1"), "the fast one is excluded"


def test_the_estimated_rate_of_a_slow_node_rises_with_time(choice: NodeChoice) -> None:
    assert choice.rate("slow", 5.0) == 10 * MIB
    assert choice.rate("slow", 10.0) == 20 * MIB
    assert choice.rate("slow", 1e9) <= choice.rate("fast", 1e9)


def test_a_rate_follows_new_samples_and_a_node_without_any_is_as_fast_as_the_mean(choice: NodeChoice) -> None:
    assert choice.expected_s("unknown", 73 * MIB, 0.0) == pytest.approx(1.0)  # 0.7 * 100 + 0.3 * 10
    choice.note_served("slow", 10 * MIB, 10 * MIB, 1.0, 0.0)
    assert choice.rate("slow", 0.0) == pytest.approx(10 * MIB)
    choice.note_served("slow", 20 * MIB, 20 * MIB, 1.0, 100.0)
    assert choice.rate("slow", 102.0) == pytest.approx(13 * MIB)


def test_requests_are_larger_for_faster_nodes(choice: NodeChoice) -> None:
    assert choice.run_bytes("fast", 8 * MIB, 0.0) == 8 * MIB
    assert choice.run_bytes("slow", 8 * MIB, 0.0) == 10 * MIB // 4
    assert choice.run_bytes("unknown", 8 * MIB, 0.0) == MIB
    assert choice.run_bytes("unknown", MIB // 2, 0.0) == MIB // 2


def test_small_reads_do_not_measure_the_rate() -> None:
    choice = NodeChoice()
    choice.note_served("a", 1000, 1000, 0.1, 0.0)
    assert choice.rate("a", 0.0) == 0.0


def test_the_limit_for_late_requests_follows_the_usual_latency_within_bounds() -> None:
    choice = NodeChoice(min_late_s=0.25, max_late_s=1.0)
    assert choice.late_s() == 1.0
    for _ in range(32):
        choice.note_latency(0.01)
    assert choice.late_s() == 0.25
    for _ in range(256):
        choice.note_latency(0.1)
    assert choice.late_s() == pytest.approx(0.4)
    for _ in range(256):
        choice.note_latency(5.0)
    assert choice.late_s() == 1.0


def test_requests_underway_limit_the_estimated_rate(choice: NodeChoice) -> None:
    choice.rate_limit = lambda node, now_s: MIB if node == "fast" else float("inf")
    assert choice.rate("fast", 0.0) == MIB
    assert choice.expected_s("fast", 2 * MIB, 0.0) == 2.0
    assert choice.rate("slow", 0.0) == 10 * MIB
    assert choice.rate("unknown", 0.0) == 0.0


def test_a_request_that_was_stopped_early_still_measures_the_rate() -> None:
    choice = NodeChoice()
    choice.note_served("a", MIB, MIB // 8, 0.5, 0.0)
    assert choice.rate("a", 0.0) == MIB // 4


def test_the_number_of_packets_per_reception_follows_the_rate(choice: NodeChoice) -> None:
    assert choice.packets("fast", 2, 16, 0.0) == 16
    assert choice.packets("slow", 2, 16, 0.0) == 4
    choice.note_served("crawling", MIB, MIB, 10.0, 0.0)
    assert choice.packets("crawling", 2, 16, 0.0) == 1
    assert choice.packets("unknown", 2, 16, 0.0) == 4


def test_requests_queued_for_a_silent_node_go_to_another_one() -> None:
    played = Played(("a:1", "b:1"), options=ReadSettings(piece_bytes=PIECE, max_run_bytes=100, connections_per_node=1))
    played.schedule.choice.note_failure("b:1", 0.0, at_once=True)
    tickets = [played.read(0, 100), played.read(500, 100)]
    silent = played.must_take("a:1")
    played.schedule.choice.probe_succeeded("b:1")
    played.finish(silent, SilentError("nothing"))
    for _ in tickets:
        played.serve(played.must_take("b:1"))
    assert sorted(ticket.offset for ticket in played.ended) == [0, 500]


def test_a_request_measures_the_rate_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.hdfs.choice._MIN_SAMPLE_BYTES", PIECE)
    played = Played(("a:1",))
    played.now_s = 10.0
    for seconds, rate in ((2.0, 50.0), (4.0, 42.5)):  # the second request measures 25
        played.read(0, 100)
        run = played.must_take("a:1")
        played.now_s += seconds
        played.serve(run)
        assert played.schedule.choice.rate("a:1", played.now_s) == pytest.approx(rate)

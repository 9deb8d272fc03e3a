"""A waiter's decisions from its observations of a lease, without a store or clock."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bootseer.artifact.lease_state import TTL_S, LeaseObservation, LeaseRecord, Next, Watch
from bootseer.errors import CorruptError

RECORD = LeaseRecord("ab" * 16, "node-1", 77, 1_800_000_000.0, TTL_S)
UNKNOWN = LeaseObservation("unknown", why="no answer")


def held(beat: int = 0, **changes: Any) -> LeaseObservation:
    record = replace(RECORD, beat=beat, **changes)
    return LeaseObservation("held", f"{record.nonce} {record.beat}", record)


def looks(watch: Watch, sights: list[LeaseObservation], every_s: float = 1.0, start_s: float = 0.0) -> list[Next]:
    """The decisions of the watch for a sequence of observations."""
    steps = []
    for number, sight in enumerate(sights):
        now_s = start_s + number * every_s
        steps.append(watch.see(sight, now_s))
        watch.pause_s(now_s, 0.5)
    return steps


def test_a_holder_with_heartbeats_never_expires() -> None:
    sights = [held(number // 10) for number in range(3000)]
    assert set(looks(Watch(1e9), sights)) == {Next.LOOK}


def test_a_holder_silent_for_too_long_is_dead() -> None:
    steps = looks(Watch(1e9), [held(7)] * 40)
    assert steps.index(Next.DEAD) == TTL_S + 1
    assert set(steps[: int(TTL_S)]) == {Next.LOOK}


def test_another_holder_begins_anew() -> None:
    watch = Watch(1e9)
    looks(watch, [held(7)] * 30)
    assert watch.see(held(7, nonce="cd" * 16, taken=True), 31) is Next.LOOK
    assert Next.DEAD not in looks(watch, [held(7, nonce="cd" * 16, taken=True)] * 25, start_s=32)


def test_a_new_holder_without_a_takeover_means_that_the_first_gave_up() -> None:
    watch = Watch(1e9)
    assert watch.see(held(7), 0) is Next.LOOK
    assert watch.see(held(8), 1) is Next.LOOK
    assert watch.see(held(0, nonce="cd" * 16), 2) is Next.LEFT


def test_time_without_observations_is_not_silence() -> None:
    away = [held(7)] * 20 + [UNKNOWN] * 500 + [held(7)] * 9
    assert Next.DEAD not in looks(Watch(1e9), away)
    assert Next.DEAD in looks(Watch(1e9), [*away, *[held(7)] * 20])


def test_a_store_that_answers_every_other_time_shows_no_silence() -> None:
    assert Next.DEAD not in looks(Watch(1e9), [held(7), UNKNOWN] * 100)


def test_a_waiter_who_was_stopped_has_not_watched() -> None:
    watch = Watch(1e9)
    assert watch.see(held(7), 0) is Next.LOOK
    assert watch.see(held(7), 7200) is Next.LOOK


@pytest.mark.parametrize(("ttl_s", "dead_after"), [(1e9, 300), (0.0, 1), (5.0, 5)])
def test_a_lease_decides_within_bounds_how_long_it_may_be_silent(ttl_s: float, dead_after: int) -> None:
    steps = looks(Watch(1e9), [held(ttl_s=ttl_s)] * 400)
    assert steps.index(Next.DEAD) == dead_after + 1


def test_an_unreadable_lease_is_dead_after_a_while() -> None:
    broken = LeaseObservation("held", "of its bytes")
    assert looks(Watch(1e9, ttl_s=10), [broken] * 20).index(Next.DEAD) == 11


def test_a_free_lease_is_free_at_any_time() -> None:
    assert Watch(0).see(LeaseObservation("free"), 1e9) is Next.FREE


@pytest.mark.parametrize("sight", [held(), UNKNOWN, LeaseObservation("held", "x")])
def test_the_time_to_wait_ends_whatever_is_seen(sight: LeaseObservation) -> None:
    watch = Watch(100)
    assert watch.see(sight, 99.9) is Next.LOOK
    assert watch.see(sight, 100) is Next.OVER


def test_looks_become_rarer_differ_between_waiters_and_end_at_the_deadline() -> None:
    watch, other = Watch(1000), Watch(1000)
    pauses = [watch.pause_s(0, 0.5) for _ in range(20)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.5
    assert 1 < pauses[-1] <= 3.75
    assert [other.pause_s(0, 0.1) for _ in range(20)] != pauses
    assert watch.pause_s(999.9, 0.5) == pytest.approx(0.1)
    assert watch.pause_s(1001, 0.5) == 0


@given(st.lists(st.tuples(st.sampled_from(["beat", "silent", "unknown"]), st.floats(0, 1000)), max_size=60))
def test_only_silence_that_was_watched_makes_dead(steps: list[tuple[str, float]]) -> None:
    watch, now_s, beat, watched_s, looked = Watch(1e12), 0.0, 0, 0.0, False
    for what, gap_s in steps:
        now_s += gap_s
        if what == "unknown":
            assert watch.see(UNKNOWN, now_s) is Next.LOOK
            looked = False
            continue
        if what == "beat":
            beat, watched_s = beat + 1, 0.0
        elif looked:
            watched_s += gap_s
        looked = True
        if watch.see(held(beat), now_s) is Next.DEAD:
            assert watched_s > TTL_S


def test_a_lease_reads_back_as_it_was_written() -> None:
    for record in (RECORD, RECORD.next(), replace(RECORD, released=True), replace(RECORD, taken=True)):
        assert LeaseRecord.parse(record.encode()) == record
    assert RECORD.next().beat == 1


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "bootseer.environment-lease/2"},
        {"nonce": "x"},
        {"nonce": None},
        {"beat": -1},
        {"beat": "1"},
        {"since_s": float("nan")},
        {"ttl_s": float("inf")},
        {"pid": None},
        {"pid": 10**400},
    ],
    ids=str,
)
def test_an_invalid_lease_is_corrupt(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptError):
        LeaseRecord.parse(json.dumps({**json.loads(RECORD.encode()), **change}).encode())


@given(st.binary(max_size=100))
def test_any_bytes_are_refused_with_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(CorruptError):
        LeaseRecord.parse(data)


def test_words_survive_clocks_that_disagree() -> None:
    assert RECORD.words(RECORD.since_s + 93) == "node-1 (process 77) has been building it for 93 s"
    assert RECORD.words(0).endswith("for 0 s")

"""Retries of small requests, in virtual time."""

from __future__ import annotations

import random

import pytest

from bootseer.artifact.objects import read_all
from bootseer.errors import CorruptError, NotFoundError, PermanentError, TransientError
from bootseer.io.retry import retrying
from store.contract import DATA, put
from store_doubles import Fault, FaultyStore, MemoryStore


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


class Call:
    """Raises these errors in order, then returns 42. Each call takes a second."""

    def __init__(self, clock: Clock, *errors: Exception) -> None:
        self.clock, self.errors, self.left = clock, list(errors), []

    def __call__(self, left_s: float) -> int:
        self.left.append(left_s)
        self.clock.now += 1
        if self.errors:
            raise self.errors.pop(0)
        return 42


def run(clock: Clock, call: Call, **options: float) -> int:
    return retrying(call, rng=random.Random(1), sleep=clock.sleep, clock=lambda: clock.now, **options)


def test_what_works_is_called_once() -> None:
    clock = Clock()
    assert run(clock, Call(clock)) == 42
    assert clock.waits == []


def test_what_is_transient_is_tried_again_with_growing_random_waits() -> None:
    clock = Clock()
    call = Call(clock, *(TransientError("x") for _ in range(4)))
    assert run(clock, call) == 42
    assert len(clock.waits) == 4
    assert all(0 <= wait <= 0.1 * 2**number for number, wait in enumerate(clock.waits))
    assert len(set(clock.waits)) == 4


def test_the_last_error_is_raised_when_all_attempts_failed() -> None:
    clock = Clock()
    with pytest.raises(TransientError, match="third"):
        run(clock, Call(clock, *(TransientError(word) for word in ("first", "second", "third", "fourth"))), attempts=3)


@pytest.mark.parametrize("error", [PermanentError("x"), NotFoundError("x"), CorruptError("x"), ValueError("x")])
def test_what_is_not_transient_is_raised_at_once(error: Exception) -> None:
    clock = Clock()
    call = Call(clock, error)
    with pytest.raises(type(error)):
        run(clock, call)
    assert len(call.left) == 1


def test_what_the_other_side_asks_for_is_obeyed() -> None:
    clock = Clock()
    assert run(clock, Call(clock, TransientError("x", retry_after_s=7.0))) == 42
    assert 7.0 <= clock.waits[0] <= 7.1


def test_nothing_is_tried_after_the_deadline() -> None:
    clock = Clock()
    call = Call(clock, TransientError("busy", retry_after_s=20.0))
    with pytest.raises(TransientError, match="busy"):
        run(clock, call, deadline_s=10)
    assert clock.waits == []


def test_no_attempt_begins_without_the_time_to_get_an_answer() -> None:
    clock = Clock()
    call = Call(clock, TransientError("busy", retry_after_s=8.5), TransientError("no answer within 0.4 s"))
    with pytest.raises(TransientError, match="busy"):
        run(clock, call, deadline_s=10)
    assert call.left == [10]


def test_each_attempt_learns_what_time_is_left() -> None:
    clock = Clock()
    call = Call(clock, TransientError("x", retry_after_s=3.0))
    run(clock, call, deadline_s=10)
    assert call.left[0] == 10
    assert 5.8 <= call.left[1] <= 6


def test_a_small_object_is_read_in_spite_of_faults() -> None:
    inner = MemoryStore("read-all")
    name = put(inner, DATA).name
    store = FaultyStore(inner, [Fault(status=503), Fault(cut_after=100_000)])
    assert read_all(store, name, len(DATA)) == DATA
    assert store.requests[name] == 3


def test_an_object_that_is_too_large_is_refused() -> None:
    store = MemoryStore("read-all")
    put(store, DATA, "large")
    with pytest.raises(PermanentError, match="larger than 1000 bytes"):
        read_all(store, "large", 1000)


@pytest.mark.parametrize("fault", [Fault(corrupt_at=5), Fault(short_after=500_000)], ids=str)
def test_bytes_that_are_not_those_of_the_name_are_corrupt(fault: Fault) -> None:
    inner = MemoryStore("read-all")
    name = put(inner, DATA).name
    with pytest.raises(CorruptError, match=name):
        read_all(FaultyStore(inner, [fault]), name, len(DATA))

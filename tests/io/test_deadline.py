"""Deadlines for calls without a timeout."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from bootseer.errors import TransientError
from bootseer.io import deadline
from bootseer.io.deadline import stream_within, within
from bootseer.io.executor import Executor


def test_the_result_and_the_errors_of_a_call_are_passed_on() -> None:
    assert within(60, "x", lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        within(60, "x", lambda: 1 // 0)


def test_a_panic_of_a_library_is_an_error_that_callers_expect() -> None:
    """Panics of Rust code are not Exceptions."""

    class PanicException(BaseException):
        pass

    def call() -> None:
        raise PanicException("rust")

    with pytest.raises(RuntimeError, match="PanicException: rust"):
        within(60, "x", call)


def test_a_call_that_hangs_ends_with_its_deadline() -> None:
    gate = threading.Event()
    try:
        with pytest.raises(TransientError, match=r"name: no complete answer within 0\.1 s"):
            within(0.1, "name", gate.wait)
    finally:
        gate.set()


def test_items_come_in_order_and_errors_after_them() -> None:
    def produce() -> Iterator[int]:
        yield from range(20)
        raise ValueError("at the end")

    items = stream_within(60, "x", produce)
    assert [next(items) for _ in range(20)] == list(range(20))
    with pytest.raises(ValueError, match="at the end"):
        next(items)


def test_a_producer_works_only_a_little_ahead_and_ends_with_its_consumer() -> None:
    produced: list[int] = []
    ended = threading.Event()

    def produce() -> Iterator[int]:
        try:
            for number in itertools.count():
                produced.append(number)
                yield number
        finally:
            ended.set()

    with closing(stream_within(60, "x", produce)) as items:
        for _ in range(10):
            next(items)
    assert ended.wait(60)
    assert len(produced) <= 10 + 2 * deadline._AHEAD + 2


def test_a_producer_that_drips_ends_with_the_deadline_of_the_whole() -> None:
    gate = threading.Event()

    def produce() -> Iterator[int]:
        while not gate.wait(0.01):
            yield 1

    try:
        with pytest.raises(TransientError, match="no complete answer"):
            list(stream_within(0.2, "x", produce))
    finally:
        gate.set()


def test_calls_that_hang_do_not_pile_up_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "_threads", Executor("bootseer-store", 2))
    gate, ended = threading.Event(), threading.Barrier(3)

    def call() -> None:
        gate.wait()
        ended.wait(60)

    for _ in range(2):
        with pytest.raises(TransientError, match="no complete answer"):
            within(0.01, "x", call)
    with pytest.raises(TransientError, match="x: bootseer-store: all of its 2 threads are busy"):
        within(60, "x", lambda: 1)
    gate.set()
    ended.wait(60)
    until = threading.Event()
    while True:
        # A slot is free when its thread has ended.
        try:
            assert within(60, "x", lambda: 1) == 1
        except TransientError:
            until.wait(0.01)
        else:
            return


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_calls_that_hang_in_the_parent_take_no_room_in_the_child_of_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "_threads", Executor("bootseer-store", 1))
    gate = threading.Event()
    with pytest.raises(TransientError, match="no complete answer"):
        within(0.01, "x", gate.wait)
    child = os.fork()
    if child == 0:
        try:
            os._exit(within(60, "x", lambda: 7))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    gate.set()

from __future__ import annotations

import threading
from concurrent.futures import wait

import pytest

from bootseer.io.tasks import Count, Tasks
from waiting import until


@pytest.fixture
def gate():
    """Calls that wait for it end with the test."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_results_come_in_the_order_of_the_calls():
    with Tasks("test", 3) as tasks:
        assert list(tasks.map(lambda number: number * 2, range(100))) == list(range(0, 200, 2))


def test_the_first_error_is_raised_and_what_has_not_begun_is_not_done(gate):
    done = []

    def call(number):
        if number == 1:
            raise ValueError("mistake")
        gate.wait(120)
        done.append(number)

    with pytest.raises(ValueError, match="mistake"), Tasks("test", 2) as tasks:
        futures = [tasks.submit(call, number) for number in range(5)]
        wait(futures[1:2])
        until(futures[2].running)
        gate.set()
        futures[1].result()
    assert sorted(done) == sorted({0, 2} | {number for number in (3, 4) if not futures[number].cancelled()})
    assert all(future.done() for future in futures)


def test_leaving_does_not_wait_for_a_call_that_hangs(gate):
    with pytest.raises(ValueError, match="mistake"), Tasks("test", 1, leave_s=0.01) as tasks:
        hung = tasks.submit(gate.wait, 120)
        begun = tasks.submit(gate.wait, 120)
        until(hung.running)
        raise ValueError("mistake")
    assert begun.cancelled()
    assert not hung.done()


def test_threads_do_not_keep_the_process_from_ending(gate):
    begun = threading.Event()
    with Tasks("test-tasks", 1, leave_s=0.0) as tasks:
        tasks.submit(lambda: (begun.set(), gate.wait(120)))
        assert begun.wait(60)  # calls that have not begun are dropped
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "test-tasks"] == [True]


def test_without_a_thread_the_caller_does_the_work(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Tasks("test", 3) as tasks:
        assert list(tasks.map(lambda _: threading.current_thread(), range(3))) == [threading.current_thread()] * 3


def test_what_is_no_exception_is_raised_where_the_result_is_asked_for():
    class Panic(BaseException):
        pass

    def call():
        raise Panic("rust")

    with Tasks("test", 1) as tasks, pytest.raises(Panic, match="rust"):
        tasks.submit(call).result()


def test_progress_is_reported_by_one_thread_at_a_time_and_the_end_always_is(gate):
    told, hangs = [], threading.Event()

    def progress(done, total):
        told.append((done, total))
        if len(told) == 1:
            hangs.set()
            gate.wait(120)

    count = Count(10, progress)
    with Tasks("test", 1) as tasks:
        first = tasks.submit(count.add, 1)
        assert hangs.wait(120)
        for _ in range(9):  # none of them waits for the hanging callback
            count.add(1)
        assert told == [(1, 10)]
        gate.set()
        first.result()
    assert told == [(1, 10), (10, 10)]


def test_no_lock_is_held_during_the_callback():
    count = Count(2, lambda done, total: free.append(not count._lock.locked()))
    free = []
    count.add(2)
    assert free == [True]


def test_errors_of_the_callback_are_raised_and_the_next_step_is_reported():
    told = []

    def progress(done, total):
        told.append(done)
        if done == 1:
            raise KeyboardInterrupt

    count = Count(3, progress)
    with pytest.raises(KeyboardInterrupt):
        count.add(1)
    count.add(1)
    assert told == [1, 2]

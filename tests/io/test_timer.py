from __future__ import annotations

import os
import threading

import pytest

from bootseer.errors import TransientError
from bootseer.io.timer import Timer
from waiting import until

# Forks with running threads are tested here.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def test_calls_are_made_in_the_order_of_their_times():
    timer, done = Timer(threads=1), []
    timer.after(1.0, lambda: done.append("later"))
    timer.after(0.0, lambda: done.append("now"))
    timer.after(0.5, lambda: done.append("soon"))
    until(lambda: len(done) == 3)
    assert done == ["now", "soon", "later"]


def test_no_call_is_made_before_its_time():
    timer, times = Timer(), []
    began = timer.now_s()
    timer.after(0.05, lambda: times.append(timer.now_s() - began))
    until(lambda: times)
    assert times[0] >= 0.05


def test_an_earlier_call_does_not_wait_for_a_later_one():
    timer, done = Timer(), []
    timer.after(3600.0, lambda: done.append("later"))
    timer.after(0.0, lambda: done.append("now"))
    until(lambda: done == ["now"])


def test_a_call_that_hangs_does_not_hold_up_the_others():
    timer, done, gate = Timer(), [], threading.Event()
    timer.after(0.0, lambda: gate.wait(120))
    for number in range(3):
        timer.after(0.001 * number, lambda number=number: done.append(number))
    until(lambda: len(done) == 3)
    gate.set()


def test_calls_are_made_with_no_lock_held():
    timer, free = Timer(), []
    timer.after(0.0, lambda: free.append(timer._change.acquire(blocking=False)))
    until(lambda: free)
    assert free == [True]
    timer._change.release()


def test_a_call_that_raises_is_reported_and_the_next_one_is_made(monkeypatch):
    reported, done = [], []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(str(args.exc_value)))
    timer = Timer(threads=1)

    def broken():
        raise RuntimeError("mistake")

    timer.after(0.0, broken)
    timer.after(0.0, lambda: done.append(1))
    until(lambda: done)
    assert reported == ["mistake"]


def test_a_call_is_refused_when_no_thread_can_be_started_and_the_next_one_is_made(monkeypatch):
    timer, done = Timer(), []

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TransientError, match="bootseer-timer: the system refuses to start a thread"):
            timer.after(0.0, lambda: done.append("refused"))
    timer.after(0.0, lambda: done.append("next"))
    until(lambda: done)
    assert done == ["next"]


def test_threads_end_after_closing_when_no_call_is_left():
    timer, done = Timer(), []
    timer.after(0.01, lambda: done.append(1))
    timer.close()
    until(lambda: done and len(timer._pool) == 0)


def test_a_child_of_a_fork_begins_without_calls():
    timer, done = Timer(), []
    timer.after(0.05, lambda: done.append(1))
    with timer._change:
        child = os.fork()
        if child == 0:
            timer.after(0.2, lambda: os._exit(7 if not done else 1))
            threading.Event().wait(120)
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    until(lambda: done)


def test_calls_that_are_dropped_are_not_made_and_hold_up_no_end():
    timer, made = Timer("test-dropped"), []
    timer.after(600.0, lambda: made.append(1))
    timer.close(120.0, drop=True)
    assert not [thread for thread in threading.enumerate() if thread.name == "test-dropped"]
    timer.after(0.0, lambda: made.append(2))
    timer.close(120.0)
    assert made == [2]

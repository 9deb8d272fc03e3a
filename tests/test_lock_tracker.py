"""The lock tracker reports locks that can deadlock, without a deadlock, and nothing else."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import pytest

from bootseer.io.executor import Executor
from bootseer.io.timer import Timer
from lock_tracker import ENTRANCES, LockMisuseError, Tracker, tracked
from waiting import until

MODULE = """
first = threading.Lock()
second = threading.RLock()
both = threading.Condition()
plain = threading.Condition(threading.Lock())
"""


@pytest.fixture
def module(monkeypatch):
    """A module in BootSeer's package; each call executes it again, which creates new locks."""
    module = ModuleType("bootseer.of_this_test")
    module.threading = threading
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def make():
        exec(MODULE, module.__dict__)  # noqa: S102 - it is written above
        return module

    return make


def test_acquiring_a_plain_lock_twice_raises_instead_of_hanging(module):
    with (
        pytest.raises(LockMisuseError, match=r"bootseer.of_this_test:\d+ is waited for by the thread that holds it"),
        tracked(Tracker()),
    ):
        first = module().first
        with first, pytest.raises(LockMisuseError), first:
            pass


def test_an_error_that_the_code_catches_still_fails_the_test(module):
    def work():
        with first, first:
            pass

    with pytest.raises(LockMisuseError), tracked(Tracker()):
        first = module().first
        try:
            work()
        except Exception:
            assert not first.locked()


def test_two_orders_are_reported_even_if_no_thread_hangs(module):
    with pytest.raises(LockMisuseError, match="locks are taken in two orders") as raised, tracked(Tracker()):
        locks = module()
        with locks.first, locks.second:
            pass
        with locks.second, locks.first:
            pass
    assert str(raised.value).count("held, ") == 2


def test_a_cycle_of_three_locks_over_several_tests(module):
    tracker = Tracker()
    with tracked(tracker):
        locks = module()
        with locks.first, locks.second:
            pass
    with tracked(tracker):
        locks = module()
        with locks.second, locks.both:
            pass
    with pytest.raises(LockMisuseError, match="locks are taken in two orders"), tracked(tracker):
        locks = module()
        with locks.both, locks.first:
            pass


def test_correct_use_passes(module):
    with tracked(Tracker()):
        locks = module()
        for _ in range(2):
            with locks.first, locks.second, locks.second, locks.both, locks.both:
                locks.both.notify_all()
        with locks.first:
            assert not locks.first.acquire(blocking=False)
        with locks.second:
            assert locks.first.acquire(blocking=False), "without waiting, the order does not matter"
        locks.first.release()


@pytest.mark.parametrize("name", ["both", "plain"])
def test_conditions_release_their_lock_while_they_wait(module, name):
    tracker = Tracker()
    with tracked(tracker):
        condition, woken = getattr(module(), name), []

        def wait():
            with condition:
                condition.wait_for(lambda: woken, 120)
                assert [lock.site for lock in tracker.held()] == [condition._lock.site]
                woken.append(2)

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: condition._waiters)
        with condition:
            assert not condition.wait(0.001)
            woken.append(1)
            condition.notify_all()
        thread.join(120)
    assert woken == [1, 2]
    assert tracker.held() == []


def test_a_lock_may_be_released_by_another_thread(module):
    tracker = Tracker()
    with tracked(tracker):
        first = module().first
        first.acquire()
        thread = threading.Thread(target=first.release)
        thread.start()
        thread.join(120)
        assert tracker.held() == []
        with first:
            pass


def test_entering_a_checked_function_with_a_lock_held_is_reported(module, monkeypatch):
    def work():
        with locks.first:
            locks.entrance()

    with pytest.raises(LockMisuseError, match=r"entrance is entered with these locks held: bootseer.of_this_test:\d+"):
        locks = module()
        locks.entrance = lambda: None
        monkeypatch.setitem(ENTRANCES, "bootseer.of_this_test", "entrance")
        with tracked(Tracker(), ("bootseer.of_this_test",)):
            module()
            locks.entrance()
            work()


def test_a_timer_calls_without_locks_held():
    done = []
    with tracked(Tracker()):
        Timer().after(0.0, lambda: done.append(1))
        until(lambda: done)


def test_a_call_of_a_timer_with_a_lock_held_is_reported(module, monkeypatch):
    calls = {}  # by timer, because other threads of this process have timers too
    monkeypatch.setattr(Timer, "after", lambda timer, delay_s, call: calls.update({timer: call}))
    with pytest.raises(LockMisuseError, match="a timer's call is entered with these locks held"), tracked(Tracker()):
        timer = Timer()
        timer.after(0.0, lambda: None)
        with module().first:
            calls[timer]()


def test_everything_is_restored_afterwards():
    before = Timer.after
    with tracked(Tracker()):
        pool = Executor("test")
        assert Timer.after is not before
    assert type(pool._change) is threading.Condition
    assert Timer.after is before
    assert sys.modules["bootseer.io.executor"].threading is threading

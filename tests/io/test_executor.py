from __future__ import annotations

import os
import threading
from functools import partial

import pytest

from bootseer.errors import TransientError
from bootseer.io.executor import Executor
from waiting import until

# Forks with running threads are tested here.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture
def gate():
    """Jobs that wait for it end with the test."""
    gate = threading.Event()
    yield gate
    gate.set()


def refuse(thread):
    raise RuntimeError("can't start new thread")


def test_threads_are_started_when_all_are_busy_and_used_again_when_free(gate):
    pool, done = Executor("test-pool"), []
    for number in range(4):
        pool.submit(lambda number=number: (gate.wait(120), done.append(number)))
    assert len(pool) == 4
    gate.set()
    until(lambda: len(done) == 4)
    until(lambda: pool._num_idle == 4)
    pool.submit(lambda: done.append("again"))
    until(lambda: len(done) == 5)
    assert len(pool) == 4
    pool.close(120)
    assert len(pool) == 0


def test_no_more_threads_than_allowed_and_jobs_in_their_order(gate):
    pool, done = Executor("test-pool", 1), []
    pool.submit(lambda: gate.wait(120))
    for number in range(5):
        pool.submit(lambda number=number: done.append(number))
    assert len(pool) == 1
    gate.set()
    until(lambda: len(done) == 5)
    assert done == [0, 1, 2, 3, 4]


def test_urgent_jobs_go_first_and_a_job_can_become_urgent(gate):
    pool, done = Executor("test-pool", 1), []
    jobs = [partial(done.append, number) for number in range(5)]
    pool.submit(lambda: gate.wait(120))
    for number, job in enumerate(jobs):
        pool.submit(job, urgent=number == 3)
    pool.prioritize(jobs[2])
    gate.set()
    until(lambda: len(done) == 5)
    assert done == [3, 2, 0, 1, 4]
    pool.prioritize(jobs[0])  # already done
    pool.close(120)
    assert done == [3, 2, 0, 1, 4]


def test_a_thread_ends_when_there_is_no_job_and_the_next_job_starts_another_one():
    pool, done = Executor("test-pool", idle_s=0.001), []
    for number in range(3):
        pool.submit(lambda number=number: done.append(number))
        until(lambda: len(pool) == 0)
    assert done == [0, 1, 2]


def test_what_is_to_be_done_when_idle_is_done_once_by_the_last_thread(gate):
    told = []
    pool = Executor("test-pool", idle_s=0.001, when_idle=lambda: told.append(len(pool)))
    for _ in range(3):
        pool.submit(lambda: gate.wait(120))
    gate.set()
    until(lambda: len(pool) == 0)
    assert told == [1]


def test_a_job_that_comes_while_the_last_thread_clears_up_is_run(gate):
    done = []
    pool = Executor("test-pool", 1, idle_s=0.001, when_idle=lambda: gate.wait(120))
    pool.submit(lambda: done.append(1))
    until(lambda: done == [1] and pool._num_idle == 0 and not pool._urgent)
    pool.submit(lambda: done.append(2))
    gate.set()
    until(lambda: done == [1, 2])


def test_closing_abandons_a_hanging_thread(gate):
    pool = Executor("test-pool")
    pool.submit(lambda: gate.wait(120))
    pool.close(0.01)
    assert len(pool) == 1
    gate.set()
    until(lambda: len(pool) == 0)


def test_a_job_that_comes_after_closing_is_run_and_its_thread_ends():
    pool, done = Executor("test-pool"), []
    pool.close()
    pool.submit(lambda: done.append(1))
    until(lambda: done and len(pool) == 0)


@pytest.mark.parametrize("error", [RuntimeError("mistake"), KeyboardInterrupt("mistake")])
def test_a_job_that_raises_is_reported_and_takes_no_thread(monkeypatch, error):
    reported, done = [], []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(str(args.exc_value)))
    pool = Executor("test-pool", 1)

    def broken():
        raise error

    pool.submit(broken)
    until(lambda: pool._num_idle == 1)
    pool.submit(lambda: done.append(1))
    until(lambda: done)
    assert len(pool) == 1
    assert reported == ["mistake"]


def test_a_job_waits_for_a_thread_when_the_system_refuses_another_one(gate, monkeypatch):
    pool, done = Executor("test-pool"), []
    pool.submit(lambda: gate.wait(120))
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        pool.submit(lambda: done.append("later"))
    assert (len(pool), done) == (1, [])
    gate.set()
    until(lambda: done == ["later"])


def test_a_job_is_refused_and_not_run_when_there_is_no_thread_at_all(monkeypatch):
    pool, done = Executor("test-pool", 1), []
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TransientError, match=r"test-pool: the system refuses to start a thread.*pids.max"):
            pool.submit(lambda: done.append("refused"))
    assert len(pool) == 0
    pool.submit(lambda: done.append("next"))
    until(lambda: done)
    pool.close(120)
    assert done == ["next"]


def test_a_job_whose_submission_is_interrupted_is_not_run(monkeypatch):
    pool, done = Executor("test-pool", 1), []

    def interrupted(thread):
        raise KeyboardInterrupt

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.submit(lambda: done.append("interrupted"))
    pool.submit(lambda: done.append("next"))
    until(lambda: done)
    pool.close(120)
    assert done == ["next"]


def test_a_job_that_cannot_wait_is_refused_when_all_threads_are_busy(gate):
    pool, done = Executor("test-pool", 1), []
    pool.submit(lambda: gate.wait(120), at_once=True)
    with pytest.raises(TransientError, match="test-pool: all of its 1 threads are busy"):
        pool.submit(lambda: done.append("refused"), at_once=True)
    gate.set()
    until(lambda: pool._num_idle == 1)
    pool.submit(lambda: done.append("next"), at_once=True)
    until(lambda: done == ["next"])


def test_a_child_of_a_fork_begins_without_threads_and_jobs_even_when_the_lock_was_held(gate):
    pool = Executor("test-pool", 1)
    pool.submit(lambda: gate.wait(120))
    pool.submit(lambda: os._exit(3))
    with pool._change:
        child = os.fork()
        if child == 0:
            pool.submit(lambda: os._exit(7 if len(pool) == 1 else 2))
            threading.Event().wait(120)
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    pool._urgent.clear()

from __future__ import annotations

import threading

from bootseer.fetch.workers import Workers
from fetch.waiting import until


def test_threads_are_started_when_all_are_busy_and_used_again_when_free():
    workers, gate, done = Workers("test-workers"), threading.Event(), []
    for number in range(4):
        workers.submit(lambda number=number: (gate.wait(120), done.append(number)))
    assert len(workers) == 4
    gate.set()
    until(lambda: len(done) == 4)
    until(lambda: workers._free == 4)
    workers.submit(lambda: done.append("again"))
    until(lambda: len(done) == 5)
    assert len(workers) == 4
    assert workers.close(120)


def test_closing_leaves_a_thread_that_hangs_behind_and_says_so():
    workers, gate = Workers("test-workers"), threading.Event()
    workers.submit(lambda: void(gate.wait(120)))
    assert not workers.close(0.01)
    gate.set()
    until(lambda: not any(thread.name.startswith("test-workers") for thread in threading.enumerate()))


def test_a_job_that_raises_is_reported_and_takes_no_thread(monkeypatch):
    reported, done = [], []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(str(args.exc_value)))
    workers = Workers("test-workers")

    def broken():
        raise RuntimeError("mistake")

    workers.submit(broken)
    until(lambda: workers._free == 1)
    workers.submit(lambda: done.append(1))
    until(lambda: done)
    assert len(workers) == 1
    assert reported == ["mistake"]
    assert workers.close(120)


def void(_):
    """Drop a value."""


def test_a_job_waits_for_a_thread_when_the_machine_has_room_for_no_more(monkeypatch):
    workers, gate, done = Workers("test-workers"), threading.Event(), []
    workers.submit(lambda: void(gate.wait(120)))

    def refused(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refused)
        workers.submit(lambda: done.append("later"))
    assert (len(workers), done) == (1, [])
    gate.set()
    until(lambda: done == ["later"])
    until(lambda: workers._free == 1)
    assert workers.close(120)

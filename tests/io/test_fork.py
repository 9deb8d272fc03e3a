from __future__ import annotations

import gc
import os

import pytest

from bootseer.io import fork

# Forks with running threads are tested here.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Counter:
    """Counts calls of `begin`."""

    def __init__(self, log):
        self.log = log
        self.count = 0
        fork.in_each_process(self.begin)

    def begin(self):
        self.count += 1
        self.log.append(self)


def in_child(condition) -> bool:
    """Whether the condition holds in a forked child."""
    child = os.fork()
    if child == 0:
        os._exit(0 if condition() else 1)
    return os.waitpid(child, 0)[1] == 0


def test_it_begins_at_once_and_again_in_the_child_only():
    counter = Counter([])
    assert counter.count == 1
    assert in_child(lambda: counter.count == 2)
    assert counter.count == 1


def test_in_the_child_what_registered_first_is_first():
    log = []
    counters = [Counter(log) for _ in range(5)]
    assert in_child(lambda: log[5:] == counters)


def test_a_child_of_the_child_too():
    counter = Counter([])
    assert in_child(lambda: in_child(lambda: counter.count == 3))


def test_one_that_raises_is_reported_and_the_others_are_called(capfd):
    def broken():
        raise ValueError("not made anew")

    fork.after_fork(broken)
    try:
        counter = Counter([])
        assert in_child(lambda: counter.count == 2)
        assert "not made anew" in capfd.readouterr().err
    finally:
        number = next(number for number, find in fork._calls.items() if find() is broken)
        del fork._calls[number]


def test_the_list_keeps_no_object_alive():
    before = len(fork._calls)
    counter = Counter([])
    assert len(fork._calls) == before + 1
    counter.log.clear()
    del counter
    gc.collect()
    assert len(fork._calls) <= before

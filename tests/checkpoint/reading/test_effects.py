from __future__ import annotations

import threading

import pytest

from bootseer.checkpoint.reading.transfer import run_effects


def test_calls_added_by_a_call_are_made_after_all_earlier_ones():
    order = []

    def first():
        run_effects([lambda: order.append("third"), lambda: order.append("fourth")])
        order.append("first")

    run_effects([first, lambda: order.append("second")])
    assert order == ["first", "second", "third", "fourth"]


def test_a_long_chain_of_calls_does_not_overflow_the_stack():
    left = [100_000]

    def step():
        left[0] -= 1
        if left[0]:
            run_effects([step])

    run_effects([step])
    assert left == [0]


def test_an_exception_of_a_call_is_reported_and_the_others_are_made(monkeypatch):
    reported, made = [], []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_value))
    problem = ValueError("unforeseen")

    def broken():
        raise problem

    run_effects([broken, lambda: made.append(1)])
    assert (reported, made) == ([problem], [1])


def test_ctrl_c_in_a_call_is_raised_after_all_others():
    made = []

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_effects([interrupted, lambda: run_effects([lambda: made.append(1)])])
    assert made == [1]
    run_effects([lambda: made.append(2)])
    assert made == [1, 2]

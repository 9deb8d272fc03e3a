"""How many second requests the scheduler starts for late ones, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bootseer.fetch.fetch_settings import WITHOUT_READ_AHEAD
from fetch.virtual import Answers, Fault, World, world

SETTINGS = WITHOUT_READ_AHEAD


def test_hedges_stay_within_their_credit_when_everything_is_slow() -> None:
    w = world(fault=lambda fetch, earlier: Fault(hang=True))
    for block in range(0, 6, 3):
        w.read(0, [block], Answers())
    w.run(until=9.0)
    assert w.scheduler.stats.hedges == SETTINGS.first_hedge_credit  # of four that were needed


def test_a_second_hedge_waits_twice_as_long_as_the_first() -> None:
    w = world(fault=lambda fetch, earlier: Fault(hang=True))
    w.read(0, [5], Answers())
    w.run(until=9.0)
    assert [time for time, _ in w.launched] == pytest.approx([0.0, SETTINGS.hedge_s, 3 * SETTINGS.hedge_s])


def test_blocks_that_arrived_for_readers_earn_hedges_and_prefetched_ones_do_not() -> None:
    def hedges(before: Callable[[World], None]) -> int:
        w = world(fault=lambda fetch, earlier: Fault(hang=True) if fetch.blocks.start >= 500 else None)
        before(w)
        w.run(until=1.0)
        w.read(0, [500], Answers())
        w.read(0, [503], Answers())
        w.run(until=10.0)
        return w.scheduler.stats.hedges

    assert hedges(lambda w: w.prefetch((0, block) for block in range(100))) == SETTINGS.first_hedge_credit
    assert hedges(lambda w: w.read(0, range(100), Answers())) == 2 * SETTINGS.max_hedges

from __future__ import annotations

from itertools import pairwise

from bootseer.fetch.elsewhere import Elsewhere


def test_a_block_of_others_is_looked_at_soon_and_then_less_and_less_often():
    elsewhere = Elsewhere(60.0)
    elsewhere.watch((0, 1), 0.0)
    elsewhere.watch((0, 1), 0.0)
    times = []
    while len(times) < 30:
        now = elsewhere.next_look
        assert elsewhere.due(now) == [(0, 1)]
        times.append(now)
    pauses = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert pauses[0] <= 0.005
    assert all(later >= 0.99 * earlier for earlier, later in pairwise(pauses))
    assert 0.04 <= pauses[-1] <= 0.1


def test_a_forgotten_block_is_not_looked_at():
    elsewhere = Elsewhere(60.0)
    elsewhere.watch((0, 1), 0.0)
    elsewhere.forget((0, 1))
    assert elsewhere.due(1.0) == []
    assert elsewhere.next_look is None


def test_a_claim_that_is_held_for_a_minute_is_overdue():
    elsewhere = Elsewhere(60.0)
    elsewhere.watch((0, 1), 10.0)
    assert not elsewhere.overdue((0, 1), 69.0)
    assert elsewhere.overdue((0, 1), 70.0)
    assert not elsewhere.overdue((0, 2), 70.0)

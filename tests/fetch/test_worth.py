from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.fetch.fetch_settings import FetchSettings
from bootseer.fetch.hotset import HotSetTrust

SETTINGS = FetchSettings()
WINDOW = 32 << 20


COVERED, UNCOVERED = (0, 0), (7, 7)


def judged(*needs: bool, settings: FetchSettings = SETTINGS) -> HotSetTrust:
    worth = HotSetTrust(settings)
    worth.add_block(COVERED, 1)
    for covered in needs:
        worth.note_need(COVERED if covered else UNCOVERED)
    return worth


def test_a_set_of_which_nothing_is_known_may_have_the_smallest_window_in_flight():
    assert judged().allowance(WINDOW) == SETTINGS.min_window_bytes


def test_each_covered_need_doubles_what_may_be_in_flight_until_all_may():
    allowed = [judged(*[True] * number).allowance(WINDOW) for number in range(5)]
    assert allowed == [4 << 20, 8 << 20, 16 << 20, 32 << 20, WINDOW]
    assert judged(*[True] * 4).proven


def test_each_uncovered_need_halves_it_and_eight_suspend_the_set():
    assert judged(False, False).allowance(WINDOW) == 1 << 20
    assert not judged(*[False] * 7).suspended
    assert judged(*[False] * 8).suspended
    assert judged(*[False] * 8).allowance(WINDOW) == 0


def test_a_set_that_covers_less_than_half_of_24_needs_is_suspended():
    assert not judged(*[True, False] * 12).suspended
    assert judged(*[True, False] * 11, False, False).suspended


def test_a_suspended_set_comes_back_when_the_latest_needs_speak_for_it():
    worth = judged(*[False] * 40)
    for _ in range(17):
        worth.note_need(COVERED)
    assert worth.suspended
    worth.note_need(COVERED)
    assert not worth.suspended
    assert worth.suspensions == 1
    assert (worth.needs, worth.covered) == (58, 18)


def test_a_workload_that_leaves_the_path_of_the_record_ends_the_trust_at_once():
    shared = [True] * 100
    assert judged(*shared, *[False] * (SETTINGS.diverged_needs - 1)).proven
    assert not judged(*shared, *[False] * SETTINGS.diverged_needs).proven
    assert judged(*shared, *[False] * (SETTINGS.diverged_needs - 1 - SETTINGS.suspend_score)).suspended


def test_a_set_with_one_need_more_for_it_than_against_it_can_still_lose_its_trust():
    worth = judged(*[True] * SETTINGS.diverged_needs, *[False] * SETTINGS.diverged_needs)
    assert worth.was_wrong
    assert worth.allowance(WINDOW) == SETTINGS.min_window_bytes >> 1


def test_the_oldest_need_leaves_the_window():
    worth = judged(False, True, True, settings=FetchSettings(judged_window=2))
    assert worth.allowance(WINDOW) == SETTINGS.min_window_bytes << 2


def test_a_set_that_was_wrong_is_fetched_only_shortly_after_the_block_that_was_needed_last():
    trust = HotSetTrust(SETTINGS)
    for block in (*range(10), 3):  # listed twice, counts once
        trust.add_block((0, block), 1 << 20)

    here: set[int] = set()

    def near(ahead_bytes: int) -> list[int]:
        return [block for _, block in trust.near(ahead_bytes, lambda key: key[1] not in here)]

    assert near(2 << 20) == []
    for block in (7, 4):  # the latest one counts, not the blocks in between
        trust.note_need((0, block))
        assert near(2 << 20) == [block, block + 1, block + 2]
    assert near((2 << 20) + 1) == [4, 5, 6, 7]
    here |= {4, 5, 7}
    assert near(99 << 20) == near(99 << 20) == [6, 8, 9]
    trust.note_need((0, 5))
    assert near(2 << 20) == [6]
    trust.note_need((0, 2))  # an earlier block
    here.clear()
    assert near(1 << 20) == [2, 3]
    for number in range(SETTINGS.diverged_needs):
        assert near(0) == [2], f"after {number} uncovered needs"
        trust.note_need(UNCOVERED)
    assert near(99 << 20) == []


SOME_SETTINGS = st.just(SETTINGS) | st.builds(
    FetchSettings,
    judged_needs=st.integers(1, 12),
    judged_window=st.integers(12, 20),
    diverged_needs=st.integers(2, 8),
    suspend_score=st.integers(-8, -1),
    trust_score=st.integers(1, 6),
)


@given(st.lists(st.booleans(), max_size=200), SOME_SETTINGS)
def test_only_the_latest_needs_decide(needs, settings):
    latest: list[int] = []
    suspended, suspensions = False, 0
    worth = judged(settings=settings)
    for number, covered in enumerate(needs):
        row = needs[max(0, number + 1 - settings.diverged_needs) : number + 1]
        if len(row) == settings.diverged_needs and not any(row) and sum(latest) > 0:
            latest = []
        latest = [*latest, 1 if covered else -1][-settings.judged_window :]
        score = sum(latest)
        if score >= settings.trust_score:
            suspended = False
        elif score <= settings.suspend_score or (len(latest) >= settings.judged_needs and score < 0):
            suspensions += not suspended
            suspended = True
        worth.note_need(COVERED if covered else UNCOVERED)
        assert (worth.suspended, worth.suspensions) == (suspended, suspensions)
        assert worth.proven == (score >= settings.trust_score)
        doubled = settings.min_window_bytes * 2.0**score
        assert worth.allowance(WINDOW) == (0 if suspended else WINDOW if worth.proven else min(WINDOW, int(doubled)))
    assert (worth.needs, worth.covered) == (len(needs), sum(needs))

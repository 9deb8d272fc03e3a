"""The scheduler's rules, one by one, in virtual time. Invariants for any load are in `test_scheduler_properties`."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from bootseer.errors import AccessError, BootseerError, CorruptError, TransientError
from bootseer.fetch.fetch_settings import WITHOUT_READ_AHEAD, FetchSettings, Purpose
from bootseer.fetch.ledger import Fetch
from bootseer.fetch.scheduler import Scheduler
from fetch.virtual import BLOCK, Answers, Fault, Layout, World, fetched, world

SETTINGS = WITHOUT_READ_AHEAD


def test_a_fresh_hot_set_starts_at_once_with_small_requests_that_grow() -> None:
    w = world()
    w.prefetch((0, block) for block in range(500))
    w.tick()
    sizes = [len(fetch.blocks) * BLOCK for _, fetch in w.launched]
    assert sizes[0] == SETTINGS.request_bytes // 16
    assert sizes[:3] == sorted(sizes[:3])
    full = SETTINGS.min_window_bytes // 4
    assert SETTINGS.min_window_bytes - full < sum(sizes) <= SETTINGS.min_window_bytes
    w.run()
    assert sorted(fetched(w, Purpose.HOT)) == list(range(500))
    # What is left of a window is not used for requests of single blocks.
    assert min(len(fetch.blocks) * BLOCK for _, fetch in w.launched[2:-1]) >= full
    assert max(len(fetch.blocks) * BLOCK for _, fetch in w.launched) <= SETTINGS.request_bytes


def test_hot_blocks_go_in_the_order_of_need() -> None:
    w = world()
    order = [900, 10, 500, 11, 30]
    w.prefetch((0, block) for block in order)
    w.run()
    assert fetched(w, Purpose.HOT) == [900, 10, 11, 500, 30]


def test_a_demanded_block_goes_at_once_though_prefetch_has_all_its_slots() -> None:
    w = world(latency_s=10.0)
    w.prefetch((0, block) for block in range(0, 900, 2))
    w.tick()
    running = len(w.transfers)
    assert running == SETTINGS.first_requests
    w.read(0, [901], Answers())
    w.tick()
    assert len(w.transfers) == running + 1
    assert w.launched[-1][1].purpose is Purpose.DEMAND
    w.read(0, range(911, 1000, 5), Answers())
    w.tick()
    assert len(w.transfers) == running + SETTINGS.reserved_requests


def test_a_queued_prefetch_that_a_reader_wants_is_promoted_and_takes_adjacent_hot_blocks_along() -> None:
    w = world(latency_s=1.0)
    w.prefetch((0, block) for block in [*range(0, 200, 2), 700, 701, 702])
    w.tick()
    w.read(0, [700], Answers())
    w.tick()
    assert w.launched[-1][1].blocks == range(700, 703)
    assert w.launched[-1][1].purpose is Purpose.DEMAND
    w.run()
    assert w.asked[0, 701] == 1


def test_a_running_prefetch_is_not_asked_for_again_when_a_reader_comes() -> None:
    w = world(latency_s=0.1)
    w.prefetch([(0, 5)])
    w.tick()
    answers = Answers()
    w.read(0, [5], answers)
    w.run()
    assert answers == [b""]
    assert w.asked[0, 5] == 1


def test_a_running_prefetch_that_hangs_is_hedged_for_its_reader() -> None:
    w = world(fault=lambda fetch, earlier: None if fetch.hedge else Fault(hang=True))
    w.prefetch([(0, 5)])
    w.tick()
    answers = Answers()
    w.read(0, [5], answers)
    w.run(until=1.0)
    assert answers == [b""]
    assert [fetch.hedge for _, fetch in w.launched] == [False, True]


@pytest.mark.parametrize("num_hot", [0, 20])
def test_a_request_that_hangs_delays_the_readers_of_its_blocks_only_once(num_hot: int) -> None:
    w = World(
        [Layout([BLOCK // 8] * 100)],
        settings=FetchSettings(max_ahead_bytes=4 * BLOCK),
        fault=lambda fetch, earlier: Fault(hang=True, after_blocks=1) if not fetch.number else None,
    )
    w.prefetch((0, block) for block in range(num_hot))
    w.tick()
    ends: list[float] = []
    w.reader(iter([(0.01, 0, [block]) for block in range(20)]), lambda: ends.append(w.now))
    w.run()
    assert len(w.launched[0][1].blocks) > 8
    assert ends[0] < 2 * SETTINGS.hedge_s + 20 * 0.05


def test_a_hedge_that_cannot_start_yet_starts_at_the_end_of_the_pause() -> None:
    w = world(fault=lambda fetch, earlier: None if fetch.number else Fault(hang=True))
    w.prefetch([(0, 5), (0, 6)])
    answers = Answers()
    w.read(0, [5], answers)
    w.run(until=0.5)
    assert answers == [b""]
    w.scheduler.origins["origin"].pace.paused_until = 1.5
    w.read(0, [6], answers)
    w.run(until=2.0)
    assert answers == [b"", b""]


def test_hedges_that_hang_too_are_followed_by_others_while_the_prefetch_hangs() -> None:
    w = world(fault=lambda fetch, earlier: Fault(hang=True) if w.now < 3 else None)
    w.prefetch([(0, 5), (0, 6), (0, 7)])
    w.tick()
    answers = Answers()
    w.read(0, [5, 6, 7], answers)
    w.run(until=SETTINGS.demand_timeout_s + 2 * SETTINGS.hedge_s)
    assert answers == [b""]  # a prefetch has three times this timeout
    assert w.scheduler._hedge_credit < 1  # a failed hedge gives back what it cost, not one for each block


def test_hedges_that_cost_nothing_give_nothing_back_when_they_fail() -> None:
    def fault(fetch: Fetch, earlier: int) -> Fault | None:
        if not fetch.hedge:
            return Fault(hang=True)
        return Fault(error=TransientError("reset")) if 1 < w.now < 3 else None

    w = world(fault=fault)
    w.prefetch([(0, 5), (0, 6)])
    answers = Answers()
    w.read(0, [5], answers)
    w.run(until=1.5)
    assert answers == [b""]
    before = w.scheduler._hedge_credit
    w.read(0, [6], answers)  # the request for both hangs, as is known now
    w.run(until=3.0)
    assert w.scheduler.stats.hedges > 4
    assert w.scheduler._hedge_credit == before
    w.run(until=8.0)
    assert answers == [b"", b""]


def test_the_slower_of_two_requests_for_a_block_is_told_to_stop() -> None:
    w = world(fault=lambda fetch, earlier: None if fetch.hedge else Fault(hang=True))
    w.read(0, [5, 6], Answers())
    w.run(until=1.0)
    assert {(0, 5), (0, 6)} <= w.here
    assert not w.transfers


def test_the_last_reader_that_leaves_turns_a_block_back_into_a_prefetch() -> None:
    w = world(latency_s=1.0)
    w.prefetch((0, block) for block in range(0, 400, 2))
    w.tick()
    w.leave(w.read(0, [398], Answers()))
    w.tick()
    assert not fetched(w, Purpose.DEMAND)
    w.run()
    assert 398 in fetched(w, Purpose.HOT)


def test_a_block_that_only_a_reader_wanted_is_not_fetched_when_the_reader_leaves() -> None:
    w = world()
    w.leave(w.read(0, [3], Answers()))
    w.run()
    assert not w.launched
    assert w.scheduler.idle


def test_cold_blocks_wait_until_hot_ones_are_done_and_readers_are_silent() -> None:
    w = world(100)
    w.prefetch((0, block) for block in range(20))
    w.scheduler.want_cold(0, range(100), w.now)
    w.at(3.0, lambda: (w.read(0, [50], Answers()), None)[1])
    w.run()
    cold = [time for time, fetch in w.launched if fetch.purpose is Purpose.COLD]
    hot = [time for time, fetch in w.launched if fetch.purpose is Purpose.HOT]
    assert hot[0] == 0.0
    assert min(cold) >= 3.0 + SETTINGS.silence_s
    assert w.here == {(0, block) for block in range(100)}
    assert max(w.asked.values()) == 1


def test_the_rest_includes_a_suspended_hot_block_whose_request_fails_later() -> None:
    w = world(20, fault=lambda fetch, earlier: Fault(hang=True) if 19 in fetch.blocks and not earlier else None)
    w.prefetch([(0, 19)])
    w.scheduler.want_cold(0, range(20), w.now)
    w.reader(iter([(0.01, 0, [block]) for block in range(10)]), lambda: None)
    w.run()
    assert w.scheduler.trust.suspended
    assert len(w.here) == 20
    assert w.scheduler.idle


def test_a_pull_at_once_does_not_wait_until_readers_are_idle() -> None:
    w = world(100)
    w.scheduler.want_cold(0, range(100), w.now)
    w.scheduler.fetch_all_now()
    w.run()
    assert len(w.here) == 100
    assert w.launched[0][0] == 0.0


def test_a_hot_set_of_another_workload_is_suspended_early() -> None:
    w = world(2000, latency_s=0.005)
    w.prefetch((0, block) for block in range(1000, 2000))
    w.reader(iter([(0.05, 0, [block]) for block in range(100)]), lambda: None)
    w.run()
    assert w.scheduler.trust.suspended
    needs = [time for time, fetch in w.launched if fetch.purpose is Purpose.DEMAND]
    assert max(time for time, fetch in w.launched if fetch.purpose is Purpose.HOT) <= needs[-SETTINGS.suspend_score]


def test_an_unproven_hot_set_gives_way_while_a_reader_waits_for_a_block_that_is_not_in_it() -> None:
    w = world(2000, latency_s=1.0)
    w.read(0, [5], Answers())
    w.prefetch((0, block) for block in range(1000, 2000))
    w.run(until=0.9)
    assert not fetched(w, Purpose.HOT)
    w.run(until=1.5)
    assert fetched(w, Purpose.HOT)


def test_a_proven_hot_set_gives_way_only_for_a_moment() -> None:
    w = world(2000, latency_s=1.0)
    w.prefetch((0, block) for block in range(1000, 2000))
    w.run(until=0.5)
    for block in range(1000, 1010):
        w.read(0, [block], Answers())
    w.run(until=0.99)
    w.read(0, [5], Answers())
    before = fetched(w, Purpose.HOT)
    # The first blocks arrive at 1.0 and make room for more.
    w.run(until=0.99 + 0.9 * SETTINGS.window_s)
    assert (0, 1009) in w.here
    assert fetched(w, Purpose.HOT) == before
    w.run(until=0.99 + 1.1 * SETTINGS.window_s)
    assert len(fetched(w, Purpose.HOT)) > len(before)
    assert (0, 5) not in w.here


def test_a_hot_set_that_comes_late_is_not_judged_by_what_was_needed_before() -> None:
    w = world(2000)
    w.reader(iter([(0.001, 0, [block]) for block in range(100)]), lambda: w.prefetch([(0, 1000)]))
    w.run()
    assert not w.scheduler.trust.suspended
    assert (0, 1000) in w.here


def test_a_suspended_hot_set_goes_on_when_readers_come_to_it() -> None:
    w = world(2000, latency_s=0.005)
    w.prefetch((0, block) for block in range(1000, 2000))
    steps = [(0.01, 0, [block]) for block in [*range(50), *range(1000, 1050)]]
    w.reader(iter(steps), lambda: None)
    w.run()
    assert w.scheduler.trust.suspensions == 1
    assert not w.scheduler.trust.suspended
    ahead = FetchSettings().min_window_bytes // BLOCK
    assert {(0, block) for block in range(1000, 1049 + ahead)} <= w.here


def test_a_block_that_is_wanted_while_its_origin_is_paused_is_requested_at_the_end_of_the_pause() -> None:
    scheduler = Scheduler(SETTINGS, lambda: 0.0)
    file = scheduler.add(Layout([BLOCK] * 10), "store")
    scheduler.want(file, [0], 0.0)
    (fetch,) = scheduler.tick(0.0).fetches
    scheduler.request_finished(fetch.number, 0.1, TransientError("busy", retry_after_s=0.02))
    scheduler.want(file, [5], 0.11)
    plan = scheduler.tick(0.11)  # block 0 is retried later, with backoff
    assert (plan.fetches, plan.wake_at) == ([], pytest.approx(0.12))


def test_retry_after_holds_for_readers_and_prefetch_of_that_origin_alone() -> None:
    busy = TransientError("too many requests", retry_after_s=7.0)
    layout = Layout([BLOCK] * 100)
    w = World([layout], fault=lambda fetch, earlier: Fault(error=busy) if not w.now else None)
    other = w.scheduler.add(layout, "elsewhere")
    w.layouts = [layout, layout]
    answers = Answers()
    w.read(0, [1], answers)
    w.run(until=0.5)
    w.prefetch([(0, 50), (other, 50)])
    w.read(0, [2], answers)
    w.run()
    times = [(time, fetch.file, fetch.blocks[0]) for time, fetch in w.launched]
    assert times[0] == (0.0, 0, 1)
    assert times[1] == (0.5, other, 50)
    assert min(time for time, file, _ in times[2:] if file == 0) >= 7.0
    assert answers == [b"", b""]


@pytest.mark.slow
def test_failures_halve_the_requests_at_once_and_successes_bring_them_back() -> None:
    w = world(
        4000, latency_s=0.2, fault=lambda fetch, earlier: Fault(error=TransientError("reset")) if w.now < 1 else None
    )
    w.scheduler.want_cold(0, range(4000), w.now)
    w.scheduler.fetch_all_now()
    most: dict[int, int] = {}
    while w.now < 30 and len(w.here) < 4000:
        w.run(until=w.now + 0.05)
        most[int(w.now)] = max(most.get(int(w.now), 0), len(w.transfers))
    assert min(most.values()) <= 2
    assert most[max(most) - 1] > 4
    assert len(w.here) == 4000


def test_successes_add_requests_only_where_all_were_in_use() -> None:
    w = world(settings=replace(SETTINGS, first_requests=2))
    w.reader(iter([(0.0, 0, [block]) for block in range(0, 100, 2)]), lambda: None)
    w.run()
    assert w.scheduler.origins["origin"].pace.limit == 2


def test_a_hot_block_that_keeps_failing_is_left_to_its_readers() -> None:
    w = world(fault=lambda fetch, earlier: Fault(error=TransientError("reset")))
    w.prefetch([(0, 5)])
    w.run()
    assert w.asked[0, 5] == SETTINGS.hot_attempts


def test_a_corrupt_block_is_tried_three_times_and_does_not_hold_up_its_neighbours() -> None:
    w = world(fault=lambda fetch, earlier: Fault(corrupt=frozenset({2})))
    bad, good = Answers(), Answers()
    w.read(0, [1, 2, 3], bad)
    w.read(0, [1, 3], good)
    w.run()
    assert w.asked[0, 2] == 3
    assert w.asked[0, 3] == 1
    assert isinstance(bad[0], CorruptError)
    assert good == [b""]


@pytest.mark.parametrize("error", [AccessError("401")])
def test_a_refusal_fails_readers_at_once_and_stops_prefetch(error: BootseerError) -> None:
    w = world(fault=lambda fetch, earlier: Fault(error=error))
    w.prefetch((0, block) for block in range(500))
    w.scheduler.want_cold(0, range(1000), 0.0)
    answers = Answers()
    w.read(0, [900], answers)
    w.run()
    assert answers == [error]
    assert w.scheduler.idle
    assert len(w.launched) < 30
    assert w.scheduler.stats.dropped
    assert w.scheduler.prefetch_error is error


def test_a_dead_origin_costs_a_reader_its_deadline_and_a_later_read_tries_afresh() -> None:
    w = world(fault=lambda fetch, earlier: Fault(error=TransientError("refused")) if w.now < 40 else None)
    answers = Answers()
    w.read(0, [1], answers)
    w.run(until=35.0)
    assert isinstance(answers[0], TransientError)
    assert 5 < w.asked[0, 1] < 60
    w.run(until=41.0)
    w.read(0, [1], answers)
    w.run()
    assert answers[1] == b""


def test_an_origin_that_is_known_to_be_dead_costs_further_readers_one_attempt() -> None:
    error = TransientError("status 500")
    w = world(fault=lambda fetch, earlier: Fault(error=error) if w.now < 35 or 36 < w.now < 102 else None)
    answers = Answers()
    w.read(0, [1], answers)
    w.run(until=31.0)
    w.prefetch([(0, 2)])
    w.read(0, [2], answers)
    w.run(until=31.5)
    assert answers[1:] == [error]
    assert w.asked[0, 2] == 1
    w.run(until=35.5)
    w.read(0, [3], answers)
    w.run(until=36.0)
    assert answers[2] == b""
    # It has answered since, and no later read has failed: the read waits out two seconds of failures.
    w.run(until=100.0)
    w.read(0, [4], answers)
    w.run()
    assert answers[3] == b""
    assert (0, 2) in w.here  # wanted in advance, too


def test_a_dead_origin_stays_dead_while_another_process_has_claimed_all_blocks_of_a_request() -> None:
    error = TransientError("status 500")
    claimed = Fault(claimed_elsewhere={2: (0.1, False)})
    w = world(fault=lambda fetch, earlier: claimed if 2 in fetch.blocks and not earlier else Fault(error=error))
    answers = Answers()
    w.read(0, [1], answers)
    w.run(until=31.0)
    w.read(0, [2], answers)
    w.run(until=32.0)
    assert answers[1:] == [error]


def test_a_dead_origin_that_names_a_time_beyond_their_deadline_is_not_waited_for() -> None:
    busy = TransientError("status 503", retry_after_s=300.0)
    w = world(fault=lambda fetch, earlier: Fault(error=busy))
    w.read(0, [1], Answers())
    w.run(until=20.0)
    assert w.scheduler.outage(0, w.now + 30, w.now) is None  # no read has waited for the full time yet
    w.run(until=31.0)
    assert w.scheduler.outage(0, w.now + 30, w.now) is busy
    assert w.scheduler.outage(0, w.now + 400, w.now) is None


def test_prefetch_of_a_dead_origin_pauses_longer_each_time_and_goes_on_when_it_is_back() -> None:
    w = world(100, fault=lambda fetch, earlier: Fault(error=TransientError("refused")) if w.now < 200 else None)
    w.scheduler.want_cold(0, range(100), w.now)
    w.run()
    assert len(w.here) == 100
    assert sum(time < 200 for time, _ in w.launched) < 60


def test_a_block_that_another_process_brings_is_not_fetched_here() -> None:
    w = world(fault=lambda fetch, earlier: Fault(claimed_elsewhere={4: (1.0, True)}))
    answers = Answers()
    w.read(0, [3, 4, 5], answers)
    w.run(until=0.15)
    assert not answers
    assert w.here == {(0, 3), (0, 5)}
    assert list(w.scheduler.claims) == [(0, 4)]
    w.settings = replace(w.settings)
    w.run()
    assert answers == [b""]
    assert not w.scheduler.claims


def test_a_block_whose_other_loader_died_is_fetched_here() -> None:
    w = world(fault=lambda fetch, earlier: None if earlier else Fault(claimed_elsewhere={4: (0.1, False)}))
    answers = Answers()
    w.read(0, [4], answers)
    w.run()
    assert answers == [b""]
    assert w.asked[0, 4] == 2
    assert not w.scheduler.claims


def test_another_process_that_hangs_delays_the_readers_of_its_blocks_only_once() -> None:
    def fault(fetch: Fetch, earlier: int) -> Fault | None:
        return Fault(claimed_elsewhere=dict.fromkeys(range(5, 20), (30 - w.now, False)))

    w = world(fault=fault)
    ends: list[float] = []
    w.reader(iter([(0.01, 0, [block]) for block in range(25)]), lambda: ends.append(w.now))
    w.run(until=30.0)
    assert ends[0] < 2 * SETTINGS.hedge_s + 25 * 0.05


def test_one_slow_block_does_not_hold_up_others() -> None:
    def fault(fetch: Fetch, earlier: int) -> Fault | None:
        return Fault(hang=True) if 7 in fetch.blocks else None

    w = world(fault=fault)
    slow, fast = Answers(), Answers()
    w.read(0, [7], slow)
    w.tick()
    for block in range(100, 200):
        w.read(0, [block], fast)
    w.run(until=1.0)
    assert fast == [b""] * 100
    assert not slow


def test_blocks_of_zeros_need_no_bytes_and_join_their_neighbours() -> None:
    w = World([Layout([BLOCK, 0, 0, BLOCK, 0])])
    answers = Answers()
    w.read(0, [0, 1, 2, 3, 4], answers)
    w.run()
    assert answers == [b""]
    assert len(w.launched) == 1
    assert w.bytes == pytest.approx(2 * BLOCK)


def test_what_is_planned_after_prefetching_was_stopped_is_not_requested() -> None:
    """Long plans are queued in parts, and a full disk or a refusal may stop the prefetch in between."""
    w = world()
    w.prefetch((0, block) for block in range(100))
    w.tick()
    before = fetched(w, Purpose.HOT)
    w.scheduler.stop_prefetch(0)
    w.prefetch((0, block) for block in range(100, 200))
    w.run()
    assert fetched(w, Purpose.HOT) == before
    assert not w.scheduler.wanted

from __future__ import annotations

import pytest

from bootseer.errors import PermanentError, TransientError
from bootseer.fetch.fetch_settings import FetchSettings
from bootseer.fetch.pace import Pace

SETTINGS = FetchSettings()
MIB = 1 << 20


@pytest.fixture
def pace():
    return Pace(SETTINGS)


def test_successes_with_all_slots_used_add_one_request_per_round(pace):
    for _ in range(SETTINGS.first_requests):
        pace.succeeded(pace.limit)
    assert pace.limit == SETTINGS.first_requests
    pace.succeeded(pace.limit)
    assert pace.limit == SETTINGS.first_requests + 1
    for _ in range(10_000):
        pace.succeeded(pace.limit)
    assert pace.limit == SETTINGS.max_requests


def test_successes_with_free_slots_prove_nothing(pace):
    for _ in range(1000):
        pace.succeeded(2)
    assert pace.limit == SETTINGS.first_requests


def test_a_failure_halves_the_requests_and_those_that_ran_then_do_not_halve_them_again(pace):
    reset = TransientError("reset")
    for started in (9.0, 9.5, 9.9):
        pace.failed(reset, started, 10.0, 0.5)
    assert pace.limit == SETTINGS.first_requests // 2
    for now in range(11, 40):
        pace.failed(reset, now, now + 0.5, 0.5)
    assert pace.limit == 1


def test_prefetch_pauses_longer_with_each_failure_and_goes_on_after_a_success(pace):
    pauses = []
    for now in range(0, 3000, 100):
        pace.failed(TransientError("refused"), now, now, 1.0)
        pauses.append(pace.prefetch_after - now)
    assert pauses == sorted(pauses)
    assert pauses[-1] == SETTINGS.max_pause_s
    pace.succeeded(1)
    assert pace.prefetch_after < 0


def test_retry_after_is_never_shortened_by_chance_or_by_a_later_answer_and_is_bounded(pace):
    pace.failed(TransientError("busy", retry_after_s=20.0), 0.0, 1.0, 1.0)
    assert 21.0 <= pace.paused_until <= 23.0
    paused_until = pace.paused_until
    pace.failed(TransientError("busy", retry_after_s=2.0), 0.0, 1.5, 0.9)
    assert pace.paused_until == paused_until
    pace.failed(PermanentError("no"), 0.0, 1.5, 0.9)
    assert pace.paused_until == paused_until
    pace.failed(TransientError("busy", retry_after_s=1e9), 0.0, 2.0, 1.0)
    assert pace.paused_until <= 2.0 + 1.1 * SETTINGS.max_retry_after_s


def test_prefetch_has_a_quarter_of_a_second_of_the_throughput_in_flight(pace):
    assert pace.window_bytes() == SETTINGS.min_window_bytes
    pace.request_started(0, 0.0)
    pace.arrived(40 * MIB, 0.5)
    assert pace.window_bytes() == 20 * MIB


def test_idle_time_does_not_lower_the_estimated_throughput(pace):
    pace.request_started(0, 0.0)
    pace.arrived(40 * MIB, 0.5)
    pace.request_started(0, 100.0)
    pace.arrived(20 * MIB, 100.25)
    assert pace.window_bytes() == 20 * MIB


def test_latency_needs_a_larger_window_but_a_full_link_does_not_widen_it(pace):
    pace.request_started(0, 0.0)
    pace.arrived(40 * MIB, 0.5)
    pace.first_block(0.2)
    assert pace.window_bytes() == int(80 * MIB * 0.4)
    for _ in range(100):
        pace.first_block(5.0)
    assert pace.window_bytes() == int(80 * MIB * 0.4)


def test_a_second_request_waits_for_three_times_what_most_requests_took(pace):
    assert pace.hedge_after_s() == SETTINGS.hedge_s
    for latency_s in [0.1] * 19 + [9.0]:
        pace.first_block(latency_s)
    assert pace.hedge_after_s() == pytest.approx(0.3)


def test_after_a_slow_moment_what_is_read_ahead_is_tried_again(pace):
    assert pace.ahead_bytes() == SETTINGS.first_ahead_bytes
    pace.next_block(100_000, 0.001)
    assert 300_000 < pace.ahead_bytes() < 500_000
    pace.next_block(100_000, 1.0)
    assert pace.ahead_bytes() < 1000
    for number in range(100):  # requests for one block each
        pace.first_block(0.003)
        assert number > 20 or pace.ahead_bytes() < 1000
    assert pace.ahead_bytes() == SETTINGS.first_ahead_bytes
    pace.next_block(100_000, 0.001)
    assert pace.ahead_bytes() > 50_000

from __future__ import annotations

import threading

import pytest

from bootseer.fetch import record as record_module
from bootseer.fetch.hotset import Availability, HotSet, Need, Record, encode_hot_set, parse_hot_set
from bootseer.fetch.record import Recorder

FILE, OTHER = "ab" * 32, "cd" * 32


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def finished() -> list[Record]:
    return []


def test_needs_come_back_with_their_times_until_training_began(finished):
    clock = Clock()
    recorder = Recorder(finished.append, clock)
    recorder.need(FILE, 5, Availability.MISSING)
    clock.now += 1.5
    recorder.need(OTHER, 5, Availability.READY)
    recorder.need(FILE, 6, Availability.IN_FLIGHT)
    clock.now += 2
    recorder.end()
    clock.now += 3
    recorder.need(FILE, 7, Availability.MISSING)
    recorder.close()
    (record,) = finished
    assert record.started_s > 1_700_000_000
    assert record.duration_ms == 3500
    assert record.needs == (
        Need(FILE, 5, 0, Availability.MISSING),
        Need(OTHER, 5, 1500, Availability.READY),
        Need(FILE, 6, 1500, Availability.IN_FLIGHT),
    )


def test_the_same_block_counts_once(finished):
    recorder = Recorder(finished.append)
    recorder.need(FILE, 1, Availability.MISSING)
    recorder.need(FILE, 1, Availability.READY)
    recorder.close()
    assert [need.found for need in finished[0].needs] == [Availability.MISSING]


def test_a_record_is_bounded(finished, monkeypatch):
    monkeypatch.setattr(record_module, "MAX_NEEDS", 10)
    recorder = Recorder(finished.append)
    for block in range(100):
        recorder.need(FILE, block, Availability.MISSING)
    recorder.close()
    assert [need.block for need in finished[0].needs] == list(range(10))


def test_what_many_threads_record_is_a_run_of_a_hot_set(finished):
    recorder = Recorder(finished.append)
    threads = [
        threading.Thread(
            target=lambda base=base: [recorder.need(FILE, base + at, Availability.MISSING) for at in range(500)]
        )
        for base in range(0, 4000, 500)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert sorted(need.block for need in finished[0].needs) == list(range(4000))
    hot_set = HotSet("image", "workload", (finished[0],))
    assert parse_hot_set(encode_hot_set(hot_set)) == hot_set

from __future__ import annotations

import threading

import pytest

from bootseer.fetch.hotset import HotSet, Record, encode_hot_set, parse_hot_set
from bootseer.mounts import block_files
from bootseer.mounts.block_files import Recorder

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
    recorder.need(FILE, 5)
    clock.now += 1.5
    recorder.need(OTHER, 5)
    recorder.need(FILE, 6)
    clock.now += 2
    recorder.end()
    clock.now += 3
    recorder.need(FILE, 7)
    recorder.close()
    (record,) = finished
    assert record.started_s > 1_700_000_000
    assert record.duration_ms == 3500
    assert list(record.needs.items()) == [((FILE, 5), 0), ((OTHER, 5), 1500), ((FILE, 6), 1500)]


def test_the_same_block_counts_once(finished):
    """An image may have a layer twice."""
    clock = Clock()
    recorder = Recorder(finished.append, clock)
    recorder.need(FILE, 1)
    clock.now += 1
    recorder.need(FILE, 1)
    recorder.close()
    assert finished[0].needs == {(FILE, 1): 0}


def test_a_record_is_bounded(finished, monkeypatch):
    monkeypatch.setattr(block_files, "MAX_NEEDS", 10)
    recorder = Recorder(finished.append)
    for block in range(100):
        recorder.need(FILE, block)
    recorder.close()
    assert [block for _, block in finished[0].needs] == list(range(10))


def test_what_many_threads_record_is_a_run_of_a_hot_set(finished):
    recorder = Recorder(finished.append)
    threads = [
        threading.Thread(target=lambda base=base: [recorder.need(FILE, base + at) for at in range(500)])
        for base in range(0, 4000, 500)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert sorted(block for _, block in finished[0].needs) == list(range(4000))
    hot_set = HotSet("image", "workload", (finished[0],))
    assert parse_hot_set(encode_hot_set(hot_set)) == hot_set

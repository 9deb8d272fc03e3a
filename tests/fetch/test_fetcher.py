"""Reads and prefetches of a real file through a real cache, from an intact origin."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from bootseer.errors import PermanentError, TransientError
from bootseer.fetch.fetch_settings import FetchSettings, Purpose
from bootseer.fetch.fetcher import Fetcher
from fetch.files import BLOCK
from store_doubles import Fault, FaultyStore
from waiting import until


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (0, 1),
        (0, BLOCK),
        (BLOCK - 1, 2),
        (3 * BLOCK + 5, 7 * BLOCK),
        (99 * BLOCK, 10_000),
        (99 * BLOCK + 100, 1),
        (10**9, 5),
    ],
)
def test_a_read_gives_the_bytes_of_the_file_first_from_the_origin_then_from_the_cache(fetching, data, offset, length):
    fetcher, store, _ = fetching()
    assert fetcher.read_blocking(0, offset, length) == data[offset : offset + length]
    asked = dict(store.requests)
    assert fetcher.read_blocking(0, offset, length) == data[offset : offset + length]
    assert dict(store.requests) == asked


def test_a_ready_block_is_answered_before_read_returns(fetching, data):
    fetcher, _, _ = fetching()
    fetcher.read_blocking(0, 0, BLOCK)
    answers = []
    assert fetcher.read(0, 10, 20, answers.append) is None
    assert answers == [data[10:30]]


def test_many_readers_at_once_get_their_bytes_and_each_block_is_fetched_once(fetching, data, index):
    # On a busy machine a block may take so long that it would be hedged.
    fetcher, store, _ = fetching(lambda request: Fault(delay_s=0.002), settings=FetchSettings(max_hedges=0))
    wrong = []

    def reader(seed):
        for number in range(60):
            offset = (number * 7919 + seed * 104729) % len(data)
            if fetcher.read_blocking(0, offset, 9000) != data[offset : offset + 9000]:
                wrong.append(offset)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(store.bytes_read.values()) <= sum(stripe.size_bytes for stripe in index.stripes)


def test_a_full_pull_completes_the_file_and_tells_its_progress(fetching, data):
    fetcher, _, cached = fetching()
    seen = []
    fetcher.pull_all(lambda done, total: seen.append((done, total)))
    assert cached.path.read_bytes() == data
    assert cached.trusted
    assert seen[-1] == (100, 100)
    assert fetcher.stats().bytes_by_purpose[Purpose.DEMAND] == 0


def test_the_rest_is_streamed_when_readers_are_silent_until_the_file_is_complete(fetching, data):
    fetcher, _, cached = fetching(settings=FetchSettings(silence_s=0.05))
    fetcher.read_blocking(0, 0, 10)
    fetcher.stream_rest()
    until(lambda: cached.complete)
    assert cached.path.read_bytes() == data


def test_after_prefetch_was_stopped_only_what_is_read_is_fetched(fetching, data):
    gate = threading.Event()
    fetcher, store, cached = fetching(lambda request: Fault(gate=gate), FetchSettings(silence_s=0.05))
    fetcher.stream_rest()
    fetcher.prefetch((0, block) for block in range(100))
    until(lambda: store.requests)
    fetcher.stop_prefetch()
    gate.set()
    until(lambda: fetcher._scheduler.idle)
    assert not cached.ready(98)
    assert fetcher.read_blocking(0, 98 * BLOCK, 10) == data[98 * BLOCK : 98 * BLOCK + 10]
    until(lambda: fetcher._scheduler.idle)
    assert not cached.ready(99)


def test_claims_of_others_are_looked_at_soon_and_many_less_often_than_few(fetching):
    fetcher, *_ = fetching()
    claims = fetcher._scheduler.claims
    with fetcher._lock:
        claims[0, 1] = 10.0
        assert fetcher._claims_to_check(10.0) == [(0, 1)]
        few_s = fetcher._next_check_s - 10.0
        assert few_s <= 0.01
        assert fetcher._claims_to_check(10.0 + few_s / 2) == []
        claims.update({(0, block): 10.0 for block in range(10_000)})
        assert len(fetcher._claims_to_check(11.0)) == 10_000
        assert few_s < fetcher._next_check_s - 11.0 <= 0.1
        claims.clear()
        assert fetcher._claims_to_check(12.0) == []


def test_requests_whose_blocks_other_processes_fetch_are_not_counted(fetching, data, cache, index):
    fetcher, store, _ = fetching(settings=FetchSettings(max_hedges=0))
    with closing(cache.open(index)) as other:
        assert other.claim(4)
        fetcher.prefetch([(0, 4)])
        until(lambda: fetcher._scheduler.claims)
        other.put(4, data[4 * BLOCK : 5 * BLOCK])
        until(lambda: fetcher._scheduler.idle)
    assert sum(fetcher.stats().requests_by_purpose.values()) == store.requests.total() == 0


def test_hot_blocks_are_fetched_before_anybody_reads_and_others_are_not(fetching):
    fetcher, _, cached = fetching()
    hot = [50, 51, 7, 8, 10]
    before = cached.num_ready  # blocks of zeros are ready from the beginning
    fetcher.prefetch([*((0, block) for block in hot), (0, 10**6), (3, 0), (0, -1)])
    until(lambda: all(cached.ready(block) for block in hot))
    assert cached.num_ready == before + len(hot)
    assert fetcher.stats().hot_blocks == len(hot)


def test_needs_are_reported_once_per_block_and_those_in_flight_are_late(fetching):
    gate = threading.Event()
    needs = []
    fetcher, store, cached = fetching(lambda request: Fault(gate=gate), on_need=lambda *need: needs.append(need))
    fetcher.prefetch([(0, 4)])
    until(lambda: store.requests)
    answers = []
    fetcher.read(0, 4 * BLOCK, BLOCK, answers.append)
    fetcher.read(0, 8 * BLOCK, BLOCK, answers.append)
    fetcher.read(0, 8 * BLOCK, BLOCK, answers.append)
    gate.set()
    until(lambda: len(answers) == 3)
    fetcher.prefetch([(0, 12)])
    until(lambda: cached.ready(12))
    fetcher.read_blocking(0, 12 * BLOCK, 1)
    gate.clear()
    fetcher.read(0, 22 * BLOCK, BLOCK, answers.append)
    fetcher.read(0, 23 * BLOCK, BLOCK, answers.append)  # it was read ahead
    gate.set()
    until(lambda: len(answers) == 5)
    assert needs == [(0, 4), (0, 8), (0, 12), (0, 22), (0, 23)]
    stats = fetcher.stats()
    assert (stats.needs, stats.late) == (5, 1)
    assert (stats.covered, stats.wasted_blocks) == (2, 0)


def test_a_cancelled_read_is_not_answered(fetching):
    gate = threading.Event()
    fetcher, _, _ = fetching(lambda request: Fault(gate=gate))
    answers, others = [], []
    cancel = fetcher.read(0, 0, 10, answers.append)
    fetcher.read(0, 0, 10, others.append)
    cancel()
    cancel()
    gate.set()
    until(lambda: others)
    assert not answers


def test_the_first_block_of_a_long_answer_does_not_wait_for_the_last(fetching, data):
    # The response comes in pieces of one block, and stops after the first.
    stop = threading.Event()

    def sleep(seconds):
        if seconds > 1:
            stop.wait(120)

    fetcher, store, cached = fetching(lambda request: Fault(piece_bytes=BLOCK, bytes_per_s=1))
    slept = iter([0.0])
    store._sleep = lambda seconds: sleep(next(slept, 2.0))
    answers = []
    fetcher.read(0, 4 * BLOCK, 4 * BLOCK, lambda answer: None)
    fetcher.read(0, 4 * BLOCK, BLOCK, answers.append)
    until(lambda: answers)
    assert answers == [data[4 * BLOCK : 5 * BLOCK]]
    assert not cached.ready(7)
    stop.set()


def test_closing_answers_all_waiting_readers_and_ends_the_threads(fetching):
    gate = threading.Event()
    fetcher, store, _ = fetching(lambda request: Fault(gate=gate))
    answers = []
    for block in range(20):
        fetcher.read(0, block * 4 * BLOCK, 1, answers.append)
    until(lambda: store.requests)
    closing = threading.Thread(target=fetcher.close)
    closing.start()
    until(lambda: len(answers) == 20)
    gate.set()
    closing.join(120)
    assert not closing.is_alive()
    fetcher.read(0, 98 * BLOCK, 1, answers.append)
    assert all(isinstance(answer, PermanentError) for answer in answers)
    assert len(answers) == 21
    fetcher.close()


def test_a_reader_that_raises_takes_nothing_from_the_others(fetching, data, monkeypatch):
    reported = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_value))
    gate = threading.Event()
    fetcher, _, _ = fetching(lambda request: Fault(gate=gate))
    answers = []

    def broken(answer):
        raise RuntimeError("a reader's mistake")

    fetcher.read(0, 0, 10, broken)
    fetcher.read(0, 0, 10, answers.append)
    gate.set()
    until(lambda: answers)
    assert answers == [data[:10]]
    assert len(reported) == 1


def test_a_block_that_was_damaged_on_the_disk_is_fetched_again(fetching, data, cache, index):
    fetcher, _, cached = fetching()
    fetcher.pull_all()
    with cached.path.open("r+b") as file:
        file.seek(5 * BLOCK + 3)
        file.write(b"x" * 100)
    other = cache.open(index)
    again = Fetcher()
    again.add(index, fetcher._files[0].store.store, other)
    assert again.read_blocking(0, 4 * BLOCK, 3 * BLOCK) == data[4 * BLOCK : 7 * BLOCK]
    again.close()
    other.close()


class Neighbour:
    """Another node with the uncompressed bytes of some blocks, one of them damaged."""

    uri, sends_plain, run_blocks, turn = "peer://neighbour", True, 4, 0.5
    steps, may_ask_store, may_read_ahead = ("neighbour",), True, False

    def __init__(self, data, has, damaged):
        self.data, self.has, self.damaged = data, has, damaged
        self.lies = []
        self.compared_with = 0

    def route(self, block, now):
        return self

    def at(self, step):
        return self

    def store_sent(self, num_bytes, seconds):
        assert seconds > 0
        self.compared_with += num_bytes

    def sent_wrong(self, step, error):
        self.lies.append((step, str(error)))

    def read(self, index, blocks, timeout_s):
        for block in blocks:
            if block not in self.has:
                raise TransientError(f"block {block} is not here")
            plain = self.data[block * BLOCK : (block + 1) * BLOCK]
            yield block, bytes(len(plain)) if block == self.damaged else plain


def test_plain_blocks_of_another_node_are_verified_and_the_store_gives_the_rest(cache, origin, index, data):
    store, near = FaultyStore(origin), Neighbour(data, range(60), damaged=6)
    cached = cache.open(index)
    with closing(Fetcher()) as fetcher:
        fetcher.add(index, store, cached, peers=near)
        assert fetcher.read_blocking(0, 4 * BLOCK, 2 * BLOCK) == data[4 * BLOCK : 6 * BLOCK]
        assert not store.requests
        assert fetcher.read_blocking(0, 6 * BLOCK, BLOCK) == data[6 * BLOCK : 7 * BLOCK]
        assert len(store.requests) == 1
        fetcher.pull_all()
        stats = fetcher.stats()
    assert stats.corrupt_blocks == 1
    assert [step for step, _ in near.lies] == ["neighbour"]
    assert near.compared_with >= BLOCK
    assert BLOCK * 40 < stats.peer_bytes < sum(stats.bytes_by_purpose.values())
    assert cached.path.read_bytes() == data
    cached.close()

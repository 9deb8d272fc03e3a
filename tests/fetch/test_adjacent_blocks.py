"""Additional blocks of a request: adjacent ones, gaps between hot blocks, and those that readers will need next."""

from __future__ import annotations

from bootseer.errors import TransientError
from bootseer.fetch.fetch_settings import FetchSettings, Purpose
from fetch.virtual import Answers, Fault, Layout, World, fetched, world


def test_a_request_for_a_hot_block_takes_the_adjacent_ones_before_it_along() -> None:
    w = world(latency_s=1.0)
    w.prefetch((0, block) for block in [51, 50])
    w.tick()
    assert [fetch.blocks for _, fetch in w.launched] == [range(50, 52)]


def test_a_readers_block_does_not_wait_for_hot_blocks_before_it() -> None:
    w = world(bytes_per_s=6e6, settings=FetchSettings())
    w.prefetch((0, block) for block in [*range(100, 200), *range(43, 51)])
    w.read(0, [50], Answers())
    w.tick()
    (request,) = (fetch for _, fetch in w.launched if fetch.purpose is Purpose.DEMAND)
    assert request.blocks[0] == 50


def test_hot_requests_span_small_gaps_on_links_known_to_be_fast() -> None:
    def gaps(bytes_per_s: float) -> list[int]:
        w = world(bytes_per_s=bytes_per_s)
        w.scheduler.origins["origin"].pace.rate = bytes_per_s
        w.prefetch((0, block) for block in range(0, 900, 3))
        w.run()
        assert w.scheduler.hot_left == 0
        assert not w.scheduler.wanted
        return [block for block in fetched(w, Purpose.HOT) if block % 3]

    assert len(gaps(150e6)) > 100  # 256 KiB are two blocks
    assert gaps(25e6) == []  # 2 ms at this rate are less than a block


def test_blocks_in_a_gap_are_not_fetched_twice() -> None:
    w = World([Layout([16 << 10] * 100)])
    w.scheduler.origins["origin"].pace.rate = 100e6
    w.read(0, [11], Answers())
    w.tick()
    w.prefetch((0, block) for block in [10, 12, 14])
    w.run()
    assert w.asked[0, 11] == 1
    assert w.asked[0, 13] == 1
    assert {(0, block) for block in range(10, 15)} <= w.here


def test_readers_read_ahead_only_on_fast_links() -> None:
    def requests(bytes_per_s: float) -> int:
        w = world(300, bytes_per_s=bytes_per_s, latency_s=0.003, settings=FetchSettings())
        for block in range(0, 300, 2):
            w.read(0, [block], Answers())
            w.run()
        assert all(count == 1 for count in w.asked.values())
        return len(w.launched)

    assert requests(200e6) < 80  # 512 KiB are four blocks
    assert requests(6e6) == 150


def test_little_is_read_ahead_of_blocks_that_compress_to_nothing() -> None:
    w = World([Layout([26] * 3000)], settings=FetchSettings())
    w.read(0, [5], Answers())
    w.run()
    assert [len(fetch.blocks) for _, fetch in w.launched] == [33]
    w.scheduler.origins["origin"].pace.rate = 1e9
    w.prefetch([(0, 1000), (0, 2000)])
    w.run()
    assert not {(0, 1500), (0, 1999)} & w.here


def test_blocks_read_ahead_are_dropped_when_their_request_fails() -> None:
    lost = Fault(TransientError("cut off"), after_blocks=1)
    w = world(settings=FetchSettings(), fault=lambda fetch, earlier: lost if not earlier else None)
    answers = Answers()
    w.read(0, [10], answers)
    w.run()
    assert answers == [b""]
    assert [fetch.blocks for _, fetch in w.launched] == [range(10, 12)]
    assert not w.scheduler.wanted


def test_blocks_read_ahead_that_another_process_fetches_are_left_to_it() -> None:
    elsewhere = Fault(claimed_elsewhere={11: (60.0, True)})
    w = world(settings=FetchSettings(), fault=lambda fetch, earlier: elsewhere if not fetch.number else None)
    w.read(0, [10], Answers())
    w.run(until=10.0)
    assert w.launched[0][1].blocks == range(10, 12)
    assert w.scheduler.idle
    assert not w.scheduler.claims

"""Hot lists of checkpoints: the ranges that were read are prefetched for the next checkpoint, and nothing else."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.checkpoint.hot_list import (
    MAX_BYTES,
    MAX_RANGES,
    SCHEMA,
    PrefetchWindow,
    Range,
    Recorder,
    common,
    decode,
    encode,
    plan,
)
from bootseer.errors import CorruptError

MIB = 1 << 20


def test_reads_are_recorded_once_in_order() -> None:
    recorder = Recorder()
    for path, offset, length in (("b", 5 * MIB, 10), ("a", 0, 2 * MIB), ("a", 2 * MIB, 1), ("b", 5 * MIB, MIB)):
        recorder.read(path, offset, length)
    assert recorder.ranges() == [Range("b", 5 * MIB, MIB), Range("a", 0, 3 * MIB)]


def test_names_within_a_checkpoint_are_mapped_to_the_next_one() -> None:
    ranges = [Range("latest", 0, MIB), Range("step-8/.metadata", 0, MIB), Range("step-8/a/b", MIB, MIB)]
    data = encode(ranges, "step-8")
    assert decode(data, "step-9") == [
        Range("latest", 0, MIB),
        Range("step-9/.metadata", 0, MIB),
        Range("step-9/a/b", MIB, MIB),
    ]
    assert decode(encode([Range("x", 0, 1)], ""), "") == [Range("x", 0, 1)]


@given(st.lists(st.tuples(st.sampled_from(["a", "s/b", "s/c"]), st.integers(0, 9), st.integers(1, 4)), max_size=30))
def test_everything_that_was_read_is_in_the_list(reads: list[tuple[str, int, int]]) -> None:
    recorder = Recorder(2)
    for path, offset, length in reads:
        recorder.read(path, offset, length)
    again = decode(encode(recorder.ranges(), "s"), "s")
    named = {(one.path, byte) for one in again for byte in range(one.offset, one.offset + one.length)}
    assert {(path, byte) for path, offset, length in reads for byte in range(offset, offset + length)} <= named


@pytest.mark.parametrize(
    "ranges",
    [
        [["../x", True, 0, 1]],
        [["/x", True, 0, 1]],
        [["a//b", False, 0, 1]],
        [["", False, 0, 1]],
        [["x", 1, 0, 1]],
        [["x", True, -1, 1]],
        [["x", True, 0, 1 << 62]],
        [["x", True, 0]],
        [["x", True, True, 1]],
        7,
    ],
)
def test_forged_lists_are_refused(ranges: object) -> None:
    with pytest.raises(CorruptError, match="malformed hot list"):
        decode(json.dumps({"schema": SCHEMA, "ranges": ranges}).encode(), "s")


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b'{"schema": "other"}', b"[" * 100_000, b" " * (MAX_BYTES + 1)])
def test_invalid_lists_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match="malformed hot list"):
        decode(data, "s")


FILES = [("s/.metadata", 900), ("s/big-0", 10 * MIB), ("s/big-1", 10 * MIB), ("s/config.json", 100)]
SMALL = [Range("s/.metadata", 0, 900), Range("s/config.json", 0, 100)]


def test_small_files_are_first_and_then_the_hot_ranges() -> None:
    hot = [Range("s/big-1", 4 * MIB, 99 * MIB), Range("s/.metadata", 0, MIB), Range("s/gone", 0, MIB)]
    assert plan(FILES, hot, alone=True, budget_bytes=1 << 40) == [*SMALL, Range("s/big-1", 4 * MIB, 6 * MIB)]


def test_without_a_list_a_single_node_needs_everything_and_one_of_several_only_small_files() -> None:
    everything = [*SMALL, Range("s/big-0", 0, 10 * MIB), Range("s/big-1", 0, 10 * MIB)]
    assert plan(FILES, [], alone=True, budget_bytes=1 << 40) == everything
    assert plan(FILES, [], alone=False, budget_bytes=1 << 40) == SMALL
    # A list without any existing file is ignored.
    assert plan(FILES, [Range("s/other", 0, 5)], alone=True, budget_bytes=1 << 40) == everything


def test_no_more_is_fetched_than_the_budget() -> None:
    assert plan(FILES, [], alone=True, budget_bytes=1000 + MIB) == [*SMALL, Range("s/big-0", 0, MIB)]
    assert plan(FILES, [], alone=True, budget_bytes=0) == []


_LISTS = st.lists(st.builds(Range, st.sampled_from(["a", "b"]), st.integers(0, 12), st.integers(0, 5)), max_size=12)


def _bytes_of(ranges: list[Range]) -> set[tuple[str, int]]:
    return {(one.path, byte) for one in ranges for byte in range(one.offset, one.offset + one.length)}


@given(_LISTS, _LISTS)
def test_common_is_the_intersection_of_both_lists(first: list[Range], second: list[Range]) -> None:
    assert _bytes_of(common(first, second)) == _bytes_of(first) & _bytes_of(second)


def test_common_keeps_the_order_of_the_first_list() -> None:
    first = [Range("b", 4, 4), Range("a", 0, 2), Range("b", 0, 4)]
    assert common(first, [Range("a", 0, 1), Range("b", 2, 4)]) == [Range("b", 4, 2), Range("a", 0, 1), Range("b", 2, 2)]


def test_forged_lists_have_no_more_in_common_than_a_list_may_hold() -> None:
    first = [Range("a", 0, 1 << 61)] * MAX_RANGES
    second = [Range("a", 2 * number, 1) for number in range(MAX_RANGES)]
    assert len(common(first, second)) == MAX_RANGES


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4 * MIB)), max_size=5),
    st.floats(0, 1, exclude_max=True),
)
def test_nodes_begin_at_different_positions_and_each_fetches_everything(
    sizes: list[tuple[int, int]], position: float
) -> None:
    files = [(f"s/{number}", size) for number, (_, size) in enumerate(sizes)]
    first = plan(files, [], alone=True, budget_bytes=1 << 40)
    rotated = plan(files, [], alone=True, budget_bytes=1 << 40, position=position)
    assert sum(one.length for one in rotated) == sum(one.length for one in first)
    spans = sorted(rotated)
    assert all(one.path != other.path or one.offset + one.length == other.offset for one, other in pairwise(spans))


def test_the_second_of_two_nodes_begins_in_the_middle() -> None:
    assert plan(FILES, [], alone=True, budget_bytes=1 << 40, position=0.25) == [
        *SMALL,
        Range("s/big-0", 5 * MIB, 5 * MIB),
        Range("s/big-1", 0, 10 * MIB),
        Range("s/big-0", 0, 5 * MIB),
    ]


class Window(PrefetchWindow):
    """Requests that each begin when the one before has ended."""

    now_s = 0.0

    def end(self, num_bytes: int, seconds: float) -> None:
        self.note_end(num_bytes, self.now_s, self.now_s + seconds)
        self.now_s += seconds


def test_many_pieces_are_in_flight_on_a_fast_link_and_one_on_a_busy_link() -> None:
    window = Window()
    assert window.size == 1
    for _ in range(100):
        window.end(MIB, 0.004)
    assert window.size > 16
    assert window.step > 1, "fewer requests to peers"
    for _ in range(10):
        window.end(MIB, 0.2)
    assert (window.size, window.step) == (1, 1)
    window.end(MIB, 0.00001)
    assert window.size == 1, "a read from the cache does not measure the link"
    window.end(0, 0.01)
    assert window.size == 1, "nor does a read that was not requested, for lack of space"
    window.end(MIB, 0.05)
    assert window.size == 2


def test_one_moment_in_which_nothing_arrives_halves_the_window_once() -> None:
    window = Window()
    for _ in range(40):
        window.end(MIB, 0.01)
    before = window.size
    for number in range(before):
        window.note_end(MIB, window.now_s, window.now_s + 0.3 + number / 1000)
    assert window.size == before // 2
    assert window.pause_s == 0
    window.note_end(MIB, window.now_s + 0.4, window.now_s + 0.6)
    assert window.size == before // 4


def test_a_slow_link_is_used_without_pauses_until_others_use_it() -> None:
    window = Window()
    for _ in range(3):
        window.end(MIB, 0.25)
        assert (window.size, window.pause_s) == (1, 0.0)
    window.end(MIB, 1.0)
    assert window.pause_s == 0.75
    window.end(MIB, 60.0)
    assert window.pause_s < 5
    window.end(MIB, 0.05)
    assert window.pause_s == 0


def test_with_a_high_latency_many_pieces_are_in_flight() -> None:
    window = Window()
    window.end(MIB, 0.13)
    assert window.size == 1
    window.end(2000, 0.11)
    for _ in range(40):
        window.end(MIB, 0.13)
    assert window.size > 16
    for _ in range(10):
        window.end(MIB, 0.3)
    assert window.size == 1


def test_one_slow_short_read_does_not_count_as_latency_of_a_slow_link() -> None:
    window = Window()
    window.end(2000, 3.0)
    window.end(MIB, 0.17)
    assert window.size == 2
    window.end(MIB, 0.34)
    assert window.size == 1

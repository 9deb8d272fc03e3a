"""Joining and spreading reads."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bootseer.checkpoint.ranges import Range, join, spread

ranges = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 900)), max_size=60).map(
    lambda pairs: [Range(start, start + length, number) for number, (start, length) in enumerate(pairs)]
)


@given(ranges, st.integers(0, 500), st.integers(1, 2000))
def test_every_range_is_in_one_span_and_no_span_is_larger_than_it_may_be(
    given_ranges: list[Range[int]], gap_bytes: int, max_bytes: int
) -> None:
    spans = join(given_ranges, max_bytes=max_bytes, gap_bytes=gap_bytes)
    assert sorted(one.item for span in spans for one in span.ranges) == sorted(one.item for one in given_ranges)
    for span in spans:
        assert (span.start, span.end) == (span.ranges[0].start, span.ranges[-1].end)
        assert span.end - span.start <= max_bytes or len(span.ranges) == 1
        for one, following in itertools.pairwise(span.ranges):
            assert 0 <= following.start - one.end <= gap_bytes


def test_adjacent_ranges_are_read_at_once_and_distant_ones_are_not() -> None:
    spans = join([Range(50, 60, "c"), Range(0, 10, "a"), Range(10, 20, "b")], max_bytes=100, gap_bytes=20)
    assert [(span.start, span.end, [one.item for one in span.ranges]) for span in spans] == [
        (0, 20, ["a", "b"]),
        (50, 60, ["c"]),
    ]


@given(st.dictionaries(st.sampled_from("abcdef"), ranges))
def test_spreading_loses_nothing(of_files: dict[str, list[Range[int]]]) -> None:
    spans = {file: join(own, max_bytes=100, gap_bytes=10) for file, own in of_files.items()}
    found = list(spread(spans))
    assert sorted(found, key=repr) == sorted(((file, span) for file in spans for span in spans[file]), key=repr)


def test_reads_that_follow_each_other_are_of_different_files_or_far_apart() -> None:
    far = 64 << 20
    spans = {
        file: join([Range(start, start + 1, 0) for start in (0, 10, far, far + 10)], max_bytes=1, gap_bytes=0)
        for file in ("a", "b")
    }
    order = [(file, span.start) for file, span in spread(spans)]
    assert order[:4] == [("a", 0), ("b", 0), ("a", far), ("b", far)]
    assert order[4:] == [("a", 10), ("b", 10), ("a", far + 10), ("b", far + 10)]

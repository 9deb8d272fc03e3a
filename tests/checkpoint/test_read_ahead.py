from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bootseer.checkpoint.read_ahead import ReadAhead, ReadAheadSettings

MIB = 1 << 20
ENDLESS = 1 << 40


def brought_for(reads, *, size=1 << 30, limit=ENDLESS, row_bytes=1):
    """The non-empty advice for the reads, in MiB, and the `ReadAhead`."""
    ahead = ReadAhead(size, row_bytes=row_bytes)
    advice = [ahead.on_read(offset, length, limit) for offset, length in reads]
    return [(one.start / MIB, one.end / MIB) for one in advice if one.start < one.end], ahead


def forwards(start, count, length=MIB):
    return [(start + number * length, length) for number in range(count)]


def total(brought):
    return sum(end - start for start, end in brought)


def test_the_window_of_a_sequential_reader_doubles_up_to_its_limit():
    brought, _ = brought_for(forwards(0, 400))
    assert brought[0] == (1, 3)
    assert all(one[1] == next_one[0] for one, next_one in pairwise(brought))
    assert max(end - start for start, end in brought) <= ReadAheadSettings().max_bytes / MIB
    assert brought[-1][1] - 400 > 32


def test_read_ahead_of_one_stream_is_bounded_by_the_callers_limit():
    brought, _ = brought_for(forwards(0, 200), limit=4 * MIB)
    assert all(start + 4 >= end for start, end in brought)


def test_refused_read_ahead_is_advised_again():
    ahead = ReadAhead(1 << 30)
    assert ahead.on_read(0, MIB, 0).end == 0
    advice = ahead.on_read(MIB, MIB, ENDLESS)
    assert (advice.start, advice.end) == (2 * MIB, 6 * MIB)
    ahead.refused(advice, 3 * MIB)
    again = ahead.on_read(2 * MIB, MIB, ENDLESS)
    assert again.start == 3 * MIB


def test_requests_of_the_kernel_may_come_in_another_order():
    order = list(range(64))
    rng = random.Random(1)
    shuffled = [number for start in range(0, 64, 4) for number in rng.sample(order[start : start + 4], 4)]
    brought, ahead = brought_for([(number * MIB, MIB) for number in shuffled])
    assert ahead.num_streams == 1
    assert brought[-1][1] >= 64


def test_small_requests_in_sequence_are_a_stream():
    brought, _ = brought_for(forwards(0, 64, 128 << 10))
    assert brought[-1][1] > 8


def test_random_reads_cause_almost_no_read_ahead():
    rng = random.Random(1)
    brought, _ = brought_for([(rng.randrange(1 << 30) & ~4095, 4096) for _ in range(1000)])
    assert total(brought) <= 20


def test_after_a_first_read_in_the_middle_read_ahead_begins_with_the_next_one():
    brought, _ = brought_for(forwards(100 * MIB, 2))
    assert brought == [(102, 106)]


def test_eight_readers_of_one_file_are_eight_streams():
    regions = [forwards(reader * 128 * MIB, 64) for reader in range(8)]
    reads = [reads[number] for number in range(64) for reads in regions]
    brought, ahead = brought_for(reads)
    assert ahead.num_streams == 8
    covered = {start for start, _ in brought}
    assert len(covered) == len(brought), "something was advised twice"
    for reader in range(8):
        mine = [end for start, end in brought if reader * 128 <= start < reader * 128 + 128]
        assert max(mine) - reader * 128 > 64


def test_jumps_begin_with_a_small_window_again():
    reads = [(group * 16 * MIB + number * MIB, MIB) for group in range(20) for number in range(4)]
    brought, _ = brought_for(reads)
    assert total(brought) <= 20 * 8


def test_a_small_skip_does_not_end_a_stream():
    reads = [*forwards(0, 40), *forwards(42 * MIB, 20)]
    brought, ahead = brought_for(reads)
    assert ahead.num_streams == 1
    assert brought[-1][1] > 70


def test_windows_end_with_whole_rows():
    brought, _ = brought_for(forwards(0, 100), row_bytes=5 * MIB)
    assert all(end % 5 == 0 for _, end in brought)


def test_read_ahead_stops_at_the_end_of_the_file():
    brought, _ = brought_for(forwards(0, 10), size=10 * MIB + 5)
    assert brought[-1][1] == (10 * MIB + 5) / MIB


def test_the_number_of_streams_is_bounded():
    ahead = ReadAhead(1 << 50, ReadAheadSettings(max_streams=4))
    for reader in range(100):
        ahead.on_read(reader * (1 << 40), MIB, ENDLESS)
        ahead.on_read(reader * (1 << 40) + MIB, MIB, ENDLESS)
    assert ahead.num_streams == 4


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 30)), max_size=60),
    st.sampled_from([1, 3]),
    st.sampled_from([0, 2 * MIB, ENDLESS]),
)
def test_advice_lies_inside_the_file_and_is_not_given_twice(reads, rows, limit):
    size = 130 * MIB
    ahead = ReadAhead(size, row_bytes=rows * MIB)
    for offset, length in reads:
        advice = ahead.on_read(offset * MIB, length * MIB, limit)
        assert 0 <= advice.start <= advice.end <= size
        assert advice.sequential or advice.start == advice.end
        if limit == 0:
            assert advice.start == advice.end

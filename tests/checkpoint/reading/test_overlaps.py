from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.checkpoint.ranges import split_overlaps

RANGES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 20)).map(lambda one: (one[0], one[0] + one[1])), max_size=12
)


@given(RANGES)
def test_overlapping_ranges_are_read_once_and_copied(ranges):
    pieces, copies = split_overlaps(ranges)
    read = [byte for piece in pieces for byte in range(piece.start, piece.end)]
    assert sorted(read) == read
    assert len(set(read)) == len(read)
    got = [set() for _ in ranges]
    for piece in pieces:
        got[piece.number].update(range(piece.start, piece.end))
    owned = [set(one) for one in got]
    for copy in copies:
        span = set(range(copy.start, copy.end))
        assert span <= owned[copy.source], "copied from where it was not read to"
        assert not span & owned[copy.number]
        got[copy.number] |= span
    assert got == [set(range(start, end)) for start, end in ranges]

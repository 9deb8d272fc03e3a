"""The pieces of a lane cover it exactly, for any spans, and each moment belongs to the span that began last."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bootseer.report.analysis.spans import TRUNCATED, Span
from bootseer.report.analysis.stages import cut, enclosing, time_by_stage
from bootseer.report.model import UNTRACKED_STAGE, WAIT
from bootseer.trace.event import FAILED, OK

STAGES = ("a", "a.b", "a.b.c", "d", "d.e", "f")


@st.composite
def spans(draw):
    begin = draw(st.integers(-20, 120))
    end = begin + draw(st.integers(0, 90))
    attrs = {"barrier": "x"} if draw(st.booleans()) else {}
    outcome = draw(st.sampled_from([OK, FAILED, TRUNCATED]))
    return Span(draw(st.sampled_from(STAGES)), "n", 0, 1, begin, end, outcome, attrs)


@st.composite
def lanes(draw):
    begin = draw(st.integers(-5, 50))
    end = begin + draw(st.integers(0, 80))
    found = draw(st.lists(spans(), max_size=12))
    arrivals = {id(span): draw(st.integers(-10, 150)) for span in found if span.barrier}
    return found, begin, end, arrivals


@given(lanes())
def test_pieces_tile_the_lane(lane):
    found, begin, end, arrivals = lane
    pieces = cut(found, begin, end, arrivals)
    assert sum(piece.end_ns - piece.begin_ns for piece in pieces) == end - begin
    assert all(piece.end_ns > piece.begin_ns for piece in pieces)
    assert all(a.end_ns == b.begin_ns for a, b in pairwise(pieces))
    if pieces:
        assert (pieces[0].begin_ns, pieces[-1].end_ns) == (begin, end)
        working = sum(piece.end_ns - piece.begin_ns for piece in pieces if piece.kind != WAIT)
        assert sum(time_by_stage(pieces, begin, end).values()) == working


@given(lanes())
def test_each_moment_is_owned_by_the_innermost_span(lane):
    """Compared with the simple rule at each moment: of the running spans the one that began last, then the shortest."""
    found, begin, end, arrivals = lane
    pieces = cut(found, begin, end, arrivals)
    parents = {s.stage.rpartition(".")[0] for s in found if s.end_ns > begin and s.begin_ns < end}
    for moment in range(begin, end):
        piece = next(piece for piece in pieces if piece.begin_ns <= moment < piece.end_ns)
        running = [span for span in found if span.begin_ns <= moment < span.end_ns]
        if not running:
            assert piece.stage == UNTRACKED_STAGE
            continue
        key = max((span.begin_ns, -span.end_ns, len(span.stage)) for span in running)
        fitting = [span for span in running if (span.begin_ns, -span.end_ns, len(span.stage)) == key]
        told = set()
        for span in fitting:
            waits = id(span) in arrivals and moment < arrivals[id(span)]
            told.add(span.stage if waits or span.stage not in parents else f"{span.stage}.{UNTRACKED_STAGE}")
        assert piece.stage in told


def test_enclosing_stages_are_named_from_the_outside():
    assert enclosing("a.b.c") == ["a", "a.b", "a.b.c"]

"""Begin and end events become spans: times, ids, limits, and missing events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.trace import otlp_spans
from bootseer.trace.event import Event
from bootseer.trace.otlp_spans import Pairing, span_id, trace_id

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BEGIN = Event(1000, 10, "moe", "n0", "a", "begin", SPAN, trace=TRACE, attrs={"bytes": 0, "n": 1})
END = BEGIN._replace(phase="end", wall_ns=9, mono_ns=60, outcome="ok", attrs={"bytes": 5})


def test_duration_comes_from_the_monotonic_clock() -> None:
    """The wall clock was set back between the two; the span still has 50 ns."""
    pairing = Pairing()
    assert pairing.feed([BEGIN]) == []
    (span,) = pairing.feed([END])
    assert (span.start_ns, span.end_ns, span.outcome, span.truncated) == (1000, 1050, "ok", False)
    assert span.attrs == {"bytes": 5, "n": 1}
    assert pairing.finish() == []


def test_monotonic_clock_going_backwards_is_no_negative_span() -> None:
    (span,) = Pairing().feed([BEGIN, END._replace(mono_ns=5)])
    assert (span.start_ns, span.end_ns) == (1000, 1000)


def test_instant() -> None:
    (span,) = Pairing().feed([BEGIN._replace(phase="instant")])
    assert (span.start_ns, span.end_ns, span.truncated) == (1000, 1000, False)


def test_end_without_begin_is_kept_as_truncated() -> None:
    (span,) = Pairing().feed([END])
    assert (span.start_ns, span.end_ns, span.outcome, span.truncated) == (9, 9, "ok", True)


def test_open_spans_end_when_the_node_was_last_seen() -> None:
    pairing = Pairing()
    other = BEGIN._replace(span="b", mono_ns=410)
    pairing.feed([BEGIN, other, BEGIN._replace(phase="instant", span="c", mono_ns=410)])
    first, second = pairing.finish()
    assert (first.start_ns, first.end_ns, first.truncated) == (1000, 1400, True)
    assert (second.start_ns, second.end_ns, second.truncated) == (1000, 1000, True)
    assert pairing.finish() == []


def test_a_begin_read_twice_is_one_span() -> None:
    spans = Pairing().feed([BEGIN, BEGIN._replace(wall_ns=5000), END])
    assert [span.start_ns for span in spans] == [1000]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones, which are the outer stages, are kept."""
    monkeypatch.setattr(otlp_spans, "MAX_OPEN", 3)
    pairing = Pairing()
    pairing.feed(BEGIN._replace(span=str(number), node=str(number)) for number in range(10))
    assert [span.event.span for span in pairing.finish()] == ["0", "1", "2"]


def test_ids() -> None:
    assert trace_id(BEGIN) == int(TRACE, 16)
    assert span_id(SPAN) == int(SPAN, 16)
    nameless = [BEGIN._replace(trace=text, node=text) for text in ("", "0" * 32, "x", TRACE.upper())]
    assert len({trace_id(event) for event in nameless}) == 1
    assert trace_id(nameless[0]) != trace_id(nameless[0]._replace(attempt=1))


@given(st.text(), st.text())
def test_ids_fit_and_are_never_zero(text: str, job: str) -> None:
    assert 0 < span_id(text) < 2**64
    assert span_id(text) == span_id(text)
    assert 0 < trace_id(BEGIN._replace(trace=text, job=job)) < 2**128

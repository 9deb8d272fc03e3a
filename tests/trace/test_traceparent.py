"""Parsing TRACEPARENT as specified by the W3C."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.trace.traceparent import TraceParent, parse

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_round_trip() -> None:
    parent = TraceParent(TRACE, SPAN)
    assert str(parent) == f"00-{TRACE}-{SPAN}-01"
    assert parse(str(parent)) == parent


@pytest.mark.parametrize(
    "text", [f"00-{TRACE}-{SPAN}-00", f"  00-{TRACE}-{SPAN}-01\n", f"cc-{TRACE}-{SPAN}-01-what-comes-later"]
)
def test_accepted(text: str) -> None:
    assert parse(text) == TraceParent(TRACE, SPAN)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-extra",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
    ],
)
def test_ignored(text: str) -> None:
    assert parse(text) is None


@given(st.text())
def test_never_raises(text: str) -> None:
    parse(text)
    parse(f"00-{text}-{SPAN}-01")

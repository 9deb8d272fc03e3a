"""The W3C trace context in the `TRACEPARENT` environment variable.

Does no I/O. Source: W3C Trace Context, level 1, and OpenTelemetry's environment-variable carriers.
"""

from __future__ import annotations

from typing import NamedTuple

VARIABLE = "TRACEPARENT"
_HEX = frozenset("0123456789abcdef")
_LENGTHS = (2, 32, 16, 2)  # version, trace, span, flags


class TraceParent(NamedTuple):
    """The trace that this process belongs to, and its parent span."""

    trace: str
    span: str

    def __str__(self) -> str:
        return f"00-{self.trace}-{self.span}-01"


def parse(text: str) -> TraceParent | None:
    """Parse the variable's value; None for an invalid one, which the standard requires to be ignored."""
    # No regular expression: compiling one takes longer than this, at the start of every job.
    fields = text.strip().split("-")
    if tuple(map(len, fields[:4])) != _LENGTHS or not all(_HEX.issuperset(field) for field in fields[:4]):
        return None
    version, trace, span = fields[:3]
    if version == "ff" or (version == "00" and len(fields) > 4) or not trace.strip("0") or not span.strip("0"):
        return None
    return TraceParent(trace, span)

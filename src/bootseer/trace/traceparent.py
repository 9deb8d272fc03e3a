"""The W3C trace context, as it travels in the `TRACEPARENT` environment variable.

Decides and touches nothing. Source: W3C Trace Context, level 1, and OpenTelemetry's environment-variable carriers.
"""

from __future__ import annotations

import re
from typing import NamedTuple

VARIABLE = "TRACEPARENT"
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


class TraceParent(NamedTuple):
    """The trace that we belong to and the span that caused us."""

    trace: str
    span: str

    def __str__(self) -> str:
        return f"00-{self.trace}-{self.span}-01"


def parse(text: str) -> TraceParent | None:
    """None for everything that the standard tells a receiver to ignore."""
    match = _FORM.fullmatch(text.strip())
    if match is None or match[1] == "ff" or (match[1] == "00" and match[4]):
        return None
    if set(match[2]) == {"0"} or set(match[3]) == {"0"}:
        return None
    return TraceParent(match[2], match[3])

"""Pair begin and end events into spans for an exporter.

Begin and end of a span have the same trace and span id; durations use only the monotonic clock. Does no I/O and is
independent of OpenTelemetry: `trace.otlp` converts `Finished` to its spans.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from bootseer.trace.event import ALIVE, BEGIN, END, INSTANT, Event

MAX_OPEN: Final = 10_000
"""Maximum number of open spans. Later begins are dropped: the outermost stages came first."""

_TRACE: Final = re.compile(r"(?!0{32})[0-9a-f]{32}")
_SPAN: Final = re.compile(r"(?!0{16})[0-9a-f]{16}")


class Finished(NamedTuple):
    """A complete span."""

    event: Event
    """The begin, or the only event seen: has name, ids and identity."""
    start_ns: int
    """ns since 1970, like `end_ns`."""
    end_ns: int
    outcome: str
    attrs: Mapping[str, Any]
    """Attributes of begin and end; the end's take precedence."""
    truncated: bool
    """Begin or end is missing."""


def trace_id(event: Event) -> int:
    """The W3C trace id, never 0. If it is invalid, all events of an attempt share one derived from its name."""
    if _TRACE.fullmatch(event.trace):
        return int(event.trace, 16)
    return _derived_id(f"{event.job}\0{event.attempt}", 16)


def span_id(text: str) -> int:
    """The span id, never 0. Equal invalid texts give equal ids, so that parents are still found."""
    return int(text, 16) if _SPAN.fullmatch(text) else _derived_id(text, 8)


def _derived_id(text: str, num_bytes: int) -> int:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:num_bytes], "big") or 1


class Pairing:
    """Holds the open spans of one node, at most `MAX_OPEN` of them."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], Event] = {}
        self._last_ns = 0
        """Monotonic time of the last event."""

    def feed(self, events: Iterable[Event]) -> list[Finished]:
        """The spans that these events complete, in the order of their ends."""
        finished = []
        for event in events:
            self._last_ns = max(self._last_ns, event.mono_ns)
            key = (event.trace, event.span)
            if event.phase == INSTANT:
                if event.stage != ALIVE:
                    finished.append(_zero_length(event, truncated=False))
            elif event.phase == BEGIN:
                if len(self._open) < MAX_OPEN:
                    self._open.setdefault(key, event)
            elif event.phase == END:
                begin = self._open.pop(key, None)
                finished.append(_paired(begin, event) if begin else _zero_length(event, truncated=True))
        return finished

    def finish(self) -> list[Finished]:
        """Close open spans at the time of the last event."""
        finished = []
        for begin in self._open.values():
            end_ns = begin.wall_ns + max(0, self._last_ns - begin.mono_ns)
            finished.append(Finished(begin, begin.wall_ns, end_ns, "", begin.attrs, truncated=True))
        self._open.clear()
        return finished


def _paired(begin: Event, end: Event) -> Finished:
    end_ns = begin.wall_ns + max(0, end.mono_ns - begin.mono_ns)
    return Finished(begin, begin.wall_ns, end_ns, end.outcome, {**begin.attrs, **end.attrs}, truncated=False)


def _zero_length(event: Event, *, truncated: bool) -> Finished:
    return Finished(event, event.wall_ns, event.wall_ns, event.outcome, event.attrs, truncated)

"""No line makes a parser raise, and nothing that it tells is absurd: garbage, and real logs cut and shuffled."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.analysis.foreign.durations import MAX_NS
from bootseer.analysis.foreign.parser import Line
from bootseer.analysis.foreign.registry import parsers
from bootseer.analysis.foreign.timestamp import EARLIEST_NS, LATEST_NS
from bootseer.trace.event import decode, encode

GOLDEN = Path(__file__).parents[2] / "golden"
LINES = [line for log in sorted(GOLDEN.glob("*/*.log")) for line in log.read_text().split("\n") if line]
PIECES = sorted({piece for line in LINES for piece in re.findall(r'\w+|[^\w\s]+|"[^"]{1,40}"', line)})

walls = st.none() | st.integers(EARLIEST_NS, LATEST_NS - 1) | st.integers(-(2**70), 2**70)
cut = st.sampled_from(LINES).flatmap(lambda line: st.integers(0, len(line)).map(lambda at: line[:at]))
mixed = st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=30).map(" ".join)
torn = st.tuples(cut, st.sampled_from(LINES)).map("".join)
texts = st.text() | cut | mixed | torn | st.sampled_from(LINES)


@settings(max_examples=6000, deadline=None)
@given(st.lists(st.tuples(texts, walls), max_size=30))
def test_parsers_never_raise_and_tell_nothing_absurd(lines: list[tuple[str, int | None]]) -> None:
    for parser in parsers():
        for number, (text, wall_ns) in enumerate(lines, 1):
            parser.feed(Line(text, "job.log", number, wall_ns, "node-0"))
        findings = parser.finish()
        begun = {}
        for event in findings.events:
            assert EARLIEST_NS <= event.wall_ns == event.mono_ns < LATEST_NS
            assert decode(encode(event))[0] == event
            if event.phase == "begin":
                begun[event.span] = event.wall_ns
            elif event.phase == "end":
                assert 0 <= event.wall_ns - begun[event.span] <= MAX_NS
        for fact in findings.facts:
            assert fact.duration_s is None or 0 <= fact.duration_s <= 100 * MAX_NS / 1e9
            assert "\n" not in fact.text

"""No line makes a parser raise or return absurd findings: garbage, and real logs, cut and shuffled."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.report.foreign.parser import Findings, Line, plain
from bootseer.report.foreign.program_tables import parsers, search
from bootseer.report.foreign.times import EARLIEST_NS, LATEST_NS, MAX_DURATION_NS
from bootseer.trace.event import decode, encode

GOLDEN = Path(__file__).parents[2] / "golden"
LINES = [line for log in sorted(GOLDEN.glob("*/*.log")) for line in log.read_text().split("\n") if line]
PIECES = sorted({piece for line in LINES for piece in re.findall(r'\w+|[^\w\s]+|"[^"]{1,40}"', line)})

walls = st.none() | st.integers(EARLIEST_NS, LATEST_NS - 1) | st.integers(-(2**70), 2**70)
cut = st.sampled_from(LINES).flatmap(lambda line: st.integers(0, len(line)).map(lambda at: line[:at]))
mixed = st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=30).map(" ".join)
torn = st.tuples(cut, st.sampled_from(LINES)).map("".join)
texts = st.text() | cut | mixed | torn | st.sampled_from(LINES)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(texts, walls), max_size=30))
def test_parsers_never_raise_and_tell_nothing_absurd(lines: list[tuple[str, int | None]]) -> None:
    for parser in parsers():
        for number, (text, wall_ns) in enumerate(lines, 1):
            parser.feed(Line(text, "job.log", number, wall_ns, "node-0"))
        findings = parser.finish()
        begun = {}
        for event in findings.events:
            assert EARLIEST_NS <= event.wall_ns == event.mono_ns < LATEST_NS
            assert decode(encode(event)) == event
            if event.phase == "begin":
                begun[event.span] = event.wall_ns
            elif event.phase == "end":
                assert 0 <= event.wall_ns - begun[event.span] <= MAX_DURATION_NS
        for fact in findings.facts:
            assert fact.duration_s is None or 0 <= fact.duration_s <= 100 * MAX_DURATION_NS / 1e9
            assert "\n" not in fact.text


def _found(lines: list[tuple[str, int | None]], *, clued: bool) -> list[Findings]:
    found = []
    for parser in parsers():
        for number, (text, wall_ns) in enumerate(lines, 1):
            data = plain(text).encode("utf-8", "replace")
            if not clued or any(re.search(clue.pattern, data) for clue in parser.clues):
                parser.feed(Line(text, "job.log", number, wall_ns, "node-0"))
        found.append(parser.finish())
    return found


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(texts, walls), max_size=30))
def test_no_line_without_a_clue_changes_what_is_found(lines: list[tuple[str, int | None]]) -> None:
    assert _found(lines, clued=True) == _found(lines, clued=False)


CLUES = [clue for parser in parsers() for clue in parser.clues]
near = st.sampled_from(CLUES).flatmap(
    lambda clue: st.sampled_from(["", "1", "42 ", ' "a/b:1"', "a-1", "\\"]).map(
        lambda more: clue.literal.decode() + more
    )
)


@settings(max_examples=200, deadline=None)
@given(st.lists(texts | near | st.just("\n"), max_size=40).map("".join))
def test_the_library_and_python_find_the_same_places(text: str) -> None:
    searching, _ = search()
    data = text.encode("utf-8", "replace")
    quick, plain_python = searching.hits(data), searching._python(data)
    assert {place for place, _ in quick} == {place for place, _ in plain_python}


def test_a_search_without_the_library_finds_all() -> None:
    """Two literals at one place are one hit, for the parsers of both."""
    data = "\n".join(LINES).encode()
    fast, wanting = search()
    by_line: list[dict[int, set[int]]] = []
    for hits in (fast.hits(data), ((place, fast._order[number]) for place, number in fast._python(data))):
        told: dict[int, set[int]] = {}
        for place, number in hits:
            told.setdefault(data.count(b"\n", 0, place), set()).update(wanting[number])
        by_line.append(told)
    assert by_line[0] == by_line[1]
    assert len(by_line[0]) > len(LINES) // 4

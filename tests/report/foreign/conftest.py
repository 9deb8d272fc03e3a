"""Feeds logs to the foreign parsers as the scan does: only lines with a literal of a parser, and their times."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bootseer.report.foreign.parser import Findings, Line, Parser, plain
from bootseer.report.foreign.program_tables import parsers
from bootseer.report.foreign.times import line_time

REFERENCE_NS = 1_795_197_600 * 10**9  # 2026-11-20T18:00:00Z
Read = Callable[..., dict[str, dict[str, Any]]]


def _feed(parser: Parser, text: str, file: str, node: str) -> Findings:
    for number, raw in enumerate(text.split("\n"), 1):
        data = plain(raw).encode("utf-8", "replace")
        if any(re.search(clue.pattern, data) for clue in parser.clues):
            wall_ns = line_time(raw, reference_ns=REFERENCE_NS)
            parser.feed(Line(raw, file, number, wall_ns, node))
    return parser.finish()


def _read(text: str, *, file: str = "job.log", node: str = "node-0") -> dict[str, dict[str, Any]]:
    """The findings of each parser, as plain data; without parsers that found nothing."""
    found = {}
    for parser in parsers():
        findings = _feed(parser, text, file, node)
        if findings.events or findings.facts:
            plain = {
                "events": [event._asdict() for event in findings.events],
                "facts": [dataclasses.asdict(fact) for fact in findings.facts],
            }
            found[parser.name] = json.loads(json.dumps(plain))
    return found


@pytest.fixture(scope="module", autouse=True)
def _utc() -> Iterator[None]:
    """Times without a zone are in this machine's zone."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def read() -> Read:
    return _read

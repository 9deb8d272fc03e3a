"""The contract of a parser for logs that jobs write anyway.

`analysis.scan` looks for each parser's needles in raw bytes and hands over only the lines that hold one: a parser sees
a few lines of a log of gigabytes. One parser object lives for one log file, because the programs spread a story over
several lines. Decides and touches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from bootseer.analysis.model import Fact
from bootseer.trace.event import Event

FOREIGN = "parsed_from"
"""The attribute that names the program whose log line an event was made from."""
UNKNOWN_JOB = "(unknown)"
"""The job of an event made from a foreign line that names none; the reader puts the real one in its place."""


class Line(NamedTuple):
    """One line of a log, without its newline, decoded with replacement of what is not UTF-8."""

    text: str
    file: str
    number: int
    wall_ns: int | None
    """The time at the start of the line, when there is one that `foreign.timestamp` understands."""
    node: str
    """The node that the reader believes the file to belong to."""


@dataclass(slots=True)
class Findings:
    """What a log told. Events need a time; what has only a duration is a fact."""

    events: list[Event] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)


class Parser(Protocol):
    """Reads the lines of one file that hold one of `needles`, in order."""

    name: str
    needles: tuple[bytes, ...]
    """Rare byte strings, each at least 8 long: the scan's speed depends on how rarely they match."""

    def feed(self, line: Line) -> None:
        """Take a line that holds a needle. It may be cut, interleaved or of another program: never raises."""

    def finish(self) -> Findings:
        """What the file told in all."""

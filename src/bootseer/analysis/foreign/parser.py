"""The contract of a parser for logs that jobs write anyway.

`analysis.scan` looks for each parser's clues in raw bytes and hands over only the lines that hold one: a parser sees a
few lines of a log of gigabytes. One parser object lives for one log file, because the programs spread a story over
several lines. Decides and touches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, tzinfo
from typing import NamedTuple, Protocol

from bootseer.analysis.model import Fact
from bootseer.analysis.search import Clue
from bootseer.trace.event import Event

FOREIGN = "parsed_from"
"""The attribute that names the program whose log line an event was made from."""
UNKNOWN_JOB = "(unknown)"
"""The job of an event made from a foreign line that names none; the reader puts the real one in its place."""

NODES = "nodes"
"""The attribute that lists all nodes of a scheduler's event, as Slurm writes lists."""
BY_LOG = "step_line"
"""What a `training_began` from a log's first line about a training step says that it came by."""


class Line(NamedTuple):
    """One line of a log, without its newline, decoded with replacement of what is not UTF-8."""

    text: str
    file: str
    number: int
    wall_ns: int | None
    """The time at the start of the line, when there is one that `foreign.timestamp` understands."""
    node: str
    """The node that the reader believes the file to belong to."""
    zone: tzinfo = UTC
    """The zone of times in the line that name none."""


@dataclass(slots=True)
class Findings:
    """What a log told. Events need a time; what has only a duration is a fact."""

    events: list[Event] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)


class Reader(Protocol):
    """Reads chosen lines of one file, in order."""

    def feed(self, line: Line) -> None:
        """Take a line. It may be cut, interleaved or of another program: never raises."""

    def finish(self) -> Findings:
        """What the file told in all."""


class Parser(Reader, Protocol):
    """Reads the lines that hold one of `clues`."""

    name: str
    clues: tuple[Clue, ...]
    """Every line that changes what the parser finds must hold one, and as few other lines as can be: each costs as
    much as a thousand that hold none."""

    @property
    def done(self) -> bool:
        """No further line changes what the parser finds."""
        return False

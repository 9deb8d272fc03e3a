"""The interface of parsers for logs of other programs, and what they find.

`log_scan` searches raw bytes for each parser's clues and passes on only the lines that contain one: a parser sees a few
lines of a log of gigabytes. Each log file has its own parser objects, because a stage may be spread over several lines.
Foreign programs have no monotonic clock in their logs: `mono_ns` is the wall time. Span ids are made from file and
line, so that reading a log twice gives the same events, which the reader drops as duplicates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

from bootseer.report.foreign.times import MAX_DURATION_NS, plausible
from bootseer.report.model import Fact
from bootseer.report.search import Clue
from bootseer.trace.event import BEGIN, END, INSTANT, NO_RANK, OK, Event
from bootseer.units import seconds

FOREIGN = "parsed_from"
"""The attribute that names the program whose log line an event was made from."""
UNKNOWN_JOB = "(unknown)"
"""The job of an event made from a foreign line that names none; `log_scan` replaces it by that of the other events."""

NODES = "nodes"
"""The attribute that lists all nodes of a scheduler's event, as Slurm writes lists."""
BY_LOG = "step_line"
"""The attribute `by` of a `training_began` that was derived from a log's first lines about training steps."""
MAX_RANK: Final = 10_000_000
MAX_LINE: Final = 65_536
"""Parsers read no further into a line, which may be of any length."""
_MAX_NAME = 256
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,255}", re.ASCII)
_DIGEST = re.compile(r"(.*)@([a-z0-9+._-]{1,32}:[0-9a-fA-F]{32,128})", re.ASCII)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.ASCII)


class Line(NamedTuple):
    """One line of a log, without its newline, decoded with replacement of what is not UTF-8."""

    text: str
    file: str
    number: int
    wall_ns: int | None
    """The time at the start of the line, when there is one that `foreign.times` understands."""
    node: str
    """The node that the file is assumed to be from."""


class Parser(Protocol):
    """Reads the lines of one file that contain one of `clues`, in order."""

    name: str
    clues: tuple[Clue, ...]
    """Every line that changes the findings must contain one, and as few other lines as possible: each costs as much as
    a thousand without a clue."""

    @property
    def done(self) -> bool:
        """No further line changes what the parser finds."""
        return False

    def feed(self, line: Line) -> None:
        """Take a line. It may be cut, interleaved or of another program: never raises."""

    def finish(self) -> Findings:
        """All that was found in the file."""


def plain(text: str) -> str:
    """The text without colours, up to `MAX_LINE`."""
    return _ANSI.sub("", text[:MAX_LINE])


def name(text: str) -> str:
    """A foreign name as an identity: printable, bounded; empty when nothing is left."""
    return "".join(char for char in text.strip() if char.isprintable())[:_MAX_NAME]


def image_reference(text: str) -> str:
    """An image reference without scheme, credentials and query; empty if the text is not a reference."""
    text = _SCHEME.sub("", text.partition("?")[0], count=1)
    digested = _DIGEST.fullmatch(text)
    bare, digest = (digested[1], "@" + digested[2]) if digested else (text, "")
    bare = bare.rpartition("@")[2]
    return bare + digest if _REFERENCE.fullmatch(bare) else ""


class Place(NamedTuple):
    """Node and restart of an instant, as far as the line states them."""

    node: str = ""
    """Empty: the node of the file."""
    restart: int = 0
    rank: int = NO_RANK
    pid: int = 0
    job: str = ""
    """Empty: the job of the file."""


_ANYWHERE: Final = Place()


@dataclass(slots=True)
class Findings:
    """What one parser finds in one file. Events need a time; what has only a duration is a fact."""

    source: str
    events: list[Event] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)

    def instant(
        self,
        line: Line,
        stage: str,
        wall_ns: int | None,
        *,
        place: Place = _ANYWHERE,
        attrs: Mapping[str, Any] | None = None,
    ) -> None:
        """A moment; dropped when it has no plausible time."""
        if wall_ns is not None and plausible(wall_ns):
            self._add(self._event(line, stage, place, attrs), INSTANT, wall_ns)

    def span(
        self,
        line: Line,
        stage: str,
        begin_ns: int | None,
        end_ns: int | None,
        *,
        place: Place = _ANYWHERE,
        outcome: str = OK,
        attrs: Mapping[str, Any] | None = None,
    ) -> bool:
        """A span; without `end_ns` only its begin. Dropped (False) when its times are not plausible."""
        if begin_ns is None or not plausible(begin_ns):
            return False
        event = self._event(line, stage, place, attrs)
        if end_ns is None:
            self._add(event, BEGIN, begin_ns)
            return True
        if not plausible(end_ns) or not 0 <= end_ns - begin_ns <= MAX_DURATION_NS:
            return False
        self._add(event, BEGIN, begin_ns)
        self._add(event._replace(outcome=outcome), END, end_ns)
        return True

    def fact(self, line: Line, stage: str, text: str, duration_ns: int | None, *, node: str = "") -> None:
        """A finding without a time. `text` may contain only validated parts, because it is shown to users."""
        duration_s = None if duration_ns is None else seconds(duration_ns)
        where = f"{line.file}:{line.number}"
        self.facts.append(Fact(self.source, stage, text, duration_s, node or line.node, where))

    def _event(self, line: Line, stage: str, place: Place, attrs: Mapping[str, Any] | None) -> Event:
        where = f"Place(node={place.node!r}, restart={place.restart}, rank={place.rank}, pid={place.pid})"
        seed = f"{self.source}\0{line.file}\0{line.number}\0{stage}\0{where}"
        return Event(
            wall_ns=0,
            mono_ns=0,
            job=place.job or UNKNOWN_JOB,
            node=place.node or line.node or "unknown",
            stage=stage,
            phase=INSTANT,
            span=blake2b(seed.encode("utf-8", "replace"), digest_size=8).hexdigest(),
            restart=place.restart,
            rank=place.rank,
            pid=place.pid,
            attrs={FOREIGN: self.source, **(attrs or {})},
        )

    def _add(self, event: Event, phase: str, wall_ns: int) -> None:
        self.events.append(event._replace(phase=phase, wall_ns=wall_ns, mono_ns=wall_ns))

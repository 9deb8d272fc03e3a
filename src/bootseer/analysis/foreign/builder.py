"""Makes events and facts from foreign lines, so that every parser builds and guards them alike.

Used by the parsers of this folder only. Foreign programs have no monotonic clock in their logs: `mono_ns` is the wall
time. Span ids are made from file and line, so that reading a log twice gives the same events, which the reader drops as
duplicates. Decides and touches nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from bootseer.analysis.foreign import durations, timestamp
from bootseer.analysis.foreign.parser import UNKNOWN_JOB, Findings, Line
from bootseer.analysis.model import Fact
from bootseer.trace.event import BEGIN, END, INSTANT, NO_RANK, Event
from bootseer.units import NS_PER_S

MAX_RANK = 10_000_000
_MAX_NAME = 256
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,255}", re.ASCII)
_DIGEST = re.compile(r"(.*)@([a-z0-9+._-]{1,32}:[0-9a-fA-F]{32,128})", re.ASCII)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.ASCII)


def plain(text: str) -> str:
    """The text without colours."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def name(text: str) -> str:
    """A foreign name as an identity: printable, bounded; empty when nothing is left."""
    return "".join(char for char in text.strip() if char.isprintable())[:_MAX_NAME]


def rank(text: str | int | None) -> int:
    """A rank that can be, or `NO_RANK`."""
    if isinstance(text, str):
        text = int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else None
    return text if type(text) is int and 0 <= text < MAX_RANK else NO_RANK


def image_reference(text: str) -> str:
    """An image reference without scheme, credentials and query; empty when it is none."""
    text = _SCHEME.sub("", text.partition("?")[0], count=1)
    digested = _DIGEST.fullmatch(text)
    bare, digest = (digested[1], "@" + digested[2]) if digested else (text, "")
    bare = bare.rpartition("@")[2]
    return bare + digest if _REFERENCE.fullmatch(bare) else ""


class Builder:
    """Collects what one parser finds in one file."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._findings = Findings()
        self.job = UNKNOWN_JOB
        """The job that the file names; given to all its events by `finish`."""

    def instant(
        self, line: Line, stage: str, wall_ns: int | None, *, attrs: Mapping[str, Any] | None = None, **identity: Any
    ) -> None:
        """A moment; dropped when it has no plausible time."""
        if _plausible(wall_ns):
            self._event(line, stage, INSTANT, wall_ns or 0, "", attrs, identity)

    def span(
        self,
        line: Line,
        stage: str,
        begin_ns: int | None,
        end_ns: int | None,
        *,
        outcome: str = "ok",
        attrs: Mapping[str, Any] | None = None,
        **identity: Any,
    ) -> bool:
        """A span; without `end_ns` only its begin. Dropped (False) when its times are not plausible."""
        if not _plausible(begin_ns) or begin_ns is None:
            return False
        if end_ns is not None and not (_plausible(end_ns) and 0 <= end_ns - begin_ns <= durations.MAX_NS):
            return False
        self._event(line, stage, BEGIN, begin_ns, "", attrs, identity)
        if end_ns is not None:
            self._event(line, stage, END, end_ns, outcome, attrs, identity)
        return True

    def fact(self, line: Line, stage: str, text: str, duration_ns: int | None, *, node: str = "") -> None:
        """What has no time. `text` must be made of validated parts only: it is shown to people."""
        duration_s = None if duration_ns is None else duration_ns / NS_PER_S
        where = f"{line.file}:{line.number}"
        self._findings.facts.append(Fact(self._source, stage, text, duration_s, node or line.node, where))

    def finish(self) -> Findings:
        """Everything, under the job that the file named."""
        events = self._findings.events
        events[:] = [event._replace(job=self.job) for event in events]
        return self._findings

    def _event(
        self,
        line: Line,
        stage: str,
        phase: str,
        wall_ns: int,
        outcome: str,
        attrs: Mapping[str, Any] | None,
        identity: dict[str, Any],
    ) -> None:
        seed = f"{self._source}\0{line.file}\0{line.number}\0{stage}\0{identity}"
        self._findings.events.append(
            Event(
                wall_ns=wall_ns,
                mono_ns=wall_ns,
                job=UNKNOWN_JOB,
                node=identity.get("node") or line.node or "unknown",
                stage=stage,
                phase=phase,
                span=blake2b(seed.encode("utf-8", "replace"), digest_size=8).hexdigest(),
                restart=identity.get("restart", 0),
                rank=identity.get("rank", NO_RANK),
                outcome=outcome,
                pid=identity.get("pid", 0),
                attrs={"source": self._source, **(attrs or {})},
            )
        )


def _plausible(wall_ns: int | None) -> bool:
    return wall_ns is not None and timestamp.EARLIEST_NS <= wall_ns < timestamp.LATEST_NS

"""Parses logs in which each line can be understood by itself: a table says what each kind of line means.

A line begins or ends a stage, states its duration, or is an instant. A begin is paired with the end that has the
same key; a begin whose end is not in the log stays open, unless its rule says that the end is seldom logged. Where a
line has no time, a duration becomes a fact, and an end a fact without a duration. `program_tables` has the tables, and
`Site` reads the pattern that a user gives.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

from bootseer.report.foreign import parser as make
from bootseer.report.foreign.parser import BY_LOG, NODES, Findings, Line, Parser, Place
from bootseer.report.foreign.times import LATEST_NS, line_time, parse_duration
from bootseer.report.search import Clue
from bootseer.trace.event import FAILED, OK, Event
from bootseer.trace.identity import expand_hosts

BEGIN: Final = "begin"
END: Final = "end"
FAIL: Final = "fail"
"""The stage failed."""
TOOK: Final = "took"
"""States a duration, which ended when the line was written, or at the time of the rule's `label`."""
MARK: Final = "mark"
AT: Final = "at"
"""States a time, for the durations with its `label`."""
NOW: Final = "now"
"""States the time of the lines after it, which have none."""
STEP: Final = "step"
"""A training step, or a group of them, is over: the first such line ends the startup."""
AGAIN: Final = "again"
"""The job's processes start, or have failed: the next line about a step ends another startup."""

_MAX_NUMBER = 20
_MAX_STEPS = 8
"""Maximum number of lines about steps that are compared: several ranks may log the same step."""
_MAX_TRIES = 8
"""Maximum number of occurrences of a literal in a line that are tried."""
_NUMBERS = ("bytes", "packages", "precision_s")
"""Groups that are attributes."""
_SITE_GROUPS = frozenset({"begin", "end", "s", "ms", "key", "host", "job"})
_LINE_END = r'(?=[ \t\r\f\v]*(?:[\n\\"]|\Z))'


class Rule(NamedTuple):
    """One kind of line: `literal`, followed by a pattern.

    Its named groups: `key` and `job` pair lines; `s`, `ms`, `clock` (`01:02`), `took` (`1m2.3s`), or the shorter `pull`
    without the time in a queue, are the duration; `at` is a time; `host` is the node, or a list as Slurm writes it;
    `step` counts steps or samples; `image`, `machine`, `uid`, `bytes`, `packages`, `precision_s` and `fastest_ms` of
    several ranks are attributes.
    """

    role: str
    stage: str
    literal: str
    then: str = ""
    says: str = ""
    """Text of a fact, with attributes in braces."""
    label: str = ""
    seldom_ended: bool = False
    """Begins what is reported only if its end is in the log."""
    restarts: bool = False
    """Begins anew what has not ended: of several begins, the last one counts."""


@cache
def _compiled(rules: tuple[Rule, ...]) -> tuple[list[tuple[Rule, re.Pattern[str]]], tuple[Clue, ...]]:
    patterns = [(rule, re.compile(re.escape(rule.literal) + rule.then, re.ASCII)) for rule in rules]
    # Clues have no groups and no key of any length; the end of the line may lie within the JSON of a collector.
    bounded = [(rule.literal, rule.then.partition("(?P<key>.*?")[0].replace(r"\s*$", _LINE_END)) for rule in rules]
    bare = [(literal, re.sub(r"\(\?P<\w+>", "(?:", then)) for literal, then in bounded]
    return patterns, tuple(Clue(literal.encode(), then.encode()) for literal, then in dict.fromkeys(bare))


class _Open(NamedTuple):
    line: Line
    wall_ns: int | None
    place: Place
    attrs: Mapping[str, Any]
    rule: Rule
    length_ns: int | None
    """The duration that the line states."""


class TableParser(Parser):
    """The parser of one program's table."""

    def __init__(self, name: str, rules: tuple[Rule, ...]) -> None:
        self.name = name
        self._rules, self.clues = _compiled(rules)
        self._findings = Findings(name)
        self._open: dict[tuple[str, str], _Open] = {}
        self._took: list[_Open] = []
        self._at: dict[str, list[tuple[int, int]]] = {}
        """Line numbers and the times found there, by label."""
        self._now_ns: int | None = None
        self._steps: list[tuple[int, _Open]] = []
        self._only_steps = bool(rules) and all(rule.role in (STEP, AGAIN) for rule in rules)

    @property
    def done(self) -> bool:
        """No further line about steps changes the result: a training log has them for months."""
        known = self._steps
        return self._only_steps and len(known) > 1 and (len(known) >= _MAX_STEPS or known[-1][0] != known[0][0])

    def feed(self, line: Line) -> None:
        for rule, fields in self._matches(make.plain(line.text)):
            self._record(line, rule, fields)

    def _matches(self, text: str) -> Iterator[tuple[Rule, dict[str, str]]]:
        """The rules that match, with the named groups that are not empty."""
        for rule, pattern in self._rules:
            place = text.find(rule.literal)
            for _ in range(_MAX_TRIES if place >= 0 else 0):
                if found := pattern.match(text, place):
                    yield rule, {name: value for name, value in found.groupdict().items() if value}
                    break
                place = text.find(rule.literal, place + 1)
                if place < 0:
                    break

    def _record(self, line: Line, rule: Rule, fields: Mapping[str, str]) -> None:
        """Record a line. `fields`: the named groups of the rule's pattern."""
        hosts = fields.get("host", "")
        host = next(iter(expand_hosts(hosts)), "")
        place = Place(make.name(host), job=make.name(fields.get("job", "")))
        at = fields.get("at")
        at_ns = line_time(at, reference_ns=LATEST_NS - 1) if at else line.wall_ns
        attrs = _attrs(fields) | ({NODES: hosts} if hosts != host else {})
        now = _Open(line, self._now_ns if at_ns is None else at_ns, place, attrs, rule, _length(fields))
        key = (rule.stage, fields.get("key") or fields.get("job", ""))
        if rule.role == BEGIN:
            self._begin(key, now)
        elif rule.role == NOW:
            self._now_ns = at_ns
        elif rule.role == AT:
            if now.wall_ns is not None:
                self._at.setdefault(rule.label, []).append((line.number, now.wall_ns))
        elif rule.role == STEP:
            if now.wall_ns is not None and not self.done:
                self._steps.append((int(fields["step"]), now))
        elif rule.role == AGAIN:
            self._record_first_step()
            self._steps.clear()
        elif rule.role == MARK:
            self._findings.instant(line, rule.stage, now.wall_ns, place=place, attrs=now.attrs)
        elif rule.role == TOOK:
            self._took.append(now)
        else:
            if not key[1]:  # it does not say which: the last that began
                key = next((known for known in reversed(self._open) if known[0] == rule.stage), key)
            self._end(self._open.pop(key, None), now)

    def _begin(self, key: tuple[str, str], now: _Open) -> None:
        if now.rule.seldom_ended and key in self._open and self._open[key].rule is now.rule:
            del self._open[key]
        # Without a time it would hide a later begin.
        if now.wall_ns is not None and (now.rule.restarts or key not in self._open):
            self._open[key] = now

    def _end(self, begun: _Open | None, now: _Open) -> None:
        rule, first = now.rule, begun or now
        begin_ns = begun.wall_ns if begun is not None else None
        if now.wall_ns is not None and now.length_ns is not None:
            # More precise than the begin, which may be that of another one, or have whole seconds.
            begin_ns = now.wall_ns - now.length_ns
        place = now.place if now.place.node else first.place
        outcome, attrs = FAILED if rule.role == FAIL else OK, {**first.attrs, **now.attrs}
        if now.wall_ns is not None and self._findings.span(
            first.line, rule.stage, begin_ns, now.wall_ns, place=place, outcome=outcome, attrs=attrs
        ):
            return
        if rule.says:
            image = now.attrs.get("image")
            says = rule.says.format(**now.attrs)
            self._findings.fact(now.line, rule.stage, f"{image}: {says}" if image else says, now.length_ns)

    def finish(self) -> Findings:
        for now in self._took:
            if now.length_ns is None:
                continue
            # The program may have been started again: the nearest line is of the same run.
            at = self._at.get(now.rule.label, [])
            behind = bisect(at, (now.line.number,))
            near = [
                (abs(number - now.line.number), -wall_ns) for number, wall_ns in at[max(behind - 1, 0) : behind + 1]
            ]
            end_ns = -min(near)[1] if near else now.wall_ns
            self._end(None, now._replace(wall_ns=end_ns))
        self._record_first_step()
        for begun in self._open.values():
            if not begun.rule.seldom_ended:
                self._findings.span(
                    begun.line, begun.rule.stage, begun.wall_ns, None, place=begun.place, attrs=begun.attrs
                )
        return self._findings

    def _record_first_step(self) -> None:
        """Record the end of the first step.

        The first line may stand for a group of steps, all but the first of which are training: the next line shows how
        long a group takes.
        """
        if not self._steps:
            return
        (first, now), (later, then) = self._steps[0], self._steps[-1]
        end_ns, grown = now.wall_ns or 0, later - first
        if grown > 0 and then.wall_ns is not None:
            took_ns = max(then.wall_ns - end_ns, 0)
            one_ns = max(took_ns // grown if then.length_ns is None else then.length_ns, 1)
            steps = round(took_ns * min(grown, max(first, 1)) / grown / one_ns)
            end_ns -= max(steps - 1, 0) * one_ns
        self._findings.instant(now.line, now.rule.stage, end_ns, attrs={"by": BY_LOG})


class Site(TableParser):
    """Lines of a site's own programs, by a pattern for one stage, which serves as the clue."""

    done = False
    """Of lines that end the startup, only the first of a file counts."""

    def __init__(self, stage: str, pattern: re.Pattern[bytes]) -> None:
        super().__init__("pattern", ())
        self.pattern = pattern
        self._ends_startup = stage == "training_began"
        self._of_role = {role: Rule(role, stage, "") for role in (BEGIN, END, MARK)}
        self._of_role[TOOK] = Rule(TOOK, stage, "", says="a duration that --pattern found")

    def taken(self) -> list[Event]:
        """The events since the last call."""
        events = self._findings.events
        found, events[:] = events[:], []
        return found

    def feed(self, line: Line) -> None:
        if self.done:
            return
        if self._ends_startup:
            self.done = True
            if line.wall_ns is None:
                self._findings.fact(line, "training_began", "the line that ends the first step has no time", None)
            attrs = {"by": "pattern", "line": line.text[:200]}
            self._findings.instant(line, "training_began", line.wall_ns, attrs=attrs)
            return
        found = self.pattern.search(line.text.encode("utf-8", "replace"))
        if found is None:
            return
        groups = {name: found[name] for name in _SITE_GROUPS & self.pattern.groupindex.keys()}
        fields = {name: value.decode("utf-8", "replace") for name, value in groups.items() if value}
        role = TOOK if {"s", "ms"} & fields.keys() else next((role for role in (BEGIN, END) if role in fields), MARK)
        self._record(line, self._of_role[role], fields)


def _length(fields: Mapping[str, str]) -> int | None:
    if took := fields.get("took") or fields.get("pull"):
        return parse_duration(took)
    if "clock" in fields:
        hours, minutes, seconds = ("0:" + fields["clock"]).split(":")[-3:]
        return parse_duration(f"{hours}h{minutes}m{seconds}s")
    return _number(fields.get("s"), "s") if "s" in fields else _number(fields.get("ms"), "ms")


def _number(text: str | None, unit: str) -> int | None:
    return parse_duration(text + unit) if text and len(text) <= _MAX_NUMBER else None


def _attrs(fields: Mapping[str, str]) -> dict[str, Any]:
    attrs: dict[str, Any] = {}
    if image := make.image_reference(fields.get("image", "").replace("#", "/", 1)):
        attrs["image"] = image
    attrs |= {name: int(fields[name]) for name in _NUMBERS if name in fields}
    for group, name in (("machine", "host"), ("uid", "pod_uid")):
        if value := make.name(fields.get(group, "")):
            attrs[name] = value
    whole_ns, pull_ns = (parse_duration(fields.get(name, "")) for name in ("took", "pull"))
    if whole_ns is not None and pull_ns is not None and whole_ns > pull_ns:
        attrs["queued_s"] = (whole_ns - pull_ns) / 1e9
    if (fastest := _number(fields.get("fastest_ms"), "ms")) is not None:
        attrs["fastest_s"] = fastest / 1e9
    return attrs

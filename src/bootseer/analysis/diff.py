"""Compare two startups: what changed, which stage moved, and whether that is more than noise.

Startups on shared machines differ from run to run, and a fleet of a thousand nodes makes any difference "significant".
So a stage counts as moved only when the difference is large enough to matter (share and seconds) and a test agrees:
Mann-Whitney over the nodes, after Holm's correction for the number of stages, with eight nodes or more; with fewer the
bar is higher and Student's test on logarithms must agree. docs/adr/0004 has the reasons.

Sources: Mann and Whitney 1947 (normal approximation with ties), Holm 1979, Student 1908. Decides and touches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bootseer.analysis.model import WAIT, Report, plain
from bootseer.analysis.spans import TRUNCATED
from bootseer.analysis.timeline import enclosing
from bootseer.analysis.words import ENDS
from bootseer.trace.event import FAILED

SCHEMA = "bootseer.diff/1"
MIN_TESTED = 8
"""Nodes on each side from which on the rank test has power."""
_ALPHA = 0.01
_MIN_SHARE = 0.10
_MIN_S = 0.5
_FEW_SHARE = 0.60
_FEW_S = 2.0
_ONE_NODE_SHARE = 1.50
"""One node does not show how much nodes scatter."""
_LEAST_SCATTER = 0.03
_TINY_S = 0.01
_T_LIMITS = {
    2: 9.925,
    3: 5.841,
    4: 4.604,
    5: 4.032,
    6: 3.707,
    7: 3.499,
    8: 3.355,
    9: 3.250,
    10: 3.169,
    11: 3.106,
    12: 3.055,
    13: 3.012,
    14: 2.977,
}
"""Two-sided limits of Student's t at p = 0.01 by degrees of freedom, from the usual tables."""
_WHOLE_SHARE = 0.35
"""Of the whole startup, which is one number a side and cannot be tested."""

SLOWER = "slower"
FASTER = "faster"
SAME = "same"


@dataclass(frozen=True, slots=True)
class Limits:
    """From where on a difference counts."""

    min_share: float = _MIN_SHARE
    """Of the smaller median, so that half and double are equally far."""
    min_s: float = _MIN_S


@dataclass(frozen=True, slots=True)
class Moved:
    """One stage in A and in B; medians over the nodes, seconds of work."""

    stage: str
    a_s: float | None
    b_s: float | None
    delta_s: float | None
    share: float | None
    p: float | None
    """Of the rank test, after Holm's correction; None where there were too few nodes to test."""
    verdict: str


@dataclass(frozen=True, slots=True)
class Changed:
    """A fact that differs: version, digest, bytes, number of nodes."""

    fact: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Difference:
    """All that differs between two startups."""

    a: str
    b: str
    a_s: float
    b_s: float
    overall: Moved
    stages: list[Moved]
    changed: list[Changed]
    tested: bool
    verdict: str
    headlines: list[str] = field(default_factory=list)

    @property
    def slower(self) -> bool:
        """The startup as a whole, or one of its stages, got slower beyond noise."""
        return self.overall.verdict == SLOWER or any(stage.verdict == SLOWER for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for `json.dump`."""
        return {"schema": SCHEMA, "slower": self.slower, **plain(self)}


def compare(a: Report, b: Report, limits: Limits | None = None) -> Difference:
    """What moved from startup A to startup B."""
    limits = limits or Limits()
    before, after = _samples(a), _samples(b)
    num_nodes = min(len(a.nodes), len(b.nodes))
    tested = num_nodes >= MIN_TESTED
    names = _nested(dict.fromkeys([*before, *after]))
    raw = {name: mann_whitney_p(before.get(name, []), after.get(name, [])) for name in names} if tested else {}
    corrected = holm(raw)
    stages = [_moved(name, before.get(name, []), after.get(name, []), corrected.get(name), limits) for name in names]
    overall = _overall(a, b, limits, num_nodes)
    return Difference(
        a=_name(a),
        b=_name(b),
        a_s=_whole_s(a),
        b_s=_whole_s(b),
        overall=overall,
        stages=stages,
        changed=_changed(a, b),
        tested=tested,
        verdict=_verdict(a, b, overall, stages, tested),
        headlines=_headlines(a, b),
    )


def _name(report: Report) -> str:
    startup = report.startup
    return f"{startup.job} attempt {startup.attempt}" + (f" restart {startup.restart}" if startup.restart else "")


def _samples(report: Report) -> dict[str, list[float]]:
    """Seconds of work by stage, one value for each node that got through it whole."""
    samples: dict[str, list[float]] = {}
    for node in report.nodes:
        totals: dict[str, float] = {}
        broken: set[str] = set()
        for segment in node.segments:
            for name in enclosing(segment.stage):
                if segment.kind != WAIT:
                    totals[name] = totals.get(name, 0.0) + segment.end_s - segment.start_s
                if segment.outcome in (TRUNCATED, FAILED):
                    broken.add(name)
        for name, value in totals.items():
            if name not in broken:
                samples.setdefault(name, []).append(value)
    return samples


def _nested(names: Iterable[str]) -> list[str]:
    """The stages in their order, each behind the one that it is a part of, also those that one startup alone has."""
    place = {name: number for number, name in enumerate(names)}
    return sorted(place, key=lambda name: [place.get(outer, place[name]) for outer in enclosing(name)])


def _moved(stage: str, a: Sequence[float], b: Sequence[float], p: float | None, limits: Limits) -> Moved:
    if not a or not b:
        return Moved(stage, median(a) if a else None, median(b) if b else None, None, None, None, SAME)
    before, after = median(a), median(b)
    if p is not None:
        real = _large(before, after, limits.min_share, limits.min_s) and p < _ALPHA
    else:
        alone = min(len(a), len(b)) == 1
        least = max(limits.min_share, _ONE_NODE_SHARE if alone else _FEW_SHARE)
        real = _large(before, after, least, max(limits.min_s, _FEW_S)) and (alone or _apart(a, b))
    verdict = SAME if not real else SLOWER if after > before else FASTER
    return Moved(stage, before, after, after - before, (after - before) / before if before else None, p, verdict)


def _apart(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether a few nodes lie further apart than they scatter: Student's test on logarithms at p < 0.01."""
    logs = [[math.log(max(value, _TINY_S)) for value in side] for side in (a, b)]
    means = [sum(side) / len(side) for side in logs]
    freedom = len(a) + len(b) - 2
    squares = sum((value - mean) ** 2 for side, mean in zip(logs, means, strict=True) for value in side)
    # Two nodes that agree by chance do not prove that nodes never scatter.
    deviation = max(math.sqrt(squares / freedom), _LEAST_SCATTER)
    t = abs(means[0] - means[1]) / (deviation * math.sqrt(1 / len(a) + 1 / len(b)))
    return t > _T_LIMITS[min(freedom, max(_T_LIMITS))]


def _large(before: float, after: float, least_share: float, least_s: float) -> bool:
    delta = abs(after - before)
    return delta >= least_s and delta >= least_share * min(before, after)


def _whole_s(report: Report) -> float:
    return report.overhead.startup_s or 0.0


def _overall(a: Report, b: Report, limits: Limits, num_nodes: int) -> Moved:
    """The whole startup: one number a side, so that only its size can be judged."""
    before, after = _whole_s(a), _whole_s(b)
    delta = after - before
    share = delta / before if before else None
    verdict = SAME
    # One that ended before training took less time for no good reason.
    if all(report.startup.outcome == "training_began" for report in (a, b)):
        few = _ONE_NODE_SHARE if num_nodes == 1 else 1.0
        least = max(limits.min_share, _WHOLE_SHARE if num_nodes >= MIN_TESTED else few)
        if _large(before, after, least, max(limits.min_s, _FEW_S)):
            verdict = SLOWER if delta > 0 else FASTER
    return Moved("startup", before, after, delta, share, None, verdict)


def _changed(a: Report, b: Report) -> list[Changed]:
    found = []
    for fact in ("kind", "num_nodes", "num_gpus"):
        found_values = [getattr(report.startup, fact) for report in (a, b)]
        values = ["unobserved" if value is None else str(value) for value in found_values]
        if values[0] != values[1]:
            found.append(Changed(fact, *values))
    before, after = _facts(a), _facts(b)
    for fact in sorted(before.keys() | after.keys()):
        old, new = before.get(fact, "-"), after.get(fact, "-")
        if old != new:
            found.append(Changed(fact, old, new))
    names = [{node.node for node in report.nodes} for report in (a, b)]
    if names[0] != names[1]:
        found.append(Changed("nodes only on one side", str(len(names[0] - names[1])), str(len(names[1] - names[0]))))
    return found


def _facts(report: Report) -> dict[str, str]:
    """What the nodes say of versions, digests and sizes: the values, most common first."""
    values: dict[str, dict[str, int]] = {}
    for node in report.nodes:
        for fact, value in node.attrs.items():
            if fact.rpartition(".")[2] in ("exit_code", "error", "attempt"):
                continue
            counts = values.setdefault(fact, {})
            counts[str(value)] = counts.get(str(value), 0) + 1
    return {fact: _common(counts) for fact, counts in values.items()}


def _common(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts, key=lambda value: (-counts[value], value))
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")


def _verdict(a: Report, b: Report, overall: Moved, stages: Sequence[Moved], tested: bool) -> str:
    delta = overall.delta_s or 0.0
    short = [side for side, report in (("A", a), ("B", b)) if report.startup.outcome != "training_began"]
    moved = [stage for stage in stages if stage.verdict != SAME and "." not in stage.stage]
    moved = moved or [stage for stage in stages if stage.verdict != SAME]
    basis = "" if tested else " (few nodes: only large changes count)"
    if short:
        told = ", ".join(f"{stage.stage} {stage.delta_s:+.2f} s" for stage in _largest(moved)) or "none"
        who = " and ".join(short)
        return f"The whole cannot be compared, {who} did not reach training; stages moved beyond noise: {told}{basis}."
    if not moved:
        if overall.verdict == SAME:
            if not tested and abs(delta) >= _FEW_S:
                return f"B took {delta:+.2f} s against A; with so few nodes that may be noise."
            return f"No difference beyond noise: {delta:+.2f} s{basis}."
        return f"B is {overall.verdict} by {abs(delta):.2f} s, and no single stage explains it{basis}."
    told = ", ".join(f"{stage.stage} {stage.delta_s:+.2f} s" for stage in _largest(moved))
    return f"B took {delta:+.2f} s against A; moved beyond noise: {told}{basis}."


def _largest(moved: Sequence[Moved]) -> list[Moved]:
    return sorted(moved, key=lambda stage: -abs(stage.delta_s or 0.0))[:3]


def _headlines(a: Report, b: Report) -> list[str]:
    lines = []
    if a.startup.kind != b.startup.kind:
        lines.append(f"A is a {a.startup.kind} startup and B a {b.startup.kind} one: they have different stages.")
    for side, report in (("A", a), ("B", b)):
        if report.startup.outcome != "training_began":
            lines.append(f"{side} is {ENDS[report.startup.outcome]}: its stages after that are missing.")
        coverage = report.coverage
        if coverage.nodes_expected and coverage.nodes_heard < coverage.nodes_expected:
            lines.append(f"{side} covers {coverage.nodes_heard} of {coverage.nodes_expected} nodes.")
    return lines


def mann_whitney_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p of the rank-sum test by its normal approximation, ties and continuity corrected."""
    n, m = len(a), len(b)
    if not n or not m:
        return 1.0
    values = sorted([(value, 0) for value in a] + [(value, 1) for value in b])
    total = n + m
    rank_sum = ties = 0.0
    start = 0
    while start < total:
        end = start
        while end < total and values[end][0] == values[start][0]:
            end += 1
        count = end - start
        rank_sum += (start + end + 1) / 2 * sum(1 for _, side in values[start:end] if side == 0)
        ties += count**3 - count
        start = end
    u = rank_sum - n * (n + 1) / 2
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1))) if total > 1 else 0.0
    if variance <= 0:
        return 1.0
    z = max(abs(u - n * m / 2) - 0.5, 0.0) / math.sqrt(variance)
    return math.erfc(z / math.sqrt(2))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down correction for testing several stages at once."""
    ordered = sorted(p_values, key=lambda name: p_values[name])
    corrected: dict[str, float] = {}
    highest = 0.0
    for index, name in enumerate(ordered):
        highest = max(highest, min(p_values[name] * (len(ordered) - index), 1.0))
        corrected[name] = highest
    return corrected

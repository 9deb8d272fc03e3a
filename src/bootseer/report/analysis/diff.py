"""Compare two startups, or sets of them: what changed, in which stages, and whether that is more than noise.

Nodes of one run are not independent: the network, the registry or the storage at that time makes all of them faster or
slower together. So a difference counts if it is large enough to matter (share and seconds) and larger than the
variation between runs. With several runs on a side this variation is measured: Student's t on the logarithms of the
runs' medians. With one pair it is an assumption (`Limits.run_variation`), to which the scatter of the nodes is added,
and the nodes must differ as well (the same test). Holm's correction covers all stages and the whole. docs/adr/0004 has
the reasons.

Sources: Holm 1979, Student 1908 (pooled t), Berger 1982 (the larger p where two tests must agree).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist, median
from typing import Any, NamedTuple

from bootseer.report.analysis.stages import enclosing, times_of
from bootseer.report.analysis.verdict import ENDS
from bootseer.report.model import Report, plain
from bootseer.units import listed, plural

SCHEMA = "bootseer.diff/2"
MIN_TESTED = 8
"""Nodes needed on each side to show how much nodes vary."""
_ALPHA = 0.005
"""For all stages together. Real runs are not exactly log-normal, and at most 1 % of comparisons may be false alarms."""
_FEW_S = 2.0
_LEAST_SCATTER = 0.03
"""Smallest assumed deviation: two runs or nodes that happen to agree do not prove that they never differ."""
_TINY_S = 0.01
_MEDIANS_ERROR = math.sqrt(math.pi / 2)
"""Standard error of a median of many, in standard errors of the mean."""
# Assumed standard errors of a pair's difference (as logarithm) where its nodes cannot show them: with few nodes, with
# one, and for the whole startup, which the slowest node ends.
_FEW_NODES = 0.18
_ONE_NODE = 0.36
_WHOLE = {MIN_TESTED: 0.12, 2: 0.27, 1: _ONE_NODE}

_ALL = ""
"""Key of the whole startup among its stages; no stage has this name."""
_NOT_COMPARED = frozenset({"exit_code", "error", "attempt", "rack", "topology"})

SLOWER = "slower"
FASTER = "faster"
SAME = "same"
UNPROVEN = "unproven"
"""The nodes of a pair differ, but not by more than the assumed variation between runs."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The smallest difference that counts."""

    min_share: float = 0.10
    """Relative to the smaller median, so that half and double are equally large changes."""
    min_s: float = 0.5
    run_variation: float = 0.15
    """Relative standard deviation between runs, assumed for one pair; with several runs it is measured."""


@dataclass(frozen=True, slots=True)
class StageChange:
    """One stage in A and B, seconds of work: the median over the nodes; for several runs the median of the medians."""

    stage: str
    a_s: float | None
    b_s: float | None
    delta_s: float | None
    share: float | None
    p: float | None
    """After Holm's correction; None if there is nothing to compare."""
    verdict: str
    a_range_s: tuple[float, float] | None = None
    """Smallest and largest of A's runs; None if A is one run."""


class _Judged(NamedTuple):
    """The evidence for a difference. `nodes_p` ignores the variation between runs; with several runs it equals `p`."""

    large: bool
    p: float
    nodes_p: float


@dataclass(frozen=True, slots=True)
class FactChange:
    """A fact that differs: version, digest, bytes, number of nodes."""

    fact: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences between two startups, or sets of them."""

    a: str
    b: str
    a_runs: int
    b_runs: int
    run_variation: float
    """Relative standard deviation between runs: assumed for one pair, else measured."""
    a_s: float
    b_s: float
    overall: StageChange
    stages: list[StageChange]
    changed: list[FactChange]
    tested: bool
    verdict: str
    headlines: list[str] = field(default_factory=list)

    @property
    def slower(self) -> bool:
        """Whether the startup or one of its stages is slower beyond noise."""
        return self.overall.verdict == SLOWER or any(stage.verdict == SLOWER for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for `json.dump`."""
        return {"schema": SCHEMA, "slower": self.slower, **plain(self)}


def compare(a: Sequence[Report], b: Sequence[Report], limits: Limits | None = None) -> Difference:
    """What changed from the startups A to the startups B, at least one each."""
    limits = limits or Limits()
    known = {_identity(report) for report in b}
    others = list({_identity(report): report for report in a if _identity(report) not in known}.values()) or a
    sides = _usable(others), _usable(b)
    a_runs, b_runs = map(len, sides)
    several = a_runs + b_runs > 2
    reached = [side[0].startup.outcome == "training_began" for side in sides]
    values = [[_samples(report) for report in side] for side in sides]
    names = _nested(dict.fromkeys(name for runs in values for run in runs for name in run))
    found = {name: tuple([run[name] for run in runs if name in run] for runs in values) for name in names}
    found[_ALL] = tuple([[_whole_s(report)] for report in side] for side in sides)
    num_nodes = min(len(report.nodes) for side in sides for report in side)
    judged = {}
    for name, (before, after) in found.items():
        # A startup that ended before training is shorter, but not faster.
        if not before or not after or (name == _ALL and not all(reached)):
            continue
        if len(before) + len(after) > 2:
            a_s, b_s = list(map(median, before)), list(map(median, after))
            p = _student(a_s, b_s)[0]
            judged[name] = _Judged(_large(median(a_s), median(b_s), limits, raised=name == _ALL), p, p)
        elif not several:
            judged[name] = _judged_pair(before[0], after[0], limits, num_nodes if name == _ALL else 0)
    proven = holm({name: one.p for name, one in judged.items()})
    seen = holm({name: one.nodes_p for name, one in judged.items()})
    changes = {}
    for name, (before, after) in found.items():
        verdict = SAME
        if name in judged and judged[name].large and seen[name] < _ALPHA:
            verdict = SLOWER if proven[name] < _ALPHA else UNPROVEN
        changes[name] = _stage_change(name, before, after, proven.get(name), verdict)
    overall = replace(changes.pop(_ALL), stage="startup")
    wholes = [[_whole_s(report) for report in side] for side in sides]
    difference = Difference(
        a=_name(sides[0]),
        b=_name(sides[1]),
        a_runs=a_runs,
        b_runs=b_runs,
        run_variation=_student(*wholes)[1] if several else limits.run_variation,
        a_s=overall.a_s or 0.0,
        b_s=overall.b_s or 0.0,
        overall=overall,
        stages=list(changes.values()),
        changed=_fact_changes(*sides),
        tested=several or num_nodes >= MIN_TESTED,
        verdict="",
        headlines=_headlines(("A", a, sides[0]), ("B", b, sides[1])),
    )
    return replace(difference, verdict=_verdict(difference, reached, len(judged)))


def _identity(report: Report) -> tuple[str, int, int, int]:
    startup = report.startup
    return startup.job, startup.attempt, startup.restart, startup.zero_ns


def _usable(side: Sequence[Report]) -> Sequence[Report]:
    """The runs that reached training; all if none did."""
    return [report for report in side if report.startup.outcome == "training_began"] or side


def _judged_pair(a: Sequence[float], b: Sequence[float], limits: Limits, whole_of: int) -> _Judged:
    """Compare one run with another by their nodes. `whole_of`: number of nodes for the startup as a whole, else 0."""
    before, after, few = median(a), median(b), min(len(a), len(b))
    nodes_p = 0.0
    if whole_of:
        error = next(error for least, error in _WHOLE.items() if whole_of >= least)
    elif few == 1:
        error = _ONE_NODE
    else:
        nodes_p, deviation = _student(a, b)
        error = max(deviation, _LEAST_SCATTER) * math.sqrt(1 / len(a) + 1 / len(b)) * _MEDIANS_ERROR
        error = error if few >= MIN_TESTED else max(error, _FEW_NODES)
    change = abs(math.log(max(after, _TINY_S) / max(before, _TINY_S)))
    by_nodes, by_runs = (
        2 * NormalDist().cdf(-change / math.hypot(error, math.sqrt(2) * variation))
        for variation in (0.0, limits.run_variation)
    )
    if few >= MIN_TESTED:
        by_nodes = student_p(change / error, len(a) + len(b) - 2)
    by_nodes = by_nodes if nodes_p < _ALPHA else 1.0
    large = _large(before, after, limits, raised=bool(whole_of) or few < MIN_TESTED)
    return _Judged(large, max(by_nodes, by_runs), by_nodes)


def _large(before: float, after: float, limits: Limits, *, raised: bool) -> bool:
    delta = abs(after - before)
    return delta >= max(limits.min_s, _FEW_S if raised else 0.0) and delta >= limits.min_share * min(before, after)


def _student(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Student's test on logarithms with a pooled deviation: the two-sided p, and the deviation.

    A single value on a side does not contribute to the deviation: it is compared with the prediction interval of the
    other side.
    """
    logs = [[math.log(max(value, _TINY_S)) for value in side] for side in (a, b)]
    means = [sum(side) / len(side) for side in logs]
    freedom = len(a) + len(b) - 2
    squares = sum((value - mean) ** 2 for side, mean in zip(logs, means, strict=True) for value in side)
    deviation = math.sqrt(squares / freedom)
    error = max(deviation, _LEAST_SCATTER) * math.sqrt(1 / len(a) + 1 / len(b))
    return student_p((means[0] - means[1]) / error, freedom), deviation


def _name(side: Sequence[Report]) -> str:
    startup = side[0].startup
    if len(side) == 1:
        return f"{startup.job} attempt {startup.attempt}" + (f" restart {startup.restart}" if startup.restart else "")
    attempts = [report.startup.attempt for report in side]
    same = {report.startup.job for report in side} == {startup.job} and len(set(attempts)) == len(attempts)
    return f"{startup.job} attempts {min(attempts)} to {max(attempts)}" if same else f"{startup.job} and others"


def _samples(report: Report) -> dict[str, list[float]]:
    """Seconds of work by stage, one value for each node that completed it."""
    by_stage = times_of(report.nodes)
    found = {name: [one.work_s for one in by_stage[name].values() if one.work_s and one.is_whole] for name in by_stage}
    return {name: samples for name, samples in found.items() if samples}


def _nested(names: Iterable[str]) -> list[str]:
    """The stages in order, each after the stage that contains it, including those of only one startup."""
    place = {name: number for number, name in enumerate(names)}
    return sorted(place, key=lambda name: [place.get(outer, place[name]) for outer in enclosing(name)])


def _stage_change(
    stage: str, a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], p: float | None, verdict: str
) -> StageChange:
    runs = [median(run) for run in a]
    before, after = median(runs) if a else None, median(map(median, b)) if b else None
    spread = (min(runs), max(runs)) if len(runs) > 1 else None
    if before is None or after is None:
        return StageChange(stage, before, after, None, None, None, SAME, spread)
    if verdict == SLOWER and after < before:
        verdict = FASTER
    return StageChange(
        stage, before, after, after - before, (after - before) / before if before else None, p, verdict, spread
    )


def _whole_s(report: Report) -> float:
    """Without the wait for the scheduler, for which the job is not responsible."""
    queued_s = sum(one.end_s - one.start_s for one in report.scheduler if one.stage == "queue")
    return max((report.overhead.startup_s or 0.0) - queued_s, 0.0)


def _fact_changes(a: Sequence[Report], b: Sequence[Report]) -> list[FactChange]:
    found = []
    before, after = _facts(a), _facts(b)
    for fact in dict.fromkeys(["kind", "num_nodes", "num_gpus", *sorted(before.keys() | after.keys())]):
        old, new = before.get(fact, {"-": 1}), after.get(fact, {"-": 1})
        # A value that one of several runs of A also had is not a change.
        if old.keys() != new.keys() if len(a) == 1 else not new.keys() <= old.keys():
            found.append(FactChange(fact, _common(old), _common(new)))
    names = [{node.node for report in side for node in report.nodes} for side in (a, b)]
    if names[0] != names[1] if len(a) == 1 else not names[1] <= names[0]:
        found.append(FactChange("nodes only on one side", str(len(names[0] - names[1])), str(len(names[1] - names[0]))))
    return found


def _facts(side: Sequence[Report]) -> dict[str, dict[str, int]]:
    """Sizes, versions and digests of the runs and their nodes: how often each value occurs."""
    values: dict[str, dict[str, int]] = {}
    for report in side:
        startup = report.startup
        facts: list[tuple[str, object]] = [("kind", startup.kind), ("num_nodes", startup.num_nodes)]
        facts.append(("num_gpus", "unobserved" if startup.num_gpus is None else startup.num_gpus))
        facts += [fact for node in report.nodes for fact in node.attrs.items()]
        for fact, value in facts:
            if fact.rpartition(".")[2] not in _NOT_COMPARED:
                counts = values.setdefault(fact, {})
                counts[str(value)] = counts.get(str(value), 0) + 1
    return values


def _common(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts, key=lambda value: (-counts[value], value))
    return listed(ordered)


def _verdict(difference: Difference, reached: Sequence[bool], num_tests: int) -> str:
    """In words: what changed, and on what evidence."""
    provable = _provable((difference.a_runs, difference.b_runs), difference.run_variation, num_tests)
    chance = f"by {difference.run_variation:.0%}; a factor below {provable:.3g} may be chance"
    if difference.a_runs + difference.b_runs > 2:
        runs = f"{plural(difference.a_runs, 'run')} against {difference.b_runs}"
        noise, basis = "the variation between runs", f" ({runs}; runs vary {chance})"
    else:
        few = "" if difference.tested else "few nodes, so only large changes count; "
        noise, basis = "noise", f" ({few}runs are assumed to vary {chance})"
    overall, changes = difference.overall, _names_of(difference.stages, SLOWER, FASTER)
    took = f"B took {overall.delta_s or 0.0:+.2f} s compared with A"
    if not all(reached):
        sides = " and ".join(side for side, there in zip("AB", reached, strict=True) if not there)
        whole = f"The whole startup cannot be compared, because {sides} did not reach training"
        return f"{whole}; stages changed beyond {noise}: {changes or 'none'}{basis}."
    if changes:
        return f"{took}; changed beyond {noise}: {changes}{basis}."
    if overall.verdict in (SLOWER, FASTER):
        return f"B is {overall.verdict} by {abs(overall.delta_s or 0.0):.2f} s, but no single stage explains it{basis}."
    unproven = _names_of(difference.stages, UNPROVEN) or _names_of([overall], UNPROVEN)
    if unproven:
        more = "several runs (--baseline) may"
        return f"{took} ({unproven} on its nodes). One pair does not prove a change of this size{basis}; {more}."
    return f"No difference beyond {noise}: {overall.delta_s or 0.0:+.2f} s{basis}."


def _provable(runs: tuple[int, int], spread: float, num_tests: int) -> float:
    """The smallest factor between A and B that these numbers of runs can prove, at most 100."""
    alpha = _ALPHA / max(num_tests, 1)
    least = NormalDist().inv_cdf(1 - alpha / 2)
    if freedom := sum(runs) - 2:
        spread = max(spread, _LEAST_SCATTER)
        below, least = least, 1e6
        for _ in range(60):  # bisection for the limit of t
            middle = (below + least) / 2
            below, least = (middle, least) if student_p(middle, freedom) > alpha else (below, middle)
    return math.exp(min(least * spread * math.sqrt(1 / runs[0] + 1 / runs[1]), math.log(100)))


def _names_of(stages: Sequence[StageChange], *verdicts: str) -> str:
    """The largest changes with such a verdict, sub-stages only if there are no top-level ones; may be empty."""
    found = [stage for stage in stages if stage.verdict in verdicts]
    found = [stage for stage in found if "." not in stage.stage] or found
    found.sort(key=lambda stage: -abs(stage.delta_s or 0.0))
    return ", ".join(f"{stage.stage} {stage.delta_s:+.2f} s" for stage in found[:3])


def _headlines(*sides: tuple[str, Sequence[Report], Sequence[Report]]) -> list[str]:
    """Warnings, from (side, the runs given, the runs compared)."""
    lines = []
    kinds = [" and ".join(sorted({report.startup.kind for report in used})) for _, _, used in sides]
    if kinds[0] != kinds[1]:
        lines.append(f"A is a {kinds[0]} startup and B a {kinds[1]} one: they have different stages.")
    for side, given, used in sides:
        if len(used) < len(given):
            lines.append(
                f"{len(given) - len(used)} of {side}'s {len(given)} runs are ignored: they did not reach training, "
                "were given twice or are B itself."
            )
        if used[0].startup.outcome != "training_began":
            lines.append(f"{side} is {ENDS[used[0].startup.outcome]}: its stages after that are missing.")
        for report in used:
            coverage = report.coverage
            if coverage.nodes_expected and coverage.nodes_heard < coverage.nodes_expected:
                which = side if len(used) == 1 else f"{side}'s attempt {report.startup.attempt}"
                lines.append(f"{which} covers {coverage.nodes_heard} of {coverage.nodes_expected} nodes.")
    return lines


def student_p(t: float, freedom: int) -> float:
    """Two-sided p of Student's t, exact for whole degrees of freedom (Abramowitz and Stegun 1964, 26.7.3 and 4)."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = 1.0 if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    inside = 2 / math.pi * (angle + sine * cosine * total) if odd else sine * total
    return min(max(1 - inside, 0.0), 1.0)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down correction for testing several stages at once."""
    ordered = sorted(p_values, key=lambda name: p_values[name])
    corrected: dict[str, float] = {}
    highest = 0.0
    for index, name in enumerate(ordered):
        highest = max(highest, min(p_values[name] * (len(ordered) - index), 1.0))
        corrected[name] = highest
    return corrected

"""How often `bootseer diff` raises a false alarm, and how often it detects a slower stage.

Nodes vary between each other and between runs by the jitter, drawn from a uniform distribution and from a log-normal
one, because real startups have a long tail. Whole runs vary by a common factor for all stages of all nodes: none,
uniform within 15 %, or log-normal with a sigma of 15 %. B is compared with one other run (a pair) and with ten
(`--baseline`) from the same distribution; or B's install takes 1.2 times or twice as long. A comparison with one alarm
anywhere is a false alarm.
"""

from __future__ import annotations

import random
from itertools import product
from typing import NamedTuple

from harness import Benchmark, Must, Outcome

from bootseer.report.analysis.compose import analyse
from bootseer.report.analysis.diff import MIN_TESTED, SAME, SLOWER, UNPROVEN, Difference, Limits, compare
from bootseer.report.analysis.prepare import Options
from bootseer.report.model import Report
from fleet import BARRIERS, DEFAULT_WORK, INSTALL, Fleet

_STARTUPS = {1: 1000, 2: 1000, 8: 500, 64: 200}
_SLOW_STARTUPS = 100
_BASELINES = {"a pair": 1, "ten runs": 10}
_SLOWDOWNS = (1.2, 2.0)
_LIMIT = 0.01
_RUNS_VARY = 0.15


class _Cell(NamedTuple):
    """The distribution of the startups of one cell."""

    nodes: int
    jitter: float
    shape: str
    runs: str

    def __str__(self) -> str:
        vary = "alike" if self.runs == "alike" else f"{self.runs} {_RUNS_VARY:.0%}"
        return f"{self.nodes} nodes, {self.shape} jitter {self.jitter:.0%}, runs {vary}"


_CELLS = [_Cell(*cell, "alike") for cell in product(_STARTUPS, (0.05, 0.20), ("even", "lognormal"))] + [
    _Cell(nodes, *nodes_vary, runs)
    for nodes, nodes_vary, runs in product(_STARTUPS, ((0.05, "even"), (0.20, "lognormal")), ("even", "lognormal"))
]


def measure(quick: bool) -> Outcome:
    cells: dict[str, dict[str, float | int]] = {}
    for cell in _CELLS:
        count = _STARTUPS[cell.nodes] // (10 if quick else 1)
        rng = random.Random(str(cell))
        startups = [_report(cell, rng, number) for number in range(count)]
        slow = {x: [_report(cell, rng, count + n, x) for n in range(min(_SLOW_STARTUPS, count))] for x in _SLOWDOWNS}
        found: dict[str, float | int] = {"comparisons": count}
        for name, runs in _BASELINES.items():
            equal = [compare(_others(startups, b, runs, rng), [b]) for b in startups]
            found[f"false_alarms, {name}"] = sum(map(_alarms, equal)) / count
            for slowdown, reports in slow.items():
                seen = sum(_sees(compare(_others(startups, b, runs, rng), [b])) for b in reports)
                found[f"seen_{slowdown:g}x, {name}"] = seen / len(reports)
        cells[str(cell)] = found
    kinds = [key for key in next(iter(cells.values())) if key != "comparisons"]
    return Outcome(
        parameters={
            "cells": [cell._asdict() for cell in _CELLS],
            "runs_vary": _RUNS_VARY,
            "assumed_run_variation": Limits().run_variation,
            "tested_from_nodes": MIN_TESTED,
        },
        samples={kind.replace("_", " "): [float(found[kind]) for found in cells.values()] for kind in kinds},
        unit="share of comparisons, over the cells",
        must_reach=[
            Must(f"false alarms, {name}, {cell}", float(found[f"false_alarms, {name}"]), _LIMIT, "of comparisons")
            for cell, found in cells.items()
            for name in _BASELINES
        ],
        details={"cells": cells},
    )


def _others(startups: list[Report], b: Report, runs: int, rng: random.Random) -> list[Report]:
    return [report for report in rng.sample(startups, runs + 1) if report is not b][:runs]


def _alarms(difference: Difference) -> bool:
    return any(moved.verdict not in (SAME, UNPROVEN) for moved in (difference.overall, *difference.stages))


def _sees(difference: Difference) -> bool:
    return any(moved.verdict == SLOWER and moved.stage == INSTALL for moved in difference.stages)


def _report(cell: _Cell, rng: random.Random, number: int, slow: float = 1.0) -> Report:
    """The report of one startup with new random durations for each node and stage."""

    def drawn(shape: str, spread: float) -> float:
        return 1 + rng.uniform(-spread, spread) if shape == "even" else rng.lognormvariate(0, spread)

    of_run = 1.0 if cell.runs == "alike" else drawn(cell.runs, _RUNS_VARY)
    work = {
        (node, stage): base_s * of_run * drawn(cell.shape, cell.jitter) * (slow if stage == INSTALL else 1.0)
        for node, (stage, base_s, _) in product(range(cell.nodes), DEFAULT_WORK)
        if stage not in BARRIERS
    }
    return analyse(Fleet(cell.nodes, work_of=work, attempt=number, begin_s=number % 1000).events(), Options())


BENCHMARK = Benchmark("diff_noise", "How often does `bootseer diff` raise false alarms and detect changes?", measure)

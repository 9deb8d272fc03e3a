"""How often `bootseer diff` cries wolf over two startups of the same kind, and how often it sees a slower stage.

Nodes differ from each other and from run to run by the jitter: drawn evenly within it, and drawn log-normal with it as
sigma, because real startups have a long tail. A pair comes from one distribution, or B's install is 20 % slower (twice
as slow, where few nodes raise the bar). One alarm anywhere in a comparison makes it a false one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from harness import Benchmark, Must, Outcome

from bootseer.analysis.diff import MIN_TESTED, SAME, SLOWER, compare
from bootseer.analysis.model import Report
from bootseer.analysis.prepare import Options
from bootseer.analysis.report import analyse
from fleet import BARRIERS, DEFAULT_WORK, INSTALL, Fleet

_SEEDS = {1: 1000, 2: 1000, 8: 600, 64: 200}
_JITTERS = (0.05, 0.20)
_SHAPES = ("even", "lognormal")
_SLOWDOWNS = (1.2, 2.0)
_LIMIT = 0.01


def measure(quick: bool) -> Outcome:
    cells: dict[str, dict[str, float | int]] = {}
    samples: dict[str, list[float]] = {"false alarms": [], **{f"seen, {slow:g}x": [] for slow in _SLOWDOWNS}}
    for (nodes, seeds), jitter, shape in product(_SEEDS.items(), _JITTERS, _SHAPES):
        pairs = seeds // 10 if quick else seeds
        alarms = 0
        seen = dict.fromkeys(_SLOWDOWNS, 0)
        for seed in range(pairs):
            draws = _draws(seed)
            a = _report(nodes, jitter, shape, next(draws))
            same = compare(a, _report(nodes, jitter, shape, next(draws)))
            alarms += any(moved.verdict != SAME for moved in (same.overall, *same.stages))
            for slow in _SLOWDOWNS:
                other = compare(a, _report(nodes, jitter, shape, next(draws), slow))
                seen[slow] += any(moved.verdict == SLOWER and moved.stage == INSTALL for moved in other.stages)
        samples["false alarms"].append(alarms / pairs)
        for slow, count in seen.items():
            samples[f"seen, {slow:g}x"].append(count / pairs)
        cells[f"{nodes} nodes, {shape} jitter {jitter:.0%}"] = {
            "pairs": pairs,
            "false_alarms": alarms / pairs,
            **{f"seen_{slow:g}x": count / pairs for slow, count in seen.items()},
        }
    return Outcome(
        parameters={"nodes": list(_SEEDS), "jitters": _JITTERS, "shapes": _SHAPES, "tested_from_nodes": MIN_TESTED},
        samples=samples,
        unit="share of comparisons, over the cells",
        must_reach=[
            Must(f"false alarms, {cell}", float(found["false_alarms"]), _LIMIT, "of comparisons")
            for cell, found in cells.items()
        ],
        details={"cells": cells},
    )


def _draws(seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield rng.getrandbits(32)


def _report(nodes: int, jitter: float, shape: str, seed: int, slow: float = 1.0) -> Report:
    """The report of one startup in which each node's work of each stage is drawn anew."""
    rng = random.Random(seed)
    work = {}
    for node, (stage, base_s, _) in product(range(nodes), DEFAULT_WORK):
        factor = 1 + rng.uniform(-jitter, jitter) if shape == "even" else rng.lognormvariate(0, jitter)
        if stage not in BARRIERS:
            work[node, stage] = base_s * factor * (slow if stage == INSTALL else 1.0)
    return analyse(Fleet(nodes, work_of=work, begin_s=seed % 1000).events(), Options())


BENCHMARK = Benchmark("diff_noise", "How often does `bootseer diff` see what is not there, and what is?", measure)

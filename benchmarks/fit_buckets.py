"""Fit the scenario `buckets` to the paper's medians of small jobs, and predict those of large ones.

The medians of simulated starts on 1 to 88 nodes are fitted; those on 177 to 625 are predicted. Prints all fits, because
four numbers do not decide between them: by relative errors (the shipped scenario), the same with a fixed waiting time
of jobs above 100 GPUs, and by errors in seconds.

    python benchmarks/fit_buckets.py > docs/simulated/buckets.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from math import log
from statistics import median

import numpy as np

from bootseer.sim.job_start import simulate
from bootseer.sim.scenario import read_scenario

PAPER_S = {1: 44, 4: 127, 28: 334, 88: 314, 177: 409, 306: 431, 625: 501}
FITTED = (1, 4, 28, 88)
SEEDS = 25
STEPS = 12
Numbers = Sequence[float]


def changes(install_s: float, sigma: float) -> list[str]:
    return [f"environment.install-s={install_s:.6g}", f"noise.sigma={sigma:.6g}"]


def starts_s(numbers: Numbers, num_nodes: int) -> list[float]:
    """Medians of all seeds. The third number: how long jobs on more than 100 GPUs wait before they start."""
    waits_s = numbers[2] if len(numbers) > 2 and num_nodes * 8 > 100 else 0.0
    scenario = read_scenario("buckets", changes(*numbers[:2]))
    return [simulate(scenario, num_nodes, "today", seed).began_s + waits_s for seed in range(SEEDS)]


def fit(numbers: list[float], scale: Callable[[float], float]) -> list[float]:
    """Damped Gauss-Newton with finite differences."""

    def errors(numbers: Numbers) -> np.ndarray:
        return np.array([scale(median(starts_s(numbers, nodes))) - scale(PAPER_S[nodes]) for nodes in FITTED])

    here = errors(numbers)
    for _ in range(STEPS):
        slopes = []
        for at, number in enumerate(numbers):
            moved = [*numbers[:at], number * 1.02, *numbers[at + 1 :]]
            slopes.append((errors(moved) - here) / (number * 0.02))
        step = np.linalg.lstsq(np.array(slopes).T, -here, rcond=None)[0]
        for part in (1.0, 0.5, 0.25, 0.1):
            tried = [max(number + part * float(by), 0.01) for number, by in zip(numbers, step, strict=True)]
            if float(np.sum((there := errors(tried)) ** 2)) < float(np.sum(here**2)) * (1 - 1e-6):
                numbers, here = tried, there
                break
        else:
            break
    return numbers


def main() -> None:
    fits = {
        "relative errors": fit([43.0, 0.9], log),
        "relative errors, a wait above 100 GPUs": fit([44.0, 0.8, 70.0], log),
        "errors in seconds": fit([70.0, 0.66], lambda seconds: seconds),
    }
    rows = []
    for name, numbers in fits.items():
        simulated = {nodes: starts_s(numbers, nodes) for nodes in PAPER_S}
        off = {nodes: median(several) / PAPER_S[nodes] - 1 for nodes, several in simulated.items()}
        rows.append({
            "fit": name, "install_s": round(numbers[0], 1), "sigma": round(numbers[1], 3),
            "waits_s": round(numbers[2], 1) if len(numbers) > 2 else 0.0,
            "startup_s": {nodes: [round(one, 1) for one in sorted(several)] for nodes, several in simulated.items()},
            "off": {nodes: round(value, 3) for nodes, value in off.items()},
            "within_20_percent": [nodes for nodes in PAPER_S if nodes not in FITTED and abs(off[nodes]) <= 0.2],
        })  # fmt: skip
    document = {"simulated": True, "scenario": "buckets", "parameters": read_scenario("buckets").digest,
                "paper_s": PAPER_S, "fitted": FITTED, "seeds": SEEDS, "fits": rows}  # fmt: skip
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

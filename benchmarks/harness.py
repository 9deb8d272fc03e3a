"""Shared by all benchmarks: alternating runs, child processes with their costs, and the result file.

A benchmark is a module with a `BENCHMARK` value; `run.py` calls its `measure` and writes the result. Arms (BootSeer,
and what users would run instead) alternate within a round, and their order is reversed from round to round, so that
other load on the machine affects all of them. The first round is discarded, so caches are warm. Results name the kind
of machine, but not its name or paths.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

from facts import facts

import bootseer

T = TypeVar("T")

SCHEMA = "bootseer.benchmark/1"
ROOT = Path(__file__).absolute().parents[1]
RESULTS = Path(__file__).absolute().parent / "results"
METHOD = (
    "arms alternate in each round, in reverse order in every other round; caches are warm; one round is discarded; "
    "other programs may use the machine, so use the median and compare it with the best (min)"
)


@dataclass(frozen=True, slots=True)
class Must:
    """A goal for one figure."""

    what: str
    value: float
    limit: float
    unit: str
    at_least: bool = False
    """The figure must not fall below the limit; otherwise it must not rise above it."""

    @property
    def reached(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(slots=True)
class Outcome:
    """The result of a benchmark. Samples are a list for each arm, in the order of the rounds."""

    parameters: Mapping[str, Any]
    samples: Mapping[str, Sequence[float]]
    unit: str
    baselines: Mapping[str, str] = field(default_factory=dict)
    """By arm, the arm with which it is compared, round by round."""
    must_reach: Sequence[Must] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    """Other figures: profiles, CPU time, peak memory."""
    method: str = METHOD
    """The method, if it differs from the usual one."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One question and its measurement."""

    name: str
    question: str
    measure: Callable[[bool], Outcome] | None = None
    """The argument is whether to be quick, with fewer rounds or smaller input."""
    by_rounds: Callable[[bool, int | None], Iterator[Outcome]] | None = None
    """Instead of `measure`, if a round takes minutes. The second argument is the number of rounds, or None. Yields the
    result so far after each round, so an interrupted run keeps its rounds."""


class Left:
    """The remaining time: the expected one, corrected by the rounds so far."""

    def __init__(self, expected_s: Sequence[float]) -> None:
        self._expected_s = list(expected_s)
        self._made = 0
        self._took_s = 0.0
        self._began_s = time.monotonic()

    def made_one(self) -> None:
        self._made += 1
        self._took_s = time.monotonic() - self._began_s

    def __str__(self) -> str:
        left_s = sum(self._expected_s[self._made :])
        if self._made:
            left_s *= self._took_s / sum(self._expected_s[: self._made])
        return f"round {self._made + 1} of {len(self._expected_s)}, about {left_s / 60:.0f} min are left"


class Cost(NamedTuple):
    """The costs of one child process."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    """At least the size of the benchmark itself when it started the child: the kernel counts that too."""


def spawn(command: Sequence[str], env: Mapping[str, str] | None = None, exit_codes: Sequence[int] = (0,)) -> Cost:
    """Run a program and discard its output. Raises `RuntimeError` for another exit code."""
    devnull = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    start = time.perf_counter()
    pid = os.posix_spawnp(command[0], list(command), dict(os.environ if env is None else env), file_actions=devnull)
    _, status, used = os.wait4(pid, 0)
    wall_s = time.perf_counter() - start
    code = os.waitstatus_to_exitcode(status)
    if code not in exit_codes:
        raise RuntimeError(f"{Path(command[0]).name} ended with exit code {code}")
    return Cost(wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call, and seconds of processor time of this process."""
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    run()
    return time.monotonic() - began_s, time.process_time() - began_cpu_s


def alternate(arms: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run each arm once per round, in alternating order. The first round is discarded."""
    results: dict[str, list[T]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(-1, rounds):
        for name in names if number % 2 else reversed(names):
            result = arms[name]()
            if number >= 0:
                results[name].append(result)
    return results


def wall_ms(costs: Mapping[str, Sequence[Cost]]) -> dict[str, list[float]]:
    """Durations of children in milliseconds."""
    return {name: [cost.wall_s * 1e3 for cost in of_arm] for name, of_arm in costs.items()}


def differences(samples: Mapping[str, Sequence[float]], arm: str, baseline: str) -> list[float]:
    """Arm minus baseline, round by round."""
    return [a - b for a, b in zip(samples[arm], samples[baseline], strict=True)]


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def run(benchmark: Benchmark, quick: bool, rounds: int | None = None) -> dict[str, Any]:
    """Measure, and write the result file. Raises `ValueError` for a number of rounds if the benchmark has none."""
    load_before, git = os.getloadavg()[0], _git()
    result: dict[str, Any] = {}
    for outcome in _outcomes(benchmark, quick, rounds):
        result = _result(benchmark, outcome, quick, load_before, git)
        # A quick run must not replace a measurement.
        _write(RESULTS / ("quick" if quick else "") / f"{benchmark.name}.json", result)
    return result


def _outcomes(benchmark: Benchmark, quick: bool, rounds: int | None) -> Iterator[Outcome]:
    if benchmark.by_rounds is not None:
        yield from benchmark.by_rounds(quick, rounds)
    elif benchmark.measure is not None and rounds is None:
        yield benchmark.measure(quick)
    else:
        raise ValueError(f"{benchmark.name} makes the rounds that it needs; their number cannot be given")


def _result(
    benchmark: Benchmark, outcome: Outcome, quick: bool, load_before: float, git: Mapping[str, Any] | None
) -> dict[str, Any]:
    against = {
        arm: {
            "baseline": baseline,
            "difference": summary(differences(outcome.samples, arm, baseline)),
            "difference_of_best": min(outcome.samples[arm]) - min(outcome.samples[baseline]),
            "ratio_of_medians": median(outcome.samples[arm]) / median(outcome.samples[baseline]),
        }
        for arm, baseline in outcome.baselines.items()
    }
    return {
        "schema": SCHEMA,
        "name": benchmark.name,
        "question": benchmark.question,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "bootseer": bootseer.__version__,
        "git": git,
        "machine": facts(),
        "load_average": [load_before, os.getloadavg()[0]],
        "quick": quick,
        "method": outcome.method,
        "parameters": outcome.parameters,
        "unit": outcome.unit,
        "samples": outcome.samples,
        "summary": {arm: summary(values) for arm, values in outcome.samples.items()},
        "against": against,
        "details": outcome.details,
        "must_reach": [
            {
                "what": must.what,
                "value": must.value,
                "limit": must.limit,
                "unit": must.unit,
                "rule": "at least" if must.at_least else "at most",
                "reached": must.reached,
            }
            for must in outcome.must_reach
        ],
    }


def _write(path: Path, result: Mapping[str, Any]) -> None:
    """Atomically: a run may be interrupted at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(_rounded(result), indent=1, ensure_ascii=False) + "\n")
    new.replace(path)


def _rounded(value: Any) -> Any:
    """With six significant digits, more than any clock here justifies."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value


def _git() -> dict[str, Any] | None:
    """The commit, and whether src differs from it; None outside of a checkout."""
    try:
        words = ["git", "-C", str(ROOT), "--no-optional-locks"]
        commit = subprocess.run([*words, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*words, "status", "--porcelain", "--", "src"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit.stdout.strip(), "src_changed": bool(changed.stdout.strip())}

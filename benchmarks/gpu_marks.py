"""How much the hook's marks on a GPU differ from timestamps of the job, and whether they slow its steps."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from gpu import TORCHRUN, Start, Work, gpu
from harness import Benchmark, Must, Outcome

_WAYS = ("eager", "fused", "amp", "clip", "compile", "reduce-overhead", "graph")
_FRAMEWORKS = ("trainer", "lightning", "accelerate", "jax", "mpi")
_LARGE = ("--width", "4096", "--layers", "12", "--batch", "8", "--length", "1024")
_LIMIT = 1.02


def rounds_of(quick: bool, rounds: int | None) -> Iterator[Outcome]:
    steps = 60 if quick else 400
    found = gpu()
    details: dict[str, Any] = {"gpu": found, "stages_s": {}, "failed": {}, "ms_of_a_step": {}}
    samples: dict[str, list[float]] = {}
    small = ("--width", "256", "--layers", "4", "--batch", "2", "--length", "128", "--steps", str(steps))
    with tempfile.TemporaryDirectory() as folder:
        work = Work(Path(folder))
        arms = _arms("nccl" if found else "gloo", bool(found))
        for number in range(1 if quick else rounds or 3):
            for arm, words in arms.items():
                try:
                    start = work.start(*words, launcher=() if arm in _FRAMEWORKS else (*TORCHRUN, "1"))
                except RuntimeError as error:
                    details["failed"][arm] = str(error)
                    continue
                samples.setdefault(arm, []).append(_late_ms(start))
                details["stages_s"].setdefault(arm, []).append(_stages(start))
            speeds = details["ms_of_a_step"]
            for arm, run in [("bare", None), ("bootseer run", ())][:: 1 if number % 2 else -1]:
                speeds.setdefault(arm, []).append(_step_ms(work.start(*small, run=run)))
            yield Outcome(
                parameters={"rounds": number + 1, "steps": steps, "large": _LARGE},
                samples=samples,
                unit="ms",
                must_reach=[
                    Must(
                        "a step under `bootseer run` against a bare one",
                        median(speeds["bootseer run"]) / median(speeds["bare"]),
                        _LIMIT,
                        "x",
                    )
                ],
                details=details,
                method="the end of the mark first_step, minus the job's own: its kernels have finished (`done`)",
            )


def _arms(backend: str, large: bool) -> dict[str, tuple[str, ...]]:
    arms = {way: ("--way", way, "--backend", backend, "--stopwatch") for way in _WAYS}
    arms["graph"] = ("--way", "graph", "--stopwatch")  # a whole step cannot be captured with DistributedDataParallel
    arms |= {way: ("--way", way, "--steps", "12", "--stopwatch") for way in _FRAMEWORKS}
    if large:
        arms["eager, large"] = (*arms["eager"], *_LARGE, "--steps", "6")
        arms["fused, large"] = (*arms["fused"], *_LARGE, "--steps", "6")
    return arms


def _late_ms(start: Start) -> float:
    """The mark's end minus the end of the first step's kernels (or, if unknown, of its calls)."""
    ended = start.marks["first_step"][1]
    return (ended - (start.point("done") or start.point("queued") or 0)) / 1e6


def _stages(start: Start) -> dict[str, Any]:
    """The duration of each mark and its begin after the command, in seconds; the same of the job's timestamps."""
    marks = {name: [(begin - start.began_ns) / 1e9, (end - begin) / 1e9] for name, (begin, end) in start.marks.items()}
    points = {name: (at - start.began_ns) / 1e9 for name, at in start.ranks[0]["points"].items()}
    ends = start.ranks[0]["ends"]
    steps = [(after - before) / 1e6 for before, after in pairwise(ends)]
    return {"marks": marks, "points": points, "steps_ms": steps[:20]}


def _step_ms(start: Start) -> float:
    """The median of the second half of the steps, after the hook has removed itself."""
    ends = start.ranks[0]["ends"]
    half = ends[len(ends) // 2 :]
    return median((after - before) / 1e6 for before, after in pairwise(half))


BENCHMARK = Benchmark("gpu_marks", "Do the hook's marks say when a first step on a GPU ended?", by_rounds=rounds_of)

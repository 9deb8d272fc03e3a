"""What a warm parent saves with a CUDA build of torch, and whether its ranks compute the same."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu import TORCHRUN, Start, Work, gpu, warm_reasons
from harness import Benchmark, Outcome

_ARMS = {
    "1 rank, NCCL": ("1", ("--backend", "nccl")),
    "8 ranks on one GPU, gloo": ("8", ("--backend", "gloo", "--width", "256")),
}
_PROBES = {
    "asks in its import whether there is a GPU": "",
    "the same with PYTORCH_NVML_BASED_CUDA_CHECK=1": "1",
}
_LEARNT = 2
"""Starts that are not measured: the first is recorded, the second learns which modules are excluded."""


def rounds_of(quick: bool, rounds: int | None) -> Iterator[Outcome]:
    found = gpu()
    samples: dict[str, list[float]] = {}
    starts: dict[str, list[Start]] = {}
    reasons: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        works = {arm: Work(Path(tempfile.mkdtemp(dir=folder))) for arm in _ARMS}  # each command has its own record

        def start(arm: str, mode: str) -> Start:
            ranks, words = _ARMS[arm]
            if not found:
                words = tuple("gloo" if word == "nccl" else word for word in words)
            launcher = (*TORCHRUN, ranks)
            works[arm].env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # required for deterministic results
            words += ("--deterministic", "--stopwatch", "--steps", "6")
            return works[arm].start(*words, launcher=launcher, run=("--warm", mode))

        for arm in _ARMS:
            reasons[arm] = [warm_reasons(start(arm, "on").stderr) for _ in range(_LEARNT)]
        for number in range(1 if quick else rounds or 3):
            for arm in _ARMS:
                for mode in ("off", "on")[:: 1 if number % 2 else -1]:
                    name = f"{arm}, {'warm' if mode == 'on' else 'exec'}"
                    one = start(arm, mode)
                    starts.setdefault(name, []).append(one)
                    samples.setdefault(name, []).append(((one.point("done") or 0) - one.began_ns) / 1e9)
                    if mode == "on":
                        reasons[arm].append(warm_reasons(one.stderr))
            if number == 0:
                reasons |= _probes(Work(Path(folder)))
            yield Outcome(
                parameters={"rounds": number + 1},
                samples=samples,
                unit="s",
                baselines={f"{arm}, warm": f"{arm}, exec" for arm in _ARMS},
                details={
                    "gpu": found,
                    "what_it_said": reasons,
                    "same_losses": {arm: len(_losses(starts, arm)) == 1 for arm in _ARMS},
                    "threads": {name: [one.ranks[0]["facts"]["threads"] for one in of] for name, of in starts.items()},
                    "points_s": {name: [_since(one) for one in of] for name, of in starts.items()},
                },
                method="from the command to the end of the first step's kernels on the last rank; page cache warm",
            )


def _probes(work: Work) -> dict[str, Any]:
    """What happens to a module that initialises or only looks for the driver when it is imported."""
    (work.folder / "asks_for_gpu.py").write_text("import torch\nGPU = torch.cuda.is_available()\n")
    paths = f"{work.folder}:{work.env.get('PYTHONPATH', '')}".rstrip(":")
    said = {}
    for probe, value in _PROBES.items():
        env = {"PYTHONPATH": paths} | ({"PYTORCH_NVML_BASED_CUDA_CHECK": value} if value else {})
        words = ("--imports", "asks_for_gpu", "--steps", "3")
        run, job = ("--warm", "on"), f"probe{value}"
        starts = [work.start(*words, launcher=(*TORCHRUN, "1"), run=run, env=env, job=job) for _ in range(3)]
        said[probe] = [warm_reasons(one.stderr) for one in starts]
    return said


def _losses(starts: dict[str, list[Start]], arm: str) -> set[tuple[str, ...]]:
    return {
        tuple(rank["losses"])
        for name, of_name in starts.items()
        if name.startswith(arm)
        for one in of_name
        for rank in one.ranks
    }


def _since(start: Start) -> dict[str, float]:
    return {name: (at - start.began_ns) / 1e9 for name, at in start.ranks[0]["points"].items()}


BENCHMARK = Benchmark("gpu_warm", "What does a warm parent save with a CUDA build of torch?", by_rounds=rounds_of)

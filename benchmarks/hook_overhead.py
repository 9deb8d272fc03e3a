"""What the injected sitecustomize adds to each Python process of a job, and to one that imports torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median

from harness import Benchmark, Must, Outcome, alternate, differences, spawn, wall_ms

import bootseer

_LIMIT_MS = 1.0
_HOOK = Path(bootseer.__file__).parent / "hook" / "path"


def measure(quick: bool) -> Outcome:
    rounds, torch_rounds, inside_rounds = (40, 3, 5) if quick else (300, 9, 20)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("BOOTSEER_", "PYTHON"))}
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder, "empty")
        empty.mkdir()
        (empty / "sitecustomize.py").touch()
        spool = {"BOOTSEER_TRACE": f"spool:{folder}/spool", "BOOTSEER_JOB": "bench"}
        hooked = {**clean, **spool, "PYTHONPATH": str(_HOOK)}
        plain = {"none": clean, "empty sitecustomize": {**clean, "PYTHONPATH": str(empty)}, "hook": hooked}
        python = [sys.executable, "-c"]
        costs = alternate(
            {f"pass, {arm}": partial(spawn, [*python, "pass"], env) for arm, env in plain.items()}, rounds
        )
        samples = wall_ms(costs)
        torch = {"none": clean, "hook": hooked}
        samples |= wall_ms(
            alternate(
                {f"import torch, {arm}": partial(spawn, [*python, "import torch"], env) for arm, env in torch.items()},
                torch_rounds,
            )
        )
        inside = {
            arm: [_sitecustomize_ms(env) for _ in range(inside_rounds)] for arm, env in plain.items() if arm != "none"
        }
    return Outcome(
        parameters={"rounds": rounds, "rounds_import_torch": torch_rounds, "rounds_importtime": inside_rounds},
        samples=samples,
        unit="ms",
        baselines={
            "pass, empty sitecustomize": "pass, none",
            "pass, hook": "pass, none",
            "import torch, hook": "import torch, none",
        },
        must_reach=[
            Must(
                "added to `python -c pass` (median of the differences)",
                median(differences(samples, "pass, hook", "pass, none")),
                _LIMIT_MS,
                "ms",
            )
        ],
        details={
            "sitecustomize_importtime_ms": inside,
            "hook_over_empty_ms": median(differences(samples, "pass, hook", "pass, empty sitecustomize")),
            "cpu_ms": {arm: median(cost.cpu_s * 1e3 for cost in of_arm) for arm, of_arm in costs.items()},
        },
    )


def _sitecustomize_ms(env: Mapping[str, str]) -> float:
    """The cumulative import time of sitecustomize, as the interpreter itself sees it."""
    command = [sys.executable, "-X", "importtime", "-c", "pass"]
    text = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stderr
    # The hook imports the sitecustomize that it shadows under the same name: the outer one is listed last.
    times = re.findall(r"\|\s*(\d+) \|\s+sitecustomize$", text, re.MULTILINE)
    return float(times[-1]) / 1e3


BENCHMARK = Benchmark("hook_overhead", "What does the hook add to each Python process?", measure)

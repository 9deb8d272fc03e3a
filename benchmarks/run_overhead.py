"""How much longer a command takes under `bootseer run`, and where the time goes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from harness import Benchmark, Must, Outcome, alternate, differences, spawn, wall_ms

_LIMIT_MS = 50.0
_CPU_LIMIT_MS = 30.0
_BOOTSEER = str(Path(sys.executable).parent / "bootseer")
_RESTORED = "with a restored environment"


def measure(quick: bool) -> Outcome:
    rounds = 10 if quick else 40
    with tempfile.TemporaryDirectory() as spool:
        run = ["run", "-q", "--spool", spool, "--", "true"]
        disabled = {**os.environ, "BOOTSEER_DISABLE": "1"}
        setup = Path(spool, "setup.sh")
        setup.write_text(f"mkdir -p {spool}/made && echo word > {spool}/made/file\n")
        env_run = ["run", "-q", "--spool", spool, "--setup", str(setup), "--store", f"{spool}/store", "--", "true"]
        own_cache = {**os.environ, "BOOTSEER_CACHE": f"{spool}/cache", "BOOTSEER_RUNTIME": f"{spool}/runtime"}
        for _ in range(2):  # the first one creates the snapshot
            spawn([_BOOTSEER, *env_run], own_cache)
        costs = alternate(
            {
                "true": lambda: spawn(["true"]),
                "python -c pass": lambda: spawn([sys.executable, "-c", "pass"]),
                "bootseer run -- true": lambda: spawn([_BOOTSEER, *run]),
                "BOOTSEER_DISABLE=1": lambda: spawn([_BOOTSEER, *run], disabled),
                _RESTORED: lambda: spawn([_BOOTSEER, *env_run], own_cache),
            },
            rounds,
        )
        spawn([_BOOTSEER, "cache", "prune", "--to", "0"], own_cache)  # its layer is mounted
        imports = _imports([sys.executable, "-X", "importtime", "-m", "bootseer", *run])
    samples = wall_ms(costs)
    added = median(differences(samples, "bootseer run -- true", "true"))
    cpu_ms = {arm: median(cost.cpu_s * 1e3 for cost in of_arm) for arm, of_arm in costs.items()}
    cpu_added = cpu_ms["bootseer run -- true"] - cpu_ms["python -c pass"]
    return Outcome(
        parameters={"rounds": rounds, "command": "bootseer run -q -- true"},
        samples=samples,
        unit="ms",
        baselines={arm: "true" for arm in samples if arm != "true"},
        must_reach=[
            Must("added by bootseer run (median of the differences)", added, _LIMIT_MS, "ms"),
            Must("processor time of bootseer run above bare Python's (medians)", cpu_added, _CPU_LIMIT_MS, "ms"),
        ],
        details={
            "imports_once_ms": imports,
            "cpu_ms": cpu_ms,
        },
    )


def _imports(command: list[str]) -> Mapping[str, float]:
    """Import times of one run in ms, by what imported a module: Python's start, click, BootSeer.

    `-X importtime` lists a module after those that it imported, which are indented. It slows imports down itself.
    """
    text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spent = {"python start": 0.0, "standard library": 0.0, "click": 0.0, "bootseer": 0.0}
    owners: list[str] = []
    started = True  # backwards: from the last import to those of the interpreter's start
    rows = [line.split("|") for line in text.splitlines() if line.startswith("import time:") and "self" not in line]
    for own, _, name in reversed(rows):
        depth = (len(name) - len(name.lstrip()) - 1) // 2
        module = name.strip()
        package = module.partition(".")[0]
        if module == "site" and depth == 0:
            started = False
        if package in ("bootseer", "click"):
            owner = package
        elif depth and owners[depth - 1] == "click":
            owner = "click"
        else:
            owner = "standard library" if started else "python start"
        owners[depth:] = [owner]
        spent[owner] += float(own.rpartition(":")[2]) / 1e3
    return spent


BENCHMARK = Benchmark("run_overhead", "What does `bootseer run` add to a command that does nothing?", measure)

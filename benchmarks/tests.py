"""How long the tests take: `make quick`, then `make test`, like a contributor."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

from harness import ROOT, Benchmark, Must, Outcome
from node import processors_s

_LIMITS_S = {"quick": 90.0, "test": 720.0}


def _measure(quick: bool) -> Outcome:
    samples: dict[str, list[float]] = {}
    details: dict[str, object] = {}
    for target in ("quick",) if quick else ("quick", "test"):
        with tempfile.TemporaryDirectory() as folder:
            # Of the whole machine, because nothing waits for the workers, which are forked.
            report, busy_s = Path(folder) / "report.xml", processors_s()[0]
            started = time.monotonic()
            # In a separate process group, to end the workers with the run.
            subprocess.run(["make", target, f"ARGS=--junitxml={report}"], cwd=ROOT, check=True, process_group=0)
            samples[f"make {target}"] = [time.monotonic() - started]
            details[f"make {target}"] = {"cpu_s": processors_s()[0] - busy_s, **_facts(report)}
    limits = [Must(name, took_s, _LIMITS_S[name.removeprefix("make ")], "s") for name, (took_s,) in samples.items()]
    return Outcome(
        parameters={"rounds": 1},
        samples=samples,
        unit="s",
        must_reach=limits,
        details=details,
        method="one run of each on an idle machine; processor time is that of the whole machine",
    )


def _facts(report: Path) -> dict[str, object]:
    suite = ElementTree.parse(report).getroot()[0]  # noqa: S314 - pytest has just written it
    cases = [(float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}") for case in suite]
    return {
        "tests": int(suite.get("tests", 0)),
        "skipped": int(suite.get("skipped", 0)),
        "slowest_s": {name: took for took, name in sorted(cases, reverse=True)[:10]},
    }


BENCHMARK = Benchmark("tests", "How long do the tests take?", _measure)

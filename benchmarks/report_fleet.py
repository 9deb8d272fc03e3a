"""How long the report of a large fleet takes: 1,440 nodes, 40 events each, 1 % of the installs slow."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

from harness import Benchmark, Must, Outcome, alternate, spawn

from fleet import slow_installs

_NODES = 1440
_RANKS_PER_NODE = 3  # 40 events a node
_LIMIT_S = 3.0
_BOOTSEER = str(Path(sys.executable).parent / "bootseer")
_OWN_SCRIPT = """
import collections, json, sys
count = collections.Counter()
for line in open(sys.argv[1], "rb"):
    event = json.loads(line.partition(b" ")[2])
    count[event["node"], event["stage"]] += event["wall_ns"]
"""
"""The simplest script: parse every line and add up, without clocks, barriers or waits."""


def measure(quick: bool) -> Outcome:
    rounds = 3 if quick else 9
    lines = slow_installs(_NODES, ranks_per_node=_RANKS_PER_NODE).lines()
    with tempfile.TemporaryDirectory() as folder:
        log, page = Path(folder, "fleet.log"), Path(folder, "fleet.html")
        log.write_bytes(b"".join(lines))
        size_bytes = log.stat().st_size
        report = [_BOOTSEER, "report", str(log)]
        costs = alternate(
            {
                "own script (json.loads)": lambda: spawn([sys.executable, "-c", _OWN_SCRIPT, str(log)]),
                "report": lambda: spawn(report),
                "report --json": lambda: spawn([*report, "--json"]),
                "report --html": lambda: spawn([*report, "--html", str(page)]),
            },
            rounds,
        )
        page_bytes = page.stat().st_size
    samples = {arm: [cost.wall_s for cost in of_arm] for arm, of_arm in costs.items()}
    return Outcome(
        parameters={
            "rounds": rounds,
            "nodes": _NODES,
            "ranks_per_node": _RANKS_PER_NODE,
            "lines": len(lines),
            "bytes": size_bytes,
        },
        samples=samples,
        unit="s",
        baselines={arm: "own script (json.loads)" for arm in samples if arm.startswith("report")},
        must_reach=[Must("report, end to end (median)", median(samples["report"]), _LIMIT_S, "s")],
        details={
            "cpu_s": {arm: median(cost.cpu_s for cost in of_arm) for arm, of_arm in costs.items()},
            "peak_bytes": {arm: max(cost.peak_bytes for cost in of_arm) for arm, of_arm in costs.items()},
            "html_bytes": page_bytes,
        },
    )


BENCHMARK = Benchmark("report_fleet", "How long does the report of 1,440 nodes take?", measure)

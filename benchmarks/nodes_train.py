"""A real training job on several nodes to the end of its first step, for three kinds of model.

torchrun in the containers of all nodes (gloo over their links) resumes from a checkpoint and does one optimizer step.
BootSeer runs with `--warm auto`: a process imports the rank's modules while torchrun imports its own.
`nodes_rows.METHOD` describes the rest of the method.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import nodes_train_job
from harness import Benchmark, Must, Outcome
from nodes_arms import Start, Techniques, bootseer, today
from nodes_claims import Found, Names
from nodes_origin import put_checkpoints, torchrun
from nodes_rows import METHOD, Arm, Lab, measure, run_row
from nodes_site import Script

_MOE_MB = 64


def _measure(quick: bool, rounds: int | None) -> Iterator[Outcome]:
    number = 2 if quick else 4
    for outcome in measure(quick, number, partial(_arms, number), _claims, rounds, whole=True):
        yield replace(outcome, method=f"{METHOD}. bootseer: run --warm auto")


def _arms(number: int, lab: Lab) -> list[Arm]:
    shutil.copy(nodes_train_job.__file__, lab.origin.bench)
    arms = []
    for kind in nodes_train_job.KINDS:
        origin = lab.origin
        if kind != "moe":
            origin = replace(origin, striped=f"{origin.striped}-{kind}", plain=f"{origin.plain}-{kind}")
            made = lab.folder / kind
            made.mkdir()
            torchrun(Path(nodes_train_job.__file__), kind, "0", str(made), "--save")
            put_checkpoints(made, origin)

        def script(start: Start, *, ours: bool, kind: str = kind, origin=origin) -> Script:  # type: ignore[no-untyped-def]
            words = ["--nnodes", str(start.of), "--nproc-per-node", "1", "--node-rank", str(start.number)]
            words += ["--master-addr", lab.site.there(0), "--master-port", "29500"]
            words += ["/bench/nodes_train_job.py", kind, str(_MOE_MB)]
            job = replace(start, origin=origin, command=("torchrun", *words), workload=f"train-{kind}")
            return bootseer(job, Techniques(peers=start.of > 1, warm=True)) if ours else today(job)

        # Discarded: it records the reads of this job.
        run_row(lab, Arm("first", 2, partial(script, ours=True)), 10_000 + len(arms), {"": set()}, shaped=False)
        arms.append(Arm(f"{Names.PEERS}: {kind}", number, partial(script, ours=True), content=kind))
        arms.append(Arm(f"{Names.TODAY}: {kind}", number, partial(script, ours=False), content=kind))
    return arms


def _claims(found: Found) -> list[Must]:
    musts = []
    for (arm, number), rows in found.items():
        before = found.get((arm.replace(Names.PEERS, Names.TODAY, 1), number))
        if arm.startswith(f"{Names.PEERS}: ") and before:
            part = median(row.slowest_s for row in rows) / median(row.slowest_s for row in before)
            musts.append(Must(f"{arm} / {Names.TODAY}, {number} nodes", part, 0.15, "x"))
    return musts


BENCHMARK = Benchmark(
    "nodes_train",
    "How long until a job on several nodes has done its first step from a checkpoint?",
    by_rounds=_measure,
)

"""A real training job on several nodes, to the end of its first step, for three kinds of model.

torchrun in the containers of all nodes (gloo over their links) resumes from the checkpoint and does one optimizer step.
The rest of how it is measured is told in `nodes_rows.METHOD`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from harness import Benchmark, Must, Outcome
from nodes_arms import Start, Techniques, bootseer, today
from nodes_claims import Found, Names, first_step_claims
from nodes_rows import Arm, Lab, Rates, Sizes, measure
from nodes_site import PYTHON, run
from nodes_train_job import KINDS

_MEGABYTES = 64


def _measure(quick: bool, rounds: int | None) -> Iterator[Outcome]:
    number = 2 if quick else 4
    rates = Rates(200, 400) if quick else Rates(50, 100)
    yield from measure(quick, number, partial(_arms, number), _claims, rounds, (rates, Sizes(_MEGABYTES)))


def _arms(number: int, lab: Lab) -> list[Arm]:
    arms = []
    for kind in KINDS:
        place = lab.checkpoints(kind, partial(_save, kind))

        def of(start: Start, kind: str = kind, place: str = place) -> Start:
            return start.training(place, ["/bench/nodes_train_job.py", kind], lab.site.there(0), lab.site.there(start.number))

        peers = partial(bootseer, techniques=Techniques(peers=True))
        arms.append(Arm(f"{Names.PEERS}, {kind}", number, lambda start, of=of: peers(of(start)), content=kind))
        arms.append(Arm(f"{Names.TODAY}, {kind}", number, lambda start, of=of: today(of(start)), content=kind))
    return arms

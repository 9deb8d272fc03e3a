"""How the start of a job on several nodes grows with their number, by what they start with.

`nodes_rows.METHOD` describes the method; `nodes_claims` has the goals.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from harness import Benchmark, Outcome
from nodes_arms import Techniques, bootseer, today
from nodes_claims import Names, claims
from nodes_rivals import mirror, seeding, torrent
from nodes_rows import Arm, Lab, measure

_RIVALS_ON = 4
"""Number of nodes for other tools: enough to show the load on the origin."""


def _measure(quick: bool, rounds: int | None) -> Iterator[Outcome]:
    with ExitStack() as stack:
        yield from measure(quick, 2 if quick else 8, partial(_arms, stack), claims, rounds)


def _arms(stack: ExitStack, lab: Lab) -> list[Arm]:
    """Arms with claims first: an interrupted run keeps its rows."""
    numbers = (1, 2) if lab.quick else (1, 2, 4, 8)
    direct = partial(bootseer, techniques=Techniques())
    peers = partial(bootseer, techniques=Techniques(peers=True))
    lazy = partial(bootseer, techniques=Techniques(record=False))
    arms = [Arm(Names.PEERS, number, peers) for number in numbers]
    arms += [Arm(Names.DIRECT, number, direct) for number in numbers]
    arms += [Arm(Names.LAZY, number, lazy) for number in (numbers[0], numbers[-1])]
    # Eight full pulls take eleven minutes and 14 GB, and show nothing that four do not.
    arms += [Arm(Names.TODAY, number, today) for number in numbers if number <= _RIVALS_ON]
    most = min(numbers[-1], _RIVALS_ON)
    path = stack.enter_context(seeding(lab.origin.layout, lab.folder, lab.site.here))
    arms.append(Arm(Names.MIRROR, most, partial(mirror, address=lab.site.there(0))))
    arms.append(Arm(Names.TORRENT, most, partial(torrent, seeds=path)))
    return arms


BENCHMARK = Benchmark(
    "nodes",
    "How does the start of a job on several nodes behind one origin grow with their number?",
    by_rounds=_measure,
)

"""What one bad node, or a bad origin, does to the start of a job whose nodes get blocks from each other; and what it
would do without the guards against it.

How it is measured is told in `nodes_rows.METHOD`; what must be reached, in `nodes_claims`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from harness import Benchmark, Outcome
from nodes_arms import Techniques, bootseer
from nodes_claims import Faults, fault_claims
from nodes_rows import Arm, Fault, Lab, measure
from nodes_site import Node, Site

_NODES = 4
"""More would be bound by the processors of a small machine, and hide what a slow link costs."""
_BAD = 1
"""The node that has the fault."""
_MIDST_BYTES = 30_000_000
"""A start is in its midst when the origin has sent so much."""


def _measure(quick: bool, rounds: int | None) -> Iterator[Outcome]:
    yield from measure(quick, _NODES, _arms, fault_claims, rounds)


def _arms(lab: Lab) -> list[Arm]:
    rates = lab.rates

    def arm(name: str, fault: Fault, without: str = "") -> Arm:
        return Arm(name, _NODES, partial(bootseer, techniques=Techniques(peers=True), without=without), fault)

    def kill(running: Sequence[Node]) -> None:
        running[_BAD].kill()

    def hang(running: Sequence[Node]) -> None:
        running[_BAD].hang()

    def starve(site: Site) -> None:
        site.shape(rates.origin // 4, rates.node)

    slow = Fault(before=lambda site: site.limit_upload(_BAD, rates.node / 20))
    killed = Fault(after_bytes=_MIDST_BYTES, act=kill, lost=frozenset({_BAD}))
    hung = Fault(after_bytes=_MIDST_BYTES, act=hang, lost=frozenset({_BAD}))
    starved = Fault(before=starve)
    # A hung node without second requests is not among them: reads fail then, and the start with them.
    return [
        arm(Faults.NONE, Fault()),
        arm(Faults.SLOW, slow),
        arm(Faults.KILLED, killed),
        arm(Faults.HUNG, hung),
        arm(Faults.STARVED, starved),
        arm(Faults.UNHEDGED, slow, "second request"),
        arm(Faults.UNBROKEN, slow, "breaker"),
        arm(Faults.NAIVE, starved, "patience"),
    ]


BENCHMARK = Benchmark(
    "nodes_faults", "What does a bad node do to a start in which nodes get blocks from each other?", by_rounds=_measure
)

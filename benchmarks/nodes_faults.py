"""The effect of a bad node or a bad origin on the start of a job with peers, with and without the guards against it.

`nodes_rows.METHOD` describes the method; `nodes_claims` has the goals.
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
"""With more nodes, the processors of a small machine would be the bound and hide the cost of a slow link."""
_BAD = 1
"""The node with the fault."""
_MIDST_BYTES = 30_000_000
"""The fault begins when the origin has sent this much."""


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
    # Not a hung node without second requests: reads and therefore the start would fail.
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


BENCHMARK = Benchmark("nodes_faults", "How does a bad node affect a start with peers?", by_rounds=_measure)

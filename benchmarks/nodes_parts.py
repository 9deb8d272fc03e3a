"""The effect of each technique on a start on several nodes: each alone, and all but one.

`nodes_rows.METHOD` describes the method.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from harness import Benchmark, Outcome
from nodes_arms import Techniques, bootseer
from nodes_rows import Arm, Lab, measure

_NODES = 2
"""The origin sends a gigabyte when two nodes pull whole images. Except with peers, ratios are those of more nodes."""
_ALL = Techniques(peers=True)
_NAMES = ("image", "environment", "checkpoint")


def _measure(quick: bool, rounds: int | None) -> Iterator[Outcome]:
    yield from measure(quick, _NODES, _arms, lambda found: [], rounds)


def _arms(lab: Lab) -> list[Arm]:
    chosen = {"all": _ALL, "none": Techniques().only()}
    chosen |= {f"{name} alone": Techniques().only(**{name: True}) for name in _NAMES}
    chosen |= {f"all but {name}": replace(_ALL, **{name: False}) for name in (*_NAMES, "record", "peers")}
    return [Arm(name, _NODES, partial(bootseer, techniques=one)) for name, one in chosen.items()]


BENCHMARK = Benchmark("nodes_parts", "What does each technique gain in a start on several nodes?", by_rounds=_measure)

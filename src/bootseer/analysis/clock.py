"""How far the nodes' clocks are apart, told from the barriers that all of them left together.

A barrier releases everybody at the same moment, so that the differences of the times at which nodes say they left it
are differences of their clocks, up to the time that a release takes. Durations never need this: they come from each
node's monotonic clock. Called by `analysis.report`. Decides and touches nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from bootseer.analysis.foreign.timestamp import plausible
from bootseer.analysis.spans import NodeSpans, begin_of
from bootseer.trace.event import OK

_APART_NS = 3600 * 10**9
"""Nodes of one startup whose events lie further apart than this were not there together: a clock is wrong."""
_FLOOR_NS = 1_000_000
"""No estimate from user-space barriers is better than a millisecond."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Add `-offset_ns` to a node's times to get the reference's. `error_ns` None: nothing ties this node."""

    offset_ns: int
    error_ns: int | None


def offsets(nodes: Mapping[str, NodeSpans]) -> dict[str, Offset]:
    """The offset of each node's clock against the middle of all."""
    releases: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    shortest: dict[str, int] = {}
    for name, node in nodes.items():
        for barrier, end_ns, length_ns in _releases(node):
            releases[barrier][name].append(end_ns)
            shortest[barrier] = min(shortest.get(barrier, length_ns), length_ns)
    differences: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for barrier, by_node in releases.items():
        if len(by_node) < 2:
            continue
        left = {name: min(ends) for name, ends in by_node.items()}
        middle = int(median(left.values()))
        for name, end_ns in left.items():
            # Whoever came last waited for nobody: its stay bounds how long after the last arrival the release came.
            differences[name].append((end_ns - middle, shortest[barrier]))
    return {name: _offset(differences.get(name, [])) for name in nodes}


def apart(nodes: Mapping[str, NodeSpans]) -> dict[str, int]:
    """Nodes that are told far away from most others, on aligned clocks, and how far: ns, negative for too early."""
    groups: list[list[str]] = []
    until_ns = 0
    for name in sorted(nodes, key=lambda name: begin_of(nodes[name])):
        if not groups or begin_of(nodes[name]) > until_ns + _APART_NS:
            groups.append([])
        groups[-1].append(name)
        until_ns = max(until_ns, nodes[name].last_ns) if len(groups[-1]) > 1 else nodes[name].last_ns
    begins = [int(median(begin_of(nodes[name]) for name in group)) for group in groups]
    most = max(range(len(groups)), key=lambda index: (len(groups[index]), plausible(begins[index]), index), default=0)
    return {
        name: begin_of(nodes[name]) - begins[most]
        for index, group in enumerate(groups)
        for name in group
        if index != most
    }


def _releases(node: NodeSpans) -> Iterable[tuple[str, int, int]]:
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for span in sorted(node.spans, key=lambda span: span.begin_ns):
        if span.barrier and span.outcome == OK:  # one that failed was left by nobody else at that moment
            turn = counts[span.barrier, span.rank]
            counts[span.barrier, span.rank] += 1
            yield f"{span.barrier}#{turn}", span.end_ns, span.end_ns - span.begin_ns


def _offset(differences: list[tuple[int, int]]) -> Offset:
    if not differences:
        return Offset(0, None)
    values = sorted(difference for difference, _ in differences)
    estimate = int(median(values))
    spread = (values[-1] - values[0]) // 2
    error = max(_FLOOR_NS, spread, min(shortest for _, shortest in differences))
    # An offset inside its own error is no evidence: well-kept clocks agree better than barriers can tell.
    return Offset(estimate if abs(estimate) > error else 0, error)

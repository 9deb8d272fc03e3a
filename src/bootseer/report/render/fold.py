"""Which nodes get their own row if there are too many for a page, and how the others are folded into bands.

1,440 rows cannot be read, and an average of them would be misleading: nodes wait at the same barriers, but their
stages differ in length. So nodes are sorted by own time (work and untracked, without waiting, which only mirrors the
slowest nodes) and divided into four bands of percentiles. A band is drawn as its median node, whose stages line up with
the barriers. The nodes that a reader looks for get their own rows: those on the critical chain, stragglers, nodes that
did not reach training, and the slowest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from bootseer.report.model import Link, Node, Report, Segment
from bootseer.trace.event import encodable

FOLD_ABOVE = 32
_MAX_OUTLIERS = 20
_CUTS = ((0, 50), (50, 90), (90, 99), (99, 100))
# Control characters are invisible, and direction marks could make a name look like another one.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


@dataclass(frozen=True, slots=True)
class Band:
    """Nodes between two percentiles of own time."""

    low: int
    high: int
    nodes: list[Node]
    """Fastest first."""

    @property
    def middle(self) -> Node:
        """The median node."""
        return self.nodes[len(self.nodes) // 2]


def top(stage: str) -> str:
    """The top-level stage: `environment_setup` of `environment_setup.install`."""
    return stage.partition(".")[0]


def shared_links(report: Report) -> list[tuple[int, Link]]:
    """The barriers with several participants, with their indexes in the critical chain; `training_began` is included
    only if training began."""
    began = report.startup.outcome == "training_began"
    links = enumerate(report.critical_chain)
    return [(i, x) for i, x in links if x.num_participants > 1 and (began or x.barrier != "training_began")]


def own_s(node: Node) -> float:
    """Seconds in which the node did not wait for others."""
    return node.work_s + node.untracked_s


def domain(nodes: list[Node]) -> str:
    """The domain that the names of all nodes share, such as `.cluster.example.com`, which labels omit. Addresses have
    none."""
    domains = {node.node.partition(".")[2] for node in nodes}
    shared = domains.pop() if len(nodes) > len(domains) == 1 else ""
    return f".{shared}" if any(character.isalpha() for character in shared) else ""


def time_range(nodes: list[Node]) -> tuple[float, float]:
    """Begin and end of the time axis, s; of positive length."""
    times = [t for n in nodes for t in (n.start_s, n.end_s, *(s.end_s for s in n.background))]
    low, high = min(times, default=0.0), max(times, default=0.0)
    low = min(low, 0.0)
    return (low, high) if high > low else (low, low + 1.0)


def outliers(report: Report) -> list[Node]:
    """The nodes to look at first, most important first."""
    by_name = {node.node: node for node in report.nodes}
    names = [link.node for link in reversed(report.critical_chain)]
    names += [straggler.node for straggler in sorted(report.stragglers, key=lambda s: -s.delay_s)]
    names += [node.node for node in ended_first(report.nodes)]
    names += [node.node for node in sorted(report.nodes, key=own_s, reverse=True)]
    chosen = [name for name in dict.fromkeys(names) if name in by_name]
    return [by_name[name] for name in chosen[:_MAX_OUTLIERS]]


def in_order(nodes: list[Node]) -> list[Node]:
    """By rank, nodes without one last."""
    return sorted(nodes, key=lambda node: (node.rank < 0, node.rank, node.node))


def ended_first(nodes: list[Node]) -> list[Node]:
    """The nodes that did not reach training. First those whose events end first: the others waited for them."""
    return sorted((node for node in nodes if node.outcome != "ok"), key=lambda node: node.own_end_s)


def bands(nodes: list[Node]) -> list[Band]:
    """All nodes in four bands by own time, fastest first, without empty bands."""
    ordered = sorted(nodes, key=lambda node: (own_s(node), node.node))
    cut = [Band(low, high, ordered[len(ordered) * low // 100 : len(ordered) * high // 100]) for low, high in _CUTS]
    return [band for band in cut if band.nodes]


def coalesced(segments: list[Segment]) -> list[Segment]:
    """Segments with neighbours of the same top-level stage, kind and outcome merged."""
    runs: list[Segment] = []
    for seg in segments:
        last = runs[-1] if runs else None
        same = last and (last.stage, last.kind, last.outcome) == (top(seg.stage), seg.kind, seg.outcome)
        if last and same and seg.start_s - last.end_s < 1e-6:
            runs[-1] = replace(last, end_s=seg.end_s)
        else:
            runs.append(replace(seg, stage=top(seg.stage)))
    return runs


def clean(text: object) -> str:
    """Printable text that every output can encode; other characters become U+FFFD."""
    return encodable(_UNPRINTABLE.sub("\ufffd", str(text)))

"""When a start is over, so that its numbers count as final. Late lines open it again.

Why not simply after some quiet time: on 1,440 nodes one slow node may be silent for minutes while all others wait, so
silence does not mean that the start is over. A start that is closed too early would be counted with a wrong duration
until the next line. So it closes 30 s after training began on every expected node (nodes write a few more lines after
the first step); or 10 s after the last line if every command that was started has ended; or after a day, even if nodes
are missing, because a node that died sends no end. Decides and touches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bootseer.units import NS_PER_S

AFTER_BEGAN_NS: Final = 30 * NS_PER_S
"""Nodes write a few more lines after the first step."""
QUIET_NS: Final = 10 * NS_PER_S
CAP_NS: Final = 24 * 3600 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of a start; times by the service's clock, because those of nodes may be wrong."""

    first_ns: int
    """When its first line arrived."""
    latest_ns: int
    """When its latest line arrived."""
    nodes_expected: int | None
    nodes_heard: int
    nodes_began: int
    """Nodes on which training began."""
    nodes_ended: int
    """Nodes whose commands have ended, or were replaced by a later restart."""


def closes_ns(seen: Seen) -> int:
    """When the start closes if no more lines arrive; at most `CAP_NS` after its first line."""
    capped_ns = seen.first_ns + CAP_NS
    all_nodes = max(seen.nodes_expected or 0, seen.nodes_heard)
    if seen.nodes_began >= all_nodes > 0:
        return min(seen.latest_ns + AFTER_BEGAN_NS, capped_ns)
    if seen.nodes_heard and seen.nodes_ended >= seen.nodes_heard:
        return min(seen.latest_ns + QUIET_NS, capped_ns)
    return capped_ns

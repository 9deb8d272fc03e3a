"""When a start is over, so that what it cost counts as final. Late lines open it again.

A quiet moment alone proves nothing: at scale, one slow node is silent for minutes. So a start ends when training began
on every node that is expected, a while after that; or when every command that was begun has ended and nothing came for
a while; or, whatever is missing, after a day. Decides and touches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bootseer.units import NS_PER_S

AFTER_BEGAN_NS: Final = 30 * NS_PER_S
"""Nodes write a last few lines behind the first step."""
QUIET_NS: Final = 10 * NS_PER_S
CAP_NS: Final = 24 * 3600 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a start; times by the service's clock, since those of nodes may be wrong."""

    first_ns: int
    """When its first line arrived."""
    latest_ns: int
    """When its latest line arrived."""
    nodes_expected: int | None
    nodes_heard: int
    nodes_began: int
    """Nodes on which training began."""
    nodes_ended: int
    """Nodes whose commands have ended, or that later restarts have replaced."""


def closes_ns(seen: Seen) -> int:
    """When the start is over if nothing more comes; never later than the cap."""
    capped_ns = seen.first_ns + CAP_NS
    all_nodes = max(seen.nodes_expected or 0, seen.nodes_heard)
    if seen.nodes_began >= all_nodes > 0:
        return min(seen.latest_ns + AFTER_BEGAN_NS, capped_ns)
    if seen.nodes_heard and seen.nodes_ended >= seen.nodes_heard:
        return min(seen.latest_ns + QUIET_NS, capped_ns)
    return capped_ns

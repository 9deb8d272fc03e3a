"""How reads behave. Defaults suit links of 1 to 100 Gbit/s and disks; tests make some of them short."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """Of one `HdfsReads`."""

    silent_s: float = 1.0
    """A DataNode that says nothing for so long is late: its pieces go elsewhere, where there is one."""
    reconnect_s: float = 5.0
    """Where there is no other, a silent connection is given up for a new one."""
    least_late_s: float = 0.25
    """No request counts as late before."""
    connections_per_node: int = 2
    max_threads: int = 64
    piece_bytes: int = 1 << 20
    """What is begun again elsewhere when it is late."""
    max_run_bytes: int = 8 << 20
    """Asked of a DataNode at once."""
    max_hedges: int = 16
    """At a time; each has memory for one piece."""
    max_pieces: int = 1 << 17
    """That wait or are on their way: more are refused."""

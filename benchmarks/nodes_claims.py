"""The names of the arms of `nodes`, its rows, and their goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from harness import Must
from nodes_site import Traffic


class Names:
    """Names of arms."""

    TODAY = "containerd, pip, plain HDFS"
    LAZY = "bootseer without record and peers"
    DIRECT = "bootseer without peers"
    PEERS = "bootseer"
    MIRROR = "containerd through a mirror on a node"
    TORRENT = "aria2 (BitTorrent) and containerd"


class Faults:
    """Names of arms with a fault, all with peers."""

    NONE = "healthy"
    SLOW = "one node's upload at a twentieth"
    KILLED = "one node is gone in mid-start"
    HUNG = "one node hangs in mid-start"
    STARVED = "the origin at a quarter"
    UNHEDGED = f"{SLOW}, no second request"
    UNBROKEN = f"{SLOW}, no circuit breaker"
    NAIVE = f"{STARVED}, who waits gives up"


BUSY = 0.9
"""A row with a higher processor utilization was bound by the processors, not by the links."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement of one arm on one number of nodes."""

    seconds: Sequence[float]
    """For each node that was to be ready, seconds from the common begin until its job has read all."""
    traffic: Traffic
    cpu_s: Sequence[float]
    """For each node, the processor time of all its processes."""
    origin_cpu_s: float
    asked: int
    """Requests between nodes for blocks of image and environment."""
    late: int
    """Those given up as late and repeated elsewhere."""
    busy: float
    """The share of all processors' time that any program of this machine used meanwhile."""

    @property
    def slowest_s(self) -> float:
        return max(self.seconds)

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def is_bound_by_processors(self) -> bool:
        return self.busy > BUSY


Found = Mapping[tuple[str, int], Sequence[Row]]
"""Rows by arm and number of nodes."""


def named(arm: str, number: int) -> str:
    """The name of an arm with its number of nodes."""
    return f"{arm}, N = {number}"


def claims(found: Found) -> list[Must]:
    """All claims about the measured rows."""
    musts: list[Must] = []

    def slowest(arm: str, number: int) -> float:
        return median(row.slowest_s for row in found[arm, number])

    def origin(arm: str, number: int) -> float:
        return median(row.traffic.origin for row in found[arm, number])

    def must(what: str, value: float, limit: float, *, at_least: bool = False) -> None:
        musts.append(Must(what, value, limit, "x", at_least=at_least))

    numbers = sorted(number for arm, number in found if arm == Names.PEERS)
    if not numbers:
        return musts
    most, one = numbers[-1], numbers[0]
    for number in numbers[1:]:
        copies = origin(Names.PEERS, number) / origin(Names.PEERS, one)
        must(f"origin sends, {number} nodes / {one}", copies, 1.05)
    if most > one:
        must(f"slowest of {most} nodes / {one} node", slowest(Names.PEERS, most) / slowest(Names.PEERS, one), 2.0)
    if (Names.LAZY, most) in found:
        faster = slowest(Names.LAZY, most) / slowest(Names.PEERS, most)
        must(f"{Names.LAZY} / {Names.PEERS}, {most} nodes", faster, 7.0, at_least=True)
    compared = [number for number in numbers if number <= 4 and (Names.TODAY, number) in found]
    if compared:
        less = slowest(Names.PEERS, compared[-1]) / slowest(Names.TODAY, compared[-1])
        must(f"{Names.PEERS} / {Names.TODAY}, {compared[-1]} nodes", less, 0.15)
    return musts


def fault_claims(found: Found) -> list[Must]:
    """Claims about starts with a fault, relative to the healthy start of the same run."""
    musts: list[Must] = []
    rows = {arm: (number, median(row.slowest_s for row in of), median(row.traffic.origin for row in of))
            for (arm, number), of in found.items()}  # fmt: skip
    if Faults.NONE not in rows:
        return musts
    number, healthy_s, copy = rows[Faults.NONE]

    def must(what: str, value: float, limit: float, unit: str = "x", *, at_least: bool = False) -> None:
        musts.append(Must(what, value, limit, unit, at_least=at_least))

    if Faults.SLOW in rows:
        must(f"{Faults.SLOW} / {Faults.NONE}: time", rows[Faults.SLOW][1] / healthy_s, 1.5)
    for arm in (Faults.KILLED, Faults.HUNG):
        if arm in rows:
            must(f"{arm}: time", rows[arm][1], 1.2 * healthy_s + 1, "s")
    for arm in (Faults.SLOW, Faults.KILLED, Faults.HUNG):
        if arm in rows:
            must(f"{arm} / {Faults.NONE}: origin sends", rows[arm][2] / copy, 1 + 1 / number)
    if starved := found.get((Faults.STARVED, number)):
        late = median(row.late / max(row.asked, 1) for row in starved)
        must(f"{Faults.STARVED}: requests given up as late, of all", late, 0.01)
        must(f"{Faults.STARVED} / {Faults.NONE}: origin sends", rows[Faults.STARVED][2] / copy, 1.05)
    # A guard without effect when it is off would be needless.
    for arm in (Faults.UNHEDGED, Faults.UNBROKEN):
        if Faults.SLOW in rows and arm in rows:
            slower = rows[arm][1] / rows[Faults.SLOW][1]
            must(f"{arm}: time, against with it", slower, 1.2, at_least=True)
    if Faults.STARVED in rows and Faults.NAIVE in rows:
        more = rows[Faults.NAIVE][2] / rows[Faults.STARVED][2]
        must(f"{Faults.NAIVE}: origin sends, against who waits", more, 1.5, at_least=True)
    return musts

"""The rows of the benchmarks of several nodes: one way to start the job on one number of nodes, measured once."""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import node
import nodes_site
from harness import ROOT, Left, Must, Outcome
from nodes_arms import Origin, Start, Techniques, bootseer
from nodes_claims import Found, Names, Row, named
from nodes_origin import Sizes, origin
from nodes_site import Node, Script, Site

_DEADLINE_S = 1800.0
METHOD = (
    "each node has a network namespace with its own link (limited in both directions by the kernel's tbf), mounts, "
    "process ids, an empty cache and a container; registry, package index and HDFS are behind one link, whose bytes"
    " are counted until the last node is ready. Everything runs on the same processors; their utilization by all "
    "programs of the machine is given for each row (busy), and a row above 0.9 was bound by them. A job repeats the"
    " reads of one start of the demo's image and environment, in their order and with their pauses, and then reads "
    "all of the checkpoint; the checksum is the same on all nodes and in all arms. Time is from the common first "
    "command until a node's job has read all; the samples are those of the slowest node. Two nodes have run the job"
    " before; starts use their records. containerd's daemon runs already. tbf adds no latency"
)


@dataclass(frozen=True, slots=True)
class Rates:
    """Limits of the links, in Mbit/s."""

    origin: int
    node: int


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault in a row."""

    before: Callable[[Site], None] = lambda site: None
    """Called after the links are limited."""
    after_bytes: int = 0
    act: Callable[[Sequence[Node]], None] | None = None
    """Called when the origin has sent `after_bytes`."""
    lost: frozenset[int] = frozenset()
    """Nodes that are not expected to become ready."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to start, on one number of nodes."""

    name: str
    number: int
    script: Callable[[Start], Script]
    fault: Fault = Fault()
    content: str = ""
    """Nodes of arms with the same content must have the same checksum or loss."""


@dataclass(frozen=True, slots=True)
class Lab:
    """Shared by all rows."""

    site: Site
    origin: Origin
    servers: set[int]
    folder: Path
    rates: Rates
    quick: bool


def measure(
    quick: bool,
    most: int,
    arms_of: Callable[[Lab], Sequence[Arm]],
    claims: Callable[[Found], list[Must]],
    rounds: int | None = None,
    *,
    whole: bool = False,
) -> Iterator[Outcome]:
    """Measure all arms; yields after each. `most`: the largest number of nodes; `whole`: all of the image."""
    rates, sizes = (Rates(100, 200), Sizes(64, cut=not whole)) if quick else (Rates(50, 100), Sizes(64))
    if chosen := os.environ.get("NODES_MBIT", ""):
        rates = Rates(*map(int, chosen.split(",")))
    for found in rows(rates, sizes, most, arms_of, rounds or 1, quick=quick):
        yield _outcome(found, rates, sizes, claims)


def rows(
    rates: Rates,
    sizes: Sizes,
    most: int,
    arms_of: Callable[[Lab], Sequence[Arm]],
    rounds: int = 1,
    *,
    quick: bool = False,
) -> Iterator[Found]:
    """Measure all rows; yields the rows so far after each."""
    if os.geteuid():
        raise RuntimeError("the benchmarks of nodes need root: they make network namespaces and mounts")
    node.adopt()
    found: dict[tuple[str, int], list[Row]] = defaultdict(list)
    cache = ROOT / ".demo-cache"
    cache.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=cache) as text,
        Site(most) as site,
        origin(site, Path(text), sizes) as (start_from, servers),
    ):
        lab = Lab(site, start_from, servers, Path(text), rates, quick)
        checksums: dict[str, set[bytes]] = defaultdict(set)
        # Discarded: it records the replay itself. On two nodes, because only chunks of the checkpoint that several
        # nodes read are prefetched.
        run_row(lab, Arm("first", 2, partial(bootseer, techniques=Techniques())), 0, checksums, shaped=False)
        arms = [arm for arm in arms_of(lab) if _is_chosen(named(arm.name, arm.number))] * rounds
        left = Left([float(arm.number) for arm in arms])
        for count, arm in enumerate(arms, 1):
            print(f"  {left}", flush=True)
            row = run_row(lab, arm, count, checksums)
            found[arm.name, arm.number].append(row)
            left.made_one()
            print(f"  {named(arm.name, arm.number)}: {told(row)}", flush=True)
            yield found


def run_row(lab: Lab, arm: Arm, count: int, checksums: dict[str, set[bytes]], *, shaped: bool = True) -> Row:
    """Start the job on all nodes of an arm."""
    site = lab.site
    site.shape(*((lab.rates.origin, lab.rates.node) if shaped else (None, None)))
    scripts = [
        arm.script(Start(lab.origin, lab.folder / f"node{i}", i, arm.number, f"row{os.getpid()}-{count}"))
        for i in range(arm.number)
    ]
    arm.fault.before(site)
    with nodes_site.nodes(site, lab.folder, scripts) as running:
        before, busy = site.traffic(), node.processors_s()
        origin_s = sum(map(node.cpu_s, lab.servers))
        cpu_s = [one.cpu_s() for one in running]
        began = nodes_site.start(running)
        if arm.fault.act is not None:
            while site.traffic().since(before).origin < arm.fault.after_bytes:
                time.sleep(0.1)
            arm.fault.act(running)
        awaited = [one for one in running if one.number not in arm.fault.lost]
        nodes_site.wait_until_ready(awaited, _DEADLINE_S)
        used, idle = (after - b for after, b in zip(node.processors_s(), busy, strict=True))
        moved = site.traffic().since(before)
        cpu_s = [one.cpu_s() - s for one, s in zip(running, cpu_s, strict=True)]
        origin_s = sum(map(node.cpu_s, lab.servers)) - origin_s
        # Nodes report their requests to peers when training begins.
        nodes_site.finish(awaited)
        said = [event for one in awaited for event in one.events() if "peer_requests" in event]
        row = Row(
            [one.ready_at - began for one in awaited if one.ready_at is not None],
            moved,
            cpu_s,
            origin_s,
            sum(event["peer_requests"] for event in said),
            sum(event.get("late_requests", 0) for event in said),
            used / (used + idle),
        )
        known = checksums[arm.content]
        known.update(one.checksum for one in awaited)
        if len(known) != 1:
            raise RuntimeError(f"{arm.name}: the nodes have not read the same: {sorted(known)}")
    return row


def _is_chosen(name: str) -> bool:
    """Whether `NODES_ARMS`, a list separated by semicolons, has this arm; without it all are measured."""
    chosen = os.environ.get("NODES_ARMS", "")
    return not chosen or name in [word.strip() for word in chosen.split(";")]


def told(row: Row) -> str:
    """A row as a line of text."""
    sent, bound = sum(row.traffic.sent) / 1e6, ", bound by the processors" if row.is_bound_by_processors else ""
    return (
        f"slowest {row.slowest_s:.1f} s, median {row.median_s:.1f} s; origin sent {row.traffic.origin / 1e6:.0f} MB, "
        f"nodes {sent:.0f} MB; {row.late} of {row.asked} requests late; "
        f"CPU {sum(row.cpu_s):.1f} + {row.origin_cpu_s:.1f} s, busy {row.busy:.2f}{bound}"
    )


def _outcome(found: Found, rates: Rates, sizes: Sizes, claims: Callable[[Found], list[Must]]) -> Outcome:
    samples = {named(*key): [row.slowest_s for row in rows] for key, rows in found.items()}
    return Outcome(
        parameters={
            "origin_mbit": rates.origin,
            "node_mbit": rates.node,
            "checkpoint_mb": sizes.checkpoint_mb,
            "image": "examples/image without PyTorch's layer" if sizes.cut else "examples/image",
        },
        samples=samples,
        unit="s",
        baselines={
            named(arm, number): named(Names.TODAY, number)
            for arm, number in found
            if arm != Names.TODAY and len(found.get((Names.TODAY, number), ())) == len(found[arm, number])
        },
        must_reach=claims(found),
        details={named(*key): _details(rows) for key, rows in found.items()},
        method=METHOD,
    )


def _details(rows: Sequence[Row]) -> Mapping[str, Any]:
    """Medians of the other figures."""
    return {
        "median_s": median(row.median_s for row in rows),
        "slowest_to_median": median(row.slowest_s / row.median_s for row in rows),
        "origin_mb": median(row.traffic.origin for row in rows) / 1e6,
        "sent_mb_by_node": [median(each) / 1e6 for each in zip(*(row.traffic.sent for row in rows), strict=True)],
        "received_mb_by_node": [
            median(each) / 1e6 for each in zip(*(row.traffic.received for row in rows), strict=True)
        ],
        "cpu_s_by_node": [median(each) for each in zip(*(row.cpu_s for row in rows), strict=True)],
        "origin_cpu_s": median(row.origin_cpu_s for row in rows),
        "asked_peers": median(row.asked for row in rows),
        "late": median(row.late for row in rows),
        "busy": median(row.busy for row in rows),
        "bound_by_processors": any(row.is_bound_by_processors for row in rows),
    }

"""One analysed start as rows of the tables, with names instead of ids; `derive` replaces them.

No I/O. `set_run_s` and `move_to_arrival` complete the rows of an attempt in place.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import zstandard

from bootseer.report.analysis.spans import RUN, TRUNCATED, StartupSpans
from bootseer.report.analysis.verdict import BUCKETS
from bootseer.report.model import Report
from bootseer.service.schema import CHECKPOINT, CLOSED, ENVIRONMENT, IMAGE, OPEN
from bootseer.trace.event import FAILED
from bootseer.units import NS_PER_S, S_PER_H, seconds

DAY_NS: Final = 86_400 * NS_PER_S
_MAX_DAY: Final = 100_000
"""In the year 2243: limits days of wrong clocks."""
_MAX_NS: Final = (1 << 63) - 1
BEGAN: Final = "training_began"
_MAX_COUNT: Final = 1 << 53
"""Bytes, lines: a database cannot sum the largest numbers that events may have, and then no sum of the day is there."""
_COUNTS: Final = ("cache_bytes", "peer_bytes", "origin_bytes", "stored_bytes", "lines_lost")
_VERSIONS: Final = ("bootseer", "python", "torch", "cuda", "driver")
_POD: Final = re.compile(r"/[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")


@dataclass(slots=True)
class Rows:
    """The rows of one start. `last_node`, `max_node`, `stage`, `node` ... are names."""

    start: dict[str, Any]
    report: bytes
    stages: list[dict[str, Any]]
    nodes: list[dict[str, Any]]
    techniques: list[dict[str, Any]]
    racks: dict[str, str]
    """Rack by node, if known."""


def rows_of(report: Report, startup: StartupSpans, *, is_closed: bool) -> Rows:
    """The rows of a start, with its report as `bootseer report --json` prints it."""
    techniques = _techniques(report)
    start = _start(report, startup, techniques)
    start["state"] = CLOSED if is_closed else OPEN
    day = start["day"]
    for one in techniques:
        one["day"] = day
    for one in (start, *techniques):
        one.update({name: min(max(one[name], 0), _MAX_COUNT) for name in _COUNTS if name in one})
    same = {name: start[name] for name in ("day", "bucket", "kind", "cache_state")}
    names = _names(node.node for node in report.nodes)
    stages = [
        {
            "stage": row.stage,
            **same,
            "num_nodes": row.num_nodes,
            "median_s": row.median_s,
            "p99_s": next((seconds_ for seconds_, part in row.cdf if part >= 0.99), row.max_s),
            "max_s": row.max_s,
            "max_node": names.get(row.max_node),
            "work_s": row.work_s,
            "wait_s": row.wait_s,
            "gpu_s": None if row.gpu_hours is None else row.gpu_hours * S_PER_H,
        }
        for row in report.stages
    ]
    # A node may be a straggler at several barriers: take the largest delay.
    worst = {one.node: one for one in sorted(report.stragglers, key=lambda one: one.delay_s)}
    last = start["last_node"] if len(report.nodes) > 1 else None
    start["last_node"] = names.get(start["last_node"])
    nodes = [
        {
            "node": names[node.node],
            "day": day,
            "is_last": node.node == last,
            "stage": worst[node.node].stage if node.node in worst else None,
            "delay_s": worst[node.node].delay_s if node.node in worst else None,
        }
        for node in report.nodes
    ]
    places = {names[node.node]: node.attrs.get("run.rack") or node.attrs.get("run.topology") for node in report.nodes}
    racks = {name: str(place) for name, place in places.items() if place}
    return Rows(start, zstandard.compress(report.to_text().encode(), 6), stages, nodes, techniques, racks)


def _names(nodes: Iterable[str]) -> dict[str, str]:
    """The name of each node in the tables. A pod has that of its machine, by which later starts are compared with this
    one, unless other pods of the start are on the same machine."""
    machines = {node: _POD.sub("", node) for node in nodes}
    pods = Counter(machines.values())
    return {node: machine if pods[machine] == 1 else node for node, machine in machines.items()}


def day_of(ns: int) -> int:
    """The day of a time, since 1970 in UTC."""
    return min(max(ns // DAY_NS, 0), _MAX_DAY)


def _start(report: Report, startup: StartupSpans, techniques: Sequence[dict[str, Any]]) -> dict[str, Any]:
    start, overhead = report.startup, report.overhead
    run = next(iter(sorted(startup.run_attrs.items())), ("", {}))[1]
    took_s = overhead.startup_s or 0.0
    # Of the nodes that were last at a barrier, the one with the largest excess.
    worst = max(report.critical_chain, key=lambda link: link.excess_s or 0.0, default=None)
    image = report.images[0] if report.images else None
    environment = report.environments[0] if report.environments else None
    checkpoint = report.checkpoints[0] if report.checkpoints else None
    queue = [segment for segment in report.scheduler if segment.stage == "queue"]
    fingerprint = {
        "image": image.digest if image else "",
        "environment": environment.key if environment else "",
        "checkpoint": checkpoint.uri if checkpoint else "",
        "nodes": start.num_nodes,
        "gpus": start.num_gpus,
        **{name: str(run[name]) for name in _VERSIONS if run.get(name)},
    }
    return {
        "job": start.job,
        "attempt": start.attempt,
        "restart": start.restart,
        "kind": start.kind,
        **{name: str(run.get(name, "")) for name in ("team", "queue", "user", "cluster")},
        "outcome": start.outcome,
        "began_ns": _stored(start.zero_ns),
        "ended_ns": _stored(start.zero_ns + round(took_s * NS_PER_S)),
        "day": day_of(start.zero_ns),
        "bucket": [name for _, name, _ in BUCKETS].index(start.scale) if start.scale else -1,
        "nodes_expected": report.coverage.nodes_expected,
        "nodes_heard": report.coverage.nodes_heard,
        "ranks": start.num_ranks,
        "gpus": start.num_gpus,
        "cache_state": _cache_state(techniques),
        "image": image.image if image else "",
        "fingerprint": json.dumps(fingerprint, sort_keys=True),
        "overhead_s": took_s,
        "queue_s": sum(segment.end_s - segment.start_s for segment in queue) if queue else None,
        "work_s": sum(node.work_s + node.untracked_s for node in report.nodes),
        "wait_s": sum(node.wait_s for node in report.nodes),
        "gpu_s": (overhead.gpu_hours or 0.0) * S_PER_H,
        "wait_gpu_s": (overhead.wait_gpu_hours or 0.0) * S_PER_H,
        "straggler_s": max((group.joint_s for group in report.straggler_groups), default=0.0),
        "run_s": None,  # see `set_run_s`
        **{name: sum(one[name] for one in techniques) for name in ("cache_bytes", "peer_bytes", "origin_bytes")},
        "lines_lost": report.coverage.events_lost,
        "clock_error_s": report.clock.max_error_s,
        "last_node": worst.node if worst else None,
        "last_stage": (worst.stage if worst and start.outcome == BEGAN else _stopped_in(report)) or None,
    }


def _stored(ns: int) -> int:
    """A time that a database can store: those of wrong clocks may lie beyond."""
    return min(max(ns, -_MAX_NS), _MAX_NS)


def _stopped_in(report: Report) -> str:
    """The stage in which a start stopped: that of a node that failed, else of the node whose events end first."""
    stopped = [node for node in report.nodes if node.outcome in (FAILED, TRUNCATED)]
    first = min(stopped, key=lambda node: (node.outcome != FAILED, node.own_end_s), default=None)
    return first.last_stage if first is not None else ""


def set_run_s(rows: Sequence[Rows], startups: Iterable[StartupSpans]) -> None:
    """Divide the time of an attempt's `bootseer run`, from the end of the queue on, among its starts: each has it until
    the next restart. It stays unknown while the run goes on on half of the nodes; a node that died sends no end."""
    runs = [span for one in startups for node in one.nodes.values() for span in node.structure if span.stage == RUN]
    ends_ns = [span.end_ns for span in runs if span.outcome != TRUNCATED]
    if 2 * len(ends_ns) <= len(runs):
        return
    starts = sorted((one.start for one in rows), key=lambda start: int(start["restart"]))
    begins_ns = [start["began_ns"] + round((start["queue_s"] or 0.0) * NS_PER_S) for start in starts]
    for start, begin_ns, end_ns in zip(starts, begins_ns, [*begins_ns[1:], max(ends_ns)], strict=True):
        start["run_s"] = seconds(max(end_ns - begin_ns, 0))


def move_to_arrival(rows: Sequence[Rows], first_ns: int) -> None:
    """Move the starts of an attempt, whose first line arrived at `first_ns`, if its nodes' clocks are ahead by more
    than a day: they would be in the sums of every `--since`, and in no month's."""
    ahead_ns = min((one.start["began_ns"] for one in rows), default=0) - first_ns
    if ahead_ns <= DAY_NS:
        return
    for one in rows:
        for name in ("began_ns", "ended_ns"):
            one.start[name] -= ahead_ns
        day = day_of(one.start["began_ns"])
        for row in (one.start, *one.stages, *one.nodes, *one.techniques):
            row["day"] = day


def _cache_state(techniques: Sequence[dict[str, Any]]) -> str:
    hits, misses = (sum(one[name] for one in techniques) for name in ("hits", "misses"))
    return "off" if not hits + misses else "hit" if not misses else "mixed" if hits else "miss"


def _techniques(report: Report) -> list[dict[str, Any]]:
    """For image, environment and checkpoint: hits and misses over nodes, and the sources of bytes."""
    found = []
    environments = [one for one in report.environments if one.mode != "bypassed"]
    for technique, starts, ready in (
        (IMAGE, report.images, ("hot", "local")),
        (ENVIRONMENT, environments, ("restored",)),
    ):
        if starts:
            came = sum(one.demand_bytes + one.hot_bytes + one.cold_bytes for one in starts)
            hits = sum(one.mode in ready for one in starts)
            saved_s = sum(getattr(one, "saved_s", None) or 0.0 for one in starts)
            found.append(
                {
                    "technique": technique,
                    "digest": next((one.digest for one in starts if one.digest), ""),
                    "stored_bytes": max(one.stored_bytes for one in starts),
                    "hits": hits,
                    "misses": len(starts) - hits,
                    "cache_bytes": sum(one.local_bytes for one in starts),
                    "peer_bytes": 0,
                    "origin_bytes": came,
                    "saved_s": saved_s,
                }
            )
    mounted = [one for one in report.checkpoints if one.mode == "mounted"]
    if mounted:
        # What was prefetched is later read from the cache, and counted there, too.
        rest = ((one, max(one.read_bytes - one.place_bytes - one.peer_bytes, 0)) for one in mounted)
        cached = sum(min(one.cache_bytes + one.same_bytes, most) for one, most in rest)
        hits = sum(one.read_bytes >= 2 * one.place_bytes for one in mounted)
        found.append(
            {
                "technique": CHECKPOINT,
                "digest": mounted[0].uri,
                "stored_bytes": 0,
                "hits": hits,
                "misses": len(mounted) - hits,
                "cache_bytes": cached,
                "peer_bytes": sum(one.peer_bytes for one in mounted),
                "origin_bytes": sum(one.place_bytes for one in mounted),
                "saved_s": 0.0,
            }
        )
    _with_peers(report, [one for one in found if one["technique"] != CHECKPOINT])
    return found


def _with_peers(report: Report, fetched: Sequence[dict[str, Any]]) -> None:
    """Split the bytes from other nodes, which are known only per node, in proportion to each technique's bytes."""
    from_peers = sum(one.peer_bytes for one in report.peers) - sum(one.peer_bytes for one in report.checkpoints)
    came = sum(one["origin_bytes"] for one in fetched)
    for one in fetched if came else ():
        one["peer_bytes"] = min(max(from_peers, 0) * one["origin_bytes"] // came, one["origin_bytes"])
        one["origin_bytes"] -= one["peer_bytes"]

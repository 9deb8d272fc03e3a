"""The report as a Chrome trace, the JSON format of ui.perfetto.dev and chrome://tracing.

Each node is a process with one thread of nested slices; background work is async, because it overlaps. The critical
chain is a process of its own. Viewers silently drop events that break the rules of the format: slices of a thread must
nest, parents must come before children, ts is in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from bootseer.report.model import UNTRACKED, WAIT, WORK, Link, Node, Report, Segment
from bootseer.report.render.fold import clean, in_order, time_range

_CHAIN_PID = 1
_FIRST_NODE_PID = 2

Event = dict[str, Any]
_Clock = Callable[[float], int]


def render(report: Report) -> str:
    return json.dumps(trace(report), separators=(",", ":"), allow_nan=False)


def trace(report: Report) -> dict[str, Any]:
    """The trace as the dict that `render` writes: `traceEvents` in the order that viewers need."""
    low_s = time_range(report.nodes)[0]

    def us(moment_s: float) -> int:
        """Seconds of the report as whole microseconds of the trace, which must not be negative."""
        return max(0, round((moment_s - low_s) * 1e6))

    events = _metadata(_CHAIN_PID, f"{clean(report.startup.job)}: critical chain", -1)
    timed = _chain(report.critical_chain, us)
    for index, node in enumerate(in_order(report.nodes)):
        pid = _FIRST_NODE_PID + index
        rank = f" rank {node.rank}" if node.rank >= 0 else ""
        events += _metadata(pid, clean(node.node) + rank, index)
        timed += _slices(node, pid, us)
        timed += _background(node, pid, us)
    # The sort is stable: with equal times, a parent stays before its children.
    timed.sort(key=lambda event: event["ts"])
    return {"displayTimeUnit": "ms", "traceEvents": events + timed, "otherData": _about(report)}


def _about(report: Report) -> dict[str, Any]:
    startup = report.startup
    return {
        "job": clean(startup.job),
        "attempt": startup.attempt,
        "restart": startup.restart,
        "kind": startup.kind,
        "verdict": clean(report.verdict),
        "zero_unix_ns": str(startup.zero_ns),
        "clock_error": "unobserved" if report.clock.max_error_s is None else f"{report.clock.max_error_s:.6f} s",
    }


def _metadata(pid: int, name: str, order: int) -> list[Event]:
    common = {"ph": "M", "pid": pid, "tid": pid, "ts": 0}
    return [
        {**common, "name": "process_name", "args": {"name": name}},
        {**common, "name": "process_sort_index", "args": {"sort_index": order}},
        {**common, "name": "thread_name", "args": {"name": "startup"}},
    ]


def _slice(name: str, category: str, span: tuple[int, int], pid: int, args: dict[str, Any]) -> Event:
    # Thread id = process id: viewers then treat it as the main thread, and ids are unique over all processes.
    return {
        "ph": "X",
        "name": clean(name),
        "cat": category,
        "ts": span[0],
        "dur": span[1] - span[0],
        "pid": pid,
        "tid": pid,
        "args": args,
    }


def _slices(node: Node, pid: int, us: _Clock) -> list[Event]:
    """Nested slices: a run of segments that share the first parts of their names lies in one slice for these."""
    leaves = []
    at = 0
    for seg in sorted(node.segments, key=lambda seg: seg.start_s):
        start, end = max(us(seg.start_s), at), us(seg.end_s)
        if end > start:
            leaves.append((start, end, seg))
            at = end
    return _nested(leaves, 0, pid, node)


def _nested(leaves: list[tuple[int, int, Segment]], depth: int, pid: int, node: Node) -> list[Event]:
    events: list[Event] = []
    first = 0
    while first < len(leaves):
        path = leaves[first][2].stage.split(".")
        if depth >= len(path):
            start, end, seg = leaves[first]
            if seg.kind == WAIT:
                events.append(_slice("wait", WAIT, (start, end), pid, _args(seg, node)))
            first += 1
            continue
        prefix, last = path[: depth + 1], first
        while (
            last + 1 < len(leaves)
            and leaves[last + 1][0] == leaves[last][1]
            and leaves[last + 1][2].stage.split(".")[: depth + 1] == prefix
        ):
            last += 1
        run = leaves[first : last + 1]
        whole = run[0][2] if len(run) == 1 and len(path) == depth + 1 else None
        kind = whole.kind if whole else WORK
        category = UNTRACKED if UNTRACKED in prefix else kind
        args = _args(whole, node) if whole else {"stage": clean(".".join(prefix))}
        events.append(_slice(prefix[-1], category, (run[0][0], run[-1][1]), pid, args))
        events += _nested(run, depth + 1, pid, node)
        first = last + 1
    return events


def _args(seg: Segment, node: Node) -> dict[str, Any]:
    args: dict[str, Any] = {"stage": clean(seg.stage), "kind": seg.kind}
    if seg.outcome:
        args["outcome"] = clean(seg.outcome)
    prefix = seg.stage + "."
    for key, value in node.attrs.items():
        if key.startswith(prefix) and "." not in key[len(prefix) :]:
            args[clean(key[len(prefix) :])] = value if isinstance(value, (bool, int, float)) else clean(value)
    return args


def _background(node: Node, pid: int, us: _Clock) -> list[Event]:
    events = []
    for index, seg in enumerate(node.background):
        common = {"name": clean(seg.stage), "cat": "background", "id": f"{pid}.{index}", "pid": pid, "tid": pid}
        start = us(seg.start_s)
        events.append({**common, "ph": "b", "ts": start, "args": _args(seg, node)})
        events.append({**common, "ph": "e", "ts": max(start, us(seg.end_s))})
    return events


def _chain(links: list[Link], us: _Clock) -> list[Event]:
    """The critical chain as a thread of its own: the node that the others waited for, from barrier to barrier."""
    events = []
    at = 0
    for link in links:
        start, end = max(us(link.from_s), at), us(link.release_s)
        if end > start:
            args = {"barrier": clean(link.barrier), "stage": clean(link.stage), "stage_s": _number(link.stage_s)}
            args |= {"excess_s": _number(link.excess_s), "waited_gpu_hours": _number(link.waited_gpu_hours)}
            events.append(_slice(f"{link.node}: {link.stage}", "critical_chain", (start, end), _CHAIN_PID, args))
            at = end
        mark = {"ph": "i", "s": "g", "name": f"barrier {clean(link.barrier)}", "cat": "barrier"}
        events.append({**mark, "ts": end, "pid": _CHAIN_PID, "tid": _CHAIN_PID})
    return events


def _number(value: float | None) -> float | str:
    return "unobserved" if value is None else round(value, 6)

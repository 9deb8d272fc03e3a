"""How the nodes read their checkpoint: rows for the report, and the lines that sum them up.

The facts come from two events of each node that `bootseer run --checkpoint` writes when training begins:
`checkpoint_start`, and `checkpoint_datanode` for each node of the file system that served it. Called by
`analysis.report` and the renderers. Decides and touches nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bootseer.analysis.model import CheckpointStart, DataNode
from bootseer.analysis.spans import StartupSpans
from bootseer.units import format_bytes

EVENT = "checkpoint_start"
DATANODE = "checkpoint_datanode"
MAX_DATANODES = 16
"""Of each node: those that served most. Others are not written down, and not believed."""
PLAIN = "plain"
_TEXTS = ("uri", "until", "fallback", "reason")
_COUNTS = ("read_bytes", "place_bytes", "cache_bytes", "same_bytes", "retries", "hedges", "hedges_won", "rebuilt",
           "refused")  # fmt: skip
_MAX_REASONS = 3
_UNEVEN = 1.5


def checkpoint_starts(startup: StartupSpans) -> list[CheckpointStart]:
    """What each node said last of its checkpoint, by node."""
    found = []
    for name, node in sorted(startup.nodes.items()):
        said = [mark for mark in node.instants if mark.stage == EVENT]
        if said:
            served = [mark.attrs for mark in node.instants if mark.stage == DATANODE]
            found.append(_start(name, max(said, key=lambda mark: mark.end_ns).attrs, served))
    return found


def _start(node: str, attrs: Mapping[str, Any], served: Sequence[Mapping[str, Any]]) -> CheckpointStart:
    texts: dict[str, Any] = {key: str(attrs.get(key) or "") for key in _TEXTS}
    counts: dict[str, Any] = {key: _count(attrs.get(key)) for key in _COUNTS}
    nodes = {str(one.get("datanode") or ""): one for one in served}
    datanodes = [
        DataNode(name, _count(one.get("bytes")), _number(one.get("seconds")), _count(one.get("failures")))
        for name, one in nodes.items()
    ]
    datanodes.sort(key=lambda one: (-one.bytes, one.name))
    return CheckpointStart(
        node=node,
        mode=PLAIN if attrs.get("mode") == PLAIN else "mounted",
        seconds=_number(attrs.get("seconds")),
        datanodes=datanodes[:MAX_DATANODES],
        **texts,
        **counts,
    )


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 else None


def summary(checkpoints: Sequence[CheckpointStart]) -> list[str]:
    """A line for what all nodes read, one for what the file system's nodes served, one for each trouble."""
    plain = [one for one in checkpoints if one.mode == PLAIN]
    mounted = [one for one in checkpoints if one.mode != PLAIN]
    lines = [f"{_nodes(plain)} read it as it lies in its folder: {plain[0].reason}"] if plain else []
    if not mounted:
        return lines
    reasons = dict.fromkeys(f"mounted because {one.reason}" for one in mounted if one.reason)
    return [_read(mounted), *_served(mounted), *_trouble(mounted), *list(reasons)[:_MAX_REASONS], *lines]


def _read(group: Sequence[CheckpointStart]) -> str:
    # They need not add up: what is fetched ahead of the reader is found in the cache then.
    parts = [
        f"{format_bytes(median(values))} {where}"
        for where, values in (
            ("fetched from the file system", [one.place_bytes for one in group]),
            ("found in the node's cache", [one.cache_bytes for one in group]),
            ("equal to what an earlier checkpoint left there", [one.same_bytes for one in group]),
        )
        if any(values)
    ]
    until = " before training began" if all(one.until == "training_began" for one in group) else ""
    read = format_bytes(median(one.read_bytes for one in group))
    sources = f"; {', '.join(parts)}" if parts else ""
    return f"{_nodes(group)} read {read}{until}{sources}"


def _nodes(group: Sequence[CheckpointStart]) -> str:
    return group[0].node if len(group) == 1 else f"{len(group):,} nodes (the median of them)"


def _served(group: Sequence[CheckpointStart]) -> list[str]:
    bytes_of: dict[str, int] = defaultdict(int)
    for one in group:
        for datanode in one.datanodes:
            if datanode.name:  # a folder is one nameless node
                bytes_of[datanode.name] += datanode.bytes
    if not any(bytes_of.values()):
        return []
    most = max(bytes_of, key=lambda name: (bytes_of[name], name))
    share = bytes_of[most] * len(bytes_of) / sum(bytes_of.values())
    uneven = f"; {most} served {share:.1f} times the mean" if share >= _UNEVEN else ", evenly"
    total = format_bytes(sum(bytes_of.values()))
    if len(bytes_of) == 1:
        return [f"one DataNode served all of {total}: {most}"]
    return [f"{len(bytes_of)} DataNodes served {total}{uneven}"]


def _trouble(group: Sequence[CheckpointStart]) -> list[str]:
    lines = []
    told = (
        ("read again after an error", sum(one.retries for one in group)),
        ("asked of a second DataNode because the first was late", sum(one.hedges for one in group)),
        ("made from parity", sum(one.rebuilt for one in group)),
        ("refused because of wrong bytes, and read elsewhere", sum(one.refused for one in group)),
    )
    if any(count for _, count in told):
        lines.append("pieces " + "; ".join(f"{what}: {count:,}" for what, count in told if count))
    failing: dict[str, int] = defaultdict(int)
    for one in group:
        for datanode in one.datanodes:
            failing[datanode.name] += datanode.failures
    worst = sorted((name for name in failing if failing[name]), key=lambda name: -failing[name])[:_MAX_REASONS]
    if worst:
        lines.append("DataNodes with failed reads: " + ", ".join(f"{name} ({failing[name]:,})" for name in worst))
    reasons = list(dict.fromkeys(one.fallback for one in group if one.fallback))
    return [*lines, *(f"fallback because {reason}" for reason in reasons[:_MAX_REASONS])]

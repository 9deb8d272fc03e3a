"""How the nodes got their container image: rows for the report, and the lines that sum them up.

The facts come from one event for each node, `image_start`, which `bootseer run --image` writes when training begins.
Called by `analysis.report` and the renderers. Decides and touches nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bootseer.analysis.model import ImageStart
from bootseer.analysis.spans import StartupSpans
from bootseer.units import format_bytes, format_seconds

EVENT = "image_start"
_MODES = {
    "hot": "lazily, with a hot set",
    "lazy": "lazily, without a hot set",
    "local": "from this node's own disk",
    "pull": "by a pull of everything",
    "fallback": "by a pull of everything, as a fallback",
}
_MAX_REASONS = 3


def image_starts(startup: StartupSpans) -> list[ImageStart]:
    """What each node said last of its image, by node."""
    found = []
    for name, node in sorted(startup.nodes.items()):
        said = [mark for mark in node.instants if mark.stage == EVENT]
        if said:
            found.append(_start(name, max(said, key=lambda mark: mark.end_ns).attrs))
    return found


def _start(node: str, attrs: Mapping[str, Any]) -> ImageStart:
    texts: dict[str, Any] = {key: str(attrs.get(key) or "") for key in _TEXTS}
    counts: dict[str, Any] = {key: _count(attrs.get(key)) for key in _COUNTS}
    seconds, coverage = _number(attrs.get("seconds")), _number(attrs.get("coverage"))
    return ImageStart(node=node, seconds=seconds, coverage=coverage, **texts, **counts)


_TEXTS = ("image", "digest", "mode", "reason", "until")
_COUNTS = ("layers", "stored_bytes", "local_bytes", "demand_bytes", "hot_bytes", "cold_bytes", "requests",
           "wasted_blocks", "late_blocks")  # fmt: skip


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 else None


def summary(images: Sequence[ImageStart]) -> list[str]:
    """One line for each way in which images came, most nodes first; a line for each reason of fallbacks."""
    by_mode: dict[str, list[ImageStart]] = defaultdict(list)
    for image in images:
        by_mode[image.mode].append(image)
    lines = []
    for mode, group in sorted(by_mode.items(), key=lambda item: (-len(item[1]), item[0])):
        times = [image.seconds for image in group if image.seconds is not None]
        took = f" in {format_seconds(median(times))}" if times else ""
        lines.append(f"{_nodes(group)} {_MODES.get(mode, mode)}{took}{_fetched(group)}{_foresight(group)}")
        if mode == "fallback":
            reasons = list(dict.fromkeys(image.reason for image in group))
            lines += [f"fallback because {reason}" for reason in reasons[:_MAX_REASONS]]
    return lines


def _nodes(group: Sequence[ImageStart]) -> str:
    return group[0].node if len(group) == 1 else f"{len(group):,} nodes"


def _fetched(group: Sequence[ImageStart]) -> str:
    total = median(image.demand_bytes + image.hot_bytes + image.cold_bytes for image in group)
    size = median(image.stored_bytes for image in group)
    if not size:
        return ""
    parts = [
        f"{name} {format_bytes(median(values))}"
        for name, values in (
            ("demand", [image.demand_bytes for image in group]),
            ("hot", [image.hot_bytes for image in group]),
            ("cold", [image.cold_bytes for image in group]),
        )
        if any(values)
    ]
    what = f" ({', '.join(parts)})" if parts else ""
    requests = median(image.requests for image in group)
    until = " before training began" if all(image.until == "training_began" for image in group) else ""
    return f": {format_bytes(total)} of {format_bytes(size)} fetched{until}{what} in {requests:.0f} requests"


def _foresight(group: Sequence[ImageStart]) -> str:
    known = [image.coverage for image in group if image.coverage is not None]
    if not known:
        return ""
    wasted, late = median(image.wasted_blocks for image in group), median(image.late_blocks for image in group)
    return f"; the hot set named {median(known):.0%} of what was read, {wasted:.0f} blocks in vain, {late:.0f} late"

"""How the nodes got their environment: rows for the report, and the lines that sum them up.

The facts come from two events of each node: `environment_start`, which `bootseer run` writes when training begins, and
`environment_publish`, which tells what became of the snapshot of a node that ran the setup. Called by
`analysis.report` and the renderers. Decides and touches nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from bootseer.analysis.model import EnvironmentStart
from bootseer.analysis.spans import StartupSpans
from bootseer.units import format_bytes, format_seconds

EVENT = "environment_start"
PUBLISHED = "environment_publish"
RESTORED, CAPTURED, INSTALLED, BYPASSED = "restored", "captured", "installed", "bypassed"
_MAX_REASONS = 3
_TEXTS = ("mode", "code", "reason", "key", "digest", "what", "builder", "trust", "way", "until")
_COUNTS = ("num_files", "size_bytes", "roots", "loose", "stored_bytes", "local_bytes", "demand_bytes", "hot_bytes",
           "cold_bytes", "requests")  # fmt: skip
_NUMBERS = ("seconds", "age_s", "saved_s", "coverage")


def environment_starts(startup: StartupSpans) -> list[EnvironmentStart]:
    """What each node said last of its environment, by node."""
    found = []
    for name, node in sorted(startup.nodes.items()):
        said = [mark for mark in node.instants if mark.stage == EVENT]
        kept = [mark for mark in node.instants if mark.stage == PUBLISHED]
        if said:
            outcome = max(kept, key=lambda mark: mark.end_ns).attrs if kept else {}
            found.append(_start(name, max(said, key=lambda mark: mark.end_ns).attrs, outcome))
    return found


def _start(node: str, attrs: Mapping[str, Any], outcome: Mapping[str, Any]) -> EnvironmentStart:
    texts: dict[str, Any] = {key: str(attrs.get(key) or "") for key in _TEXTS}
    counts: dict[str, Any] = {key: _count(attrs.get(key)) for key in _COUNTS}
    numbers: dict[str, Any] = {key: _number(attrs.get(key)) for key in _NUMBERS}
    published = outcome.get("published")
    return EnvironmentStart(
        node=node,
        published=published if isinstance(published, bool) else None,
        why_not=str(outcome.get("why_not") or ""),
        **texts,
        **counts,
        **numbers,
    )


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 else None


def summary(environments: Sequence[EnvironmentStart]) -> list[str]:
    """One line for each way in which environments came and its reason, most nodes first."""
    groups: dict[tuple[str, str], list[EnvironmentStart]] = defaultdict(list)
    for one in environments:
        # Of those that share a way, a restore and a capture have one reason each; installs have many.
        groups[one.mode, one.reason if one.mode not in (RESTORED, CAPTURED) else ""].append(one)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    lines: list[str] = []
    left = 0
    reasons: dict[str, int] = defaultdict(int)
    for (mode, _), group in ordered:
        reasons[mode] += 1
        if reasons[mode] > _MAX_REASONS:
            left += len(group)
            continue
        lines += _LINES.get(mode, _other)(group)
    if left:
        lines.append(f"{left:,} more nodes for other reasons")
    return lines


def _restored(group: Sequence[EnvironmentStart]) -> list[str]:
    ages = [one.age_s for one in group if one.age_s is not None]
    builders = sorted({one.builder for one in group if one.builder})
    age = f" made {format_seconds(median(ages))} ago" if ages else ""
    by = f" by {builders[0]}" if len(builders) == 1 else f" by {len(builders)} builders" if builders else ""
    made = f"{_nodes(group)} restored a snapshot{age}{by}"
    lines = [f"{made}{_took(group)}{_saved(group)}{_size(group)}{_fetched(group)}"]
    untrusted = [one for one in group if one.trust == "untrusted"]
    if untrusted:
        who = _nodes(untrusted)
        lines.append(f"untrusted: the setup read files that its key does not know ({who}); name them with --env-input")
    return lines


def _captured(group: Sequence[EnvironmentStart]) -> list[str]:
    lines = [f"{_nodes(group)} ran the setup{_took(group)}{_size(group)}; {_first_reason(group)}"]
    kept = [one for one in group if one.published]
    if kept:
        lines.append(f"{_nodes(kept)} kept a snapshot for the next start")
    whys = dict.fromkeys(one.why_not for one in group if one.published is False)
    lines += [f"no snapshot was kept: {why}" for why in list(whys)[:_MAX_REASONS]]
    return lines


def _installed(group: Sequence[EnvironmentStart]) -> list[str]:
    return [f"{_nodes(group)} ran the setup without a snapshot{_took(group)}: {_first_reason(group)}"]


def _bypassed(group: Sequence[EnvironmentStart]) -> list[str]:
    return [f"{_nodes(group)} ran the setup{_took(group)}; snapshots were not asked for (--env bypass)"]


def _other(group: Sequence[EnvironmentStart]) -> list[str]:
    return [f"{_nodes(group)} {group[0].mode or 'in an unknown way'}{_took(group)}: {_first_reason(group)}"]


_LINES: Mapping[str, Callable[[Sequence[EnvironmentStart]], list[str]]] = {
    RESTORED: _restored,
    CAPTURED: _captured,
    INSTALLED: _installed,
    BYPASSED: _bypassed,
}


def _first_reason(group: Sequence[EnvironmentStart]) -> str:
    return next((one.reason for one in group if one.reason), "no reason was given")


def _nodes(group: Sequence[EnvironmentStart]) -> str:
    return group[0].node if len(group) == 1 else f"{len(group):,} nodes"


def _took(group: Sequence[EnvironmentStart]) -> str:
    times = [one.seconds for one in group if one.seconds is not None]
    return f" in {format_seconds(median(times))}" if times else ""


def _saved(group: Sequence[EnvironmentStart]) -> str:
    saved = [one.saved_s for one in group if one.saved_s is not None]
    each = " each" if len(group) > 1 else ""
    return f" (saved {format_seconds(median(saved))}{each})" if saved else ""


def _size(group: Sequence[EnvironmentStart]) -> str:
    files = median(one.num_files for one in group)
    return f": {files:,.0f} files, {format_bytes(median(one.size_bytes for one in group))}" if files else ""


def _fetched(group: Sequence[EnvironmentStart]) -> str:
    total = median(one.demand_bytes + one.hot_bytes + one.cold_bytes for one in group)
    size = median(one.stored_bytes for one in group)
    if not size:
        return ""
    until = " before training began" if all(one.until == "training_began" for one in group) else ""
    known = [one.coverage for one in group if one.coverage is not None]
    foresight = f"; the hot set named {median(known):.0%} of what was read" if known else ""
    return f", {format_bytes(total)} of {format_bytes(size)} fetched{until}{foresight}"

"""How the nodes got image, environment and checkpoint, and the traffic between them: rows and summary lines.

The facts come from events that `bootseer run` writes when training begins, one per node and part. For an environment
there is also `environment_publish`, the result of publishing a snapshot, and for a checkpoint `checkpoint_datanode`,
one for each DataNode that served it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from statistics import median
from typing import Any, Final

from bootseer.report.analysis.lanes import TRAINING_BEGAN
from bootseer.report.analysis.spans import Key, Span, StartupSpans
from bootseer.report.model import Overview, Report
from bootseer.report.model_starts import (
    CheckpointStart,
    DataNode,
    EnvironmentStart,
    Fetched,
    ImageStart,
    PeersStart,
    Restarted,
)
from bootseer.trace.event import STACK
from bootseer.units import NS_PER_S, format_bytes, format_seconds, listed, plural

RESTORED, CAPTURED, INSTALLED, BYPASSED = "restored", "captured", "installed", "bypassed"
PLAIN = "plain"
CHECKPOINT_START, CHECKPOINT_DATANODE = "checkpoint_start", "checkpoint_datanode"
PEERS_START = "peers_start"
_STAY = ("queue", "allocation", "image_loading", "environment_setup", "model_initialization.checkpoint_mount")
"""Stages that a restart in place does not repeat."""
MAX_DATANODES = 16
"""Per node, those that served most. `bootseer run` writes no more, and more from elsewhere are ignored."""
_MAX_REASONS = 3
_MAX_IMPORTS = 10
_MAX_RESTARTS = 10
_UNEVEN = 1.5
_CHUNK_BYTES: Final = 1 << 20
_MAX_S = 1e12
"""Sums of larger numbers may be infinite, which JSON cannot express."""
_SENT_MORE: Final = 1.25
"""Nodes that sent more than this times what they received, and ..."""
_SENT_MORE_BYTES: Final = 16 << 20
"""... so many bytes more, sent the rest to processes that do not report what they read."""
_IMAGE_WAYS = {
    "hot": "loaded it lazily with a hot set",
    "lazy": "loaded it lazily without a hot set",
    "local": "had it on the local disk",
    "pull": "pulled all of it first",
    "fallback": "pulled all of it first, as a fallback",
}


def image_starts(startup: StartupSpans) -> list[ImageStart]:
    """The last report of each node about its image, by node."""
    return [ImageStart(**_row(ImageStart, node, last)) for node, last, _ in _last_marks(startup, "image_start")]


def environment_starts(startup: StartupSpans) -> list[EnvironmentStart]:
    """The last report of each node about its environment, by node."""
    found = []
    for node, last, marks in _last_marks(startup, "environment_start"):
        kept = [mark for mark in marks if mark.stage == "environment_publish"]
        outcome = max(kept, key=lambda mark: mark.end_ns).attrs if kept else {}
        published = outcome.get("published")
        row = _row(EnvironmentStart, node, {**last, "why_not": outcome.get("why_not")})
        found.append(EnvironmentStart(**row, published=published if isinstance(published, bool) else None))
    return found


def checkpoint_starts(startup: StartupSpans) -> list[CheckpointStart]:
    """The last report of each node about its checkpoint, by node."""
    found = []
    for node, last, marks in _last_marks(startup, CHECKPOINT_START):
        named = {str(one.attrs.get("datanode") or ""): one.attrs for one in marks if one.stage == CHECKPOINT_DATANODE}
        named.pop("", None)  # a bucket or a folder has no DataNodes
        served = [DataNode(**{**_row(DataNode, "", attrs), "name": name}) for name, attrs in named.items()]
        served.sort(key=lambda one: (-one.bytes, one.name))
        mode = PLAIN if last.get("mode") == PLAIN else "mounted"
        row = _row(CheckpointStart, node, {**last, "mode": mode})
        found.append(CheckpointStart(**row, datanodes=served[:MAX_DATANODES]))
    return found


def peers_starts(startup: StartupSpans) -> list[PeersStart]:
    """Where the bytes of each node with peers came from, by node."""
    found = []
    for node, last, marks in _last_marks(startup, PEERS_START):
        latest = {one.stage: one.attrs for one in sorted(marks, key=lambda mark: mark.end_ns)}
        parts = [latest.get(stage, {}) for stage in ("image_start", "environment_start", CHECKPOINT_START)]
        parts += [one.attrs for one in startup.nodes[node].spans if one.stage.endswith(".pull")]

        def total(*names: str, parts: Sequence[Mapping[str, Any]] = parts) -> int:
            return sum(_count(part.get(name)) for part in parts for name in names)

        def named(name: str, parts: Sequence[Mapping[str, Any]] = parts) -> str:
            return " ".join(sorted({word for part in parts for word in str(part.get(name) or "").split()}))

        peer_bytes = total("peer_bytes")
        # Images and environments report stores and peers together, checkpoints report them separately.
        both = total("demand_bytes", "hot_bytes", "cold_bytes") - peer_bytes + total("peer_bytes", parts=parts[2:3])
        row = {
            "cache_bytes": total("local_bytes", "cache_bytes"),
            "peer_bytes": peer_bytes,
            "origin_bytes": max(both, 0) + total("place_bytes"),
            "late_requests": total("late_requests"),
            "late_peers": named("late_peers"),
            "wrong_peers": named("wrong_peers"),
        }
        found.append(PeersStart(**_row(PeersStart, node, {**last, **row})))
    return found


def warm_lines(startup: StartupSpans) -> list[str]:
    """How many Python programs were forked from a warm parent and what that saved: the imports of all but one, which
    each warm parent made; the reasons for the others."""
    warm = startup.marks("warm_start")
    reasons = Counter(str(why) for mark in warm if (why := mark.attrs.get("why_not")))
    imports_s: dict[tuple[str, int], list[float]] = defaultdict(list)
    for mark in warm:
        if not mark.attrs.get("why_not"):
            imports_s[mark.node, mark.pid].append(_number(mark.attrs.get("saved_s")) or 0.0)
    lines = []
    if imports_s:
        saved_s = sum(sum(times) - max(times) for times in imports_s.values())
        words = f": {format_seconds(saved_s)} of CPU time saved" if saved_s else ""
        lines.append(f"{plural(sum(map(len, imports_s.values())), 'Python program')} started warm{words}")
    ordered = sorted(reasons, key=lambda reason: (-reasons[reason], reason))
    return lines + [f"{plural(reasons[one], 'program')} not started warm: {one}" for one in ordered[:_MAX_REASONS]]


def unused_import_lines(startup: StartupSpans) -> list[str]:
    """Slow imports of which no function ran on any of the nodes that report imports; slowest first."""
    rows: dict[str, dict[str, tuple[float, str]]] = defaultdict(dict)
    for mark in startup.marks("unused_import"):
        name, by, within = (str(mark.attrs.get(key) or "") for key in ("module", "by", "within"))
        text = f"{name}, imported by {by or 'the program'}" + (f" for {within}" if within != by else "")
        rows[name][mark.node] = _number(mark.attrs.get("import_s")) or 0.0, text
    telling = {node for by_node in rows.values() for node in by_node}
    worst = sorted((max(by_node.values()) for by_node in rows.values() if by_node.keys() == telling), reverse=True)
    return [f"{format_seconds(took_s)} {text}" for took_s, text in worst[:_MAX_IMPORTS]]


def restarts(tries: Sequence[StartupSpans], overviews: Sequence[Overview]) -> list[Restarted]:
    """The restarts of an attempt; `tries` are all its starts in order."""
    startup_s = {
        Key(one.job, one.attempt, one.restart): one.startup_s for one in overviews if one.outcome == TRAINING_BEGAN
    }
    found = []
    for startup in tries[1:] if tries[0].key.restart == 0 else ():
        skipped = []
        for name, node in startup.nodes.items():
            again = {span.stage for span in node.spans}
            took: dict[str, float] = defaultdict(float)
            for span in tries[0].nodes[name].spans if name in tries[0].nodes else ():
                if span.stage in _STAY and span.stage not in again:
                    took[span.stage] += (span.end_ns - span.begin_ns) / NS_PER_S
            skipped.append(dict(took))
        longest = max(skipped, key=lambda took: sum(took.values()), default={})
        restarts = [span for node in startup.nodes.values() for span in node.spans if span.stage == "restart"]
        code = next((span.attrs["exit_code"] for span in restarts if type(span.attrs.get("exit_code")) is int), None)
        requested = any(span.attrs.get("requested") is True for span in restarts)
        by = "request" if requested else "bootseer" if restarts else "launcher"
        seconds = startup_s.get(startup.key)
        found.append(Restarted(startup.key.restart, by, code, seconds, sum(longest.values()), longest))
    return found


def restarts_summary(found: Sequence[Restarted]) -> list[str]:
    """The number of restarts and what was saved by not repeating stages; then the reason and result of each."""
    if not found:
        return []
    stages: dict[str, float] = defaultdict(float)
    for one in found:
        for stage, seconds in one.not_repeated.items():
            stages[stage] += seconds
    parts = ", ".join(f"{stage} {format_seconds(seconds)}" for stage, seconds in stages.items())
    saved = f": {format_seconds(sum(stages.values()))} saved by skipping stages ({parts})" if stages else ""
    lines = [f"{plural(len(found), 'restart')} in place{saved}"]
    for one in found[-_MAX_RESTARTS:]:
        why = f"after exit code {one.exit_code}" if one.exit_code is not None else f"by the {one.by}"
        why = "on request" if one.by == "request" else why
        took = f"first step {format_seconds(one.startup_s)} later" if one.startup_s is not None else "no first step"
        lines.append(f"restart {one.restart} {why}: {took}")
    return lines


def stack_lines(startup: StartupSpans) -> list[str]:
    """The stacks of late processes that the service asked for."""
    return [
        f"{mark.node}{f' rank {rank}' if (rank := mark.attrs.get('of_rank', -1)) != -1 else ''} in "
        f"{mark.attrs.get('in_stage', '?')}: {mark.attrs.get('stack') or mark.attrs.get('why_not')}"
        for mark in startup.marks(STACK)
    ]


def _last_marks(startup: StartupSpans, stage: str) -> list[tuple[str, dict[str, Any], list[Span]]]:
    """For each node with instants of this stage, by name: the attributes of the last one, and all its instants."""
    return [
        (name, max(last, key=lambda mark: mark.end_ns).attrs, node.instants)
        for name, node in sorted(startup.nodes.items())
        if (last := [mark for mark in node.instants if mark.stage == stage])
    ]


def _row(kind: type, node: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The text and number fields of a row. Values are checked, because an event may contain anything."""
    read = {"str": lambda value: str(value or ""), "int": _count, "float | None": _number}
    found = {one.name: read[one.type](attrs.get(one.name)) for one in fields(kind) if one.type in read}
    if "saved_s" in found:  # negative if a restore took longer than the setup
        found["saved_s"] = _signed(attrs.get("saved_s"))
    return {**found, "node": node} if "node" in found else found


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


def _number(value: object) -> float | None:
    found = _signed(value)
    return found if found is not None and found >= 0 else None


def _signed(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < _MAX_S else None


def image_summary(images: Sequence[ImageStart]) -> list[str]:
    """A line for each way of loading images, most nodes first, and one for each reason of a fallback."""
    by_mode: dict[str, list[ImageStart]] = defaultdict(list)
    for image in images:
        by_mode[image.mode].append(image)
    lines = []
    for mode, group in sorted(by_mode.items(), key=lambda item: (-len(item[1]), item[0])):
        line = f"{_nodes(group)} {_IMAGE_WAYS.get(mode, mode)}{_took(group)}"
        if amounts := _amounts(group):
            parts = {kind: [getattr(one, f"{kind}_bytes") for one in group] for kind in ("demand", "hot", "cold")}
            shown = ", ".join(f"{kind} {format_bytes(median(sizes))}" for kind, sizes in parts.items() if any(sizes))
            requests = f"{median(one.requests for one in group):.0f} requests"
            line += f": {amounts}{f' ({shown})' if shown else ''} in {requests}"
        if coverage := _coverage(group):
            wasted, late = median(one.wasted_blocks for one in group), median(one.late_blocks for one in group)
            line += f"{coverage}, {wasted:.0f} blocks unused, {late:.0f} late"
        lines.append(line)
        if mode == "fallback":
            lines += _reasons("fallback because", (image.reason for image in group))
    return lines


def _reasons(words: str, texts: Iterable[str]) -> list[str]:
    """A line for each of the first different reasons."""
    return [f"{words} {text}" for text in list(dict.fromkeys(filter(None, texts)))[:_MAX_REASONS]]


def _amounts(group: Sequence[Fetched]) -> str:
    """Bytes fetched of the whole; empty if the size is unknown."""
    total = median(one.demand_bytes + one.hot_bytes + one.cold_bytes for one in group)
    size = median(one.stored_bytes for one in group)
    return f"{format_bytes(total)} of {format_bytes(size)} fetched{_until(group)}" if size else ""


def _until(group: Sequence[Fetched | CheckpointStart | PeersStart]) -> str:
    return " before training began" if all(one.until == "training_began" for one in group) else ""


def _coverage(group: Sequence[Fetched]) -> str:
    known = [one.coverage for one in group if one.coverage is not None]
    return f"; the hot set covered {median(known):.0%} of what was read" if known else ""


def environment_summary(environments: Sequence[EnvironmentStart]) -> list[str]:
    """A line for each way of getting the environment and its reason, most nodes first."""
    groups: dict[tuple[str, str], list[EnvironmentStart]] = defaultdict(list)
    for one in environments:
        # Restores and captures have a single reason each, installs have many.
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
        lines += _environment_lines(mode, group)
    if left:
        lines.append(f"{left:,} more nodes for other reasons")
    return lines


def _environment_lines(mode: str, group: Sequence[EnvironmentStart]) -> list[str]:
    reason = next((one.reason for one in group if one.reason), "no reason given")
    if mode == RESTORED:
        ages = [one.age_s for one in group if one.age_s is not None]
        builders = sorted({one.builder for one in group if one.builder})
        age = f" made {format_seconds(median(ages))} ago" if ages else ""
        by = f" by {builders[0]}" if len(builders) == 1 else f" by {len(builders)} builders" if builders else ""
        made = f"{_nodes(group)} restored a snapshot{age}{by}"
        return [f"{made}{_took(group)}{_saved(group)}{_size(group)}{_fetched(group)}"]
    if mode == CAPTURED:
        lines = [f"{_nodes(group)} ran the setup{_took(group)}{_size(group)}; {reason}"]
        if kept := [one for one in group if one.published]:
            lines.append(f"{_nodes(kept)} published a snapshot for the next start")
        return lines + _reasons("no snapshot was published:", (o.why_not for o in group if o.published is False))
    if mode == BYPASSED:
        return [f"{_nodes(group)} ran the setup{_took(group)}; snapshots are turned off (--env bypass)"]
    way = "ran the setup without a snapshot" if mode == INSTALLED else mode or "in an unknown way"
    return [f"{_nodes(group)} {way}{_took(group)}: {reason}"]


def _nodes(group: Sequence[EnvironmentStart | ImageStart | CheckpointStart], more: str = "") -> str:
    return group[0].node if len(group) == 1 else f"{len(group):,} nodes{more}"


def _took(group: Sequence[EnvironmentStart | ImageStart]) -> str:
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
    amounts = _amounts(group)
    return f", {amounts}{_coverage(group)}" if amounts else ""


def checkpoint_summary(checkpoints: Sequence[CheckpointStart]) -> list[str]:
    """A line for what all nodes read, one for what the DataNodes served, one for each problem."""
    plain = [one for one in checkpoints if one.mode == PLAIN]
    mounted = [one for one in checkpoints if one.mode != PLAIN]
    lines = [f"{_nodes(plain, ' (median)')} read it directly from its folder: {plain[0].reason}"] if plain else []
    if not mounted:
        return lines
    reasons = _reasons("mounted because", (one.reason for one in mounted))
    return [_read(mounted), *_served(mounted), *_trouble(mounted), *reasons, *lines]


def _read(group: Sequence[CheckpointStart]) -> str:
    # The parts need not add up: prefetched bytes are later read from the cache.
    parts = [
        f"{format_bytes(median(values))} {where}"
        for where, values in (
            ("fetched from the file system", [one.place_bytes for one in group]),
            ("from the job's other nodes", [one.peer_bytes for one in group]),
            ("from the node's cache", [one.cache_bytes for one in group]),
            ("shared with earlier checkpoints in the cache", [one.same_bytes for one in group]),
        )
        if any(values)
    ]
    read = format_bytes(median(one.read_bytes for one in group))
    sources = f"; {', '.join(parts)}" if parts else ""
    return f"{_nodes(group, ' (median)')} read {read}{_until(group)}{sources}"


def _served(group: Sequence[CheckpointStart]) -> list[str]:
    bytes_of: dict[str, int] = defaultdict(int)
    for one in group:
        for datanode in one.datanodes:
            bytes_of[datanode.name] += datanode.bytes
    if not any(bytes_of.values()):
        return []
    most = max(bytes_of, key=lambda name: (bytes_of[name], name))
    share = bytes_of[most] * len(bytes_of) / sum(bytes_of.values())
    uneven = f"; {most} served {share:.1f} times the mean" if share >= _UNEVEN else ", evenly"
    if sum(bytes_of.values()) < len(bytes_of) * _CHUNK_BYTES:  # too few chunks for all to serve as many
        uneven = ""
    total = format_bytes(sum(bytes_of.values()))
    if len(bytes_of) == 1:
        return [f"one DataNode served all of {total}: {most}"]
    return [f"{len(bytes_of)} DataNodes served {total}{uneven}"]


def _trouble(group: Sequence[CheckpointStart]) -> list[str]:
    lines = []
    counts = (
        ("retried after an error", sum(one.retries for one in group)),
        ("hedged because the first request was slow", sum(one.hedges for one in group)),
        ("rebuilt from parity", sum(one.rebuilt for one in group)),
        ("repeated elsewhere because of wrong bytes", sum(one.refused for one in group)),
    )
    if any(count for _, count in counts):
        lines.append("reads " + "; ".join(f"{what}: {count:,}" for what, count in counts if count))
    failing: dict[str, int] = defaultdict(int)
    for one in group:
        for datanode in one.datanodes:
            failing[datanode.name] += datanode.failures
    worst = sorted((name for name in failing if failing[name]), key=lambda name: -failing[name])[:_MAX_REASONS]
    if worst:
        lines.append("DataNodes with failed reads: " + ", ".join(f"{name} ({failing[name]:,})" for name in worst))
    return lines + _reasons("fallback because", (one.fallback for one in group))


def peers_summary(peers: Sequence[PeersStart]) -> list[str]:
    """A line for the sources of bytes, one for the traffic per network interface, one for each problem."""
    if not peers:
        return []
    received, sent = (sum(getattr(one, name) for one in peers) for name in ("peer_bytes", "sent_bytes"))
    others = (
        ("from the origin", sum(one.origin_bytes + one.filled_bytes for one in peers)),
        ("from the nodes' own caches", sum(one.cache_bytes for one in peers)),
    )
    nodes = peers[0].node if len(peers) == 1 else f"{len(peers):,} nodes together"
    is_whole = len(peers) >= max(one.peers for one in peers)
    is_more = is_whole and sent > received * _SENT_MORE + _SENT_MORE_BYTES
    lines = []
    if received or any(count for _, count in others) or not is_more:
        sources = (f"{format_bytes(count)} {where}" for where, count in (("from other nodes", received), *others))
        lines.append(f"{nodes} got {', '.join(sources)}{_until(peers)}")
    if is_more:
        lines.append(
            f"{nodes} sent {format_bytes(sent)} to each other{_until(peers)}; what training code reads itself"
            " (StripedReader, safetensors, fsspec) is not counted as received"
        )
    carried: dict[str, int] = defaultdict(int)
    for one in peers:
        for word in one.interfaces.split():
            name, _, count = word.rpartition("=")
            carried[name] += int(count) if count.isdecimal() and len(count) < 19 else 0
    if any(carried.values()):
        ordered = sorted(carried, key=lambda name: (-carried[name], name))
        lines.append("sent over " + ", ".join(f"{name} {format_bytes(carried[name])}" for name in ordered))
    for what, names in (
        ("late", [one.late_peers for one in peers]),
        ("excluded after sending wrong blocks", [one.wrong_peers for one in peers]),
    ):
        seen = Counter(" ".join(names).split())
        worst = sorted(seen, key=lambda name: (-seen[name], name))
        if worst:
            named = listed([f"{name} (to {plural(seen[name], 'node')})" for name in worst], _MAX_REASONS)
            lines.append(f"{what}: {named}")
    alone = max(peers, key=lambda one: one.unreachable)
    if alone.unreachable:
        lines.append(f"{plural(alone.unreachable, 'node')} did not answer {alone.node} (ports, secrets: docs/peers.md)")
    return lines


SUMMARIES: Sequence[tuple[str, str, Callable[[Report], Sequence[str]]]] = (
    ("images", "Container image", lambda report: image_summary(report.images)),
    ("environments", "Environment", lambda report: environment_summary(report.environments)),
    ("checkpoints", "Checkpoint", lambda report: checkpoint_summary(report.checkpoints)),
    ("peers", "Traffic between the nodes", lambda report: peers_summary(report.peers)),
    ("restarts", "Restarts", lambda report: restarts_summary(report.restarts)),
    ("warm", "Warm starts of Python programs", lambda report: report.warm),
    ("unused-imports", "Imports not used before the first step", lambda report: report.unused_imports),
    ("stacks", "Stacks of late processes", lambda report: report.stacks),
    ("connections", "Connections between the ranks", lambda report: report.connections),
)
"""The parts of a report that consist of lines: name, heading, and a function for the lines, which may be none."""

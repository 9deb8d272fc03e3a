"""The parts of the HTML report about images, environments, checkpoints, peers and restarts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from bootseer.report.analysis.starts import RESTORED, SUMMARIES
from bootseer.report.model import Report
from bootseer.report.render.html_text import cell, count, esc, head, percent, seconds, section, size, table, word_cell

_MAX_ROWS = 200
Column = tuple[str, str, Callable[[float], str]]
_FETCHED: tuple[Column, ...] = (
    (">of", "stored_bytes", size),
    (">demand", "demand_bytes", size),
    (">hot", "hot_bytes", size),
)
_IMAGE: tuple[Column, ...] = (
    *((">took", "seconds", seconds), *_FETCHED, (">cold", "cold_bytes", size)),
    *((">requests", "requests", count), (">coverage", "coverage", percent), (">late", "late_blocks", count)),
)
_ENVIRONMENT: tuple[Column, ...] = (
    *((">took", "seconds", seconds), (">age", "age_s", seconds), (">saved", "saved_s", seconds)),
    *((">files", "num_files", count), (">size", "size_bytes", size), *_FETCHED, (">coverage", "coverage", percent)),
)
_CHECKPOINT: tuple[Column, ...] = (
    *((">mounted in", "seconds", seconds), (">read", "read_bytes", size), (">fetched", "place_bytes", size)),
    *((">from nodes", "peer_bytes", size), (">cached", "cache_bytes", size), (">same", "same_bytes", size)),
    *((">retries", "retries", count), (">hedges", "hedges", count), (">won", "hedges_won", count)),
    *((">rebuilt", "rebuilt", count), (">refused", "refused", count)),
)

_PEERS: tuple[Column, ...] = (
    *((">peers", "peers", count), (">from peers", "peer_bytes", size), (">origin", "origin_bytes", size)),
    *((">cache", "cache_bytes", size), (">sent", "sent_bytes", size), (">fetched for others", "filled_bytes", size)),
    *((">late requests", "late_requests", count), (">refused", "refused", count)),
)


_NOTES = {
    "images": "Demand: fetched while a reader waited. Hot: prefetched because earlier starts needed it.",
    "environments": "A restored environment is a mounted snapshot of an earlier setup's result.",
    "checkpoints": "Reads from the kernel's page cache are not counted.",
    "peers": "Each run of blocks has an owner among the nodes, the only one that fetches it from the origin.",
    "restarts": "Image, environment and mounts are kept; see restarts.md.",
    "warm": "A warm parent has already imported the modules of earlier starts; see process.md.",
    "unused-imports": "Time of each module's own code. Functions in C or traced by torch.compile are not detected.",
    "stacks": "Taken by the service while the processes were late, innermost frame first; see service.md.",
    "connections": "Ranks connect to a store, then form groups; see peers.md, Names of the nodes.",
}


def starts_sections(report: Report) -> str:
    """The parts that have lines, each with a table of the nodes if they reported numbers."""
    found = []
    for ident, title, lines_of in SUMMARIES:
        lines = lines_of(report)
        if not lines:
            continue
        left = len(getattr(report, ident)) - _MAX_ROWS if ident in _TABLES else 0
        more = f" {_MAX_ROWS} nodes are shown; {left:,} more are in the JSON report." if left > 0 else ""
        items = "".join(f"<li>{esc(line)}</li>" for line in lines)
        body = f"<ul>{items}</ul>{_TABLES[ident](report) if ident in _TABLES else ''}"
        found.append(section(ident, title, body, _NOTES[ident] + more))
    return "".join(found)


def _images(report: Report) -> str:
    # Worst first: fallbacks, then those that waited for most bytes.
    ordered = sorted(report.images, key=lambda image: (image.mode != "fallback", -image.demand_bytes, image.node))
    rows = [
        word_cell(one.node, css="id")
        + word_cell(one.mode, title=one.image)
        + _cells(one, _IMAGE)
        + word_cell(one.reason, css="text")
        for one in ordered[:_MAX_ROWS]
    ]
    return table(_head("node", "way", _IMAGE, "why"), rows, label="Images by node", css="sortable")


def _environments(report: Report) -> str:
    # Worst first: setups that ran, then those that took longest.
    ordered = sorted(report.environments, key=lambda one: (one.mode == RESTORED, -(one.seconds or 0.0), one.node))
    rows = [
        word_cell(one.node, css="id")
        + word_cell(one.mode, title=one.way)
        + _cells(one, _ENVIRONMENT)
        + word_cell(one.builder, css="id")
        + word_cell(one.key[:12], css="id", title=one.key)
        + word_cell(f"{one.reason}; not published: {one.why_not}" if one.why_not else one.reason, css="text")
        for one in ordered[:_MAX_ROWS]
    ]
    columns = _head("node", "way", _ENVIRONMENT, "built by", "snapshot", "why")
    return table(columns, rows, label="Environments by node", css="sortable")


def _checkpoints(report: Report) -> str:
    """The nodes, and the DataNodes that served them."""
    # Those that had to fetch most come first.
    ordered = sorted(report.checkpoints, key=lambda one: (-one.place_bytes, one.node))
    rows = [
        word_cell(one.node, css="id", title=one.uri)
        + _cells(one, _CHECKPOINT)
        + word_cell(one.fallback or one.reason, css="text")
        for one in ordered[:_MAX_ROWS]
    ]
    body = table(_head("node", _CHECKPOINT, "why"), rows, label="Checkpoints by node", css="sortable")
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0])
    for one in ordered:
        for datanode in one.datanodes:
            total = totals[datanode.name]
            total[0] += datanode.bytes
            total[1] += datanode.seconds or 0.0
            total[2] += datanode.failures
    rows = [
        word_cell(name, css="id") + cell(total[0], size) + cell(total[1], seconds) + cell(int(total[2]), count)
        for name, total in sorted(totals.items(), key=lambda item: -item[1][0])[:_MAX_ROWS]
    ]
    columns = head("DataNode", ">served", ">read time", ">failures")
    return body + (table(columns, rows, label="DataNodes", css="sortable") if rows else "")


def _peers(report: Report) -> str:
    # Those that fetched most from the origin come first.
    ordered = sorted(report.peers, key=lambda one: (-one.origin_bytes, one.node))
    rows = [
        word_cell(one.node, css="id", title=one.interfaces)
        + _cells(one, _PEERS)
        + word_cell(" ".join(filter(None, (one.late_peers, one.wrong_peers))), css="text")
        for one in ordered[:_MAX_ROWS]
    ]
    return table(_head("node", _PEERS, "late or wrong"), rows, label="Peers by node", css="sortable")


_TABLES = {"images": _images, "environments": _environments, "checkpoints": _checkpoints, "peers": _peers}


def _head(*columns: str | tuple[Column, ...]) -> str:
    names = [[column] if isinstance(column, str) else [name for name, _, _ in column] for column in columns]
    return head(*[name for group in names for name in group])


def _cells(one: Any, columns: tuple[Column, ...]) -> str:
    return "".join(cell(getattr(one, field), form) for _, field, form in columns)

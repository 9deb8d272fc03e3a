"""The parts of the HTML report about images, environments, checkpoints, peers and restarts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from bootseer.report.analysis.starts import RESTORED, SUMMARIES
from bootseer.report.model import Report
from bootseer.report.model_starts import CheckpointStart, DataNode
from bootseer.report.render.html_text import cell, count, percent, seconds, size, table, word_cell

_MAX_ROWS = 200
Column = tuple[str, Any, Any]
"""Head; the field, or a function of the row; and the format of a number, or the CSS class of a text and, after a colon,
the field that is its tooltip."""


_FETCHED: tuple[Column, ...] = (
    (">of", "stored_bytes", size),
    (">demand", "demand_bytes", size),
    (">hot", "hot_bytes", size),
)
_IMAGE: tuple[Column, ...] = (
    *(("node", "node", "id"), ("way", "mode", ":image"), (">took", "seconds", seconds), *_FETCHED),
    *((">cold", "cold_bytes", size), (">requests", "requests", count), (">coverage", "coverage", percent)),
    *((">late", "late_blocks", count), ("why", "reason", "text")),
)
_ENVIRONMENT: tuple[Column, ...] = (
    *(("node", "node", "id"), ("way", "mode", ":way"), (">took", "seconds", seconds), (">age", "age_s", seconds)),
    *((">saved", "saved_s", seconds), (">files", "num_files", count), (">size", "size_bytes", size), *_FETCHED),
    *((">coverage", "coverage", percent), ("built by", "builder", "id")),
    ("snapshot", lambda one: one.key[:12], "id:key"),
    ("why", lambda one: f"{one.reason}; not published: {one.why_not}" if one.why_not else one.reason, "text"),
)
_CHECKPOINT: tuple[Column, ...] = (
    *(("node", "node", "id:uri"), (">mounted in", "seconds", seconds), (">read", "read_bytes", size)),
    *((">fetched", "place_bytes", size), (">from nodes", "peer_bytes", size), (">cached", "cache_bytes", size)),
    *((">same", "same_bytes", size), (">retries", "retries", count), (">hedges", "hedges", count)),
    *((">won", "hedges_won", count), (">rebuilt", "rebuilt", count), (">refused", "refused", count)),
    ("why", lambda one: one.fallback or one.reason, "text"),
)
_DATANODE: tuple[Column, ...] = (
    *(("DataNode", "name", "id"), (">served", "bytes", size), (">read time", "seconds", seconds)),
    (">failures", "failures", count),
)
_PEERS: tuple[Column, ...] = (
    *(("node", "node", "id:interfaces"), (">peers", "peers", count), (">from peers", "peer_bytes", size)),
    *((">origin", "origin_bytes", size), (">cache", "cache_bytes", size), (">sent", "sent_bytes", size)),
    *((">fetched for others", "filled_bytes", size), (">late requests", "late_requests", count)),
    (">refused", "refused", count),
    ("late or wrong", lambda one: " ".join(filter(None, (one.late_peers, one.wrong_peers))), "text"),
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


class Part(NamedTuple):
    """A section of the page; `tables` is HTML."""

    ident: str
    title: str
    note: str
    lines: Sequence[str]
    tables: Markup


def starts_parts(report: Report) -> list[Part]:
    """The parts that have lines, each with a table of the nodes if they reported numbers."""
    found = []
    for ident, title, lines_of in SUMMARIES:
        if lines := lines_of(report):
            tables, more = "", ""
            if ident in _TABLES:
                label, order, columns = _TABLES[ident]
                rows = sorted(getattr(report, ident), key=order)
                tables = _table(label, rows, columns) + (_datanodes(rows) if ident == "checkpoints" else "")
                left = len(rows) - _MAX_ROWS
                more = f" {_MAX_ROWS} nodes are shown; {left:,} more are in the JSON report." if left > 0 else ""
            found.append(Part(ident, title, _NOTES[ident] + more, lines, Markup(tables)))  # noqa: S704 - by `_table`
    return found


_TABLES: dict[str, tuple[str, Callable[[Any], Any], tuple[Column, ...]]] = {
    # Worst first: fallbacks, then those that waited for most bytes.
    "images": ("Images by node", lambda one: (one.mode != "fallback", -one.demand_bytes, one.node), _IMAGE),
    # Setups that ran, then those that took longest.
    "environments": (
        "Environments by node",
        lambda one: (one.mode == RESTORED, -(one.seconds or 0.0), one.node),
        _ENVIRONMENT,
    ),
    # Those that fetched most.
    "checkpoints": ("Checkpoints by node", lambda one: (-one.place_bytes, one.node), _CHECKPOINT),
    "peers": ("Peers by node", lambda one: (-one.origin_bytes, one.node), _PEERS),
}


def _datanodes(checkpoints: Sequence[CheckpointStart]) -> str:
    """What each DataNode served to all nodes."""
    totals: dict[str, DataNode] = {}
    for one in (datanode for node in checkpoints for datanode in node.datanodes):
        so_far = totals.get(one.name, DataNode(one.name, 0, 0.0, 0))
        took_s = (so_far.seconds or 0.0) + (one.seconds or 0.0)
        totals[one.name] = DataNode(one.name, so_far.bytes + one.bytes, took_s, so_far.failures + one.failures)
    datanodes = sorted(totals.values(), key=lambda one: -one.bytes)
    return _table("DataNodes", datanodes, _DATANODE) if datanodes else ""


def _table(label: str, rows: Sequence[object], columns: Sequence[Column]) -> str:
    body = "".join(f"<tr>{''.join(_cell(one, *column[1:]) for column in columns)}</tr>" for one in rows[:_MAX_ROWS])
    return table([name for name, *_ in columns], body, label, "sortable")


def _cell(one: object, of: str | Callable[[Any], object], form: Callable[[float], str] | str) -> str:
    value: Any = getattr(one, of) if isinstance(of, str) else of(one)
    if not isinstance(form, str):
        return cell(value, form)
    css, _, title = form.partition(":")
    return word_cell(value, css=css, title=str(getattr(one, title)) if title else "")

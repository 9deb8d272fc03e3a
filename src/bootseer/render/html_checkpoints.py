"""The part of the HTML report that tells how the nodes read their checkpoint. Called by `html.render`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from bootseer.analysis.checkpoints import summary
from bootseer.analysis.model import CheckpointStart, Report
from bootseer.render.html_text import cell, count, esc, head, seconds, section, size, table, word_cell

_MAX_ROWS = 200


def checkpoints_section(report: Report) -> str:
    """Lines that sum it up, the nodes, and who served them; empty when no node told of a checkpoint."""
    starts = report.checkpoints
    if not starts:
        return ""
    lines = "".join(f"<li>{esc(line)}</li>" for line in summary(starts))
    # Those that had to fetch most come first.
    ordered = sorted(starts, key=lambda one: (-one.place_bytes, one.node))
    columns = head(
        *("node", ">mounted in", ">read", ">fetched", ">cached", ">same", ">retries", ">hedges", ">won"),
        *(">rebuilt", ">refused", "why"),
    )
    rows = [_row(one) for one in ordered[:_MAX_ROWS]]
    body = f"<ul>{lines}</ul>" + table(columns, rows, label="Checkpoints by node", css="sortable")
    body += _datanodes(starts)
    left = len(ordered) - _MAX_ROWS
    note = "What the kernel kept of a file is read again without being counted."
    if left > 0:
        note += f" {_MAX_ROWS} nodes are shown; {left:,} more are in the JSON report."
    return section("checkpoints", "How the checkpoint was read", body, note)


def _row(one: CheckpointStart) -> str:
    return (
        word_cell(one.node, css="id", title=one.uri)
        + cell(one.seconds, seconds)
        + cell(one.read_bytes, size)
        + cell(one.place_bytes, size)
        + cell(one.cache_bytes, size)
        + cell(one.same_bytes, size)
        + cell(one.retries, count)
        + cell(one.hedges, count)
        + cell(one.hedges_won, count)
        + cell(one.rebuilt, count)
        + cell(one.refused, count)
        + word_cell(one.fallback or one.reason, css="text")
    )


def _datanodes(starts: Sequence[CheckpointStart]) -> str:
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0])
    for one in starts:
        for datanode in one.datanodes:
            total = totals[datanode.name]
            total[0] += datanode.bytes
            total[1] += datanode.seconds or 0.0
            total[2] += datanode.failures
    rows = [
        word_cell(name, css="id") + cell(total[0], size) + cell(total[1], seconds) + cell(int(total[2]), count)
        for name, total in sorted(totals.items(), key=lambda item: -item[1][0])[:_MAX_ROWS]
    ]
    columns = head("DataNode", ">served", ">its reads took", ">failures")
    return table(columns, rows, label="DataNodes", css="sortable") if rows else ""

"""The part of the HTML report that tells how the nodes got their environment. Called by `html.render`."""

from __future__ import annotations

from bootseer.analysis.environments import RESTORED, summary
from bootseer.analysis.model import EnvironmentStart, Report
from bootseer.render.html_text import cell, count, esc, head, percent, seconds, section, size, table, word_cell

_MAX_ROWS = 200


def environments_section(report: Report) -> str:
    """A line for each way in which environments came, and the nodes; empty when no node told of one."""
    if not report.environments:
        return ""
    lines = "".join(f"<li>{esc(line)}</li>" for line in summary(report.environments))
    # What went worse than elsewhere comes first: setups that ran, then those that took longest.
    ordered = sorted(report.environments, key=lambda one: (one.mode == RESTORED, -(one.seconds or 0.0), one.node))
    columns = head(
        *("node", "way", ">took", ">age", ">saved", ">files", ">size", ">of", ">demand", ">hot", ">coverage"),
        *("built by", "snapshot", "why"),
    )
    body = f"<ul>{lines}</ul>" + table(
        columns, [_row(one) for one in ordered[:_MAX_ROWS]], label="Environments by node", css="sortable"
    )
    left = len(ordered) - _MAX_ROWS
    note = "A restored environment is a mount of what the setup did when it ran the last time."
    if left > 0:
        note += f" {_MAX_ROWS} nodes are shown; {left:,} more are in the JSON report."
    return section("environments", "How the environment came", body, note)


def _row(one: EnvironmentStart) -> str:
    return (
        word_cell(one.node, css="id")
        + word_cell(one.mode, title=one.way)
        + cell(one.seconds, seconds)
        + cell(one.age_s, seconds)
        + cell(one.saved_s, seconds)
        + cell(one.num_files, count)
        + cell(one.size_bytes, size)
        + cell(one.stored_bytes, size)
        + cell(one.demand_bytes, size)
        + cell(one.hot_bytes, size)
        + cell(one.coverage, percent)
        + word_cell(one.builder, css="id")
        + word_cell(one.key[:12], css="id", title=one.key)
        + word_cell(f"{one.reason}; not kept: {one.why_not}" if one.why_not else one.reason, css="text")
    )

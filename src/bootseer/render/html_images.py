"""The part of the HTML report that tells how the nodes got their container image. Called by `html.render`."""

from __future__ import annotations

from bootseer.analysis.images import summary
from bootseer.analysis.model import ImageStart, Report
from bootseer.render.html_text import cell, count, esc, head, percent, seconds, section, size, table, word_cell

_MAX_ROWS = 200


def images_section(report: Report) -> str:
    """A line for each way in which images came, and the nodes; empty when no node told of an image."""
    if not report.images:
        return ""
    lines = "".join(f"<li>{esc(line)}</li>" for line in summary(report.images))
    # What went worse than elsewhere comes first: fallbacks, then those that waited for most.
    ordered = sorted(report.images, key=lambda image: (image.mode != "fallback", -image.demand_bytes, image.node))
    columns = head("node", "way", ">took", ">of", ">demand", ">hot", ">cold", ">requests", ">coverage", ">late", "why")
    body = f"<ul>{lines}</ul>" + table(
        columns, [_row(image) for image in ordered[:_MAX_ROWS]], label="Images by node", css="sortable"
    )
    left = len(ordered) - _MAX_ROWS
    note = "Demand was fetched while a reader waited, hot ahead of readers because earlier starts needed it."
    if left > 0:
        note += f" {_MAX_ROWS} nodes are shown; {left:,} more are in the JSON report."
    return section("images", "How the container image came", body, note)


def _row(image: ImageStart) -> str:
    return (
        word_cell(image.node, css="id")
        + word_cell(image.mode, title=image.image)
        + cell(image.seconds, seconds)
        + cell(image.stored_bytes, size)
        + cell(image.demand_bytes, size)
        + cell(image.hot_bytes, size)
        + cell(image.cold_bytes, size)
        + cell(image.requests, count)
        + cell(image.coverage, percent)
        + cell(image.late_blocks, count)
        + word_cell(image.reason, css="text")
    )

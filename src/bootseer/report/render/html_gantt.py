"""The timeline of the HTML report: a row per node, or bands and outliers if there are too many nodes.

A row is a `details` element, so it can be opened by mouse or keyboard without JavaScript. The segments of all nodes are
in the page as compact JSON (`payload`), from which `assets/report.js` draws any node found by the search.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from bootseer.report.model import UNTRACKED, WAIT, WORK, Node, Report, Segment, Straggler
from bootseer.report.render.fold import FOLD_ABOVE, Band, bands, clean, coalesced, domain, outliers, own_s, shared_links
from bootseer.report.render.html_svg import Palette, Scale, axis, bar, icon, swatch
from bootseer.report.render.html_text import (
    cell,
    esc,
    head,
    num,
    rank_cell,
    seconds,
    section,
    table,
    term,
    word_cell,
)
from bootseer.units import listed, plural

_MAX_LISTED = 60
_MAX_SHADES = 8


def timeline(report: Report, scale: Scale, palette: Palette) -> str:
    """The section with legend, controls, axis and rows."""
    if not report.nodes:
        return section("timeline", "Timeline", '<p class="empty">No node was seen.</p>')
    folded = len(report.nodes) > FOLD_ABOVE
    if folded:
        chosen = outliers(report)
        grouped = bands(report.nodes)
        body = _group("All nodes in bands", "".join(_band_row(band, scale, palette) for band in grouped))
        body += _group("Nodes to look at", "".join(_node_row(node, report, scale, palette) for node in chosen))
        note = (
            f"{plural(len(report.nodes), 'node')} folded into {plural(len(grouped), 'band')} by own time (without "
            "waiting). A band shows the most frequent stage of its nodes at each moment. Below: nodes on the critical "
            "chain, stragglers, nodes that did not reach training, and the slowest. Use the search for any other node."
        )
    else:
        by_rank = 0 < len(report.ranks) <= FOLD_ABOVE
        ordered = sorted(
            report.ranks if by_rank else report.nodes, key=lambda node: (node.rank < 0, node.rank, node.node)
        )
        body = _group("", "".join(_node_row(node, report, scale, palette) for node in ordered))
        row = "rank" if by_rank else "node (its slowest rank)"
        note = f"One row per {row}. Open a row to see its segments."
    top = (
        f'<div class="row top" aria-hidden="true"><span></span><div class="plot">{axis(scale)}</div><span></span></div>'
    )
    body = _scheduler_row(report, scale, palette) + body
    found = '<div id="found" class="group" aria-live="polite"></div>'
    chart = f'<div id="gantt" class="gantt" data-folded="{str(folded).lower()}">{top}{found}{body}</div>'
    return section("timeline", "Timeline", _controls(folded) + _legend(report, palette) + chart, note)


def _controls(folded: bool) -> str:
    search = ""
    if folded:
        search = (
            '<label>Find a node <input id="find" type="search" autocomplete="off" spellcheck="false" '
            'placeholder="name or rank"></label>'
        )
    zoom = "".join(
        f'<button type="button" data-zoom="{name}" aria-label="{label}">{sign}</button>'
        for name, label, sign in (
            ("left", "earlier", "◀"),
            ("out", "zoom out", "−"),
            ("in", "zoom in", "+"),
            ("right", "later", "▶"),
            ("all", "show the whole startup", "Reset"),
        )
    )
    hint = '<span class="hint">or drag across the rows</span>'
    return (
        f'<div class="controls js">{search}<span class="zoom" role="group" aria-label="Zoom">{zoom}{hint}</span></div>'
    )


def _legend(report: Report, palette: Palette) -> str:
    items = []
    for stage in palette.stages:
        inner = palette.inner.get(stage, [])
        names = [f"{swatch(palette.css(name, WORK))} {esc(name.partition('.')[2])}" for name in inner]
        text = f"<span>{esc(stage)}: <i>{listed(names, _MAX_SHADES)}</i></span>" if len(inner) > 1 else esc(stage)
        items.append((swatch(palette.sign(stage)), text))
    looks = {(seg.kind, seg.outcome) for node in report.nodes for seg in node.segments}
    kinds, outcomes = {kind for kind, _ in looks}, {outcome for _, outcome in looks}
    if WAIT in kinds:
        items.append((swatch("h2"), f"{term('wait', 'wait')} (hatched)"))
    if UNTRACKED in kinds:
        items.append((swatch("cu"), term("untracked", "untracked")))
    if outcomes & {"failed", "truncated"}:
        sign = icon('<path class="x" d="M3 3L11 11M11 3L3 11"/>')
        items.append((sign, f"{term('truncated', 'truncated')} or failed"))
    if shared_links(report):
        sign = icon('<line class="bl" x1="7" x2="7" y2="14"/>')
        items.append((sign, f"{term('barrier', 'barrier')} opens, numbered as in the critical chain"))
    if any(node.background for node in report.nodes):
        items.append((icon('<rect class="c2" y="9" width="14" height="3"/>'), "in the background"))
    return f'<ul class="legend" aria-label="Legend">{"".join(f"<li>{sign}{name}</li>" for sign, name in items)}</ul>'


def _group(title: str, rows: str) -> str:
    heading = f"<h3>{title}</h3>" if title else ""
    return f'<div class="group">{heading}{rows}</div>'


def _node_row(node: Node, report: Report, scale: Scale, palette: Palette) -> str:
    chain = [link.barrier for _, link in shared_links(report) if (link.node, link.rank) == (node.node, node.rank)]
    slow = [s for s in report.stragglers if s.node == node.node]
    tags = '<b class="tag crit" title="last at a barrier">critical</b>' if chain else ""
    tags += '<b class="tag slow">straggler</b>' if slow else ""
    tags += f'<b class="tag bad">{esc(node.outcome)}</b>' if node.outcome != "ok" else ""
    title = f"{node.node}: {seconds(node.work_s)} work, {seconds(node.wait_s)} wait"
    rank = f'<span class="rank" title="rank {node.rank}">r{node.rank}</span>' if node.rank >= 0 else ""
    name = node.node.removesuffix(domain(report.nodes))
    label = f'<span class="name" title="{esc(node.node)}">{esc(name)}</span>{rank}{tags}'
    figures = f"{seconds(node.work_s)}<i>work</i>" + (f" {seconds(node.wait_s)}<i>wait</i>" if node.wait_s else "")
    drawing = bar(node.segments, scale, palette, title, node.background)
    return _row(label, drawing, figures, _node_detail(node, slow))


def _scheduler_row(report: Report, scale: Scale, palette: Palette) -> str:
    """Queue and allocation, above the nodes."""
    if not report.scheduler:
        return ""
    took = ", ".join(f"{seg.stage} {seconds(seg.end_s - seg.start_s)}" for seg in report.scheduler)
    segments = table(
        head("stage", "kind", "outcome", ">from", ">takes"),
        [_segment_cells(seg) for seg in report.scheduler],
        label="Segments of the scheduler",
    )
    drawing = bar(report.scheduler, scale, palette, took)
    return _group("", _row('<span class="name">scheduler</span>', drawing, esc(took), segments))


def _row(label: str, drawing: str, figures: str, detail: str) -> str:
    return (
        f'<details class="node"><summary class="row"><span class="who">{label}</span><div class="plot">{drawing}</div>'
        f'<span class="fig">{figures}</span></summary><div class="detail">{detail}</div></details>'
    )


def _node_detail(node: Node, slow: list[Straggler]) -> str:
    lines = [f"own first step ended at {seconds(node.own_end_s)}", f"{seconds(node.untracked_s)} untracked"]
    if node.gpus is not None:
        lines.append(plural(node.gpus, "GPU"))
    lines.append(f"clock corrected by {_signed(node.clock_offset_s)}, {_error(node.clock_error_s)}")
    if node.outcome != "ok":
        lines.append(f"{node.outcome}: its events end in {node.last_stage or 'no stage'}")
    lines += [f"straggler in {s.stage}: {seconds(s.delay_s)} late at {s.barrier}" for s in slow]
    facts = "".join(f"<li>{esc(key)} = {esc(value)}</li>" for key, value in list(node.attrs.items())[:_MAX_LISTED])
    facts = f'<ul class="facts">{facts}</ul>' if facts else ""
    shown = node.segments if len(node.segments) <= _MAX_LISTED else coalesced(node.segments)[:_MAX_LISTED]
    rows = [_segment_cells(seg) for seg in shown]
    columns = head("stage", "kind", "outcome", ">from", ">takes")
    return f"<p>{esc('; '.join(lines))}.</p>{table(columns, rows, label=f'Segments of {node.node}')}{facts}"


def _segment_cells(seg: Segment) -> str:
    start, takes = cell(seg.start_s, seconds), cell(seg.end_s - seg.start_s, seconds)
    return word_cell(seg.stage) + word_cell(seg.kind) + word_cell(seg.outcome) + start + takes


def _signed(value: float) -> str:
    return f"{value:+.3f} s"


def _error(value: float | None) -> str:
    return "error unknown" if value is None else f"error at most {value:.3f} s"


def _band_row(band: Band, scale: Scale, palette: Palette) -> str:
    members = band.nodes
    work, wait = median(n.work_s for n in members), median(n.wait_s for n in members)
    title = f"{plural(len(members), 'node')} between percentile {band.low} and {band.high}"
    label = (
        f'<span class="name">p{band.low}–p{band.high}</span><span class="rank">{plural(len(members), "node")}</span>'
    )
    figures = f"{seconds(work)}<i>work</i> {seconds(wait)}<i>wait</i>"
    names = ", ".join(esc(node.node) for node in members[-_MAX_LISTED:])
    more = f" and {len(members) - _MAX_LISTED:,} more" if len(members) > _MAX_LISTED else ""
    detail = (
        f"<p>Own time from {seconds(own_s(members[0]))} to {seconds(own_s(members[-1]))}; median work {seconds(work)}, "
        f'median wait {seconds(wait)}.</p><p class="names">{names}{more}</p>'
    )
    return _row(label, bar(band.segments, scale, palette, title), figures, detail)


def nodes_section(report: Report) -> str:
    """A table of all nodes, closed at first if there are many; a single node has only its row."""
    if len(report.nodes) < 2:
        return ""
    rows = [_node_cells(node) for node in report.nodes]
    columns = head(
        *("node", ">rank", "outcome", "last stage", ">work", ">wait", ">untracked", ">own end", ">clock offset")
    )
    body = '<label class="controls js">Filter <input type="search" data-filter autocomplete="off"></label>'
    body += table(columns, rows, label="All nodes", css="sortable")
    opened = " open" if len(rows) <= FOLD_ABOVE else ""
    total = num(len(rows), lambda v: plural(int(v), "node"), "nodes.length")
    return section("nodes", "Nodes", f"<details{opened}><summary>{total}</summary>{body}</details>")


def _node_cells(node: Node) -> str:
    return (
        word_cell(node.node, css="id")
        + rank_cell(node.rank)
        + word_cell(node.outcome)
        + word_cell(node.last_stage)
        + cell(node.work_s, seconds)
        + cell(node.wait_s, seconds)
        + cell(node.untracked_s, seconds)
        + cell(node.own_end_s, seconds)
        + cell(node.clock_offset_s, _signed)
    )


def payload(report: Report, scale: Scale, palette: Palette) -> dict[str, Any]:
    """All nodes for the script: `looks` are [class, text]; a node is [name, rank, work, wait, outcome, start, cuts].

    `cuts` is flat: look, end in ms, look, end in ms, ...; a segment begins where the one before it ends.
    """
    looks: dict[tuple[str, str], int] = {}
    nodes = []
    for node in report.nodes if len(report.nodes) > FOLD_ABOVE else []:
        cuts: list[int] = []
        shown = node.segments if len(node.segments) <= _MAX_LISTED else coalesced(node.segments)
        for seg in shown:
            if math.isfinite(seg.end_s):
                bad = " bad" if seg.outcome in ("failed", "truncated") else ""
                words = [clean(seg.stage), seg.kind, *([seg.outcome] if bad else [])]
                look = (palette.css(seg.stage, seg.kind) + bad, ", ".join(words))
                cuts += (looks.setdefault(look, len(looks)), round(seg.end_s * 1000))
        start = round(node.start_s * 1000) if math.isfinite(node.start_s) else 0
        figures = [seconds(node.work_s), seconds(node.wait_s)]
        nodes.append([clean(node.node), node.rank, *figures, node.outcome, start, cuts])
    barriers = [round(at * 1000) for _, at in scale.barriers]
    span = [round(scale.low * 1000), round(scale.high * 1000)]
    return {"span": span, "barriers": barriers, "looks": list(looks), "nodes": nodes}

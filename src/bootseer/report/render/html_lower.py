"""The lower parts of the HTML report: distributions, ledger, evidence, other startups, glossary.

Each function renders one part of a `Report`; `html.render` puts them in order.
"""

from __future__ import annotations

import math

from bootseer.report.analysis.stragglers import MIN_NODES
from bootseer.report.model import Overview, Report, Stage
from bootseer.report.render.html_svg import Palette, attempts, cdf, stacked, swatch
from bootseer.report.render.html_text import (
    GLOSSARY,
    cell,
    count,
    dotted,
    esc,
    head,
    hours,
    moment,
    money,
    num,
    percent,
    ratio,
    seconds,
    section,
    size,
    table,
    term,
    word_cell,
)
from bootseer.units import plural

_MIN_RATIO = 1.1
_MIN_SPREAD_S = 0.5
_MAX_FACTS = 500
_MAX_STARTUPS = 500
_MAX_COLUMNS = 120
_ALWAYS = ("startup", "stage")


def distributions(report: Report, palette: Palette) -> str:
    """How the nodes spread in each stage, as small multiples."""
    drawn = [_multiple(stage, palette) for stage in report.stages if _spreads(stage, report.stages)]
    if not drawn:
        return ""
    note = (
        "Share of nodes that were done (vertical) over seconds (horizontal). Dashed: median; solid: maximum. "
        "A long flat tail means a few slow nodes, an even slope a shared limit."
    )
    return section("spread", "Spread over nodes", f'<div class="multiples">{"".join(drawn)}</div>', note)


def _spreads(stage: Stage, stages: list[Stage]) -> bool:
    """Whether the nodes differ visibly in a stage; if a sub-stage has the same times, only that is drawn."""
    if len(stage.cdf) < MIN_NODES or (stage.max_over_median or math.inf) < _MIN_RATIO:
        return False
    inner = [other for other in stages if other.stage.startswith(stage.stage + ".") and other.cdf == stage.cdf]
    return not inner and stage.cdf[-1][0] - stage.cdf[0][0] >= _MIN_SPREAD_S


def _multiple(stage: Stage, palette: Palette) -> str:
    most = "" if stage.max_over_median is None else f'<b class="r">{ratio(stage.max_over_median)}</b>'
    median = "" if stage.median_s is None else f"median {seconds(stage.median_s)}"
    longest = "" if stage.max_s is None else f"max {seconds(stage.max_s)}"
    drawing = cdf(stage, palette.css(stage.stage, "work"))
    return (
        f"<figure><figcaption><span>{dotted(stage.stage)}</span>{most}</figcaption>"
        f'{drawing}<p class="ends"><span>{median}</span><span>{longest}</span></p></figure>'
    )


def ledger(report: Report, palette: Palette) -> str:
    """What each top-level stage cost, in work and in waiting."""
    stages = [stage for stage in report.stages if stage.depth == 0 and stage.num_nodes]
    # Without GPUs, the stage table of a single node shows the same.
    in_hours = bool(report.overhead.gpu_hours) and all(stage.gpu_hours is not None for stage in stages)
    if not stages or (not in_hours and len(report.nodes) < 2):
        return ""
    most = max(_weight(stage, in_hours) for stage in stages)
    rows = []
    for stage in stages:
        total, weight = stage.work_s + stage.wait_s, _weight(stage, in_hours)
        work = weight * stage.work_s / total if total > 0 else 0.0
        form = hours if in_hours else seconds
        label = f"{stage.stage}: {form(work)} work, {form(weight - work)} wait"
        css, hatch = palette.css(stage.stage, "work"), palette.css(stage.stage, "wait")
        rows.append(
            f'<td class="id">{swatch(palette.sign(stage.stage))}{esc(stage.stage)}</td>'
            f'<td class="wide">{stacked(work, weight - work, most=most, css=css, hatch=hatch, label=label)}</td>'
            + cell(work, form)
            + cell(weight - work, form)
            + cell(stage.cost, money)
        )
    over = report.overhead
    if in_hours:
        wait = over.wait_gpu_hours
        work_sum = over.gpu_hours - wait if over.gpu_hours is not None and wait is not None else None
        rows.append(
            '<tr class="sum"><td>all, with untracked</td><td></td>'
            + cell(work_sum, hours)
            + cell(wait, hours)
            + cell(over.cost, money)
            + "</tr>"
        )
    unit_name = "GPU-hours" if in_hours else "node time"
    columns = head("stage", unit_name, ">work", ">wait (hatched)", f">cost, {esc(over.currency)}")
    note = (
        f"{term('work')} and {term('wait', 'wait')} in {unit_name}"
        f"{'' if in_hours or report.startup.num_gpus == 0 else '; the number of GPUs is unobserved'}."
    )
    return section("ledger", "Cost by stage", table(columns, rows, label="Ledger"), note)


def _weight(stage: Stage, in_hours: bool) -> float:
    return stage.gpu_hours or 0.0 if in_hours else stage.work_s + stage.wait_s


def evidence(report: Report) -> str:
    """How complete the data is: coverage, clocks, what is missing, what was read."""
    many = len(report.nodes) > 1
    heard = report.coverage
    parts = [
        _coverage(report) if many or heard.nodes_expected not in (None, 1) or heard.events_lost else "",
        _clock(report) if many or report.clock.steps else "",
        _unobserved(report),
        _input(report),
    ]
    return f'<div class="pair">{"".join(parts)}</div>'


def _pairs(lines: list[tuple[str, str]]) -> str:
    pairs = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in lines if value)
    return f'<dl class="pairs">{pairs}</dl>'


def _coverage(report: Report) -> str:
    heard = report.coverage
    lines = [
        (
            "nodes seen / expected",
            _of(heard.nodes_heard, heard.nodes_expected),
        ),
        ("ranks seen / expected", _of(heard.ranks_heard, heard.ranks_expected)),
        (f"{term('truncated', 'truncated')} nodes", num(heard.nodes_truncated, count, "coverage.nodes_truncated")),
        ("lost events", num(heard.events_lost, count, "coverage.events_lost")),
    ]
    return section("coverage", "Coverage", _pairs(lines))


def _of(heard: int, expected: int | None) -> str:
    return "" if not heard and not expected else f"{num(heard, count)} / {num(expected, count)}"


def _clock(report: Report) -> str:
    clock = report.clock
    lines = [
        ("reference node", f'<span class="id">{esc(clock.reference_node) or "none"}</span>'),
        (f"largest {term('clock', 'offset')}", num(clock.max_offset_s, _precise, "clock.max_offset_s")),
        ("largest error of offsets", num(clock.max_error_s, _precise, "clock.max_error_s")),
        ("nodes without a common barrier", num(clock.nodes_untied, count, "clock.nodes_untied")),
        ("wall clock jumped on", f'<span class="id">{esc(", ".join(clock.steps[:50])) or "no node"}</span>'),
    ]
    return section("clock", "Clocks", _pairs(lines))


def _precise(value: float) -> str:
    return f"{value * 1000:.1f} ms" if abs(value) < 1 else f"{value:.3f} s"


def _unobserved(report: Report) -> str:
    names = [f"<b>{esc(stage)}</b>" for stage in report.unobserved if " " not in stage]
    lines = [esc(line) for line in report.unobserved if " " in line]
    if names:
        lines.insert(0, f"{', '.join(names)}: not in the input, and not included in any sum.")
    if report.overhead.job_level_s is None and report.startup.outcome == "training_began":
        lines.append("Submission time of the job, which is needed for the job-level overhead.")
    if report.startup.num_gpus is None:
        lines.append("GPUs of each node, which are needed for GPU-hours and cost (`bootseer report --gpus-per-node`).")
    body = f'<ul class="plain">{"".join(f"<li>{line}</li>" for line in lines)}</ul>'
    return section("unobserved", "Not observed", body) if lines else ""


def _input(report: Report) -> str:
    read = report.input
    lines = [
        ("files", num(read.files, count, "input.files")),
        ("size", num(read.bytes, size, "input.bytes")),
        ("lines", num(read.lines, count, "input.lines")),
        ("events", num(read.events, count, "input.events")),
        ("duplicates", num(read.duplicates, count, "input.duplicates") if read.duplicates else ""),
    ]
    lines += [(f"skipped: {esc(why)}", f"<span>{esc(count(number))}</span>") for why, number in read.skipped.items()]
    return section("input", "Input", _pairs(lines))


def facts(report: Report) -> str:
    if not report.facts:
        return ""
    rows = [
        word_cell(fact.source)
        + word_cell(fact.stage)
        + word_cell(fact.text, css="text")
        + cell(fact.duration_s, seconds)
        + word_cell(fact.node, css="id")
        + word_cell(fact.where, css="id")
        for fact in report.facts[:_MAX_FACTS]
    ]
    columns = head("source", "stage", "fact", ">took", "node", "where")
    left = len(report.facts) - _MAX_FACTS
    note = "From lines of other programs in the same logs: measured by them, not by BootSeer."
    if left > 0:
        note += f" The first {_MAX_FACTS:,} are shown; {left:,} more are in the JSON report."
    return section(
        "facts", "Seen in other logs", table(columns, rows, label="Facts from other logs", css="sortable"), note
    )


def startups(report: Report, palette: Palette) -> str:
    """All startups in the input, and their share of the job's time."""
    if len(report.startups) < 2:
        return ""
    shown = report.startups[:_MAX_STARTUPS]
    this = report.startup
    here = (this.job, this.attempt, this.restart)
    rows = [_startup_cells(one, (one.job, one.attempt, one.restart) == here) for one in shown]
    columns = head(*("job", ">attempt", ">restart", "kind", "began", "outcome", ">nodes", ">GPUs", ">startup"))
    note = ""
    share = report.share
    if share is not None:
        note = (
            f"{plural(share.num_startups, 'startup')} took {num(share.startup_s, seconds, 'share.startup_s')} of "
            f"{num(share.wall_s, seconds, 'share.wall_s')}: "
            f"<b>{num(share.share, percent, 'share.share')} of the wall time</b>, "
            f"{num(share.gpu_hours, hours, 'share.gpu_hours')} GPU-hours."
        )
    left = len(report.startups) - _MAX_STARTUPS
    if left > 0:
        note += f" The first {_MAX_STARTUPS:,} are shown; {left:,} more are in the JSON report."
    chart = attempts(shown[-_MAX_COLUMNS:], palette)
    body = chart + table(columns, rows, label="Startups", css="sortable")
    return section("startups", "All startups in the input", body, note)


def _startup_cells(one: Overview, this: bool) -> str:
    css = ' class="this" aria-current="true"' if this else ""
    return (
        f"<tr{css}>"
        + word_cell(one.job, css="id")
        + cell(one.attempt, count)
        + cell(one.restart, count)
        + word_cell(one.kind)
        + f'<td data-sort="{one.begin_ns}">{esc(moment(one.begin_ns, "%m-%d %H:%M:%S"))}</td>'
        + word_cell(one.outcome.replace("_", " "))
        + cell(one.num_nodes, count)
        + cell(one.num_gpus, count)
        + cell(one.startup_s, seconds)
        + "</tr>"
    )


def glossary(page: str) -> str:
    """The terms that the page links to, each explained in a sentence or two."""
    entries = "".join(
        f'<div id="g-{key}"><dt>{esc(title)}</dt><dd>{esc(meaning)}</dd></div>'
        for key, (title, meaning) in GLOSSARY.items()
        if f'"#g-{key}"' in page or key in _ALWAYS
    )
    return section("words", "Glossary", f'<dl class="glossary">{entries}</dl>')

"""The parts of the HTML report below the fold: distributions, ledger, evidence, other startups, glossary.

Each function turns a `Report` into the HTML of one part; `html.render` puts them in order.
"""

from __future__ import annotations

from bootseer.analysis.model import Overview, Report, Stage
from bootseer.render.html_svg import Palette, cdf, stacked, swatch
from bootseer.render.html_text import (
    GLOSSARY,
    cell,
    count,
    esc,
    head,
    hours,
    moment,
    money,
    num,
    percent,
    plural,
    ratio,
    seconds,
    section,
    size,
    table,
    term,
    word_cell,
)

_MAX_FACTS = 500
_MAX_STARTUPS = 500


def distributions(report: Report, palette: Palette) -> str:
    """How the nodes spread in each stage, as small multiples."""
    drawn = [_multiple(stage, palette) for stage in report.stages if len(stage.cdf) >= 2]
    if not drawn:
        return ""
    note = (
        "Share of nodes (up) that were done after so many seconds (right). Dashed: median; solid: maximum. "
        "A long flat tail is a few slow nodes; an even slope is a shared limit."
    )
    return section("spread", "Spread over nodes", f'<div class="multiples">{"".join(drawn)}</div>', note)


def _multiple(stage: Stage, palette: Palette) -> str:
    most = "" if stage.max_over_median is None else f'<b class="r">{ratio(stage.max_over_median)}</b>'
    median = "" if stage.median_s is None else f"median {seconds(stage.median_s)}"
    longest = "" if stage.max_s is None else f"max {seconds(stage.max_s)}"
    drawing = cdf(stage, palette.css(stage.stage, "work"))
    return (
        f'<figure><figcaption><span title="{esc(stage.stage)}">{esc(stage.stage)}</span>{most}</figcaption>'
        f'{drawing}<p class="ends"><span>{median}</span><span>{longest}</span></p></figure>'
    )


def ledger(report: Report, palette: Palette) -> str:
    """What each top-level stage cost, in work and in waiting."""
    stages = [stage for stage in report.stages if stage.depth == 0]
    if not stages:
        return ""
    in_hours = all(stage.gpu_hours is not None for stage in stages)
    most = max(_weight(stage, in_hours) for stage in stages)
    rows = []
    for stage in stages:
        total, weight = stage.work_s + stage.wait_s, _weight(stage, in_hours)
        work = weight * stage.work_s / total if total > 0 else 0.0
        form = hours if in_hours else seconds
        said = f"{stage.stage}: {form(work)} work, {form(weight - work)} wait"
        css, hatch = palette.css(stage.stage, "work"), palette.css(stage.stage, "wait")
        rows.append(
            f'<td class="id">{swatch(palette.sign(stage.stage))}{esc(stage.stage)}</td>'
            f'<td class="wide">{stacked(work, weight - work, most=most, css=css, hatch=hatch, label=said)}</td>'
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
    columns = head("stage", unit_name, ">work", ">wait (hatched)", ">cost")
    note = (
        f"{term('work')} and {term('wait', 'wait')} in {unit_name}"
        f"{'' if in_hours else '; the number of GPUs is unobserved'}. "
        + ("No price was given." if over.price_per_gpu_hour is None else "Cost in the currency of the price.")
    )
    return section("ledger", "Cost by stage", table(columns, rows, label="Ledger"), note)


def _weight(stage: Stage, in_hours: bool) -> float:
    return stage.gpu_hours or 0.0 if in_hours else stage.work_s + stage.wait_s


def evidence(report: Report) -> str:
    """How much of the truth was seen: coverage, clocks, what is missing, what was read."""
    return f'<div class="pair">{_coverage(report)}{_clock(report)}{_unobserved(report)}{_input(report)}</div>'


def _pairs(lines: list[tuple[str, str]]) -> str:
    return f'<dl class="pairs">{"".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in lines)}</dl>'


def _coverage(report: Report) -> str:
    heard = report.coverage
    lines = [
        (
            "nodes heard of / expected",
            f"{num(heard.nodes_heard, count)} / {num(heard.nodes_expected, count)}",
        ),
        ("ranks heard of / expected", f"{num(heard.ranks_heard, count)} / {num(heard.ranks_expected, count)}"),
        (f"{term('truncated', 'truncated')} nodes", num(heard.nodes_truncated, count, "coverage.nodes_truncated")),
        ("events that writers lost", num(heard.events_lost, count, "coverage.events_lost")),
    ]
    return section("coverage", "Coverage", _pairs(lines))


def _clock(report: Report) -> str:
    clock = report.clock
    lines = [
        ("reference node", f'<span class="id">{esc(clock.reference_node) or "none"}</span>'),
        (f"largest {term('clock', 'offset')}", num(clock.max_offset_s, _precise, "clock.max_offset_s")),
        ("error of the offsets, at most", num(clock.max_error_s, _precise, "clock.max_error_s")),
        ("nodes that nothing ties to the others", num(clock.nodes_untied, count, "clock.nodes_untied")),
        ("wall clock jumped on", f'<span class="id">{esc(", ".join(clock.steps[:50])) or "no node"}</span>'),
    ]
    return section("clock", "Clocks", _pairs(lines))


def _precise(value: float) -> str:
    return f"{value * 1000:.1f} ms" if abs(value) < 1 else f"{value:.3f} s"


def _unobserved(report: Report) -> str:
    if not report.unobserved:
        body = '<p class="empty">Nothing that this report tells about is missing.</p>'
    else:
        body = f'<ul class="plain">{"".join(f"<li>{_missing(line)}</li>" for line in report.unobserved)}</ul>'
    return section("unobserved", "Not observed", body)


def _missing(what: str) -> str:
    """A sentence; the analysis names a stage by its name alone."""
    text = esc(what)
    return text if " " in what else f"<b>{text}</b>: nothing in the input tells about it; it is in no sum."


def _input(report: Report) -> str:
    read = report.input
    lines = [
        ("files", num(read.files, count, "input.files")),
        ("size", num(read.bytes, size, "input.bytes")),
        ("lines", num(read.lines, count, "input.lines")),
        ("events", num(read.events, count, "input.events")),
        ("duplicates left out", num(read.duplicates, count, "input.duplicates")),
    ]
    lines += [(f"skipped: {esc(why)}", f"<span>{esc(count(number))}</span>") for why, number in read.skipped.items()]
    return section("input", "Input", _pairs(lines))


def facts(report: Report) -> str:
    """What foreign logs said by themselves."""
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
    columns = head("source", "stage", "said", ">took", "node", "where")
    left = len(report.facts) - _MAX_FACTS
    note = "Lines of other programs in the same logs: measured by them, not by BootSeer."
    if left > 0:
        note += f" The first {_MAX_FACTS:,} are shown; {left:,} more are in the JSON report."
    return section(
        "facts", "Seen in other logs", table(columns, rows, label="Facts from other logs", css="sortable"), note
    )


def startups(report: Report) -> str:
    """All startups in the input, and their share of the time that the job ran."""
    if not report.startups:
        return ""
    shown = report.startups[:_MAX_STARTUPS]
    most = max((one.startup_s for one in shown), default=0.0)
    rows = [_startup_cells(one, most, _is_this(one, report)) for one in shown]
    columns = head(*("job", ">attempt", ">restart", "kind", "began", "outcome", ">nodes", ">GPUs", ">startup", ""))
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
    return section(
        "startups", "All startups in the input", table(columns, rows, label="Startups", css="sortable"), note
    )


def _is_this(one: Overview, report: Report) -> bool:
    this = report.startup
    return (one.job, one.attempt, one.restart) == (this.job, this.attempt, this.restart)


def _startup_cells(one: Overview, most: float, this: bool) -> str:
    css = ' class="this" aria-current="true"' if this else ""
    drawing = stacked(one.startup_s, 0.0, most=most, css="c2", hatch="h2", label=seconds(one.startup_s))
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
        + f'<td class="wide">{drawing}</td></tr>'
    )


def glossary() -> str:
    """The words of the page, each in a sentence or two."""
    entries = "".join(
        f'<div id="g-{key}"><dt>{esc(title)}</dt><dd>{esc(meaning)}</dd></div>'
        for key, (title, meaning) in GLOSSARY.items()
    )
    return section("words", "Words", f'<dl class="glossary">{entries}</dl>')

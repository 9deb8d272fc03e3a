"""The upper parts of the HTML report: header, key figures, critical chain, stragglers, stages.

Each function renders one part of a `Report`; `html.render` puts them in order.
"""

from __future__ import annotations

from collections.abc import Callable

from bootseer.report.analysis.stragglers import MIN_NODES, host_list
from bootseer.report.analysis.verdict import is_about_clocks, located
from bootseer.report.model import Link, Report, Stage, Straggler, StragglerGroup
from bootseer.report.render.fold import shared_links
from bootseer.report.render.html_svg import Palette, stacked, swatch
from bootseer.report.render.html_text import (
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
    rank_cell,
    ratio,
    seconds,
    section,
    table,
    term,
    word_cell,
)
from bootseer.units import plural

_OUTCOMES = {
    "training_began": ("ok", "training began"),
    "truncated": ("warn", "abandoned startup, or still running"),
    "failed": ("bad", "failed startup"),
    "unobserved": ("warn", "beginning of training not observed"),
}
_ENDS = {
    "first_step": "ends with the first optimizer step",
    "training_began": "ends when training was marked as begun",
    "last_event": "ends with the last event seen",
    "command": "ends with the command",
    "restart": "ends with the next restart",
}


def header(report: Report) -> str:
    """Job, identity, verdict and warnings."""
    startup = report.startup
    css, words = _OUTCOMES.get(startup.outcome, ("warn", startup.outcome))
    size = [plural(startup.num_nodes, "node"), *([plural(startup.num_ranks, "rank")] if startup.num_ranks else [])]
    size.append("GPUs unobserved" if startup.num_gpus is None else plural(startup.num_gpus, "GPU"))
    facts = [
        f"attempt {startup.attempt}",
        f"restart {startup.restart}" if startup.restart else "",
        f"{startup.kind} startup",
        ", ".join(size),
        f"scale {startup.scale} GPUs" if startup.scale else "",
        f"began {moment(startup.zero_ns)}" if startup.zero_ns > 0 else "",
        _ENDS.get(startup.ended_by, startup.ended_by),
    ]
    meta = "".join(f"<li>{esc(fact)}</li>" for fact in facts if fact)
    banners = _banners([line for line in report.headlines if not is_about_clocks(line)])
    return (
        f'<header><p class="brand">BootSeer startup report</p><h1>{esc(startup.job)}</h1>'
        f'<p class="verdict {css}"><b class="chip">{esc(words)}</b> <span id="verdict">{esc(report.verdict)}</span></p>'
        f'<ul class="meta">{meta}</ul></header>{banners}'
    )


def _banners(lines: list[str]) -> str:
    items = "".join(f"<li>{esc(line)}</li>" for line in lines)
    return f'<ul class="banners" aria-label="Warnings">{items}</ul>' if items else ""


def figures(report: Report) -> str:
    """The tiles with key figures; those without a value are omitted."""
    over, heard = report.overhead, report.coverage
    many = max(len(report.nodes), heard.nodes_expected or 0) > 1
    judged = len(report.nodes) >= MIN_NODES or report.stragglers

    def of(name: str, form: Callable[[float], str]) -> str:
        value = getattr(over, name)
        return num(value, form, f"overhead.{name}") if value else ""

    expected = num(heard.nodes_expected, count, "coverage.nodes_expected")
    nodes = f"{num(heard.nodes_heard, count, 'coverage.nodes_heard')} / {expected}"
    ranks = f"nodes seen; ranks {num(heard.ranks_heard, count, 'coverage.ranks_heard')}"
    if heard.ranks_expected:
        ranks += f" / {num(heard.ranks_expected, count, 'coverage.ranks_expected')}"
    low = "low" if heard.nodes_expected is not None and heard.nodes_heard < heard.nodes_expected else ""
    shares = f"{of('work_share', percent)} / {of('wait_share', percent)}" if over.wait_share else ""
    work, wait = over.work_share or 0.0, over.wait_share or 0.0
    bar = stacked(work, wait, most=1.0, css="c2", hatch="h2", label="share of work and wait in the nodes' time")
    last = len(report.straggler_groups) - 1
    saved = num(report.straggler_groups[-1].joint_s, seconds, f"straggler_groups.{last}.joint_s") if last >= 0 else ""
    without = f"{saved} sooner without them" if saved else "none beyond noise"
    cost = f"{of('wait_cost', money) or 'none'} of it waiting; {of('price_per_gpu_hour', money)} per GPU-hour"
    name = {"failed": "Failed startup", "truncated": "Abandoned startup"}.get(report.startup.outcome, "Startup")
    tiles = (
        _tile("startup", name, of("startup_s", seconds), "first event to its end", "main"),
        _tile("job", "Job-level", of("job_level_s", seconds), "from the submission"),
        _tile(
            *("node", "Node-level, median", of("node_level_median_s", seconds) if many else ""),
            f"max {of('node_level_max_s', seconds)}",
        ),
        _tile("gpuh", "GPU-hours", of("gpu_hours", hours), f"{of('wait_gpu_hours', hours) or 'none'} of them waiting"),
        _tile("", f"Cost, {over.currency}", of("cost", money), cost),
        _tile("wait", "Work / wait", shares, bar),
        _tile("coverage", "Coverage", nodes if many else "", ranks if heard.ranks_heard else "nodes seen", low),
        _tile(
            *("straggler", "Stragglers"),
            num(len(report.stragglers), count, "stragglers.length") if judged else "",
            without,
        ),
    )
    shown = f'<section class="tiles" aria-label="Key figures">{"".join(tiles)}</section>' if any(tiles) else ""
    return shown + _banners([line for line in report.headlines if is_about_clocks(line)])


def _tile(key: str, name: str, value: str, below: str, css: str = "") -> str:
    if not value:
        return ""
    title = term(key, name) if key else esc(name)
    return f'<div class="tile {css}"><h3>{title}</h3><p class="big">{value}</p><p class="sub">{below}</p></div>'


def chain(report: Report, palette: Palette) -> str:
    """The critical chain as a sequence of barriers."""
    note = f"At each {term('barrier', 'barrier')}: the last node, where it lost time, and how long others waited."
    links = shared_links(report)
    if not links:
        return ""
    body = f'<ol class="chain">{"".join(_link(i, x, palette) for i, x in links)}</ol>'
    return section("chain", "Critical chain", body, note)


def _link(i: int, link: Link, palette: Palette) -> str:
    key = f"critical_chain.{i}."
    median = num(link.others_median_arrival_s, seconds, key + "others_median_arrival_s")
    lines = [
        ("arrived", f"{num(link.arrival_s, seconds, key + 'arrival_s')} <i>others' median</i> {median}"),
        (
            "opened",
            f"{num(link.release_s, seconds, key + 'release_s')} <i>for</i> {plural(link.num_participants, 'rank')}",
        ),
        (
            "lost most in",
            f"{swatch(palette.css(link.stage, 'work'))}{dotted(link.stage) or 'no stage'} "
            f"{num(link.stage_s, seconds, key + 'stage_s')}",
        ),
        ("more than others", num(link.excess_s, seconds, key + "excess_s")),
        ("others waited", f"{num(link.waited_gpu_hours, hours, key + 'waited_gpu_hours')} <i>GPU-hours</i>"),
    ]
    body = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in lines)
    rank = f" <i>rank {link.rank}</i>" if link.rank >= 0 else ""
    return (
        f'<li><p class="gate">{esc(link.barrier)}</p>'
        f'<p class="last"><b class="id">{esc(link.node)}</b>{rank} arrived last</p>'
        f"<dl>{body}</dl></li>"
    )


def stragglers(report: Report) -> str:
    """Groups with their joint cost, then each straggler."""
    note = (
        f"{term('savings', 'Savings')} are computed by replaying the observed barriers without these nodes. Groups "
        "hide each other, so they are listed in the order in which to fix them: each with what it saves alone, adds to "
        "those above it, and saves together with them. z is the robust z-score of the node's work among the others."
    )
    if not report.stragglers and len(report.nodes) < MIN_NODES:
        return ""
    if not report.stragglers:
        return section(
            "stragglers", "Stragglers", '<p class="empty">No node was slower than clock errors and noise explain.</p>'
        )
    groups = [_group_cells(i, group) for i, group in enumerate(report.straggler_groups)]
    columns = head(
        *("stage", "barrier", ">nodes", "where", ">saves alone", ">adds", ">together", ">GPU-hours"),
        *(f">cost, {esc(report.overhead.currency)}", "which"),
    )
    body = table(columns, groups, label="Stragglers by stage") if groups else ""
    rows = [_straggler_cells(i, one) for i, one in enumerate(report.stragglers)]
    columns = head("node", ">rank", "stage", "barrier", ">delay", ">z", ">saves alone", ">GPU-hours")
    body += table(columns, rows, label="Stragglers one by one", css="sortable")
    return section("stragglers", "Stragglers", body, note)


def _group_cells(i: int, group: StragglerGroup) -> str:
    key = f"straggler_groups.{i}."
    size = num(len(group.nodes), count, key + "nodes.length")
    names = esc(", ".join(group.nodes[:200]))
    return (
        word_cell(group.stage, css="id")
        + word_cell(group.barrier)
        + f'<td class="r" title="{names}">{size}</td>'
        + word_cell(located(group))
        + cell(group.savings_s, seconds, key + "savings_s")
        + cell(group.next_s, seconds, key + "next_s")
        + cell(group.joint_s, seconds, key + "joint_s")
        + cell(group.joint_gpu_hours, hours, key + "joint_gpu_hours")
        + cell(group.joint_cost, money, key + "joint_cost")
        + word_cell(host_list(group.nodes), css="text")
    )


def _straggler_cells(i: int, one: Straggler) -> str:
    key = f"stragglers.{i}."
    return (
        word_cell(one.node, css="id")
        + rank_cell(one.rank)
        + word_cell(one.stage)
        + word_cell(one.barrier)
        + cell(one.delay_s, seconds, key + "delay_s")
        + cell(one.z, lambda v: f"{v:.1f}", key + "z")
        + cell(one.savings_s, seconds, key + "savings_s")
        + cell(one.savings_gpu_hours, hours, key + "savings_gpu_hours")
    )


def _stage_name(stage: Stage, palette: Palette) -> str:
    name = stage.stage.rpartition(".")[2] if stage.depth else stage.stage
    inner = stage.stage in palette.inner.get(stage.stage.partition(".")[0], [])
    mark = swatch(palette.sign(stage.stage)) if inner or not stage.depth else ""
    return f'<td class="id" title="{esc(stage.stage)}">{mark}{esc(name)}</td>'


def _scheduler(_: float) -> str:
    """Shown instead of the number of nodes for a stage of the scheduler."""
    return "job"


def stages(report: Report, palette: Palette) -> str:
    if not report.stages:
        return ""
    many = len(report.nodes) > 1  # for a single node, median and name are superfluous
    rows = []
    for i, stage in enumerate(report.stages):
        key = f"stages.{i}."
        depth = min(max(stage.depth, 0), 4)
        bad = stage.num_truncated + stage.num_failed
        ended = f"{stage.num_truncated} / {stage.num_failed}" if bad else "–"
        spread = (
            cell(stage.num_nodes, count if stage.num_nodes else _scheduler, key + "num_nodes")
            + cell(stage.median_s, seconds, key + "median_s")
            + cell(stage.p90_s, seconds, key + "p90_s")
            + cell(stage.max_s, seconds, key + "max_s")
        )
        rows.append(
            f'<tr class="d{depth}">{_stage_name(stage, palette)}'
            + (spread if many else "<td></td>" * 4)
            + cell(stage.max_over_median, ratio, key + "max_over_median")
            + word_cell(stage.max_node if many else "", css="id")
            + cell(stage.work_s, seconds, key + "work_s")
            + cell(stage.wait_s, seconds, key + "wait_s")
            + cell(stage.gpu_hours, hours, key + "gpu_hours")
            + cell(stage.cost, money, key + "cost")
            + f'<td class="r" data-sort="{bad}">{ended}</td></tr>'
        )
    columns = head(
        *("stage", ">nodes", ">median", ">p90", ">max", f">{term('ratio')}", "slowest"),
        *((">work, all", ">wait, all") if many else (">took", ">waited")),
        *(">GPU-hours", f">cost, {esc(report.overhead.currency)}", ">truncated / failed"),
    )
    return section("stages", "Stages", table(columns, rows, label="Stages over all nodes"))

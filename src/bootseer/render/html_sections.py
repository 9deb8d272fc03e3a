"""The parts of the HTML report that answer "what happened and who was it": head, figures, critical chain, stragglers.

Each function turns a `Report` into the HTML of one part; `html.render` puts them in order.
"""

from __future__ import annotations

from bootseer.analysis.model import Link, Report, Straggler, StragglerGroup
from bootseer.analysis.words import located
from bootseer.render.html_svg import Palette, stacked, swatch
from bootseer.render.html_text import (
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
    plural,
    rank_cell,
    ratio,
    seconds,
    section,
    table,
    term,
    word_cell,
)

_OUTCOMES = {
    "training_began": ("ok", "training began"),
    "truncated": ("warn", "truncated: the logs stop before training began"),
    "failed": ("bad", "failed"),
}
_ENDS = {
    "first_step": "ends with the first optimizer step",
    "training_began": "ends when training was said to have begun",
    "last_event": "ends with the last event seen",
}


def header(report: Report) -> str:
    """Job, identity, verdict and warnings."""
    startup = report.startup
    css, words = _OUTCOMES.get(startup.outcome, ("warn", startup.outcome))
    size = [plural(startup.num_nodes, "node"), plural(startup.num_ranks, "rank")]
    size.append("GPUs unobserved" if startup.num_gpus is None else plural(startup.num_gpus, "GPU"))
    facts = [
        f"attempt {startup.attempt}",
        f"restart {startup.restart}",
        f"{startup.kind} startup",
        ", ".join(size),
        f"scale {startup.scale} GPUs" if startup.scale else "",
        f"began {moment(startup.zero_ns)}" if startup.zero_ns > 0 else "",
        _ENDS.get(startup.ended_by, startup.ended_by),
    ]
    meta = "".join(f"<li>{esc(fact)}</li>" for fact in facts if fact)
    banners = "".join(f"<li>{esc(line)}</li>" for line in report.headlines)
    banners = f'<ul class="banners" aria-label="Warnings">{banners}</ul>' if banners else ""
    return (
        f'<header><p class="brand">BootSeer startup report</p><h1>{esc(startup.job)}</h1>'
        f'<p class="verdict {css}"><b class="chip">{esc(words)}</b> <span id="verdict">{esc(report.verdict)}</span></p>'
        f'<ul class="meta">{meta}</ul></header>{banners}'
    )


def figures(report: Report) -> str:
    """The tiles: what the startup took and what it cost."""
    over, heard = report.overhead, report.coverage
    expected = num(heard.nodes_expected, count, "coverage.nodes_expected")
    ranks = num(heard.ranks_heard, count, "coverage.ranks_heard")
    all_ranks = num(heard.ranks_expected, count, "coverage.ranks_expected")
    groups = report.straggler_groups
    saved = num(groups[-1].joint_s, seconds, f"straggler_groups.{len(groups) - 1}.joint_s") if groups else None
    tiles = [
        _tile(
            "startup", "Startup", num(over.startup_s, seconds, "overhead.startup_s"), "first event to its end", "main"
        ),
        _tile("job", "Job-level", num(over.job_level_s, seconds, "overhead.job_level_s"), "from the submission"),
        _tile(
            "node",
            "Node-level, median",
            num(over.node_level_median_s, seconds, "overhead.node_level_median_s"),
            f"max {num(over.node_level_max_s, seconds, 'overhead.node_level_max_s')}",
        ),
        _tile(
            "gpuh",
            "GPU-hours",
            num(over.gpu_hours, hours, "overhead.gpu_hours"),
            f"{num(over.wait_gpu_hours, hours, 'overhead.wait_gpu_hours')} of them waiting",
        ),
        _tile("", "Cost", num(over.cost, money, "overhead.cost"), _cost_note(report)),
        _tile("wait", "Work / wait", _shares(report), _share_bar(report)),
        _tile(
            "coverage",
            "Coverage",
            f"{num(heard.nodes_heard, count, 'coverage.nodes_heard')} / {expected}",
            f"nodes heard; ranks {ranks} / {all_ranks}",
            "low" if heard.nodes_expected is not None and heard.nodes_heard < heard.nodes_expected else "",
        ),
        _tile(
            "straggler",
            "Stragglers",
            num(len(report.stragglers), count, "stragglers.length"),
            "none beyond noise" if saved is None else f"without them {saved} sooner",
        ),
    ]
    return f'<section class="tiles" aria-label="Key figures">{"".join(tiles)}</section>'


def _cost_note(report: Report) -> str:
    over = report.overhead
    price = num(over.price_per_gpu_hour, money, "overhead.price_per_gpu_hour")
    if over.cost is None:
        return f"price per GPU-hour: {price}"
    return f"{num(over.wait_cost, money, 'overhead.wait_cost')} of it waiting; {price} per GPU-hour"


def _tile(key: str, name: str, value: str, below: str, css: str = "") -> str:
    title = term(key, name) if key else esc(name)
    return f'<div class="tile {css}"><h3>{title}</h3><p class="big">{value}</p><p class="sub">{below}</p></div>'


def _shares(report: Report) -> str:
    over = report.overhead
    work, wait = (
        num(over.work_share, percent, "overhead.work_share"),
        num(over.wait_share, percent, "overhead.wait_share"),
    )
    return work if over.work_share is None and over.wait_share is None else f"{work} / {wait}"


def _share_bar(report: Report) -> str:
    work, wait = report.overhead.work_share, report.overhead.wait_share
    if work is None or wait is None:
        return "of the nodes' time"
    return stacked(work, wait, most=1.0, css="c2", hatch="h2", label="share of work and wait in the nodes' time")


def chain(report: Report, palette: Palette) -> str:
    """The critical chain as a sequence of barriers."""
    note = (
        f"At each {term('barrier', 'barrier')}: who came last, where it lost the time, and what the others paid for it."
    )
    if not report.critical_chain:
        body = '<p class="empty">No barrier was observed, so nobody can be said to have held the others back.</p>'
    else:
        body = f'<ol class="chain">{"".join(_link(i, x, palette) for i, x in enumerate(report.critical_chain))}</ol>'
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
        f'<p class="last"><b class="id">{esc(link.node)}</b>{rank} came last</p>'
        f"<dl>{body}</dl></li>"
    )


def stragglers(report: Report) -> str:
    """Groups with what they cost together, then each straggler."""
    note = (
        f"{term('savings', 'Savings')} are exact for the observed barriers: the job replayed without these nodes. "
        "Groups hide behind each other: they stand in the order in which to mend them, each with what it adds to those "
        "above it and what they save together. z is the robust z-score of the node's work among the others."
    )
    if not report.stragglers:
        return section(
            "stragglers", "Stragglers", '<p class="empty">No node was slower than clock error and noise explain.</p>'
        )
    groups = [_group_cells(i, group) for i, group in enumerate(report.straggler_groups)]
    columns = head(
        *("stage", "barrier", ">nodes", "where", ">saves alone", ">adds", ">together", ">GPU-hours", ">cost")
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


def _scheduler(_: float) -> str:
    """What stands for the number of nodes when the scheduler, not a node, went through a stage."""
    return "job"


def stages(report: Report, palette: Palette) -> str:
    """The stage table."""
    if not report.stages:
        return section("stages", "Stages", '<p class="empty">No stage was observed.</p>')
    rows = []
    for i, stage in enumerate(report.stages):
        key = f"stages.{i}."
        depth = min(max(stage.depth, 0), 4)
        name = stage.stage.rpartition(".")[2] if depth else stage.stage
        mark = "" if depth else swatch(palette.sign(stage.stage))
        bad = stage.num_truncated + stage.num_failed
        ended = f"{stage.num_truncated} / {stage.num_failed}" if bad else "–"
        rows.append(
            f'<tr class="d{depth}"><td class="id" title="{esc(stage.stage)}">{mark}{esc(name)}</td>'
            + cell(stage.num_nodes, count if stage.num_nodes else _scheduler, key + "num_nodes")
            + cell(stage.median_s, seconds, key + "median_s")
            + cell(stage.p90_s, seconds, key + "p90_s")
            + cell(stage.max_s, seconds, key + "max_s")
            + cell(stage.max_over_median, ratio, key + "max_over_median")
            + word_cell(stage.max_node, css="id")
            + cell(stage.work_s, seconds, key + "work_s")
            + cell(stage.wait_s, seconds, key + "wait_s")
            + cell(stage.gpu_hours, hours, key + "gpu_hours")
            + cell(stage.cost, money, key + "cost")
            + f'<td class="r" data-sort="{bad}">{ended}</td></tr>'
        )
    columns = head(
        *("stage", ">nodes", ">median", ">p90", ">max", f">{term('ratio')}", "slowest"),
        *(">work, all", ">wait, all", ">GPU-hours", ">cost", ">truncated / failed"),
    )
    return section("stages", "Stages", table(columns, rows, label="Stages over all nodes"))

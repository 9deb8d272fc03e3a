"""The report, and the comparison of two startups, in a terminal.

Fits 80 columns, is readable without colour, and shows `unobserved` for values that were not measured. Strings from logs
are cleaned of control characters: a log must not control the reader's terminal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bootseer.report.analysis.diff import FASTER, SLOWER, UNPROVEN, Difference
from bootseer.report.analysis.starts import SUMMARIES
from bootseer.report.analysis.verdict import is_about_clocks, located
from bootseer.report.model import UNTRACKED, WAIT, Node, Report, Segment, StragglerGroup
from bootseer.report.render.fold import clean, domain, ended_first, top
from bootseer.units import format_bytes, format_hours, format_money, format_seconds, plural

_COLOURS = {
    "queue": "magenta",
    "image_loading": "blue",
    "environment_setup": "yellow",
    "model_initialization": "magenta",
    "first_step": "green",
}
_OTHER_COLOUR = "cyan"
_SIGNS = {"queue": "░", "image_loading": "█", "environment_setup": "▓", "model_initialization": "▒", "first_step": "◆"}
_LABEL_WIDTH = 18
_NEGLIGIBLE = 0.005
"""Share of the whole below which untracked time and the last wait have no row of their own."""
_MAX_NODES = 12
_MAX_ROWS = 8
_MAX_GROUPS = 6
_MAX_LINKS = 16
_NAMES = frozenset({"stage", "barrier", "last to arrive", "node", ""})
"""Columns of names, which may be shortened."""
_UNOBSERVED = "unobserved"
_UNTIL = {"last_event": "last event seen", "command": "the command's end", "restart": "the restart"}
_MAX_FACTS = 20
_POD = re.compile(r"/([0-9a-f]{4})[0-9a-f]{4}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?= |$)")
"""A pod's uid behind the name of its machine, which would not fit beside it."""
_STYLES = {SLOWER: "bold red", FASTER: "bold green", UNPROVEN: "yellow"}


def render(report: Report, console: Console) -> None:
    """Print the report on the console, which should have at least 60 columns."""
    console.print(Text(clean(report.verdict), style="bold"))
    _print_headlines([line for line in report.headlines if not is_about_clocks(line)], console)
    console.print()
    if report.nodes:
        _print_facts(report, console)
        _print_waterfall(report, console)
    _print_stages(report, console)
    _print_chain(report, console)
    _print_stragglers(report, console)
    for _, heading, lines in SUMMARIES:
        _print_lines(heading, lines(report), console)
    said = [
        f"{fact.source}: {fact.text}" + (f", {format_seconds(fact.duration_s)}" if fact.duration_s is not None else "")
        for fact in report.facts
    ]
    _print_lines("From logs of other programs", said, console, _MAX_ROWS)
    _print_headlines([line for line in report.headlines if is_about_clocks(line)], console)
    _print_foot(report, console)


def _print_headlines(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(Text(f"! {clean(line)}", style="bold red"))


@contextmanager
def following(console: Console) -> Iterator[Callable[[str, object], None]]:
    """A function that shows a changing text: in place on a terminal, elsewhere as a new line whenever the second
    argument has changed."""
    from rich.live import Live

    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield lambda text, about: live.update(Text(clean(text)), refresh=True)
        return
    last: list[object] = [None]

    def show(text: str, about: object) -> None:
        if last[0] != about:
            last[0] = about
            console.print(Text(clean(text)), soft_wrap=True)
            console.file.flush()

    yield show


def _seconds(value: float | None) -> str:
    return _UNOBSERVED if value is None else format_seconds(value)


def _job_level(report: Report) -> str:
    value = report.overhead.job_level_s
    if value is not None:
        return f"{format_seconds(value)} (submission to first step's end)"
    began = report.startup.outcome == "training_began"
    return f"{_UNOBSERVED}: {'submission time unknown' if began else 'training did not begin'}"


def _seen(number: int, expected: int | None, what: str) -> str:
    return f"{number:,} of {plural(expected, what)}" if expected else plural(number, what)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _fit(text: str, width: int) -> str:
    text = _POD.sub(r"/\1", clean(text))
    if cell_len(text) <= width:
        return text
    # Keep the end: nodes differ there, while their names begin alike.
    text = text[-(width - 1) :]
    while cell_len(text) > width - 1:  # wide characters
        text = text[1:]
    return "…" + text


def _print_facts(report: Report, console: Console) -> None:
    startup, overhead, coverage = report.startup, report.overhead, report.coverage
    began = datetime.fromtimestamp(startup.zero_ns / 1e9, UTC)
    until = _UNTIL.get(startup.ended_by, "first step's end")
    restart = f", restart {startup.restart}" if startup.restart else ""
    rows = [
        (
            "job",
            f"{clean(startup.job)}, attempt {startup.attempt}{restart}, {startup.kind}, {began:%Y-%m-%d %H:%M:%S} UTC",
        ),
        ("job-level", _job_level(report)),
        (
            "node-level",
            _UNOBSERVED
            if overhead.node_level_median_s is None
            else f"median {format_seconds(overhead.node_level_median_s)}, max {_seconds(overhead.node_level_max_s)} "
            f"(node bound to {until})",
        ),
    ]
    if overhead.work_share is not None and startup.num_nodes > 1:
        rows.append(("work / wait", f"{overhead.work_share:.0%} / {overhead.wait_share or 0:.0%} of the nodes' time"))
    if startup.num_gpus == 0:
        rows.append(("GPU time", "none: these nodes have no GPUs"))
    elif overhead.gpu_hours is None and startup.num_gpus is not None:
        rows.append(("GPU time", f"{_UNOBSERVED}: the logs do not show how much of this was startup"))
    elif overhead.gpu_hours is None:
        rows.append(("GPU time", f"{_UNOBSERVED}: GPUs per node unknown (--gpus-per-node)"))
    else:
        cost, wait_cost = (format_money(v or 0, overhead.currency) for v in (overhead.cost, overhead.wait_cost))
        money = f" = {cost}, waiting {wait_cost}" if overhead.cost is not None else ""
        wait_hours = format_hours(overhead.wait_gpu_hours or 0)
        hours = f"{format_hours(overhead.gpu_hours)} GPU-hours, {wait_hours} of them waiting{money}"
        rows.append(("GPU time", hours))
    seen = [_seen(coverage.nodes_heard, coverage.nodes_expected, "node")]
    seen += [_seen(coverage.ranks_heard, coverage.ranks_expected, "rank")] * bool(coverage.ranks_heard)
    rows.append(("seen", ", ".join(seen)))
    if report.share is not None:
        share = report.share
        rows.append(
            (
                "all startups",
                f"{share.num_startups} took {format_seconds(share.startup_s)} of {format_seconds(share.wall_s)}: "
                f"{share.share:.1%} of the job's wall time",
            )
        )
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    console.print(table)
    console.print()


def _cell(kind: str, stage: str) -> tuple[str, str]:
    if kind == WAIT:
        return "·", "dim"
    if kind == UNTRACKED and stage == "untracked":
        return "╌", "dim"
    return _SIGNS.get(top(stage), "▪"), _COLOURS.get(top(stage), _OTHER_COLOUR)


def _bar(pieces: Iterable[Segment], width: int, total_s: float) -> Text:
    """One character for each slice of time: the stage that owned the middle of it."""
    bar = Text()
    segments = iter(pieces)
    segment = next(segments, None)
    for column in range(width):
        middle = (column + 0.5) * total_s / width
        while segment is not None and segment.end_s <= middle:
            segment = next(segments, None)
        if segment is None or segment.start_s > middle:
            bar.append(" ")
        else:
            bar.append(*_cell(segment.kind, segment.stage))
    return bar


def _shown(report: Report) -> list[tuple[str, Node]]:
    """All nodes if they are few; else percentiles and the stragglers."""
    # Ranks are more detailed than nodes, if there is room for them.
    nodes = report.ranks if 0 < len(report.ranks) <= _MAX_NODES else report.nodes
    shared = domain(report.nodes)

    def label(node: Node) -> str:
        return node.node.removesuffix(shared)

    if len(nodes) <= _MAX_NODES:
        return [(label(node) + (f" r{node.rank}" if node.rank >= 0 else ""), node) for node in nodes]
    ordered = sorted(nodes, key=lambda node: (node.outcome != "ok", node.work_s))
    picked = {
        f"p{share} of {len(nodes)}": ordered[min(share * len(ordered) // 100, len(ordered) - 1)]
        for share in (1, 50, 90)
    }
    stopped = [node.node for node in ended_first(nodes) if node.outcome in ("truncated", "failed")]
    worst = [row.node for row in report.stragglers] + stopped
    by_name = {node.node: node for node in nodes}
    for name in list(dict.fromkeys(worst))[:_MAX_ROWS]:
        picked[label(by_name[name])] = by_name[name]
    return list(picked.items())


def _print_waterfall(report: Report, console: Console) -> None:
    total_s = max((node.end_s for node in report.nodes), default=0.0)
    if total_s <= 0:
        return
    width = max(console.width - _LABEL_WIDTH - 3, 30)
    scale = (
        f"{'0 s':<{width // 2 - 4}}{format_seconds(total_s / 2):^8}{format_seconds(total_s):>{width - width // 2 - 4}}"
    )
    console.print(Text(" " * (_LABEL_WIDTH + 1) + scale, style="dim"))
    rows = [("scheduler", report.scheduler, "")] * bool(report.scheduler)
    rows += [(name, node.segments, node.outcome) for name, node in _shown(report)]
    for name, segments, outcome in rows:
        line = Text(f"{set_cell_size(_fit(name, _LABEL_WIDTH), _LABEL_WIDTH)} ")
        line.append_text(_bar(segments, width, total_s))
        console.print(line.append("✗", "bold red") if outcome in ("truncated", "failed") else line)
    drawn = [
        segment
        for _, segments, _ in [*rows, *[("", node.segments, "") for node in report.nodes]]
        for segment in segments
    ]
    used = {(_cell(s.kind, s.stage), s.kind, top(s.stage)) for s in drawn}
    names = sorted(
        {(sign, style, "wait" if kind == WAIT else stage) for (sign, style), kind, stage in used}, key=lambda x: x[2]
    )
    for line in _legend(names, width):
        console.print(Text(" " * (_LABEL_WIDTH + 1)).append_text(line))
    console.print()


def _legend(names: Iterable[tuple[str, str, str]], width: int) -> list[Text]:
    """The legend in lines that are wrapped between entries."""
    lines = [Text()]
    for sign, style, name in names:
        entry = Text().append(f"{sign} ", style).append(clean(name), "dim")
        if lines[-1] and lines[-1].cell_len + 2 + entry.cell_len > width:
            lines.append(Text())
        if lines[-1]:
            lines[-1].append("  ")
        lines[-1].append_text(entry)
    return lines


def _table(*columns: str, gap: int = 1) -> Table:
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim", pad_edge=False)
    for index, column in enumerate(columns):
        # Only names may be shortened: a number without its last digits is another number.
        names, side = column in _NAMES, "left" if index == 0 else "right"
        table.add_column(column, justify=side, no_wrap=not names, overflow="ellipsis")  # type: ignore[arg-type]
    return table


def _print_stages(report: Report, console: Console) -> None:
    many = len(report.nodes) > 1
    gpus = any(row.gpu_hours for row in report.stages)
    columns = ["stage", "median s", "p90", "max", "max/med", "wait s"] if many else ["stage", "seconds", "share"]
    table = _table(*columns, *(["GPU-h"] if gpus else []), "")
    total = sum(node.end_s - node.start_s for node in report.nodes)
    for row in report.stages:
        rest = row.stage == "wait_for_others" or row.stage.endswith("untracked")
        if rest and row.work_s + row.wait_s < _NEGLIGIBLE * total:
            continue
        name = "  " * row.depth + clean(row.stage.rpartition(".")[2])
        marks = [f"{n} {word}" for n, word in ((row.num_truncated, "truncated"), (row.num_failed, "failed")) if n]
        if many:
            per_node_wait = row.wait_s / row.num_nodes if row.num_nodes else 0.0
            cells = [_short(row.median_s), _short(row.p90_s), _short(row.max_s), _short(row.max_over_median)]
            cells.append(_short(per_node_wait) if row.wait_s else "")
        else:
            spent = row.work_s + row.wait_s
            cells = [f"{spent:.2f}", f"{spent / total:.0%}" if total and row.num_nodes else ""]
        if gpus:
            cells.append(format_hours(row.gpu_hours) if row.gpu_hours else "")
        style = "bold" if row.depth == 0 else "" if not row.stage.endswith("untracked") else "dim"
        table.add_row(Text(name, style), *cells, Text(", ".join(marks), "red"))
    if report.stages:
        console.print(table)
    if report.unobserved:
        console.print(Text(f"unobserved: {', '.join(report.unobserved)}", style="dim"))
    console.print()


def _print_chain(report: Report, console: Console) -> None:
    links = [link for link in report.critical_chain if link.num_participants > 1]
    if not links:
        return
    console.print(Text("Critical chain: the last node at each barrier, and the stage where it lost time", style="bold"))
    table = _table("barrier", "at", "last to arrive", "stage", "took", "excess")
    # If there are very many barriers, only the last ones are shown.
    for link in links[-_MAX_LINKS:]:
        rank = f" r{link.rank}" if link.rank >= 0 else ""
        table.add_row(
            _fit(link.barrier, 24),
            format_seconds(link.release_s),
            _fit(link.node + rank, 16),
            _fit(link.stage.rpartition(".")[2], 16),
            _short(link.stage_s),
            _short(link.excess_s),
        )
    console.print(table)
    if len(links) > _MAX_LINKS:
        console.print(Text(f"  and {len(links) - _MAX_LINKS:,} earlier barriers (--json shows all)", style="dim"))
    console.print()


def _print_stragglers(report: Report, console: Console) -> None:
    if not report.stragglers:
        return
    console.print(Text("Stragglers: nodes whose own work delayed the others", style="bold"))
    groups = report.straggler_groups
    hours = groups[-1].joint_gpu_hours
    gain = f"{format_seconds(groups[-1].joint_s)} sooner" + (
        f", {format_hours(hours)} GPU-hours" if hours is not None else ""
    )
    names = [_slow_nodes(group) for group in groups[:_MAX_GROUPS]]
    if len(groups) == 1:
        lines = [f"without {names[0]}: {gain}"]
    else:
        lines = [f"without all {sum(len(group.nodes) for group in groups)} nodes: {gain}; group by group:"]
        saved = [format_seconds(group.next_s) for group in groups]
        lines += [f"{'then' if i else 'first'} {name}: {saved[i]} sooner" for i, name in enumerate(names)]
    for line in lines:
        console.print(Text(clean(f"  {line}")))
    print_rest(len(groups) - _MAX_GROUPS, console)
    table = _table("node", "late by s", "z", "saves alone s", "stage")
    for row in report.stragglers[:_MAX_ROWS]:
        z = "-" if row.z is None else f"{row.z:.0f}"
        table.add_row(_fit(row.node, 24), _short(row.delay_s), z, _short(row.savings_s), _fit(row.stage, 28))
    console.print(table)
    print_rest(len(report.stragglers) - _MAX_ROWS, console)
    console.print()


def _print_lines(heading: str, lines: Sequence[str], console: Console, most: int = 1000) -> None:
    if not lines:
        return
    console.print(Text(heading, style="bold"))
    for line in lines[:most]:
        console.print(Text(f"  {clean(line)}"))
    print_rest(len(lines) - most, console)
    console.print()


def _slow_nodes(group: StragglerGroup) -> str:
    where = f" ({located(group)})" if group.places else ""
    return f"the {plural(len(group.nodes), 'node')} slow in {group.stage}{where}"


def print_rest(count: int, console: Console) -> None:
    """Print the number of omitted lines, if any."""
    if count > 0:
        console.print(Text(f"  and {count} more (--json shows all)", style="dim"))


def _print_foot(report: Report, console: Console) -> None:
    read, clock = report.input, report.clock
    parts = [
        f"read {plural(read.files, 'file')}, {format_bytes(read.bytes)}, {plural(read.lines, 'line')}, "
        f"{plural(read.events, 'event')}"
    ]
    if read.duplicates:
        parts.append(plural(read.duplicates, "duplicate"))
    if read.skipped:
        parts.append("skipped " + ", ".join(f"{count:,} {reason}" for reason, count in read.skipped.items()))
    if len(report.nodes) > 1:
        error = "unknown" if clock.max_error_s is None else f"at most {clock.max_error_s:.3f} s"
        parts.append(f"clock error: {error}")
    console.print(Text("; ".join(parts), style="dim"))


def render_difference(difference: Difference, console: Console) -> None:
    """Print verdict, warnings, stages and changed facts."""
    console.print(Text(clean(difference.verdict), style="bold"))
    _print_headlines(difference.headlines, console)
    a, b = (difference.a, difference.a_runs, difference.a_s), (difference.b, difference.b_runs, difference.b_s)
    for side, (name, runs, took_s) in (("A", a), ("B", b)):
        of_runs = f" ({runs} runs), median" if runs > 1 else ","
        console.print(Text(f"{side}: {clean(name)}{of_runs} {format_seconds(took_s)}"))
    console.print()
    ranges = ["A's runs"] * (difference.a_runs > 1)
    table = _table("stage", "A s", *ranges, "B s", "change", "", "p", " ", gap=2)
    for stage in difference.stages:
        name = "  " * stage.stage.count(".") + clean(stage.stage.rpartition(".")[2])
        table.add_row(
            name,
            "-" if stage.a_s is None else f"{stage.a_s:.2f}",
            *[f"{stage.a_range_s[0]:.1f}-{stage.a_range_s[1]:.1f}" if stage.a_range_s else ""] * len(ranges),
            "-" if stage.b_s is None else f"{stage.b_s:.2f}",
            "" if stage.delta_s is None else f"{stage.delta_s:+.2f}",
            "" if stage.share is None else f"{stage.share:+.0%}",
            "" if stage.p is None else f"{stage.p:.1g}",
            Text(stage.verdict if stage.verdict in _STYLES else "", _STYLES.get(stage.verdict, "")),
        )
    console.print(table)
    console.print()
    changed = [f"{fact.fact}: {fact.a} -> {fact.b}" for fact in difference.changed]
    _print_lines("Changed facts", changed, console, _MAX_FACTS)

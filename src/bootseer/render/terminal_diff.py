"""The comparison of two startups in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bootseer.analysis.diff import FASTER, SLOWER, UNPROVEN, Difference
from bootseer.render.clean import clean
from bootseer.render.terminal import print_rest
from bootseer.units import format_seconds

_MAX_FACTS = 20
_STYLES = {SLOWER: "bold red", FASTER: "bold green", UNPROVEN: "yellow"}


def render(difference: Difference, console: Console) -> None:
    """Print verdict, warnings, stages and changed facts."""
    console.print(Text(clean(difference.verdict), style="bold"))
    for line in difference.headlines:
        console.print(Text(f"! {clean(line)}", style="bold red"))
    a, b = (difference.a, difference.a_runs, difference.a_s), (difference.b, difference.b_runs, difference.b_s)
    for side, (name, runs, took_s) in (("A", a), ("B", b)):
        of_runs = f" ({runs} runs), median" if runs > 1 else ","
        console.print(Text(f"{side}: {clean(name)}{of_runs} {format_seconds(took_s)}"))
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    ranges = ["A's runs"] * (difference.a_runs > 1)
    for index, column in enumerate(("stage", "A s", *ranges, "B s", "change", "", "p", " ")):
        # Only names may be cut when there is no room: a number without its last digits is another number.
        side = "left" if column in ("stage", " ") else "right"
        table.add_column(column, justify=side, no_wrap=index > 0, overflow="ellipsis")  # type: ignore[arg-type]
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
    if difference.changed:
        console.print()
        console.print(Text("What changed", style="bold"))
        for fact in difference.changed[:_MAX_FACTS]:
            console.print(Text(f"  {clean(fact.fact)}: {clean(fact.a)} -> {clean(fact.b)}"))
        print_rest(len(difference.changed) - _MAX_FACTS, console)

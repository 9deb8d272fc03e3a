"""`bootseer report`: where the time of a startup went; `bootseer diff`: what changed between two startups."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from bootseer.cli.output import Progress, print_json, terminal, write_file
from bootseer.cli.pattern import compiled, of_stages
from bootseer.cli.verb_parts import Count, Number, price_options
from bootseer.launch.supervise import say
from bootseer.report.analysis.live import Moment
from bootseer.report.analysis.prepare import Options
from bootseer.report.read_logs import read_report, read_runs


@click.command("report")
@click.argument("logs", nargs=-1, metavar="[LOG|JOB]...")
@click.option("--job", help="Job to report, if the logs contain several.")
@click.option("--attempt", type=Count(0), help="Attempt to report (default: the last).")
@click.option("--restart", type=Count(0), help="Restart within the attempt (default: the last).")
@click.option("--nodes", "num_nodes", type=Count(1), help="Number of nodes, if the logs do not say or are wrong.")
@click.option("--gpus-per-node", type=Count(0, 65535), help="GPUs of every node, if the logs do not say or are wrong.")
@price_options
@click.option("--began-pattern", metavar="REGEX", help="Log line that marks the end of the first step.")
@click.option(
    "--pattern",
    "patterns",
    multiple=True,
    metavar="STAGE=REGEX|@FILE",
    help="Recognise a stage in your own log lines, by the named groups begin and end, or s or ms for a duration; lines "
    "with the same value of a group key belong together. @FILE: a file of such patterns. May be repeated.",
)
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Also write a self-contained HTML page.")
@click.option("--perfetto", type=click.Path(dir_okay=False, path_type=Path), help="Also write a trace for Perfetto.")
@click.option("--follow", is_flag=True, help="Show which nodes are missing during the start, then the report.")
@click.option("--wait", is_flag=True, help="With --follow: wait for a job that has not started yet.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON (schema bootseer.report/1).")
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Colours in the output.",
)
def report_command(
    logs: tuple[str, ...],
    began_pattern: str | None,
    patterns: tuple[str, ...],
    html: Path | None,
    perfetto: Path | None,
    follow: bool,
    wait: bool,
    as_json: bool,
    color: str,
    **chosen: Any,
) -> None:
    """Show where a startup's time went, node by node.

    LOG is a file (plain, gzip, zstd), a folder, or - for standard input, with event spools, job logs, or both. JOB is
    the name of a job that ran on this machine; a folder of the same name is JOB/. The default is the last job here.

    \b
    bootseer report                                    # the last `bootseer run` here
    bootseer report logs/ --gpus-per-node 8 --price 2
    kubectl logs -l job-name=moe --tail=-1 | bootseer report -
    bootseer report --follow moe                       # which nodes the barrier waits for now
    bootseer report --follow --wait moe                # the same, even before the job has started
    bootseer report train.log --pattern 'model_initialization.data=(?P<begin>Loading corpus)|(?P<end>Corpus ready)'
    """
    if wait and not follow:
        raise click.UsageError("--wait needs --follow")
    options = Options(**chosen)
    stages = of_stages(patterns)
    if began_pattern is not None:
        stages.append(("training_began", compiled(began_pattern, re.MULTILINE)))
    with watched(follow, as_json, color) as watch, Progress("reading") as progress:
        report = read_report(
            logs, options, os.environ, patterns=stages, watch=watch, wait=wait, progress=progress.show_bytes
        )
    if html is not None:
        from bootseer.report.render.html import render as render_html

        write_file(html, render_html(report))
    if perfetto is not None:
        from bootseer.report.render.perfetto import render as render_perfetto

        write_file(perfetto, render_perfetto(report))

    if as_json:
        if not follow:  # otherwise `watch` has printed JSON already
            print_json(report.to_json())
        return
    from bootseer.report.render.terminal import render

    with terminal(color) as console:
        render(report, console)
    for path in (html, perfetto):
        if path is not None:
            say(f"wrote {path}")


@contextmanager
def watched(follow: bool, as_json: bool, color: str) -> Iterator[Callable[[Moment], None] | None]:
    """A function that shows a running start: a line updated in place on a terminal, otherwise a line per change."""
    if not follow:
        yield None
    elif as_json:
        yield lambda moment: print_json(moment.to_json())
    else:
        from bootseer.report.render.terminal import following

        with terminal(color, least=0) as console, following(console) as show:
            yield lambda moment: show(moment.text(), moment.timeless())


@click.command("diff")
@click.argument("sides", nargs=-1, required=True, metavar="[A] B")
@click.option("--baseline", multiple=True, metavar="A", help="Run to compare B with, instead of A; may be repeated.")
@click.option("--min-share", type=Number(0), default=0.10, show_default=True, help="Ignore smaller relative changes.")
@click.option("--min-seconds", type=Number(0), default=0.5, show_default=True, help="Ignore changes of fewer seconds.")
@click.option(
    "--run-variation",
    type=Number(0),
    default=0.15,
    show_default=True,
    metavar="SHARE",
    help="Assumed relative standard deviation between runs, for a single pair; with several runs it is measured.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema bootseer.diff/2).")
@click.option("--exit-zero", is_flag=True, help="Exit with 0 even if B is slower.")
def diff_command(
    sides: tuple[str, ...],
    baseline: tuple[str, ...],
    min_share: float,
    min_seconds: float,
    run_variation: float,
    as_json: bool,
    exit_zero: bool,
) -> int:
    """Compare startup B with startup A, stage by stage.

    A and B are logs, folders or job names as for `bootseer report`. JOB@ATTEMPT names an earlier attempt, JOB@0..9 a
    range of attempts. After --baseline, all names but the last belong to the baseline. The exit code is 1 if B is
    slower by more than runs usually vary, for use in CI. A single pair shows only large changes: give ten runs as
    baseline.

    \b
    bootseer diff moe@0 moe@1
    bootseer diff --baseline moe@0..9 moe@10
    bootseer diff --baseline last-week/*.log.gz today.log.gz --min-seconds 5
    """
    places = [*baseline, *sides]
    if len(places) < 2 or (len(places) > 2 and not baseline):
        raise click.UsageError("give two startups, or a baseline and one startup: --baseline moe@0..9 moe@10")
    from bootseer.report.analysis.diff import Limits, compare

    with Progress("reading") as progress:
        *a, b = [read_runs(place, os.environ, progress.show_bytes) for place in places]
    difference = compare([run for runs in a for run in runs], b, Limits(min_share, min_seconds, run_variation))
    if as_json:
        print_json(difference.to_json())
    else:
        from bootseer.report.render.terminal import render_difference

        with terminal() as console:
            render_difference(difference, console)
    return 1 if difference.slower and not exit_zero else 0

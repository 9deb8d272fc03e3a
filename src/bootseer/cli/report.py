"""`bootseer report`: where the time of a startup went."""

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
from bootseer.cli.verb_parts import Count, price_options
from bootseer.launch.supervise import say
from bootseer.report.analysis.live import Moment
from bootseer.report.analysis.prepare import Options
from bootseer.report.read_logs import read_report


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

        with terminal(color) as console, following(console) as show:
            yield lambda moment: show(moment.text(), moment.timeless())

"""`bootseer diff`: what changed between two startups, stage by stage."""

from __future__ import annotations

import os

import click

from bootseer.cli.output import Progress, print_json, terminal
from bootseer.cli.verb_parts import Number
from bootseer.report.analysis.diff import Limits, compare
from bootseer.report.read_logs import read_runs


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

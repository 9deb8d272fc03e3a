"""`bootseer diff`: what changed between two startups, and which stage moved."""

from __future__ import annotations

import os

import click

from bootseer.cli.command import Amount
from bootseer.cli.output import print_json, terminal


@click.command("diff")
@click.argument("sides", nargs=-1, required=True, metavar="[A] B")
@click.option("--baseline", multiple=True, metavar="A", help="Runs that B is compared with, in the place of A.")
@click.option("--min-share", type=Amount(), default=0.10, show_default=True, help="Smallest share that counts.")
@click.option("--min-seconds", type=Amount(), default=0.5, show_default=True, help="Smallest change in s.")
@click.option(
    "--run-variation",
    type=Amount(),
    default=0.15,
    show_default=True,
    metavar="SHARE",
    help="Standard deviation of whole runs that one pair is judged by; several runs show it themselves.",
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON (schema bootseer.diff/1).")
@click.option("--exit-zero", is_flag=True, help="Exit 0 even when B is slower.")
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

    A and B are logs, folders or job names as for `bootseer report`; JOB@ATTEMPT names an earlier attempt, JOB@0..9 all
    of these. --baseline may be given several times; behind it, all names but the last belong to it. Exit code 1 says
    that B got slower by more than runs differ, for use in CI: give it ten runs as baseline. One pair proves only large
    changes.

    \b
    bootseer diff moe@0 moe@1
    bootseer diff --baseline moe@0..9 moe@10
    bootseer diff --baseline last-week/*.log.gz today.log.gz --min-seconds 5
    """
    from bootseer.analysis.diff import Limits, compare
    from bootseer.launch.reading import read_runs

    places = [*baseline, *sides]
    if len(places) < 2 or (len(places) > 2 and not baseline):
        raise click.UsageError("give two startups, or several as --baseline and one more: --baseline moe@0..9 moe@10")
    a = [report for place in places[:-1] for report in read_runs(place, os.environ)]
    difference = compare(a, read_runs(places[-1], os.environ), Limits(min_share, min_seconds, run_variation))
    if as_json:
        print_json(difference.to_json())
    else:
        from bootseer.render.terminal_diff import render

        with terminal() as console:
            render(difference, console)
    return 1 if difference.slower and not exit_zero else 0

"""`bootseer diff`: what changed between two startups, and which stage moved."""

from __future__ import annotations

import os

import click

from bootseer.cli.amount import Amount


@click.command("diff", short_help="Compare two startups.")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--min-share", type=Amount(), default=0.10, show_default=True, help="Smallest share that counts.")
@click.option("--min-seconds", type=Amount(), default=0.5, show_default=True, help="Smallest change in s.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON (schema bootseer.diff/1).")
@click.option("--exit-zero", is_flag=True, help="Exit 0 even when B is slower.")
def command(a: str, b: str, min_share: float, min_seconds: float, as_json: bool, exit_zero: bool) -> int:
    """Compare startup B with startup A, stage by stage.

    A and B are logs, folders or job names as for `bootseer report`; JOB@ATTEMPT names an earlier attempt. Exit code 1
    says that B got slower beyond noise, for use in CI.

    \b
    bootseer diff moe@0 moe@1
    bootseer diff monday.log.gz tuesday.log.gz --min-seconds 5
    """
    from bootseer.analysis.diff import Limits, compare
    from bootseer.cli.printing import print_json, terminal
    from bootseer.launch.reading import read_one

    difference = compare(read_one(a, os.environ), read_one(b, os.environ), Limits(min_share, min_seconds))
    if as_json:
        print_json(difference.to_json())
    else:
        from bootseer.render.terminal_diff import render

        with terminal() as console:
            render(difference, console)
    return 1 if difference.slower and not exit_zero else 0

"""`bootseer env capture`: run a setup and keep a snapshot of what it did, before any job needs it."""

from __future__ import annotations

import os
from typing import Any

import click

from bootseer.cli.command import with_options
from bootseer.cli.env_find import STORE
from bootseer.cli.env_options import CAPTURE, KEY, SETUP
from bootseer.cli.signing_options import TRUST

SCHEMA = "bootseer.environment-capture/1"


@click.command("capture", short_help="Run a setup and keep a snapshot of what it did.")
@with_options(SETUP)
@with_options(KEY)
@with_options(CAPTURE)
@with_options(STORE)
@with_options(TRUST)
@click.option("--refresh", is_flag=True, help="Make it anew when there is one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema bootseer.environment-capture/1).")
def command(
    setup: str | None,
    requirements: tuple[str, ...],
    store: str | None,
    plain_http: bool,
    refresh: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Run a setup as `bootseer run` would, without a job, and keep its snapshot: the first job finds it.

    Nothing happens when there is one. The exit code is 1 when none can be kept, and the setup's when that failed.

    \b
    bootseer env capture --requirements requirements.txt --env-import torch --store /shared/bootseer
    """
    import sys
    from dataclasses import asdict

    from bootseer.cli.env_options import wanted
    from bootseer.cli.printing import print_json, terminal
    from bootseer.errors import UsageError
    from bootseer.launch.environment.plain import check_files
    from bootseer.launch.environment.snapshot import make_snapshot
    from bootseer.units import format_bytes, format_seconds

    if not setup and not requirements:
        raise UsageError("no setup", hint="give --setup SCRIPT or --requirements FILE")
    check_files(setup, requirements)
    source = {**values, "store": store, "plain_http": plain_http}
    asked = wanted({**values, "env_mode": "refresh" if refresh else "auto"}, source, os.environ)
    made = make_snapshot(setup, requirements, asked, os.environ)
    if as_json:
        print_json({"schema": SCHEMA, **asdict(made)})
    else:
        with terminal() as console:
            console.print(made.key or "no key", soft_wrap=True)
            if made.published:
                took = format_seconds(made.seconds)
                console.print(f"{made.num_files:,} files, {format_bytes(made.size_bytes)}, kept in {took}")
            else:
                console.print(made.why_not, soft_wrap=True)
    if made.code or not (made.published or made.was_there):
        sys.exit(made.code or 1)

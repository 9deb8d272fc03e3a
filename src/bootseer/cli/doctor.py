"""`bootseer doctor`: what works on this machine, what does not, and what to install.

Shows the results of `machine.probes`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from bootseer.artifact.places import cache_root, runtime_root
from bootseer.cli.output import Output
from bootseer.cli.verb_parts import json_option
from bootseer.machine.check import Check, usable
from bootseer.machine.probes import run_checks
from bootseer.trace.event import visible
from bootseer.trace.spools import default_root

SCHEMA = "bootseer.doctor/1"
_COLOUR = {"ok": "green", "limited": "yellow", "missing": "yellow", "broken": "red"}


@click.command(name="doctor")
@json_option(SCHEMA)
@click.option("--spool", type=click.Path(path_type=Path), help="Folder for event files to check.")
@click.option(
    "--bundle",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write checks, versions, settings, and states and logs of mounts to FILE (.tar.gz) for a bug report.",
)
def doctor_command(output: Output, spool: Path | None, bundle: Path | None) -> None:
    """Check what BootSeer can use on this machine, and what each part is needed for.

    Mounts and namespaces are tried for real, in a separate process that leaves nothing behind. The exit code is 1 if
    the kernel, Python or the spool folder prevents measuring, else 0.

    \b
    bootseer doctor
    bootseer doctor --bundle bug.tar.gz     # without secrets; check it before you send it
    """
    from bootseer.hdfs.addresses import configuration
    from bootseer.image.mounting import trial
    from bootseer.launch import doctor
    from bootseer.snapshotter import service

    cache = cache_root()
    more = [
        (trial.CHECK, lambda: trial.check(cache)),
        (doctor.ENVIRONMENTS, lambda: doctor.check_environments(cache)),
        (doctor.PEERS, doctor.check_peers),
        (doctor.NAMES, doctor.check_names),
        (doctor.STACKS, doctor.check_stacks),
        (doctor.PROCESSES, lambda: doctor.check_processes(os.environ)),
        (service.CHECK, lambda: service.check(runtime_root())),
    ]
    if configuration():
        more.append((doctor.HDFS_LOGIN, doctor.check_hdfs_login))
    checks = run_checks(spool or Path(default_root(os.environ)), more)
    good = usable(checks)
    rows = [{**asdict(check), "required": check.required} for check in checks]
    found: dict[str, Any] = {"ok": good, "checks": rows}
    if bundle is not None:
        found["bundle"] = doctor.write_bundle(bundle, {"schema": SCHEMA, **found}, os.environ)
    num_ok = sum(check.status == "ok" for check in checks)
    output(
        found,
        table_of(checks),
        "",
        f"BootSeer {'can' if good else 'cannot'} measure here; {num_ok} of {len(checks)} checks are ok.",
        *([f"{bundle}: {', '.join(found['bundle'])}"] if bundle is not None else []),
        failed=not good,
    )


def table_of(checks: Sequence[Check]) -> Table:
    """The checks as a table; one that is not `ok` says why, what to do and what it is needed for."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        table.add_row(Text(check.status, style=_COLOUR[check.status]), Text(check.name), _explained(check))
    return table


def _explained(check: Check) -> Text:
    text = Text(visible(check.found))  # it may quote names of folders, hosts and stores
    if check.status != "ok":
        lines = [
            check.why,
            check.install and f"to do: {check.install}",
            f"needed for: {', '.join(check.opens)}" if check.opens else "",
        ]
        for line in filter(None, lines):
            style = "dim" if line.startswith("needed for") else ""
            text.append(("\n" if text else "") + visible(line), style)
    return text

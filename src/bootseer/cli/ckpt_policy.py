"""`bootseer ckpt policy`: show or set how new files of a folder are striped."""

from __future__ import annotations

import click

from bootseer.cli.ckpt_stripes import STRIPES, changed
from bootseer.cli.command import with_options

SCHEMA = "bootseer.checkpoint-policy/1"


@click.command("policy", short_help="Show or set how new files of a folder are striped.")
@click.argument("folder", metavar="FOLDER")
@with_options(STRIPES)
@click.option("--inherit", is_flag=True, help="Take back what was set for this folder.")
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}).")
def command(folder: str, inherit: bool, as_json: bool, **stripes: object) -> None:
    """Show how files are striped that are written into FOLDER and the folders below it, or set it.

    Files that are there stay as they are.

    \b
    bootseer ckpt policy hdfs://namenode/jobs
    bootseer ckpt policy hdfs://namenode/jobs --stripes 8 --parity
    """
    from dataclasses import asdict

    from bootseer.cli.ckpt_place import files_at
    from bootseer.cli.printing import print_json, terminal
    from bootseer.errors import UsageError
    from bootseer.units import format_bytes

    with files_at(folder) as files:
        list(files.names(""))  # a file has no policy
        if inherit:
            if any(value is not None for value in stripes.values()):
                raise UsageError("--inherit takes back what other options set", hint="give one or the other")
            files.set_policy("", None)
        policy, said_by = files.policy_and_folder("")
        new = changed(policy, stripes)
        if new is not None:
            files.set_policy("", new)
            policy, said_by = files.policy_and_folder("")
    if as_json:
        print_json({"schema": SCHEMA, "folder": folder, "set_for": said_by, "policy": asdict(policy)})
        return
    source = f"set for {said_by}" if said_by else "by default"
    with terminal() as console:
        parity = " and parity" if policy.parity else ""
        copies = "the storage's own number of" if policy.replication is None else str(policy.replication)
        console.print(
            f"{policy.stripes} stripes{parity}, parts of up to {format_bytes(policy.part_bytes)}, {copies} copies, "
            f"{source}",
            soft_wrap=True,
        )

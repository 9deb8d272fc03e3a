"""`bootseer ckpt get`: copy a checkpoint to a local folder."""

from __future__ import annotations

import time
from contextlib import closing

import click

SCHEMA = "bootseer.checkpoint-got/1"


@click.command("get", short_help="Copy a checkpoint to a local folder.")
@click.argument("checkpoint", metavar="SRC")
@click.argument("target", metavar="[DST]", required=False, type=click.Path())
@click.option("--replace", is_flag=True, help="Take the place of what DST is.")
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}).")
def command(checkpoint: str, target: str | None, replace: bool, as_json: bool) -> None:
    """Copy the checkpoint or file SRC to DST, by default under its name in this folder. DST appears when it is whole.

    JOB/latest is the checkpoint that the job's `latest` names.

    \b
    bootseer ckpt get hdfs://namenode/jobs/moe/latest ./resume
    bootseer ckpt get hdfs://namenode/jobs/moe/step-1000/.metadata
    """
    from pathlib import Path

    from bootseer.checkpoint.download import get_checkpoint
    from bootseer.checkpoint.reading.reading import Reading
    from bootseer.cli.ckpt_place import files_at, number_of_files, resolved, split
    from bootseer.cli.printing import print_json, terminal
    from bootseer.cli.progress import Progress
    from bootseer.launch.interrupt import interruptible
    from bootseer.units import format_bytes, format_seconds

    folder, name = split(checkpoint)
    began_s = time.monotonic()
    with interruptible(), files_at(folder) as files, Progress("reading") as progress:
        name = resolved(files, name)
        local = Path(target or name)
        with closing(Reading(files.place)) as reading:
            got = get_checkpoint(files, reading, name, local, replace=replace, progress=progress.show_bytes)
        uri = f"{files.place.uri}/{name}"
    took_s = time.monotonic() - began_s
    if as_json:
        print_json(
            {
                "schema": SCHEMA,
                "checkpoint": uri,
                "target": str(local.absolute()),
                "size_bytes": got.size_bytes,
                "files": got.num_files,
                "seconds": round(took_s, 3),
            }
        )
        return
    amount = f"{number_of_files(got.num_files)}, {format_bytes(got.size_bytes)}"
    rate = f", {format_bytes(got.size_bytes / took_s)}/s" if took_s > 0 else ""
    with terminal() as console:
        console.print(
            f"{local}: {amount}, in {format_seconds(took_s)}{rate}",
            soft_wrap=True,
        )

"""`bootseer ckpt put`: copy a checkpoint into the storage, and publish it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from bootseer.cli.ckpt_stripes import STRIPES, changed
from bootseer.cli.command import with_options

if TYPE_CHECKING:
    from bootseer.checkpoint.layout import Policy

SCHEMA = "bootseer.checkpoint-put/1"
_PATIENCE_S = 2.0
_RESTS = "what was written is used by the same put again, and removed by later writers or by `bootseer ckpt remove`"


@click.command("put", short_help="Copy a checkpoint into the storage, and publish it.")
@click.argument("source", metavar="SRC", type=click.Path(exists=True))
@click.argument("job", metavar="JOB")
@click.option("--name", metavar="NAME", help="Of the checkpoint (default: that of SRC).")
@click.option("--replace", is_flag=True, help="Take the place of a checkpoint of this name.")
@click.option("--latest/--no-latest", default=True, help="Let `latest` name it unless that has a later one.")
@click.option(
    "--keep-last",
    metavar="N",
    type=click.IntRange(min=1),
    help="Then remove older checkpoints than the N newest, of names that differ in numbers alone; never the latest.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be written and removed, and do nothing.")
@click.option("--read-back", is_flag=True, help="Read all of it before it is published.")
@with_options(STRIPES)
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}).")
def command(
    source: str,
    job: str,
    name: str | None,
    replace: bool,
    latest: bool,
    keep_last: int | None,
    dry_run: bool,
    read_back: bool,
    as_json: bool,
    **stripes: object,
) -> None:
    """Copy the folder or file SRC into the folder JOB. It appears there when all of it is durable, and then `latest`
    names it.

    A put that was interrupted goes on where it stopped when it is repeated on the same machine.
    Its files are striped as the folder's policy says, or as said here.

    \b
    bootseer ckpt put ./step-1000 hdfs://namenode/jobs/moe
    bootseer ckpt put model.pt hdfs://namenode/jobs/moe --name step-1000.pt --stripes 8 --parity
    bootseer ckpt put ./step-1000 hdfs://namenode/jobs/moe --keep-last 3 --dry-run
    """
    from pathlib import Path

    from bootseer.checkpoint.places.place import TakenError
    from bootseer.checkpoint.publish import PutSettings, put_checkpoint
    from bootseer.cli.ckpt_place import files_at, number_of_files, tell_fallback
    from bootseer.cli.printing import print_json, terminal
    from bootseer.cli.progress import Progress
    from bootseer.errors import UsageError
    from bootseer.launch.interrupt import interruptible
    from bootseer.units import format_bytes, format_seconds

    local = Path(source).absolute()
    began_s = time.monotonic()
    with interruptible(_PATIENCE_S, _RESTS), files_at(job) as files, Progress("writing") as progress:
        policy: Policy | None = changed(files.policy(""), stripes)
        settings = PutSettings(
            replace=replace,
            policy=policy,
            move_latest=latest,
            read_back=read_back,
            keep_last=keep_last,
            dry_run=dry_run,
        )
        try:
            put = put_checkpoint(
                files.place, local, name or local.name, settings=settings, progress=progress.show_bytes
            )
        except TakenError as error:
            raise UsageError(str(error), hint="--name NAME or --replace", exit_code=1) from error
        uri, fallback = f"{files.place.uri}/{put.path}", tell_fallback(files.place.facts())
    took_s = time.monotonic() - began_s
    if as_json:
        print_json(
            {
                "schema": SCHEMA,
                "checkpoint": uri,
                "size_bytes": put.size_bytes,
                "kept_bytes": put.kept_bytes,
                "files": put.num_files,
                "striped_files": put.num_striped,
                "latest": put.latest,
                "removed": [{"name": name, "size_bytes": size_bytes} for name, size_bytes in put.removed],
                "dry_run": dry_run,
                "seconds": round(took_s, 3),
                "fallback": fallback,
            }
        )
        return
    kept = f" ({format_bytes(put.kept_bytes)} of an earlier, interrupted put)" if put.kept_bytes else ""
    with terminal() as console:
        console.print(
            f"{'would write ' if dry_run else ''}{uri}: {number_of_files(put.num_files)}, {put.num_striped} striped, "
            f"{format_bytes(put.size_bytes)}{kept}{'' if dry_run else f', in {format_seconds(took_s)}'}",
            soft_wrap=True,
        )
        for old, size_bytes in put.removed:
            console.print(
                f"{'would remove' if dry_run else 'removed'} {old}, {format_bytes(size_bytes)}", soft_wrap=True
            )
        if put.latest not in (None, put.path):
            console.print(f"latest stays at {put.latest}, which is later; `bootseer ckpt latest` sets it")

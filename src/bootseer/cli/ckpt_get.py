"""`bootseer ckpt get`: copy a checkpoint to a local folder."""

from __future__ import annotations

import os
import time
from contextlib import closing
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from bootseer.checkpoint.files import Files

_PIECE_BYTES = 32 << 20
SCHEMA = "bootseer.checkpoint-got/1"


@click.command("get", short_help="Copy a checkpoint to a local folder.")
@click.argument("checkpoint", metavar="SRC")
@click.argument("target", metavar="[DST]", required=False, type=click.Path())
@click.option(
    "--only",
    metavar="PATTERN",
    multiple=True,
    help="Only files whose path in SRC matches, or a folder of theirs; repeatable. * matches / too.",
)
@click.option("--replace", is_flag=True, help="Take the place of what DST is.")
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}).")
def command(checkpoint: str, target: str | None, only: tuple[str, ...], replace: bool, as_json: bool) -> None:
    """Copy the checkpoint or file SRC to DST, by default under its name in this folder. DST appears when it is whole.

    A get that was interrupted goes on where it stopped when it is repeated.
    JOB/latest is the checkpoint that the job's `latest` names. A file goes to standard output when DST is -.

    \b
    bootseer ckpt get hdfs://namenode/jobs/moe/latest ./resume
    bootseer ckpt get hdfs://namenode/jobs/moe/step-1000 --only 'rank-0*' --only '*.json'
    bootseer ckpt get hdfs://namenode/jobs/moe/step-1000/.metadata
    bootseer ckpt get hdfs://namenode/jobs/moe/step-1000/config.json - | jq .
    """
    from pathlib import Path

    from bootseer.checkpoint.download import get_checkpoint
    from bootseer.checkpoint.reading.reading import Reading
    from bootseer.cli.ckpt_place import files_at, number_of_files, resolved, split, tell_fallback
    from bootseer.cli.printing import print_json, terminal
    from bootseer.cli.progress import Progress
    from bootseer.errors import UsageError
    from bootseer.launch.interrupt import interruptible
    from bootseer.units import format_bytes, format_seconds

    folder, name = split(checkpoint)
    began_s = time.monotonic()
    with interruptible(), files_at(folder) as files, Progress("reading") as progress:
        name = resolved(files, name)
        if target == "-":
            if as_json or replace or only:
                raise UsageError(
                    "the file itself goes to standard output", hint="leave out --json, --replace and --only"
                )
            _print(files, name)
            tell_fallback(files.place.facts())
            return
        local = Path(target or name)
        with closing(Reading(files.place)) as reading:
            got = get_checkpoint(files, reading, name, local, only=only, replace=replace, progress=progress.show_bytes)
        uri, fallback = f"{files.place.uri}/{name}", tell_fallback(files.place.facts())
    took_s = time.monotonic() - began_s
    if as_json:
        print_json(
            {
                "schema": SCHEMA,
                "checkpoint": uri,
                "target": str(local.absolute()),
                "size_bytes": got.size_bytes,
                "kept_bytes": got.kept_bytes,
                "files": got.num_files,
                "seconds": round(took_s, 3),
                "fallback": fallback,
            }
        )
        return
    amount = f"{number_of_files(got.num_files)}, {format_bytes(got.size_bytes)}"
    if got.kept_bytes:
        amount += f" ({format_bytes(got.kept_bytes)} of an earlier, interrupted get)"
    rate = f", {format_bytes(got.size_bytes / took_s)}/s" if took_s > 0 else ""
    with terminal() as console:
        console.print(
            f"{local}: {amount}, in {format_seconds(took_s)}{rate}",
            soft_wrap=True,
        )


def _print(files: Files, name: str) -> None:
    """A file on standard output, in large reads: each comes from all nodes that have of it."""
    from bootseer.checkpoint.reading.reading import Reading
    from bootseer.errors import PermanentError, UsageError

    if files.stat(name).is_folder:
        raise UsageError(f"{files.place.uri}/{name} is a folder", hint="only a file goes to standard output")
    with closing(Reading(files.place)) as reading, reading.open(name) as file:
        buffer, offset = memoryview(bytearray(min(_PIECE_BYTES, file.size_bytes))), 0
        while length := file.readinto(offset, buffer):
            offset += length
            left = buffer[:length]
            while left:
                try:
                    left = left[os.write(1, left) :]
                except BrokenPipeError:
                    raise
                except OSError as error:
                    raise PermanentError(f"standard output: cannot be written: {error.strerror}") from error

"""`bootseer ckpt verify`: read a checkpoint and compare it with its digests."""

from __future__ import annotations

from dataclasses import asdict

import click

SCHEMA = "bootseer.checkpoint-verified/1"
_MAX_SHOWN = 20


@click.command("verify", short_help="Read a checkpoint and compare it with its digests.")
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}).")
def command(checkpoint: str, as_json: bool) -> None:
    """Read all of a checkpoint, or one file: striped files are compared with the digests of their chunks and with their
    parity, ordinary ones with the checksums of the storage. The exit code is 1 when anything is wrong.

    \b
    bootseer ckpt verify hdfs://namenode/jobs/moe/latest
    """
    from bootseer.checkpoint.verify import verify
    from bootseer.cli.ckpt_place import files_at, number_of_files, resolved, split
    from bootseer.cli.printing import print_json, terminal
    from bootseer.cli.progress import Progress
    from bootseer.launch.interrupt import interruptible
    from bootseer.units import format_bytes

    folder, name = split(checkpoint)
    with interruptible(), files_at(folder) as files, Progress("verifying") as progress:
        name = resolved(files, name)
        found = verify(files, name, progress=progress.show_bytes)
        uri = f"{files.place.uri}/{name}"
    if as_json:
        print_json(
            {
                "schema": SCHEMA,
                "checkpoint": uri,
                "files": found.num_files,
                "striped_files": found.num_striped,
                "size_bytes": found.size_bytes,
                "problems": [asdict(problem) for problem in found.problems],
            }
        )
    else:
        from rich.text import Text

        with terminal() as console:
            for problem in found.problems[:_MAX_SHOWN]:
                where = f"bytes {problem.offset:,} to {problem.offset + problem.length:,}"
                part = f", part {problem.part}" if problem.part else ""
                node = f" on {problem.node}" if problem.node else ""
                repair = "; the parity has them" if problem.repairable else ""
                console.print(Text(f"{problem.path}: {where}{part}{node}: {problem.what}{repair}"), soft_wrap=True)
            if len(found.problems) > _MAX_SHOWN:
                console.print(f"and {len(found.problems) - _MAX_SHOWN} more (--json has all)")
            count = len(found.problems)
            words = "all as it was written" if not count else f"{count} problem{'s' * (count != 1)}"
            console.print(
                Text(f"{uri}: {number_of_files(found.num_files)}, {format_bytes(found.size_bytes)}: {words}"),
                soft_wrap=True,
            )
    if found.problems:
        raise SystemExit(1)

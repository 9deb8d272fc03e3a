"""`bootseer ckpt verify`: read a checkpoint and compare it with its digests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from bootseer.checkpoint.verify import Problem

_PATIENCE_S = 2.0
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
    from bootseer.cli.ckpt_place import files_at, number_of_files, resolved, split, tell_fallback
    from bootseer.cli.printing import print_json, terminal
    from bootseer.cli.progress import Progress
    from bootseer.launch.interrupt import interruptible
    from bootseer.units import format_bytes

    folder, name = split(checkpoint)
    with (
        interruptible(_PATIENCE_S, "nothing was changed"),
        files_at(folder) as files,
        Progress("verifying") as progress,
    ):
        name = resolved(files, name)
        found = verify(files, name, progress=progress.show_bytes)
        uri, fallback = f"{files.place.uri}/{name}", tell_fallback(files.place.facts())
    if as_json:
        print_json(
            {
                "schema": SCHEMA,
                "checkpoint": uri,
                "files": found.num_files,
                "striped_files": found.num_striped,
                "size_bytes": found.size_bytes,
                "problems": [asdict(problem) for problem in found.problems],
                "fallback": fallback,
            }
        )
    else:
        from rich.text import Text

        from bootseer.render.clean import clean

        lines = _lines(found.problems)
        with terminal() as console:
            for line in lines[:_MAX_SHOWN]:
                console.print(Text(clean(line)), soft_wrap=True)
            if len(lines) > _MAX_SHOWN:
                console.print(f"and {len(lines) - _MAX_SHOWN} more (--json has all)")
            if found.problems and all(problem.repairable for problem in found.problems):
                console.print(
                    "nothing is lost: `bootseer ckpt get` reads it as it was; `ckpt put --replace` of that mends it",
                    soft_wrap=True,
                )
            count = len(found.problems)
            words = "all as it was written" if not count else f"{count} problem{'s' * (count != 1)}"
            console.print(
                Text(clean(f"{uri}: {number_of_files(found.num_files)}, {format_bytes(found.size_bytes)}: {words}")),
                soft_wrap=True,
            )
    if found.problems:
        raise SystemExit(1)


def _lines(problems: Sequence[Problem]) -> list[str]:
    """One line for all that is wrong with a part in the same way: a lost one is a problem of each of its chunks."""
    alike: dict[tuple[object, ...], list[Problem]] = {}
    for problem in problems:
        key = (problem.path, problem.part, problem.node, problem.what, problem.repairable)
        alike.setdefault(key, []).append(problem)
    lines = []
    for first, *more in alike.values():
        where = f"bytes {first.offset:,} to {first.offset + first.length:,}"
        part = f", part {first.part}" if first.part else ""
        node = f" on {first.node}" if first.node else ""
        places = f" (and {len(more)} more place{'s' * (len(more) != 1)} of it)" if more else ""
        repair = "; the parity has them" if first.repairable else ""
        lines.append(f"{first.path}: {where}{part}{node}: {first.what}{repair}{places}")
    return lines

"""The verbs of `bootseer ckpt` that copy and read checkpoints; `ckpt_jobs` has those about the checkpoints of a job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import click

from bootseer.checkpoint.download import get_checkpoint
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.publish import PutSettings, put_checkpoint
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.verify import Problem, verify
from bootseer.cli.ckpt_place import STRIPES, changed, files_at, resolved, split, tell_fallback, tell_left_out
from bootseer.cli.output import Output, Progress, print_bytes
from bootseer.cli.verb_parts import Count, json_option, with_options
from bootseer.errors import AlreadyExistsError, UsageError
from bootseer.launch.interrupt import interruptible
from bootseer.units import format_bytes, format_seconds, plural


@click.command("put")
@click.argument("source", metavar="SRC", type=click.Path(exists=True))
@click.argument("job", metavar="JOB")
@click.option("--name", metavar="NAME", help="Name of the checkpoint (default: that of SRC).")
@click.option("--replace", is_flag=True, help="Replace a checkpoint of the same name.")
@click.option("--latest/--no-latest", default=True, help="Point `latest` at it, unless that is later (default: yes).")
@click.option(
    "--keep-last",
    metavar="N",
    type=Count(min=1),
    help="Afterwards remove all but the N newest checkpoints whose names differ only in numbers; never the latest.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be written and removed.")
@with_options(STRIPES)
@json_option("bootseer.checkpoint-put/1")
def put_command(
    source: str,
    job: str,
    name: str | None,
    replace: bool,
    latest: bool,
    keep_last: int | None,
    dry_run: bool,
    output: Output,
    **stripes: object,
) -> None:
    """Copy the folder or file SRC into the folder JOB. It becomes visible once all of it is durable, and `latest` then
    points at it.

    Repeat an interrupted put on the same machine to resume it. Files are striped by the folder's policy unless options
    override it.

    \b
    bootseer ckpt put ./step-1000 hdfs://namenode/jobs/moe
    bootseer ckpt put model.pt hdfs://namenode/jobs/moe --name step-1000.pt --stripes 8 --parity
    bootseer ckpt put ./step-1000 hdfs://namenode/jobs/moe --keep-last 3 --dry-run
    """
    local = Path(source).absolute()
    began_s = time.monotonic()
    with interruptible(once=True), files_at(job) as files, Progress("writing") as progress:
        settings = PutSettings(
            replace=replace,
            policy=changed(files.policy(""), stripes),
            move_latest=latest,
            keep_last=keep_last,
            dry_run=dry_run,
        )
        try:
            put = put_checkpoint(
                files.place,
                local,
                local.name if name is None else name,
                settings=settings,
                progress=progress.show_bytes,
            )
        except AlreadyExistsError as error:
            raise UsageError(str(error), hint="give --name NAME or --replace", exit_code=1) from error
        uri, fallback = f"{files.place.uri}/{put.path}", tell_fallback(files.place.facts())
    took_s = time.monotonic() - began_s
    kept = f" ({format_bytes(put.kept_bytes)} of an earlier, interrupted put)" if put.kept_bytes else ""
    lines = [
        f"{'would write ' if dry_run else ''}{uri}: {plural(put.num_files, 'file')}, {put.num_striped} striped, "
        f"{format_bytes(put.size_bytes)}{kept}{'' if dry_run else f', in {format_seconds(took_s)}'}"
    ]
    for old, size_bytes in put.removed:
        lines.append(f"{'would remove' if dry_run else 'removed'} {old}, {format_bytes(size_bytes)}")
    if put.latest not in (None, put.path):
        lines.append(f"latest stays at {put.latest}, which is later; `bootseer ckpt latest` sets it")
    output(
        {
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
        },
        *lines,
    )


_PIECE_BYTES = 32 << 20


@click.command("get")
@click.argument("checkpoint", metavar="SRC")
@click.argument("target", metavar="[DST]", required=False, type=click.Path())
@click.option(
    "--only",
    metavar="PATTERN",
    multiple=True,
    help="Copy only files whose path in SRC, or a parent folder, matches; * also matches /. May be repeated.",
)
@click.option("--replace", is_flag=True, help="Replace DST if it exists.")
@json_option("bootseer.checkpoint-got/1")
def get_command(checkpoint: str, target: str | None, only: tuple[str, ...], replace: bool, output: Output) -> None:
    """Copy the checkpoint or file SRC to DST, by default under its own name in the current folder. DST appears once it
    is complete.

    Repeat an interrupted get to resume it. JOB/latest is the checkpoint that `latest` points at. If DST is -, a file is
    written to standard output.

    \b
    bootseer ckpt get hdfs://namenode/jobs/moe/latest ./resume
    bootseer ckpt get hdfs://namenode/jobs/moe/step-1000 --only 'rank-0*' --only '*.json'
    bootseer ckpt get hdfs://namenode/jobs/moe/step-1000/.metadata
    bootseer ckpt get hdfs://namenode/jobs/moe/step-1000/config.json - | jq .
    """
    if target == "":  # an unset variable of a script
        raise UsageError("DST is empty", hint="leave it out to copy to the current folder")
    folder, name = split(checkpoint)
    began_s = time.monotonic()
    with interruptible(once=True), files_at(folder) as files, Progress("reading") as progress:
        name = resolved(files, name)
        if target == "-":
            if output.as_json or replace or only:
                raise UsageError(
                    "the file is written to standard output", hint="leave out --json, --replace and --only"
                )
            _print_file(files, name)
            tell_fallback(files.place.facts())
            return
        local = Path(target or name)
        with closing(Reading(files.place)) as reading:
            got = get_checkpoint(files, reading, name, local, only=only, replace=replace, progress=progress.show_bytes)
        uri, fallback = f"{files.place.uri}/{name}", tell_fallback(files.place.facts())
        tell_left_out(files, name)
    took_s = time.monotonic() - began_s
    amount = f"{plural(got.num_files, 'file')}, {format_bytes(got.size_bytes)}"
    if got.kept_bytes:
        amount += f" ({format_bytes(got.kept_bytes)} of an earlier, interrupted get)"
    rate = f", {format_bytes(got.size_bytes / took_s)}/s" if took_s > 0 else ""
    output(
        {
            "checkpoint": uri,
            "target": str(local.absolute()),
            "size_bytes": got.size_bytes,
            "kept_bytes": got.kept_bytes,
            "files": got.num_files,
            "seconds": round(took_s, 3),
            "fallback": fallback,
        },
        f"{local}: {amount}, in {format_seconds(took_s)}{rate}",
    )


def _print_file(files: Files, name: str) -> None:
    """Write a file to standard output. Reads are large, so that each one uses all nodes that store parts of it."""
    if files.stat(name).is_folder:
        raise UsageError(f"{files.place.uri}/{name} is a folder", hint="only a file can be written to standard output")
    with closing(Reading(files.place)) as reading, reading.open(name) as file:
        buffer, offset = memoryview(bytearray(min(_PIECE_BYTES, file.size_bytes))), 0
        while length := file.readinto(offset, buffer):
            offset += length
            print_bytes(buffer[:length])


_MAX_SHOWN = 20


@click.command("verify")
@click.argument("checkpoint", metavar="CHECKPOINT")
@json_option("bootseer.checkpoint-verified/1")
def verify_command(checkpoint: str, output: Output) -> None:
    """Read a checkpoint or a file completely. Striped files are compared with the digests of their chunks and with
    their parity, ordinary ones with the checksums of the storage. The exit code is 1 if there is a problem.

    \b
    bootseer ckpt verify hdfs://namenode/jobs/moe/latest
    """
    folder, name = split(checkpoint)
    with interruptible(once=True), files_at(folder) as files, Progress("verifying") as progress:
        name = resolved(files, name)
        found = verify(files, name, progress=progress.show_bytes)
        uri, fallback = f"{files.place.uri}/{name}", tell_fallback(files.place.facts())
        tell_left_out(files, name)
    lines = _problem_lines(found.problems)
    shown = lines[:_MAX_SHOWN]
    if len(lines) > _MAX_SHOWN:
        shown.append(f"and {len(lines) - _MAX_SHOWN} more (--json shows all)")
    if found.problems and all(problem.repairable for problem in found.problems):
        shown.append("nothing is lost: repair it with `bootseer ckpt get`, then `bootseer ckpt put --replace`")
    words = plural(len(found.problems), "problem") if found.problems else "no problems"
    output(
        {
            "checkpoint": uri,
            "files": found.num_files,
            "striped_files": found.num_striped,
            "size_bytes": found.size_bytes,
            "problems": [asdict(problem) for problem in found.problems],
            "fallback": fallback,
        },
        *shown,
        f"{uri}: {plural(found.num_files, 'file')}, {format_bytes(found.size_bytes)}: {words}",
        failed=bool(found.problems),
    )


def _problem_lines(problems: Sequence[Problem]) -> list[str]:
    """One line for all equal problems of a part: a lost part is a problem of each of its chunks."""
    alike: dict[tuple[object, ...], list[Problem]] = {}
    for problem in problems:
        key = (problem.path, problem.part, problem.node, problem.what, problem.repairable)
        alike.setdefault(key, []).append(problem)
    lines = []
    for first, *more in alike.values():
        where = f": bytes {first.offset:,} to {first.offset + first.length:,}" if first.length else ""
        part = f", part {first.part}" if first.part else ""
        node = f" on {first.node}" if first.node else ""
        places = f" (and {plural(len(more), 'more place')} in it)" if more else ""
        repair = "; can be rebuilt from parity" if first.repairable else ""
        lines.append(f"{first.path}{where}{part}{node}: {first.what}{repair}{places}")
    return lines

"""`bootseer ckpt`: checkpoints in striped files, and ordinary ones.

The verbs that copy and read them; those about a job's checkpoints are in `ckpt_jobs`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bootseer.cli.ckpt_place import STRIPES, changed, files_at, resolved, split, tell_fallback
from bootseer.cli.command import Group, json_option, with_options
from bootseer.cli.output import Output, Progress
from bootseer.errors import PermanentError, UsageError
from bootseer.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from bootseer.checkpoint.files import Files
    from bootseer.checkpoint.layout import Policy
    from bootseer.checkpoint.verify import Problem


_VERBS = {
    "mount": ("ckpt_mount", "Mount a folder of checkpoints on a local folder."),
    "umount": ("ckpt_mount", "Undo a mount."),
    "mounted": ("ckpt_mount", "What is mounted, and whether it works."),
    "put": ("ckpt", "Copy a checkpoint into the storage, and publish it."),
    "get": ("ckpt", "Copy a checkpoint to a local folder."),
    "list": ("ckpt_jobs", "The checkpoints of a job."),
    "latest": ("ckpt_jobs", "Show or set the checkpoint to resume from."),
    "stat": ("ckpt_jobs", "What a file consists of, and on which nodes it lies."),
    "verify": ("ckpt", "Read a checkpoint and compare it with its digests."),
    "remove": ("ckpt_jobs", "Remove checkpoints."),
    "clean": ("ckpt_jobs", "Remove what killed writers have left."),
    "policy": ("ckpt_jobs", "Show or set how new files of a folder are striped."),
}


@click.command("ckpt", cls=Group, verbs=_VERBS)
def ckpt_command() -> None:
    """Checkpoints whose files are spread over the nodes of the storage, and ordinary ones.

    A place is hdfs://host:port/dir, s3://bucket/dir (gs, az), file:///dir or the path of a folder. A job is a folder
    with checkpoints in it.

    \b
    bootseer ckpt mount hdfs://namenode/jobs/moe /ckpt        for training code as it is
    bootseer ckpt put ./step-1000 hdfs://namenode/jobs/moe
    bootseer ckpt list s3://checkpoints/moe
    bootseer ckpt get hdfs://namenode/jobs/moe/latest ./resume
    """


_PATIENCE_S = 2.0
_PUT_RESTS = "what was written is used by the same put again, and removed by later writers or by `bootseer ckpt remove`"


@click.command("put")
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
@json_option("bootseer.checkpoint-put/1")
def put_command(
    source: str,
    job: str,
    name: str | None,
    replace: bool,
    latest: bool,
    keep_last: int | None,
    dry_run: bool,
    read_back: bool,
    output: Output,
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
    from bootseer.checkpoint.publish import PutSettings, put_checkpoint
    from bootseer.launch.interrupt import interruptible
    from bootseer.places.place import TakenError

    local = Path(source).absolute()
    began_s = time.monotonic()
    with interruptible(_PATIENCE_S, _PUT_RESTS), files_at(job) as files, Progress("writing") as progress:
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
_GET_RESTS = "what was copied lies in a hidden folder beside its name, which the next get there removes"


@click.command("get")
@click.argument("checkpoint", metavar="SRC")
@click.argument("target", metavar="[DST]", required=False, type=click.Path())
@click.option(
    "--only",
    metavar="PATTERN",
    multiple=True,
    help="Only files whose path in SRC matches, or a folder of theirs; repeatable. * matches / too.",
)
@click.option("--replace", is_flag=True, help="Take the place of what DST is.")
@json_option("bootseer.checkpoint-got/1")
def get_command(checkpoint: str, target: str | None, only: tuple[str, ...], replace: bool, output: Output) -> None:
    """Copy the checkpoint or file SRC to DST, by default under its name in this folder. DST appears when it is whole.

    A get that was interrupted goes on where it stopped when it is repeated.
    JOB/latest is the checkpoint that the job's `latest` names. A file goes to standard output when DST is -.

    \b
    bootseer ckpt get hdfs://namenode/jobs/moe/latest ./resume
    bootseer ckpt get hdfs://namenode/jobs/moe/step-1000 --only 'rank-0*' --only '*.json'
    bootseer ckpt get hdfs://namenode/jobs/moe/step-1000/.metadata
    bootseer ckpt get hdfs://namenode/jobs/moe/step-1000/config.json - | jq .
    """
    from bootseer.checkpoint.download import get_checkpoint
    from bootseer.checkpoint.reading.reading import Reading
    from bootseer.launch.interrupt import interruptible

    folder, name = split(checkpoint)
    began_s = time.monotonic()
    with interruptible(_PATIENCE_S, _GET_RESTS), files_at(folder) as files, Progress("reading") as progress:
        name = resolved(files, name)
        if target == "-":
            if output.as_json or replace or only:
                raise UsageError(
                    "the file itself goes to standard output", hint="leave out --json, --replace and --only"
                )
            _print_file(files, name)
            tell_fallback(files.place.facts())
            return
        local = Path(target or name)
        with closing(Reading(files.place)) as reading:
            got = get_checkpoint(files, reading, name, local, only=only, replace=replace, progress=progress.show_bytes)
        uri, fallback = f"{files.place.uri}/{name}", tell_fallback(files.place.facts())
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
    """A file on standard output, in large reads: each comes from all nodes that have of it."""
    from bootseer.checkpoint.reading.reading import Reading

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


_MAX_SHOWN = 20


@click.command("verify")
@click.argument("checkpoint", metavar="CHECKPOINT")
@json_option("bootseer.checkpoint-verified/1")
def verify_command(checkpoint: str, output: Output) -> None:
    """Read all of a checkpoint, or one file: striped files are compared with the digests of their chunks and with their
    parity, ordinary ones with the checksums of the storage. The exit code is 1 when anything is wrong.

    \b
    bootseer ckpt verify hdfs://namenode/jobs/moe/latest
    """
    from bootseer.checkpoint.verify import verify
    from bootseer.launch.interrupt import interruptible

    folder, name = split(checkpoint)
    with (
        interruptible(_PATIENCE_S, "nothing was changed"),
        files_at(folder) as files,
        Progress("verifying") as progress,
    ):
        name = resolved(files, name)
        found = verify(files, name, progress=progress.show_bytes)
        uri, fallback = f"{files.place.uri}/{name}", tell_fallback(files.place.facts())
    lines = _problem_lines(found.problems)
    shown = lines[:_MAX_SHOWN]
    if len(lines) > _MAX_SHOWN:
        shown.append(f"and {len(lines) - _MAX_SHOWN} more (--json has all)")
    if found.problems and all(problem.repairable for problem in found.problems):
        shown.append("nothing is lost: `bootseer ckpt get` reads it as it was; `ckpt put --replace` of that mends it")
    words = plural(len(found.problems), "problem") if found.problems else "all as it was written"
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
    )
    if found.problems:
        raise SystemExit(1)


def _problem_lines(problems: Sequence[Problem]) -> list[str]:
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

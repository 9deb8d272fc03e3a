"""`bootseer ckpt list`, `latest`, `stat`, `remove`, `clean` and `policy`: the checkpoints of a job."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import click

from bootseer.checkpoint.attempts import collect
from bootseer.checkpoint.catalog import anatomy, checkpoints, flaw, newest_whole, remove
from bootseer.checkpoint.latest import LATEST, read_latest, set_latest
from bootseer.cli.ckpt_place import STRIPES, changed, files_at, split
from bootseer.cli.env_options import parse_duration
from bootseer.cli.output import Output, styled, table
from bootseer.cli.verb_parts import json_option, with_options
from bootseer.errors import CorruptError, NotFoundError, UsageError
from bootseer.units import format_bytes, format_seconds, plural


@click.command("list")
@click.argument("job", metavar="JOB")
@json_option("bootseer.checkpoints/1")
def list_command(job: str, output: Output) -> None:
    """List the checkpoints in the folder JOB, newest last, including those not written by BootSeer.

    \b
    bootseer ckpt list hdfs://namenode/jobs/moe
    """
    with files_at(job) as files:
        refused: list[str] = []
        found = checkpoints(files, "", refused.append)
        problem = ""
        try:
            latest = read_latest(files.place, "")
        except CorruptError as error:
            latest, problem = None, str(error)
        uri = files.place.uri
        # A bucket has no folders that could be missing.
        is_empty = not found and not refused and not any(files.list(""))
    if latest is not None and latest not in refused and not any(one.is_latest for one in found):
        problem = f"latest names {latest}, which does not exist"
    now_s = time.time()
    rows = table("name", "step", "size", "files", "kind", "age", "", right=("step", "size", "files", "age"))
    for one in found:
        rows.add_row(
            one.name,
            "-" if one.step is None else str(one.step),
            format_bytes(one.size_bytes),
            f"{one.num_files:,}",
            _kind(one.num_striped, one.num_files),
            format_seconds(max(now_s - one.mtime_ns / 1e9, 0)),
            styled("latest", "bold") if one.is_latest else "",
        )
    output(
        {
            "job": uri,
            "latest": latest,
            "problem": problem,
            "checkpoints": [
                {
                    "name": one.name,
                    "step": one.step,
                    "size_bytes": one.size_bytes,
                    "files": one.num_files,
                    "striped_files": one.num_striped,
                    "changed_at": one.mtime_ns / 1e9,
                    "age_s": max(now_s - one.mtime_ns / 1e9, 0.0),
                    "latest": one.is_latest,
                }
                for one in found
            ],
            "refused": refused,
        },
        rows,
        *([styled(f"no permission to read {', '.join(refused)}", "yellow")] if refused else []),
        *([styled(problem, "red")] if problem else []),
        f"{plural(len(found), 'checkpoint')} in {uri}" + (", where nothing at all is stored" if is_empty else ""),
    )


def _kind(num_striped: int, num_files: int) -> str:
    if num_striped == 0:
        return "ordinary"
    # Small files of a striped checkpoint are ordinary.
    return "striped" if num_striped == num_files else f"{num_striped:,} striped"


@click.command("latest")
@click.argument("job", metavar="JOB")
@click.argument("name", metavar="[NAME]", required=False)
@json_option("bootseer.checkpoint-latest/1")
def latest_command(job: str, name: str | None, output: Output) -> None:
    """Print the name of the checkpoint that JOB should resume from, or set it to NAME.

    It is stored in the file `latest` in JOB, which training code may also read and write. The exit code is 1 if there
    is no such file, or if the checkpoint does not exist.

    \b
    bootseer ckpt latest hdfs://namenode/jobs/moe
    bootseer ckpt latest hdfs://namenode/jobs/moe step-900
    """
    with files_at(job) as files:
        uri = files.place.uri
        if name is not None:
            try:
                set_latest(files, "", name)
            except NotFoundError as error:
                raise UsageError(f"{uri} has no {name}", hint=f"bootseer ckpt list {job}", exit_code=1) from error
        found = read_latest(files.place, "")
        problem = f"{uri} has no latest" if found is None else ""
        if found is not None and (reason := flaw(files, found)):
            problem = f"{uri}: latest names {found}, which {reason}"
        other = newest_whole(files, "", without=found) if problem else None
    document = {"job": uri, "latest": found, "problem": problem, "newest_whole": other}
    output(document, *([] if problem else [found]))
    if problem:
        newest = f"; the newest complete checkpoint is {other}" if other else "; there is no complete checkpoint"
        hint = f"bootseer ckpt latest {job} {other}" if other else ""
        raise UsageError(problem + newest, hint=hint, exit_code=1)


@click.command("stat")
@click.argument("file", metavar="FILE")
@json_option("bootseer.checkpoint-file/1")
def stat_command(file: str, output: Output) -> None:
    """Show the segments and parts of a file and the nodes that store them, with the original nodes if they differ.

    The exit code is 1 if a part is missing.

    \b
    bootseer ckpt stat hdfs://namenode/jobs/moe/step-1000/model.safetensors
    """
    folder, name = split(file)
    with files_at(folder) as files:
        found = anatomy(files, name)
        uri = f"{files.place.uri}/{name}"
    problems = [part["problem"] for segment in found["segments"] for part in segment["parts"] if part["problem"]]
    output({"file": uri, **found}, *_stat_lines(uri, found), failed=bool(problems))


def _stat_lines(uri: str, found: dict[str, Any]) -> list[str]:
    kind = "striped" if found["striped"] else "ordinary"
    lines = [
        f"{uri}: {kind}, {format_bytes(found['size_bytes'])}, mode {found['mode']}"
        + (f", {found['owner']}:{found['group']}" if found["owner"] else "")
    ]
    for node, size_bytes in sorted(found["bytes_by_node"].items()):
        lines.append(f"  {node}  {format_bytes(size_bytes)}")
    for number, segment in enumerate(found["segments"]):
        lines.append(f"segment {number}: {format_bytes(segment['size_bytes'])} from byte {segment['start']:,} on")
        lines += [f"  {_part_words(part)}" for part in segment["parts"]]
    return lines


def _part_words(part: dict[str, Any]) -> str:
    words = f"{part['name']}  {part['kind']}  {format_bytes(part['size_bytes'])}"
    was = ", ".join(part["put_on"])
    if part["problem"]:
        return f"{words}  {part['problem']}; it was written to {was or 'a folder'}"
    moved = f"; it was written to {was}" if was and set(part["nodes"]) != set(part["put_on"]) else ""
    return f"{words}  {', '.join(part['nodes'])}{moved}".rstrip()


@click.command("remove")
@click.argument("names", metavar="CHECKPOINT...", nargs=-1, required=True)
@click.option(
    "--force",
    is_flag=True,
    help="Also remove the one that `latest` names (which then names the newest of the others), or a whole job.",
)
@json_option("bootseer.checkpoints-removed/1")
def remove_command(names: tuple[str, ...], force: bool, output: Output) -> None:
    """Remove checkpoints: each is hidden first and then deleted. Also deletes leftovers of dead writers next to them.

    \b
    bootseer ckpt remove hdfs://namenode/jobs/moe/step-900 hdfs://namenode/jobs/moe/step-800
    """
    removed: list[dict[str, object]] = []
    try:
        for uri in names:
            folder, name = split(uri)
            if name == LATEST:
                raise UsageError(f"{uri} is not a checkpoint", hint="name the checkpoint itself")
            with files_at(folder) as files:
                freed = remove(files, "", name, force=force)
            removed.append({"checkpoint": uri, "size_bytes": freed})
            if not output.as_json:
                output({}, f"{uri}: removed, {format_bytes(freed)}")
    finally:
        if output.as_json and removed:  # also when a later one could not be removed
            output({"removed": removed})


@click.command("clean")
@click.argument("job", metavar="JOB")
@click.option("--older-than", metavar="TIME", default="24h", show_default=True,
              help="Keep younger uploads, which may still be in progress; without a unit in hours.")  # fmt: skip
@json_option("bootseer.checkpoint-clean/1")
def clean_command(job: str, older_than: str, output: Output) -> None:
    """Remove leftovers of killed writers in the folder JOB and below it.

    In S3 this includes unfinished multipart uploads below JOB, which no listing shows but which are billed. Other
    leftovers are removed 10 minutes after their writer's last heartbeat, or after a day if it had none.

    \b
    bootseer ckpt clean s3://checkpoints/moe --older-than 2d
    """
    age_s = parse_duration(older_than, "--older-than", zero=True, unit="h")
    ended: list[str] = []
    with files_at(job) as files:
        leftovers, uri = collect(files.place, "", below=True), files.place.uri
    if uri.startswith("s3://"):
        from bootseer.places.uploads import Uploads  # needs the extra s3

        uploads = Uploads(uri)
        for upload in uploads.left(age_s):
            uploads.end(upload)
            ended.append(upload.key)
    removed = f"{plural(leftovers, 'leftover')} removed, {plural(len(ended), 'upload')} ended"
    output({"job": job, "leftovers": leftovers, "uploads": ended}, f"{job}: {removed}")


@click.command("policy")
@click.argument("folder", metavar="FOLDER")
@with_options(STRIPES)
@click.option("--inherit", is_flag=True, help="Remove this folder's own policy.")
@json_option("bootseer.checkpoint-policy/1")
def policy_command(folder: str, inherit: bool, output: Output, **stripes: object) -> None:
    """Show or set how new files in FOLDER and the folders below it are striped.

    Existing files are not changed.

    \b
    bootseer ckpt policy hdfs://namenode/jobs
    bootseer ckpt policy hdfs://namenode/jobs --stripes 8 --parity
    """
    with files_at(folder) as files:
        list(files.names(""))  # raises an error for a file, which has no policy
        if inherit:
            if any(value is not None for value in stripes.values()):
                raise UsageError("--inherit cannot be combined with other options", hint="give one or the other")
            files.set_policy("", None)
        if (new := changed(files.policy(""), stripes)) is not None:
            files.set_policy("", new)
        policy, set_for = files.policy_and_folder("")
    source = f"set for {set_for}" if set_for else "by default"
    parity = " and parity" if policy.parity else ""
    copies = "the storage's default replication" if policy.replication is None else f"replication {policy.replication}"
    output(
        {"folder": folder, "set_for": set_for, "policy": asdict(policy)},
        f"{plural(policy.stripes, 'stripe')}{parity}, parts of up to {format_bytes(policy.part_bytes)}, {copies}, "
        f"{source}",
    )

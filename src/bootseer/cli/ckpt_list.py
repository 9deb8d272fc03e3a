"""`bootseer ckpt list`: the checkpoints of a job."""

from __future__ import annotations

import time

import click

SCHEMA = "bootseer.checkpoints/1"


@click.command("list", short_help="The checkpoints of a job.")
@click.argument("job", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}).")
def command(job: str, as_json: bool) -> None:
    """List the checkpoints in the folder JOB, the newest last. It need not have been written by BootSeer.

    \b
    bootseer ckpt list hdfs://namenode/jobs/moe
    """
    from rich.table import Table
    from rich.text import Text

    from bootseer.checkpoint.catalog import checkpoints
    from bootseer.checkpoint.latest import read_latest
    from bootseer.cli.ckpt_place import files_at
    from bootseer.cli.printing import print_json, terminal
    from bootseer.errors import CorruptError
    from bootseer.render.clean import clean
    from bootseer.units import format_bytes, format_seconds

    with files_at(job) as files:
        refused: list[str] = []
        found = checkpoints(files, "", refused.append)
        problem = ""
        try:
            latest = read_latest(files.place, "")
        except CorruptError as error:
            latest, problem = None, str(error)
        uri = files.place.uri
    if latest is not None and latest not in refused and not any(one.is_latest for one in found):
        problem = f"latest names {latest}, which is not there"
    now_s = time.time()
    if as_json:
        rows = [
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
        ]
        print_json(
            {
                "schema": SCHEMA,
                "job": uri,
                "latest": latest,
                "problem": problem,
                "checkpoints": rows,
                "refused": refused,
            }
        )
        return
    with terminal() as console:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("name", "step", "size", "files", "kind", "age", ""):
            table.add_column(
                name, justify="right" if name in ("step", "size", "files", "age") else "left", overflow="fold"
            )
        for one in found:
            table.add_row(
                Text(clean(one.name)),
                "-" if one.step is None else str(one.step),
                format_bytes(one.size_bytes),
                f"{one.num_files:,}",
                _kind(one.num_striped, one.num_files),
                format_seconds(max(now_s - one.mtime_ns / 1e9, 0)),
                Text("latest", "bold") if one.is_latest else "",
            )
        if found:
            console.print(table)
        if refused:
            console.print(Text(f"you may not read {clean(', '.join(refused))}", "yellow"), soft_wrap=True)
        if problem:
            console.print(Text(problem, "red"), soft_wrap=True)
        console.print(Text(f"{len(found)} checkpoint{'s' * (len(found) != 1)} in {uri}"), soft_wrap=True)


def _kind(num_striped: int, num_files: int) -> str:
    if num_striped == 0:
        return "ordinary"
    # Small files of a striped checkpoint are ordinary; what matters is whether all are.
    return "striped" if num_striped == num_files else f"{num_striped:,} striped"

"""`bootseer ckpt latest`: show or set the checkpoint to resume from."""

from __future__ import annotations

import click

SCHEMA = "bootseer.checkpoint-latest/1"


@click.command("latest", short_help="Show or set the checkpoint to resume from.")
@click.argument("job", metavar="JOB")
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}).")
def command(job: str, name: str | None, as_json: bool) -> None:
    """Print the name of the checkpoint that JOB is to resume from, or let it be NAME.

    It stands in the file `latest` in JOB, which training code may read and write as well. The exit code is 1 when there
    is none, or when it names a checkpoint that is not there.

    \b
    bootseer ckpt latest hdfs://namenode/jobs/moe
    bootseer ckpt latest hdfs://namenode/jobs/moe step-900
    """
    from bootseer.checkpoint.catalog import missing_parts, newest_whole
    from bootseer.checkpoint.latest import read_latest, set_latest
    from bootseer.cli.ckpt_place import files_at
    from bootseer.cli.printing import print_json, terminal
    from bootseer.errors import NotFoundError, UsageError

    with files_at(job) as files:
        uri = files.place.uri
        if name is not None:
            try:
                set_latest(files, "", name)
            except NotFoundError as error:
                raise UsageError(f"{uri} has no {name}", hint=f"bootseer ckpt list {job}", exit_code=1) from error
        found = read_latest(files.place, "")
        problem = ""
        if found is None:
            problem = f"{uri} has no latest"
        else:
            try:
                if missing_parts(files, found):
                    problem = f"{uri}: latest names {found}, which has lost some of its parts"
            except NotFoundError:
                problem = f"{uri}: latest names {found}, which is not there"
        other = newest_whole(files, "", without=found) if problem else None
    if as_json:
        print_json({"schema": SCHEMA, "job": uri, "latest": found, "problem": problem, "newest_whole": other})
    elif not problem:
        with terminal() as console:
            console.print(found, soft_wrap=True)
    if problem:
        newest = f"; the newest whole checkpoint is {other}" if other else "; there is no whole checkpoint"
        hint = f"bootseer ckpt latest {job} {other}" if other else ""
        raise UsageError(problem + newest, hint=hint, exit_code=1)

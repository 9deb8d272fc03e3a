"""`bootseer restart`: start the command of a running job again in place, after a change of its code."""

from __future__ import annotations

import time

import click
from msgspec.structs import asdict

from bootseer.cli.output import Output, Progress
from bootseer.cli.verb_parts import Number, json_option
from bootseer.launch.restart_request import restart


@click.command("restart")
@click.argument("job", default="")
@click.option("--within", type=Number(0), default=60.0, show_default=True, metavar="S",
              help="How many seconds to wait for the command to start again.")  # fmt: skip
@json_option("bootseer.restart/1")
def restart_command(job: str, within: float, output: Output) -> None:
    """Start the command of JOB on this node again in place: a hot update, after a change of its code.

    The job runs under `bootseer run --restarts N` (`--restarts 0` allows only this). Image, environment, checkpoints
    and warm parent stay; the command gets SIGTERM, and SIGKILL after 30 s. JOB may be left out if just one job runs. On
    several nodes, call it on each.

    \b
    bootseer restart moe
    srun --overlap --jobid 4711 --ntasks-per-node 1 bootseer restart moe     # on all nodes of a Slurm job
    """
    began_s = time.monotonic()
    with Progress("waiting for the command to start again", line=not output.as_json) as progress:
        runs = restart(job, within, progress.wait)
    took_s = time.monotonic() - began_s
    lines = [
        f"{run.job}: started again in {took_s:.1f} s (run {run.pid}, process {run.command}, restart {run.restart})"
        for run in runs
    ]
    output({"took_s": took_s, "runs": [asdict(run) for run in runs]}, *lines)

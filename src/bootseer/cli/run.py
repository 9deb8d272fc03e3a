"""`bootseer run`: run a command and measure its startup."""

from __future__ import annotations

import os
import re

import click

from bootseer.cli.command import WithCommand, command_of


def _pattern(ctx: click.Context, param: click.Parameter, value: str | None) -> re.Pattern[bytes] | None:
    if value is None:
        return None
    try:
        return re.compile(value.encode("utf-8", "surrogateescape"))
    except re.error as error:
        raise click.BadParameter(f"not a regular expression: {error}") from error


def _sinks(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    for word in value:
        if word not in ("spool", "stderr") and word.partition("=")[0] != "otlp":
            raise click.BadParameter(f"{word!r} is none of: spool, stderr, otlp, otlp=URL")
    return value


@click.command("run", cls=WithCommand, short_help="Run a command and measure its startup.")
@click.option("--job", envvar="BOOTSEER_JOB", help="Name of the job; by default from the scheduler, then the script's.")
@click.option("--attempt", type=click.IntRange(0), envvar="BOOTSEER_ATTEMPT", help="Number of this start of the job.")
@click.option("--kind", type=click.Choice(["full", "hot_update", "restart"]), envvar="BOOTSEER_KIND")
@click.option("--node", envvar="BOOTSEER_NODE", help="Unique name of this machine within the job.")
@click.option("--num-nodes", type=click.IntRange(1), help="Nodes of the job, to notice those that stay silent.")
@click.option("--gpus", type=click.IntRange(0), help="GPUs of this node that the job uses.")
@click.option("--setup", metavar="SCRIPT", help="Run this first, as the stage environment_setup.")
@click.option("--requirements", "-r", metavar="FILE", multiple=True, help="Install these first with pip.")
@click.option("--spool", metavar="DIR", help="Where events are kept; a folder that nodes share is fine.")
@click.option(
    "--trace-to", "sinks", multiple=True, default=("spool",), callback=_sinks, metavar="SINK",
    help="spool (default), stderr (into the job's own log), otlp or otlp=URL; may be repeated.",
)  # fmt: skip
@click.option("--hook/--no-hook", default=True, help="Mark torch's stages in Python children (default: yes).")
@click.option(
    "--began-pattern", metavar="REGEX", callback=_pattern,
    help="A line of output that tells the end of the first step, for programs without torch.",
)  # fmt: skip
@click.option("--quiet", "-q", is_flag=True, help="Say nothing at the end.")
@click.pass_context
def command(
    ctx: click.Context,
    job: str | None,
    attempt: int | None,
    kind: str | None,
    node: str | None,
    num_nodes: int | None,
    gpus: int | None,
    setup: str | None,
    requirements: tuple[str, ...],
    spool: str | None,
    sinks: tuple[str, ...],
    hook: bool,
    began_pattern: re.Pattern[bytes] | None,
    quiet: bool,
) -> int:
    """Run COMMAND and measure its startup: arguments, exit code, signals and terminal stay as they are.

    \b
    bootseer run -- torchrun --nproc-per-node 8 train.py --config big.yaml
    bootseer run --job moe --requirements requirements.txt -- torchrun train.py
    bootseer run --began-pattern 'step 1 .*loss' -- ./train
    BOOTSEER_DISABLE=1 turns it into a plain exec of COMMAND.
    """
    from bootseer.launch.run import Options, run

    said = {
        "BOOTSEER_JOB": job,
        "BOOTSEER_ATTEMPT": attempt,
        "BOOTSEER_KIND": kind,
        "BOOTSEER_NODE": node,
        "BOOTSEER_NUM_NODES": num_nodes,
        "BOOTSEER_GPUS": gpus,
    }
    env = {**os.environ, **{name: str(value) for name, value in said.items() if value is not None}}
    options = Options(
        setup=setup,
        requirements=requirements,
        spool=spool,
        sinks=sinks,
        hook=hook,
        began_pattern=began_pattern,
        quiet=quiet,
    )
    return run(command_of(ctx), options, env)

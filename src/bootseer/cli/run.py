"""`bootseer run`: run a command and measure its startup."""

from __future__ import annotations

import click

from bootseer.cli.command import WithCommand, command_of, with_options
from bootseer.cli.run_options import OPTIONS, start


@click.command("run", cls=WithCommand, short_help="Run a command and measure its startup.")
@with_options(OPTIONS)
@click.pass_context
def command(ctx: click.Context, /, **values: object) -> int:
    """Run COMMAND and measure its startup: arguments, exit code, signals and terminal stay as they are.

    \b
    bootseer run -- torchrun --nproc-per-node 8 train.py --config big.yaml
    bootseer run --job moe --requirements requirements.txt -- torchrun train.py
    bootseer run --requirements uv.lock -- torchrun train.py
    bootseer run --began-pattern 'step 1 .*loss' -- ./train
    BOOTSEER_DISABLE=1 turns it into a plain exec of COMMAND.
    """
    return start(values, command_of(ctx))

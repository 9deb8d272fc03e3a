"""`bootseer run`, `stage` and `bench`: verbs that start a program.

The benchmarks are programs of the source checkout, as the tests are, and no part of the package. `make bench` calls
them too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from bootseer.cli.command import WithCommand, command_of, with_options
from bootseer.cli.run_options import OPTIONS, start
from bootseer.errors import UsageError


@click.command("run", cls=WithCommand)
@with_options(OPTIONS)
@click.pass_context
def run_command(ctx: click.Context, /, **values: object) -> int:
    """Run COMMAND and measure its startup: arguments, exit code, signals and terminal stay as they are.

    \b
    bootseer run -- torchrun --nproc-per-node 8 train.py --config big.yaml
    bootseer run --job moe --requirements requirements.txt -- torchrun train.py
    bootseer run --requirements uv.lock -- torchrun train.py
    bootseer run --began-pattern 'step 1 .*loss' -- ./train
    bootseer run --restarts 3 --restart-delay 10 -- torchrun train.py
    BOOTSEER_DISABLE=1 turns it into a plain exec of COMMAND.
    """
    return start(values, command_of(ctx))


def _attr(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, str | int]:
    found: dict[str, str | int] = {}
    for word in value:
        name, sign, text = word.partition("=")
        if not sign or not name:
            raise click.BadParameter(f"{word!r} is not NAME=VALUE")
        try:
            found[name] = int(text)
        except ValueError:
            found[name] = text
    return found


@click.command("stage", cls=WithCommand)
@click.argument("name")
@click.option("--attr", "-a", "attrs", multiple=True, callback=_attr, metavar="NAME=VALUE", help="A fact to record.")
@click.pass_context
def stage_command(ctx: click.Context, name: str, attrs: dict[str, str | int]) -> int:
    """Run COMMAND as the stage NAME of the startup around it; its exit code is passed on.

    Outside of `bootseer run` (or with tracing off) it is a plain exec of COMMAND.

    \b
    bootseer stage environment_setup.data -a shards=64 -- ./fetch-data.sh
    """
    from bootseer.launch.command import run_stage

    return run_stage(name, attrs, command_of(ctx), os.environ)


@click.command("bench")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--quick", is_flag=True, help="Fewer rounds and smaller input.")
@click.option(
    "--rounds", metavar="N", type=click.IntRange(1, 999), help="How often, where a round takes minutes: checkpoint."
)
def bench_command(names: tuple[str, ...], quick: bool, rounds: int | None) -> int:
    """Run the benchmarks NAME..., by default all, of the source checkout that BootSeer is installed from.

    The exit code is 1 when a claim was not reached. Results go to benchmarks/results of the checkout.

    \b
    bootseer bench --quick
    bootseer bench image
    """
    import bootseer
    from bootseer.launch.supervise import replace_process

    program = Path(bootseer.__file__).absolute().parents[2] / "benchmarks" / "run.py"
    if not program.is_file():
        raise UsageError(
            "the benchmarks are not installed, they come with the source",
            hint="in a checkout of it: make bench, or pip install --editable '.[dev]' and bootseer bench",
        )
    words = [*(["--quick"] if quick else []), *([] if rounds is None else ["--rounds", str(rounds)]), *names]
    return replace_process([sys.executable, str(program), *words], os.environ)

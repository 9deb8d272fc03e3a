"""`bootseer run`, `stage`, `restart` and `bench`: verbs that start a program.

Like the tests, the benchmarks are in the source checkout and not part of the package; `make bench` runs them too.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from bootseer.cli.output import Output, Progress
from bootseer.cli.run_options import OPTIONS, SECTIONS, start
from bootseer.cli.verb_parts import Count, Number, WithCommand, json_option, with_options
from bootseer.errors import UsageError


class _Run(WithCommand):
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = {param.name or "": param.get_help_record(ctx) or ("", "") for param in self.get_params(ctx)}
        sections = {title: [rows.pop(option.name) for option in options] for title, options in SECTIONS.items()}
        sections["Options"] += rows.values()  # --help
        for title, lines in sections.items():
            with formatter.section(title):
                formatter.write_dl(lines)


@click.command("run", cls=_Run)
@with_options(OPTIONS)
@click.pass_context
def run_command(ctx: click.Context, /, **values: object) -> int:
    """Run COMMAND and measure its startup. Arguments, exit code, signals and terminal are passed through unchanged.

    \b
    bootseer run -- torchrun --nproc-per-node 8 train.py --config big.yaml
    bootseer run --job moe --requirements requirements.txt -- torchrun train.py
    bootseer run --requirements uv.lock -- torchrun train.py
    bootseer run --began-pattern 'step 1 .*loss' -- ./train
    bootseer run --restarts 3 --restart-delay 10 -- torchrun train.py
    With BOOTSEER_DISABLE=1 nothing is measured; without setup, image and checkpoint it is a plain exec of COMMAND.
    """
    return start(values, ctx.meta["command"])


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
@click.option("--attr", "-a", "attrs", multiple=True, callback=_attr, metavar="NAME=VALUE",
              help="Attribute to record with the stage; may be repeated.")  # fmt: skip
@click.pass_context
def stage_command(ctx: click.Context, name: str, attrs: dict[str, str | int]) -> int:
    """Run COMMAND as the stage NAME of the surrounding startup, and pass on its exit code.

    Outside `bootseer run`, or with tracing off, it is a plain exec of COMMAND.

    \b
    bootseer stage environment_setup.data -a shards=64 -- ./fetch-data.sh
    """
    from bootseer.launch.command import run_stage

    return run_stage(name, attrs, ctx.meta["command"], os.environ)


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
    from msgspec.structs import asdict

    from bootseer.launch.restart_request import restart

    began_s = time.monotonic()
    with Progress("waiting for the command to start again", line=not output.as_json) as progress:
        runs = restart(job, within, progress.wait)
    took_s = time.monotonic() - began_s
    lines = [
        f"{run.job}: started again in {took_s:.1f} s (run {run.pid}, process {run.command}, restart {run.restart})"
        for run in runs
    ]
    output({"took_s": took_s, "runs": [asdict(run) for run in runs]}, *lines)


@click.command("bench")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--quick", is_flag=True, help="Fewer rounds and smaller inputs.")
@click.option(
    "--rounds", metavar="N", type=Count(1, 999), help="Rounds of those whose rounds take minutes (checkpoint, nodes)."
)
def bench_command(names: tuple[str, ...], quick: bool, rounds: int | None) -> int:
    """Run the benchmarks NAME... (default: all) of the source checkout that BootSeer is installed from.

    The exit code is 1 if a claimed figure was not reached. Results are written to benchmarks/results in the checkout.

    \b
    bootseer bench --quick
    bootseer bench image
    """
    import bootseer
    from bootseer.launch.supervise import replace_process

    program = Path(bootseer.__file__).absolute().parents[2] / "benchmarks" / "run.py"
    if not program.is_file():
        raise UsageError(
            "the benchmarks are not installed: they are part of the source checkout",
            hint="in a checkout: make bench, or pip install --editable '.[dev]' and bootseer bench",
        )
    words = [*(["--quick"] if quick else []), *([] if rounds is None else ["--rounds", str(rounds)]), *names]
    return replace_process([sys.executable, str(program), *words], os.environ)

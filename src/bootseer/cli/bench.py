"""`bootseer bench`: measure BootSeer's claims on this machine.

The benchmarks are programs of the source checkout, as the tests are, and no part of the package. `make bench` calls
them too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click


@click.command("bench", short_help="Measure the claims on this machine.")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--quick", is_flag=True, help="Fewer rounds and smaller input.")
@click.option(
    "--rounds", metavar="N", type=click.IntRange(1, 999), help="How often, where a round takes minutes: checkpoint."
)
def command(names: tuple[str, ...], quick: bool, rounds: int | None) -> int:
    """Run the benchmarks NAME..., by default all, of the source checkout that BootSeer is installed from.

    The exit code is 1 when a claim was not reached. Results go to benchmarks/results of the checkout.

    \b
    bootseer bench --quick
    bootseer bench image
    """
    import bootseer
    from bootseer.errors import UsageError
    from bootseer.launch.supervise import replace_process

    program = Path(bootseer.__file__).absolute().parents[2] / "benchmarks" / "run.py"
    if not program.is_file():
        raise UsageError(
            "the benchmarks are not installed, they come with the source",
            hint="in a checkout of it: make bench, or pip install --editable '.[dev]' and bootseer bench",
        )
    words = [*(["--quick"] if quick else []), *([] if rounds is None else ["--rounds", str(rounds)]), *names]
    return replace_process([sys.executable, str(program), *words], os.environ)

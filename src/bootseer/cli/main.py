"""The command line: a static table of verbs, each in a module that is imported only when it is called.

This is the only place that turns errors into exit codes: 0 success, 2 usage, 1 failure.
"""

from __future__ import annotations

import importlib
import os
import sys

import click

from bootseer import __version__
from bootseer.errors import BootseerError, UsageError

VERBS = {
    "run": "Run a command and measure its startup.",
    "stage": "Mark a stage from a shell script.",
    "report": "Show where a startup's time went.",
    "diff": "Compare two startups.",
    "doctor": "Say what works on this machine, and why not.",
}


class Verbs(click.Group):
    """Finds verbs by name without importing the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"bootseer.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.command(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "--version", prog_name="bootseer", message="%(prog)s %(version)s")
def cli() -> None:
    """Measure the startup of GPU training jobs, from submission to the first step.

    \b
    bootseer run -- torchrun --nproc-per-node 8 train.py
    bootseer report train
    """


def main() -> None:
    """Entry point of the `bootseer` program."""
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Exit as exit_:
        code = exit_.exit_code
    except click.Abort:
        sys.stderr.write("bootseer: interrupted\n")
        code = 130
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except BootseerError as error:
        sys.stderr.write(f"bootseer: {error}\n")
        if isinstance(error, UsageError) and error.hint:
            sys.stderr.write(f"hint: {error.hint}\n")
        code = error.exit_code
    except BrokenPipeError:  # `bootseer report | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 141
    sys.exit(code if isinstance(code, int) else 0)

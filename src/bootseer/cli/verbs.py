"""The verbs of the command line: a static table, each verb in a module that is imported only when it is called."""

from __future__ import annotations

import importlib

import click

from bootseer import __version__

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

"""A verb made of verbs: a static table of names, each in a module that is imported only when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import click


class Verb(NamedTuple):
    """One row of the table."""

    module: str
    """Below `bootseer.cli`."""
    help: str
    attribute: str = "command"


class Group(click.Group):
    """Finds its verbs by name without importing the others."""

    verbs: ClassVar[Mapping[str, Verb]] = {}
    heading = "Verbs"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = self.verbs.get(cmd_name)
        if verb is None:
            return None
        module = importlib.import_module(f"bootseer.cli.{verb.module}")
        command: click.Command = getattr(module, verb.attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section(self.heading):
            formatter.write_dl([(name, verb.help) for name, verb in self.verbs.items()])

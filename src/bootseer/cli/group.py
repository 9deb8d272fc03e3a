"""A verb made of verbs: a static table of names, each in a module that is imported only when it is called."""

from __future__ import annotations

import difflib
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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.verbs and not name.startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"no verb {name!r}{self._meant(ctx, name)}")
        return super().resolve_command(ctx, args)

    def _meant(self, ctx: click.Context, name: str) -> str:
        """The verbs that look like this one, or have it as theirs, as a question."""
        near = [f"{ctx.command_path} {verb}" for verb in difflib.get_close_matches(name, self.verbs)]
        for verb in self.verbs:
            group = self.get_command(ctx, verb)
            if isinstance(group, Group) and name in group.verbs:
                near.append(f"{ctx.command_path} {verb} {name}")
        return f": did you mean `{'` or `'.join(near)}`?" if near else ""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section(self.heading):
            formatter.write_dl([(name, verb.help) for name, verb in self.verbs.items()])

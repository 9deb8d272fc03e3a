"""What all verbs with a command share: a command line behind `--` that is passed on untouched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from bootseer.cli.options import COUNT, FLAG, Option


class MayHaveCommand(click.Command):
    """Everything behind the first `--` is the user's command; nothing of it is read as an option of ours."""

    command_usage = "[-- COMMAND...]"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            ctx.meta["command"] = tuple(args[place + 1 :])
            args = args[:place]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), self.command_usage]


class WithCommand(MayHaveCommand):
    """The same, where there must be one."""

    command_usage = "-- COMMAND..."

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and not {"--", "-h", "--help"}.intersection(args):  # that is completion
            raise _no_command(ctx)
        return super().parse_args(ctx, args)


def with_options(options: Sequence[Option]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of a table as click's."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            if option.kind == FLAG:
                flags = ["/".join(option.flags)] if option.flags[-1].startswith("--no-") else list(option.flags)
                decorator = click.option(*flags, option.name, is_flag=True, default=option.default, help=option.help)
            else:
                decorator = click.option(
                    *option.flags,
                    option.name,
                    type=_type(option),
                    metavar=option.metavar,
                    multiple=option.many,
                    default=option.default,
                    help=option.help,
                )
            function = decorator(function)
        return function

    return decorate


def _type(option: Option) -> click.ParamType[Any] | None:
    if option.kind == COUNT:
        return click.IntRange(option.least, option.most)
    return click.Choice(option.choices) if option.choices else None


def command_of(ctx: click.Context) -> tuple[str, ...]:
    """The command behind `--`; a usage error when there is none."""
    command: tuple[str, ...] = ctx.meta.get("command", ())
    if not command:
        raise _no_command(ctx)
    return command


def _no_command(ctx: click.Context) -> click.UsageError:
    return click.UsageError(f"no command: put it behind --, as in `{ctx.command_path} ... -- python train.py`", ctx=ctx)

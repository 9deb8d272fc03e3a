"""What `run` and `stage` share: a command line behind `--` that is passed on untouched."""

from __future__ import annotations

import click


class WithCommand(click.Command):
    """Everything behind the first `--` is the user's command; nothing of it is read as an option of ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            ctx.meta["command"] = tuple(args[place + 1 :])
            args = args[:place]
        elif not {"-h", "--help"}.intersection(args):
            raise _no_command(ctx)
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "-- COMMAND..."]


def command_of(ctx: click.Context) -> tuple[str, ...]:
    """The command behind `--`; a usage error when there is none."""
    command: tuple[str, ...] = ctx.meta.get("command", ())
    if not command:
        raise _no_command(ctx)
    return command


def _no_command(ctx: click.Context) -> click.UsageError:
    return click.UsageError(f"no command: put it behind --, as in `{ctx.command_path} ... -- python train.py`", ctx=ctx)

"""`bootseer stage`: mark a stage of a startup from a shell script."""

from __future__ import annotations

import os

import click

from bootseer.cli.command import WithCommand, command_of


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


@click.command("stage", cls=WithCommand, short_help="Mark a stage from a shell script.")
@click.argument("name")
@click.option("--attr", "-a", "attrs", multiple=True, callback=_attr, metavar="NAME=VALUE", help="A fact to record.")
@click.pass_context
def command(ctx: click.Context, name: str, attrs: dict[str, str | int]) -> int:
    """Run COMMAND as the stage NAME of the startup around it; its exit code is passed on.

    Outside of `bootseer run` (or with tracing off) it is a plain exec of COMMAND.

    \b
    bootseer stage environment_setup.data -a shards=64 -- ./fetch-data.sh
    """
    from bootseer.launch.command import run_stage

    return run_stage(name, attrs, command_of(ctx), os.environ)

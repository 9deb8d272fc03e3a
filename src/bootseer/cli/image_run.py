"""`bootseer image run`: run a command in an image, without measuring a startup around it."""

from __future__ import annotations

import os
from typing import Any

import click

from bootseer.cli.command import MayHaveCommand, with_options
from bootseer.cli.image_options import CONTAINER, SOURCE


@click.command("run", cls=MayHaveCommand, short_help="Run a command in an image.")
@click.argument("reference", metavar="REF")
@with_options(SOURCE)
@with_options(CONTAINER)
@click.option("--gpus", metavar="GPUS", help="all (default where a CDI file tells of them), numbers, or none.")
@click.pass_context
def command(ctx: click.Context, /, reference: str, gpus: str | None, **values: Any) -> int:
    """Run COMMAND (default: the image's own) in a container of the image REF: exit code, signals and terminal pass.

    `bootseer run --image REF -- COMMAND` does the same and measures it.

    \b
    bootseer image run registry:5000/team/train:7 -- python -c 'import torch'
    bootseer image run --gpus all --mount /data:/data:ro registry:5000/team/train:7
    """
    from bootseer.cli.image_options import wanted
    from bootseer.cli.progress import shown
    from bootseer.launch.command import Options
    from bootseer.launch.run import run

    options = Options(image=wanted(reference, values, gpus), quiet=True, show=shown)
    return run(ctx.meta.get("command", ()), options, {**os.environ, "BOOTSEER_DISABLE": "1"})

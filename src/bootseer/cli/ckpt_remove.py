"""`bootseer ckpt remove`: remove checkpoints."""

from __future__ import annotations

import click

SCHEMA = "bootseer.checkpoints-removed/1"


@click.command("remove", short_help="Remove checkpoints.")
@click.argument("names", metavar="CHECKPOINT...", nargs=-1, required=True)
@click.option(
    "--force",
    is_flag=True,
    help="Also the one that `latest` names, which names the newest of the others then, and a whole job.",
)
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}).")
def command(names: tuple[str, ...], force: bool, as_json: bool) -> None:
    """Remove checkpoints: each is hidden at once and deleted then. What dead writers have left beside them goes too.

    \b
    bootseer ckpt remove hdfs://namenode/jobs/moe/step-900 hdfs://namenode/jobs/moe/step-800
    """
    from bootseer.checkpoint.catalog import remove
    from bootseer.checkpoint.latest import LATEST
    from bootseer.cli.ckpt_place import files_at, split
    from bootseer.cli.printing import print_json, terminal
    from bootseer.errors import UsageError
    from bootseer.units import format_bytes

    removed: list[dict[str, object]] = []
    for uri in names:
        folder, name = split(uri)
        if name == LATEST:
            raise UsageError(f"{uri} is not a checkpoint", hint="name the checkpoint itself")
        with files_at(folder) as files:
            freed = remove(files, "", name, force=force)
        removed.append({"checkpoint": uri, "size_bytes": freed})
        if not as_json:
            with terminal() as console:
                console.print(f"{uri}: removed, {format_bytes(freed)}", soft_wrap=True)
    if as_json:
        print_json({"schema": SCHEMA, "removed": removed})

"""`bootseer env restore`: a snapshot's files on a folder, or a command that finds them where the setup put them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from bootseer.cli.command import MayHaveCommand, with_options
from bootseer.cli.env_find import STORE
from bootseer.cli.signing_options import TRUST

SCHEMA = "bootseer.environment-restored/1"


@click.command("restore", cls=MayHaveCommand, short_help="Show a snapshot on a folder, or run a command on it.")
@click.argument("key", metavar="KEY")
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@with_options(STORE)
@with_options(TRUST)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema bootseer.environment-restored/1).")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    key: str,
    folder: Path | None,
    store: str | None,
    plain_http: bool,
    as_json: bool,
    **trust: Any,
) -> int:
    """Write the files of the snapshot KEY below the new folder DIR, or run COMMAND with them in their places.

    What lies below DIR is a copy to look at: paths are those of the setup, deletions are left out.

    \b
    bootseer env restore 3fa9 /tmp/look
    bootseer env restore 3fa9 -- python -c 'import torch'
    """
    from bootseer.cli.env_find import cache, catalog_of, document_of
    from bootseer.cli.printing import print_json, terminal
    from bootseer.errors import UsageError
    from bootseer.launch.environment.snapshot import SavedSnapshot

    words: tuple[str, ...] = ctx.meta.get("command", ())
    if (folder is None) == (not words):
        raise UsageError("what shall be done with it?", hint="name a folder, or a command behind --")
    with catalog_of(store, plain_http, trust) as catalog:
        document = document_of(catalog, key)
        snapshot = SavedSnapshot(
            document, catalog.store.uri, cache(), os.environ, plain_http=plain_http, signatures=catalog.signatures
        )
    if folder is None:
        return snapshot.run(words)
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder}: not empty", hint="name a new folder")
    num_files = snapshot.copy_to(folder)
    if as_json:
        print_json({"schema": SCHEMA, "key": document.key, "target": str(folder.absolute()), "num_files": num_files})
    else:
        with terminal() as console:
            console.print(f"{folder}: {num_files:,} files of {document.key[:12]}", soft_wrap=True)
    return 0

"""`bootseer env verify`: is a snapshot what its manifest says, and what a fresh installation would give?"""

from __future__ import annotations

import os
from typing import Any, Literal

import click

from bootseer.cli.command import with_options
from bootseer.cli.env_find import STORE
from bootseer.cli.env_options import SETUP
from bootseer.cli.signing_options import TRUST

SCHEMA = "bootseer.environment-verified/1"
_MAX_SHOWN = 20


@click.command("verify", short_help="Compare a snapshot with its digests, or with a fresh installation.")
@click.argument("key", metavar="KEY")
@with_options(STORE)
@with_options(TRUST)
@with_options(SETUP)
@click.option(
    "--tier",
    type=click.Choice(("quick", "full", "oracle")),
    default="full",
    show_default=True,
    help="How much is compared, see above.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema bootseer.environment-verified/1).")
def command(
    key: str,
    store: str | None,
    plain_http: bool,
    setup: str | None,
    requirements: tuple[str, ...],
    tier: Literal["quick", "full", "oracle"],
    as_json: bool,
    **trust: Any,
) -> None:
    """Verify the snapshot whose key begins with KEY. The exit code is 1 when something differs.

    \b
    --tier quick    kinds, sizes, modes, owners and links of all paths, against the snapshot's manifest
    --tier full     also the digest of each file
    --tier oracle   runs the setup once more, for real, with the versions that the snapshot has, in a capture that
                    leaves this machine as it is, and compares file by file what a job could tell apart

    The oracle takes as long as the setup. It needs the setup as it was given to `bootseer run`, in the same folder, and
    root or a user namespace. What two installations of the same packages may differ in is left out: times, bytecode,
    names of the installer.

    \b
    bootseer env verify 3fa9
    bootseer env verify 3fa9 --tier quick --json
    bootseer env verify 3fa9 --tier oracle --requirements requirements.txt
    bootseer env verify 3fa9 --tier oracle --setup prepare.sh
    """
    from bootseer.cli.env_find import cache, catalog_of, document_of
    from bootseer.cli.printing import print_json, terminal
    from bootseer.cli.progress import Progress
    from bootseer.errors import UsageError
    from bootseer.launch.environment.snapshot import SavedSnapshot

    if tier == "oracle" and not setup and not requirements:
        raise UsageError("the oracle has no setup to run", hint="give --setup SCRIPT or --requirements FILE")
    with catalog_of(store, plain_http, trust) as catalog:
        document = document_of(catalog, key)
        snapshot = SavedSnapshot(document, catalog.store.uri, cache(), os.environ, plain_http=plain_http)
    with Progress("verifying") as progress:
        if tier == "oracle":
            found = snapshot.compare_with_fresh(setup, requirements)
        else:
            found = snapshot.check(tier, lambda done, of: progress.show(done, of, "paths"))
    if as_json:
        print_json({"schema": SCHEMA, "key": document.key, "tier": tier, **found.as_json()})
    else:
        with terminal() as console:
            for path, words in found.differences[:_MAX_SHOWN]:
                console.print(f"{path}: {words}", soft_wrap=True)
            left = len(found.differences) - _MAX_SHOWN
            if left > 0:
                console.print(f"and {left} more (--json has all)")
            console.print(f"{document.key[:12]}: {found.num_paths:,} paths compared, {len(found.differences)} differ")
    if found.differences:
        raise SystemExit(1)

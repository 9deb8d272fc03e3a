"""`bootseer env remove` and `prune`: let no start use a snapshot any more, and delete what none needs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from bootseer.cli.command import with_options
from bootseer.cli.env_find import STORE

if TYPE_CHECKING:
    from bootseer.env.document import EnvironmentDocument
    from bootseer.mounts.state import Runtime
    from bootseer.store.store import Store

SCHEMA = "bootseer.environments-removed/1"
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON (schema bootseer.environments-removed/1).")


@click.command("remove", short_help="Let no start use a snapshot any more.")
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@with_options(STORE)
@click.option("--package", metavar="NAME[==V]", help="All snapshots that have this package.")
@click.option("--older-than", metavar="TIME", help="All snapshots older than this, as 30d.")
@click.option("--dry-run", "-n", is_flag=True, help="Only say which.")
@_JSON
def remove(
    keys: tuple[str, ...],
    store: str | None,
    plain_http: bool,
    package: str | None,
    older_than: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove snapshots: later starts run the setup again. What is mounted stays until it is not needed.

    The files in the store go a day later, by `bootseer env prune`.

    \b
    bootseer env remove 3fa9
    bootseer env remove --package requests==2.31.0
    """
    from bootseer.cli.env_find import catalog_of, full_key
    from bootseer.cli.printing import print_json, terminal
    from bootseer.errors import UsageError

    if not keys and package is None and older_than is None:
        raise UsageError("nothing to remove", hint="give a KEY, --package NAME or --older-than 30d")
    now_s = time.time()
    with catalog_of(store, plain_http) as catalog:
        found = [full_key(catalog, key) for key in keys]
        if package is not None or older_than is not None:
            found += [document.key for document in _chosen(catalog.all().documents, package, older_than, now_s)]
        found = list(dict.fromkeys(found))
        gone = found if dry_run else [key for key in found if catalog.remove(key, now_s) is not None]
    if as_json:
        print_json({"schema": SCHEMA, "dry_run": dry_run, "removed": gone})
        return
    with terminal() as console:
        for key in gone:
            console.print(key[:12])
        console.print(f"{len(gone)} environments {'would be removed' if dry_run else 'removed'}")


def _chosen(
    documents: Iterable[EnvironmentDocument], package: str | None, older_than: str | None, now_s: float
) -> Iterator[EnvironmentDocument]:
    from bootseer.cli.env_options import parse_duration

    age_s = None if older_than is None else parse_duration(older_than, "--older-than")
    for document in documents:
        if age_s is not None and now_s - document.built_s <= age_s:
            continue
        if package is None or any(_is(package, installed) for installed in document.packages):
            yield document


def _is(wanted: str, installed: str) -> bool:
    """Whether `name==version` of a snapshot is the wanted package, of any version if none is said."""
    name, _, version = wanted.partition("==")
    its_name, _, its_version = installed.partition("==")
    return _plain(name) == _plain(its_name) and (not version or version == its_version)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip().lower())


@click.command("prune", short_help="Delete what no snapshot needs.")
@with_options(STORE)
@click.option("--grace", metavar="TIME", default="1d", show_default=True, help="Only what was removed so long ago.")
@_JSON
def prune(store: str | None, plain_http: bool, grace: str, as_json: bool) -> None:
    """Delete the files of snapshots that were removed or are too old. What this node has mounted stays.

    Other nodes' mounts are not known here: the grace is longer than they take to fetch a snapshot.

    \b
    bootseer env prune --store hdfs://namenode/bootseer
    """
    from bootseer.artifact.places import runtime_root
    from bootseer.cli.env_find import catalog_of
    from bootseer.cli.env_options import parse_duration
    from bootseer.cli.printing import print_json, terminal
    from bootseer.env.life import prune as life
    from bootseer.mounts.state import Runtime
    from bootseer.units import format_bytes

    runtime = Runtime(runtime_root(os.environ, os.getuid()))
    with catalog_of(store, plain_http) as catalog:
        done = life.prune(
            catalog,
            time.time(),
            grace_s=parse_duration(grace, "--grace"),
            in_use=_mounted(runtime),
            also_used=lambda: _of_images(catalog.store),
        )
    if as_json:
        print_json(
            {"schema": SCHEMA, "removed": done.expired, "objects": done.num_objects, "freed_bytes": done.freed_bytes,
             "waiting": done.num_waiting, "in_use": done.num_in_use, "problems": done.problems}
        )  # fmt: skip
    else:
        with terminal() as console:
            for problem in done.problems:
                console.print(problem, style="red", soft_wrap=True)
            console.print(
                f"freed {format_bytes(done.freed_bytes)} in {done.num_objects} files; {len(done.expired)} environments "
                f"were too old, {done.num_waiting} wait for their grace, {done.num_in_use} are in use"
            )
    if done.problems:
        raise SystemExit(1)


def _mounted(runtime: Runtime) -> set[str]:
    from bootseer.mounts.kept import kept

    return {layer for state in runtime.all() for layer in state.layers} | set(kept(runtime))


def _of_images(store: Store) -> Iterator[str]:
    """Content names that converted images in the same store need."""
    from bootseer.errors import NotFoundError
    from bootseer.image.mounting.metadata import read_document

    for stored in list(store.list("images/")):
        kind, _, digest = stored.name.removeprefix("images/").partition("-")
        try:
            yield from (needed.name for needed in read_document(store, f"{kind}:{digest}").objects)
        except NotFoundError:
            continue  # deleted meanwhile

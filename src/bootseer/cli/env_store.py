"""`bootseer env list`, `show`, `remove` and `prune`: the snapshots of a store; and the lookup for all verbs of `env`.

A key may be abbreviated to its first digits if they are unique.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import asdict

from bootseer.artifact.places import STORE as VARIABLE
from bootseer.artifact.places import cache_root, runtime_root
from bootseer.artifact.prune import Pruned
from bootseer.artifact.signatures import UNSIGNED
from bootseer.cli.env_options import parse_duration
from bootseer.cli.image_options import PLAIN_HTTP, signatures
from bootseer.cli.options import Option
from bootseer.cli.output import Output, styled, table
from bootseer.cli.verb_parts import json_option, with_options
from bootseer.env.document import EnvironmentDocument, is_key
from bootseer.env.keys.requirement import normalised
from bootseer.env.life.catalog import Catalog, prune
from bootseer.errors import NotFoundError, UsageError
from bootseer.image.catalog import images_in
from bootseer.launch.environment.task import own_store
from bootseer.launch.supervise import say
from bootseer.mounts.shared_layers import mounted_layers
from bootseer.mounts.state import Runtime
from bootseer.store.open import open_store
from bootseer.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from rich.text import Text

    from bootseer.store.store import Store


STORE = (
    Option("--store", "Store of the snapshots (default: $BOOTSEER_STORE, else this node's cache).", metavar="URI"),
    PLAIN_HTTP,
)
_LEAST_DIGITS = 4


def check_folder(named: str | None, store: Store) -> None:
    """Raise `UsageError` if a store is a folder that was named and does not exist: it is no empty store."""
    if named and store.uri.startswith("file://") and not Path(store.uri.removeprefix("file://")).is_dir():
        raise UsageError(f"{named}: no such folder", hint="name the folder of a store")


@contextmanager
def catalog_of(source: Mapping[str, Any]) -> Iterator[Catalog]:
    """The snapshots of a store. `source`: the values of `STORE`, and of `TRUST` for verbs that use the content of a
    snapshot."""
    uri = source["store"] or os.environ.get(VARIABLE)
    with closing(open_store(uri or own_store(cache_root()), plain_http=source["plain_http"])) as store:
        check_folder(source["store"], store)
        # The node's own store contains only what this node made, so it needs no signatures.
        yield Catalog(store, say, signatures(source) if uri and "trusted_keys" in source else UNSIGNED)


def full_key(catalog: Catalog, digits: str) -> str:
    """The key that begins with these digits. Raises `UsageError` if there is none or more than one."""
    if is_key(digits):
        return digits
    if len(digits) < _LEAST_DIGITS or not set(digits) <= set("0123456789abcdef"):
        raise UsageError(
            f"{digits!r} is not a key", hint=f"give at least its first {_LEAST_DIGITS} digits: bootseer env list"
        )
    found = sorted(key for key in catalog.published_keys() if key.startswith(digits))
    if len(found) > 1:
        raise UsageError(f"{len(found)} snapshots begin with {digits}", hint="give more digits: bootseer env list")
    if not found:
        raise UsageError(
            f"{catalog.store.uri}: no snapshot begins with {digits}", hint="bootseer env list", exit_code=1
        )
    return found[0]


def document_of(catalog: Catalog, digits: str) -> EnvironmentDocument:
    """The snapshot whose key begins with these digits. Raises `UsageError` or `NotFoundError` if there is none."""
    key = full_key(catalog, digits)
    document = catalog.find(key)
    if document is None:
        raise NotFoundError(f"{catalog.store.uri}: no snapshot with the key {key[:12]}; bootseer env list shows all")
    return document


@click.command("list")
@with_options(STORE)
@json_option("bootseer.environments/1")
def list_command(output: Output, **source: Any) -> None:
    """List the snapshots of a store, newest first: key, age, size, builder, content.

    \b
    bootseer env list --store hdfs://namenode/bootseer
    """
    with catalog_of(source) as catalog:
        listing = catalog.all()
        where = catalog.store.uri
    documents = sorted(listing.documents, key=lambda document: document.built_s, reverse=True)
    now_s = time.time()
    rows = table("key", "age", "files", "size", "built by", "state", "what", right=("age", "files", "size"))
    for document in documents:
        rows.add_row(
            document.key[:12],
            format_seconds(max(now_s - document.built_s, 0)),
            f"{document.num_files:,}",
            format_bytes(document.size_bytes),
            document.builder,
            _state(document, now_s),
            document.what,
        )
    output(
        {
            "store": where,
            "environments": [_row(document, now_s) for document in documents],
            "broken": list(listing.broken),
            "unread": list(listing.unread),
        },
        rows,
        *(styled(line, "red") for line in (*listing.broken, *listing.unread)),
        f"{plural(len(documents), 'environment')} in {where}",
    )


def _state(document: EnvironmentDocument, now_s: float) -> str:
    words = ["untrusted"] if document.trust == "untrusted" else []
    return ", ".join([*words, *(["too old"] if document.expired(now_s) else [])]) or "ready"


def _row(document: EnvironmentDocument, now_s: float) -> dict[str, Any]:
    return {
        "key": document.key,
        "digest": document.digest,
        "what": document.what,
        "builder": document.builder,
        "built_at": document.built_s,
        "age_s": max(now_s - document.built_s, 0.0),
        "max_age_s": document.max_age_s,
        "state": _state(document, now_s),
        "trust": document.trust,
        "setup_s": document.setup_s,
        "num_files": document.num_files,
        "size_bytes": document.size_bytes,
        "stored_bytes": sum(stored.size_bytes for stored in document.objects),
        "job": document.job,
        "version": document.version,
    }


@click.command("show")
@click.argument("key", metavar="KEY")
@with_options(STORE)
@json_option("bootseer.environments/1")
def show_command(key: str, output: Output, **source: Any) -> None:
    """Show the snapshot whose key begins with KEY: packages, folders, exports, parts of the key.

    \b
    bootseer env show 3fa9
    """
    with catalog_of(source) as catalog:
        document = document_of(catalog, key)
    now_s = time.time()
    output(
        {
            "components": dict(document.components),
            "platform": dict(document.platform),
            "roots": list(document.roots),
            "num_loose": document.num_loose,
            "packages": list(document.packages),
            "exports": list(map(asdict, document.exports)),
            "daemons": [
                {"name": one.name, "argv": list(one.argv), "user": one.user, "sockets": list(one.sockets)}
                for one in document.daemons
            ],
            "unaccounted": list(document.unaccounted),
            "left_out": [{"path": one.path, "rule": one.rule, "reason": one.reason} for one in document.left_out],
            **_row(document, now_s),
        },
        *_facts(document, now_s),
    )


def _facts(document: EnvironmentDocument, now_s: float) -> Iterator[Text]:
    age = format_seconds(max(now_s - document.built_s, 0))
    limit = "" if document.max_age_s is None else f", valid for {format_seconds(document.max_age_s)}"
    rows = [
        ("key", document.key),
        ("digest", document.digest),
        ("made from", document.what),
        ("built", f"{age} ago by {document.builder}, job {document.job or '-'}, BootSeer {document.version}{limit}"),
        ("state", f"{_state(document, now_s)}, {document.trust}"),
        ("setup took", format_seconds(document.setup_s)),
        ("files", f"{document.num_files:,}, {format_bytes(document.size_bytes)}"),
        ("stored", format_bytes(sum(stored.size_bytes for stored in document.objects))),
        *(("folder", root) for root in document.roots),
    ]
    if document.num_loose:
        rows.append(("elsewhere", f"{plural(document.num_loose, 'file')}, copied to their paths"))
    rows += [("export", f"{export.kind} {export.name}={export.value}") for export in document.exports]
    rows += [("daemon", f"{one.name}: {' '.join(one.argv)} ({', '.join(one.sockets)})") for one in document.daemons]
    rows += [("not in key", path) for path in document.unaccounted]
    rows += [("left out", f"{one.path} ({one.rule}): {one.reason}") for one in document.left_out]
    rows += [("key part", f"{name}: {value}") for name, value in document.components.items()]
    rows += [("package", name) for name in document.packages]
    for name, text in rows:
        yield styled(f"{name:<12}", "dim").append(text, "not dim")


@click.command("remove")
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@with_options(STORE)
@click.option("--package", metavar="NAME[==V]", help="Remove all snapshots that contain this package.")
@click.option("--older-than", metavar="TIME", help="Remove all snapshots older than this, such as 30d.")
@click.option("--dry-run", "-n", is_flag=True, help="Only list what would be removed.")
@json_option("bootseer.environments-removed/1")
def remove_command(
    keys: tuple[str, ...], package: str | None, older_than: str | None, dry_run: bool, output: Output, **source: Any
) -> None:
    """Remove snapshots: later starts run the setup again. Mounted ones stay usable.

    The files stay in the store until `bootseer env prune`, a day later, deletes them.

    \b
    bootseer env remove 3fa9
    bootseer env remove --package requests==2.31.0
    """
    if not keys and package is None and older_than is None:
        raise UsageError("nothing to remove", hint="give a KEY, --package NAME or --older-than 30d")
    now_s = time.time()
    with catalog_of(source) as catalog:
        found = [full_key(catalog, key) for key in keys]
        if package is not None or older_than is not None:
            found += [document.key for document in _chosen(catalog.all().documents, package, older_than, now_s)]
        found = list(dict.fromkeys(found))
        gone = found if dry_run else [key for key in found if catalog.remove(key, now_s)]
    output(
        {"dry_run": dry_run, "removed": gone},
        *(key[:12] for key in gone),
        f"{plural(len(gone), 'environment')} {'would be removed' if dry_run else 'removed'}",
    )


def _chosen(
    documents: Iterable[EnvironmentDocument], package: str | None, older_than: str | None, now_s: float
) -> Iterator[EnvironmentDocument]:
    age_s = None if older_than is None else parse_duration(older_than, "--older-than")
    for document in documents:
        if age_s is not None and now_s - document.built_s <= age_s:
            continue
        if package is None or any(_is(package, installed) for installed in document.packages):
            yield document


def _is(wanted: str, installed: str) -> bool:
    """Whether `name==version` of a snapshot matches the wanted package, of any version if none is given."""
    name, _, version = wanted.partition("==")
    its_name, _, its_version = installed.partition("==")
    return normalised(name.strip()) == normalised(its_name) and (not version or version == its_version)


@click.command("prune")
@with_options(STORE)
@click.option("--grace", metavar="TIME", default="1d", show_default=True, help="Keep what was removed more recently.")
@json_option("bootseer.environments-removed/1")
def prune_command(grace: str, output: Output, **source: Any) -> None:
    """Delete the files of removed and expired snapshots. Snapshots mounted on this node are kept.

    Mounts of other nodes are unknown: the grace period must be longer than such a node takes to fetch a snapshot.

    \b
    bootseer env prune --store hdfs://namenode/bootseer
    """
    runtime = Runtime(runtime_root())
    with catalog_of(source) as catalog:
        done = prune(
            catalog,
            time.time(),
            grace_s=parse_duration(grace, "--grace", zero=True),
            in_use={layer for state in runtime.all() for layer in state.layers} | set(mounted_layers(runtime)),
            also_used=images_in(catalog.store).used_objects,
        )
    left = f"{plural(len(done.expired), 'environment')} expired, {done.num_waiting} within the grace period"
    show_pruned(output, done, {"removed": done.expired}, left)


def show_pruned(output: Output, done: Pruned, document: Mapping[str, object], left: str, *lines: str) -> None:
    """Print what a prune of environments or images did; the exit code is 1 if it had problems.

    document, lines, left: what differs between the two.
    """
    output(
        {
            **document,
            "objects": len(done.deleted),
            "freed_bytes": done.freed_bytes,
            "waiting": done.num_waiting,
            "in_use": done.num_in_use,
            "problems": done.problems,
        },
        *lines,
        *(styled(problem, "red") for problem in done.problems),
        f"freed {format_bytes(done.freed_bytes)} in {plural(len(done.deleted), 'file')}; {left}, "
        f"{done.num_in_use} in use",
        failed=bool(done.problems),
    )

"""`bootseer env list` and `show`: the snapshots of a store, and what is known of one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.command import with_options
from bootseer.cli.env_find import STORE

if TYPE_CHECKING:
    from bootseer.env.document import EnvironmentDocument

SCHEMA = "bootseer.environments/1"
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON (schema bootseer.environments/1).")


@click.command("list", short_help="The snapshots of a store.")
@with_options(STORE)
@_JSON
def listed(store: str | None, plain_http: bool, as_json: bool) -> None:
    """List the snapshots of a store, the newest first: key, age, who built it, what it has.

    \b
    bootseer env list --store hdfs://namenode/bootseer
    """
    from rich.table import Table
    from rich.text import Text

    from bootseer.cli.env_find import catalog_of
    from bootseer.cli.printing import print_json, terminal
    from bootseer.units import format_bytes, format_seconds

    with catalog_of(store, plain_http) as catalog:
        listing = catalog.all()
        where = catalog.store.uri
    documents = sorted(listing.documents, key=lambda document: document.built_s, reverse=True)
    now_s = time.time()
    if as_json:
        rows = [_row(document, now_s) for document in documents]
        print_json(
            {"schema": SCHEMA, "store": where, "environments": rows, "broken": list(listing.broken),
             "unread": list(listing.unread)}
        )  # fmt: skip
        return
    with terminal() as console:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("key", "age", "files", "size", "built by", "state", "what"):
            table.add_column(name, justify="right" if name in ("age", "files", "size") else "left", overflow="fold")
        for document in documents:
            table.add_row(
                document.key[:12],
                format_seconds(max(now_s - document.built_s, 0)),
                f"{document.num_files:,}",
                format_bytes(document.size_bytes),
                Text(document.builder),
                _state(document, now_s),
                Text(document.what),
            )
        if documents:
            console.print(table)
        for line in (*listing.broken, *listing.unread):
            console.print(Text(line, "red"), soft_wrap=True)
        console.print(Text(f"{len(documents)} environment{'s' * (len(documents) != 1)} in {where}"), soft_wrap=True)


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


@click.command("show", short_help="What is known of a snapshot.")
@click.argument("key", metavar="KEY")
@with_options(STORE)
@_JSON
def show(key: str, store: str | None, plain_http: bool, as_json: bool) -> None:
    """Show the snapshot whose key begins with KEY: packages, folders, exports, what the key is made of.

    \b
    bootseer env show 3fa9
    """
    from rich.text import Text

    from bootseer.cli.env_find import catalog_of, document_of
    from bootseer.cli.printing import print_json, terminal

    with catalog_of(store, plain_http) as catalog:
        document = document_of(catalog, key)
    now_s = time.time()
    if as_json:
        more = {
            "schema": SCHEMA,
            "components": dict(document.components),
            "platform": dict(document.platform),
            "roots": list(document.roots),
            "num_loose": document.num_loose,
            "packages": list(document.packages),
            "exports": [
                {"name": export.name, "kind": export.kind, "value": export.value} for export in document.exports
            ],
            "unaccounted": list(document.unaccounted),
            "left_out": [{"path": one.path, "rule": one.rule, "reason": one.reason} for one in document.left_out],
        }
        print_json({**_row(document, now_s), **more})
        return
    with terminal() as console:
        for name, text in _facts(document, now_s):
            console.print(Text(f"{name:<12}", "dim").append(text, "not dim"), soft_wrap=True)


def _facts(document: EnvironmentDocument, now_s: float) -> list[tuple[str, str]]:
    from bootseer.units import format_bytes, format_seconds

    age = format_seconds(max(now_s - document.built_s, 0))
    limit = "" if document.max_age_s is None else f", serves for {format_seconds(document.max_age_s)}"
    rows = [
        ("key", document.key),
        ("digest", document.digest),
        ("made from", document.what),
        ("built", f"{age} ago by {document.builder}, job {document.job or '-'}, BootSeer {document.version}{limit}"),
        ("state", f"{_state(document, now_s)}, {document.trust}"),
        ("setup took", format_seconds(document.setup_s)),
        ("files", f"{document.num_files:,}, {format_bytes(document.size_bytes)}"),
        ("stored", format_bytes(sum(stored.size_bytes for stored in document.objects))),
    ]
    rows += [("folder", root) for root in document.roots]
    if document.num_loose:
        rows.append(("elsewhere", f"{document.num_loose:,} files, written to their places"))
    rows += [("export", f"{export.kind} {export.name}={export.value}") for export in document.exports]
    rows += [("not in key", path) for path in document.unaccounted]
    rows += [("left out", f"{one.path} ({one.rule}): {one.reason}") for one in document.left_out]
    rows += [("key part", f"{name}: {value}") for name, value in document.components.items()]
    rows += [("package", name) for name in document.packages]
    return rows

"""The verbs of `bootseer image hotset`: the blocks that starts of an image need, in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import click

from bootseer.artifact.hotsets import HotSets
from bootseer.cli.image_options import CONVERTED, request_of_verb
from bootseer.cli.output import Output, print_bytes, shown, table, write_file
from bootseer.cli.verb_parts import json_option, with_options
from bootseer.errors import PermanentError, UsageError, os_errors_as
from bootseer.fetch.hotset import MAX_STORED_BYTES, HotSet, encode_hot_set, parse_hot_set
from bootseer.image.mounting.resolve import ResolvedImage, resolve_image
from bootseer.launch.supervise import say
from bootseer.store.open import open_store
from bootseer.units import format_bytes, plural

_JSON = json_option("bootseer.hotsets/2")


@click.command("show")
@click.argument("reference", metavar="REF")
@with_options(CONVERTED)
@_JSON
def show_command(reference: str, store: str | None, plain_http: bool, output: Output) -> None:
    """List the hot sets of the image REF."""
    with _opened(reference, store, plain_http) as (found, sets):
        rows = [_row(hot_set, found) for name in sets.workloads() if (hot_set := sets.load(name)) is not None]
    sets_shown = table("workload", "runs", "blocks", "stored")
    for row in rows:
        sets_shown.add_row(row["workload"], str(row["runs"]), f"{row['blocks']:,}", format_bytes(row["stored_bytes"]))
    output(
        {"digest": found.document.digest, "hotsets": rows},
        sets_shown if rows else "no start of this image has been recorded yet",
    )


@click.command("merge")
@click.argument("reference", metavar="REF")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@with_options(CONVERTED)
@_JSON
def merge_command(reference: str, files: tuple[Path, ...], store: str | None, plain_http: bool, output: Output) -> None:
    """Merge exported hot sets into the known ones, and publish the result."""
    rows = []
    with _opened(reference, store, plain_http) as (found, sets):
        for path in files:
            with os_errors_as(UsageError, path, hint="name a file that `hotset export` wrote"), path.open("rb") as file:
                given = parse_hot_set(file.read(MAX_STORED_BYTES + 1))
            if given.image != found.document.digest:
                raise UsageError(
                    f"{path}: hot set of another image, {given.image}", hint=f"{reference} is {found.document.digest}"
                )
            merged = sets.add_set(given)
            if not sets.publish(merged):
                raise PermanentError(f"{path}: merged on this node, but not published")
            rows.append(_row(merged, found))
    output(
        {"digest": found.document.digest, "hotsets": rows},
        *(f"{row['workload']}: {plural(row['runs'], 'run')}, {row['blocks']:,} blocks, published" for row in rows),
    )


@click.command("export")
@click.argument("reference", metavar="REF")
@click.argument("workload", metavar="WORKLOAD")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path, allow_dash=True))
@with_options(CONVERTED)
def export_command(reference: str, workload: str, file: Path, store: str | None, plain_http: bool) -> None:
    """Write the hot set WORKLOAD of the image REF to FILE (- for standard output), for another store or site."""
    with _opened(reference, store, plain_http) as (_, sets):
        hot_set = sets.load(workload)
        known = sets.workloads() if hot_set is None else []
    if hot_set is None:
        raise UsageError(f"no hot set {workload!r}", hint=f"known hot sets: {', '.join(known) or 'none'}")
    if str(file) == "-":
        print_bytes(encode_hot_set(hot_set))
    else:
        write_file(file, encode_hot_set(hot_set))


@contextmanager
def _opened(reference: str, store: str | None, plain_http: bool) -> Iterator[tuple[ResolvedImage, HotSets]]:
    wanted = request_of_verb(reference, store, plain_http)
    found = resolve_image(wanted, say=say, show=shown)
    found.store.close()
    with closing(open_store(found.store_uri, plain_http=plain_http)) as opened:  # not a mirror's: it is written to
        yield found, HotSets(wanted.cache, found.document.digest, opened, say, wanted.signatures)


def _row(hot_set: HotSet, found: ResolvedImage) -> dict[str, Any]:
    indexes = {index.identity: index for index in found.indexes}
    plan = [(name, block) for name, block in hot_set.plan() if name in indexes and block < indexes[name].num_blocks]
    newest = hot_set.records[-1] if hot_set.records else None
    return {
        "workload": hot_set.workload,
        "runs": len(hot_set.records),
        "blocks": len(plan),
        "stored_bytes": sum(indexes[name].place(block).length for name, block in plan),
        "last_run_s": newest.started_s if newest is not None else None,
    }

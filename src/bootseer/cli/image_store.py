"""What a store has of images: `bootseer image remove` and `prune` for the converted form; the verbs of `image hotset`
for the blocks that starts need."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import click

from bootseer.artifact.hotsets import HotSets
from bootseer.artifact.places import STORE, cache_root, converted_folder, own_folder, runtime_root
from bootseer.cli.env_options import parse_duration
from bootseer.cli.env_store import check_folder, show_pruned
from bootseer.cli.image_options import CONVERTED, PLAIN_HTTP, request_of_verb
from bootseer.cli.options import Option
from bootseer.cli.output import Output, print_bytes, shown, styled, table, write_file
from bootseer.cli.verb_parts import json_option, with_options
from bootseer.env.life.catalog import Catalog
from bootseer.errors import PermanentError, UsageError, os_errors_as
from bootseer.fetch.hotset import MAX_STORED_BYTES, HotSet, encode_hot_set, parse_hot_set
from bootseer.image import catalog as images
from bootseer.image.mounting.metadata import Metadata
from bootseer.image.mounting.resolve import ResolvedImage, converted_digest, resolve_image
from bootseer.launch.supervise import say
from bootseer.mounts.state import Runtime
from bootseer.store.open import open_store
from bootseer.units import format_bytes, plural

_HOTSETS = json_option("bootseer.hotsets/2")
_EXPORTED = "name a file that `hotset export` wrote"


@click.command("remove")
@click.argument("references", metavar="REF...", nargs=-1, required=True)
@with_options(CONVERTED)
@click.option("--dry-run", "-n", is_flag=True, help="Only list what would be removed.")
@json_option("bootseer.images-removed/1")
def remove_command(
    references: tuple[str, ...], store: str | None, plain_http: bool, dry_run: bool, output: Output
) -> None:
    """Remove the converted form of images, by name or digest. Later starts convert them again.

    The images themselves stay. An image that is mounted on this node is not removed, and the exit code is 1. The files
    stay in the store until `bootseer image prune`, a day later, deletes them.

    \b
    bootseer image remove registry:5000/team/train:6
    bootseer image remove --store /shared/images sha256:3fa9...
    """
    mounted = _mounted()
    removed: list[str] = []
    kept: dict[str, str] = {}
    try:
        for reference in references:
            asked = request_of_verb(reference, store, plain_http)
            with closing(open_store(_uri(asked.store), plain_http=plain_http)) as opened:
                catalog = images.images_in(opened, say)
                digest = converted_digest(catalog, asked, say)
                reason = images.remove(catalog, digest, time.time(), mounted=mounted, dry_run=dry_run)
            if reason:
                kept[digest] = reason
                continue
            removed.append(digest)
            if not dry_run:
                Metadata(asked.cache, say).forget(digest)
    finally:
        if removed or kept:  # also if a later one failed
            output(
                {"dry_run": dry_run, "removed": removed, "kept": [{"digest": key, "why": kept[key]} for key in kept]},
                *removed,
                *(styled(f"{digest} stays: {reason}", "red") for digest, reason in kept.items()),
                f"{plural(len(removed), 'image')} {'would be removed' if dry_run else 'removed'}",
            )
    if kept:
        raise SystemExit(1)


@click.command("prune")
@with_options(
    (Option("--store", "Store of images (default: $BOOTSEER_STORE, else this node's).", metavar="URI"), PLAIN_HTTP)
)
@click.option("--grace", metavar="TIME", default="1d", show_default=True, help="Keep what was removed more recently.")
@json_option("bootseer.images-removed/1")
def prune_command(store: str | None, plain_http: bool, grace: str, output: Output) -> None:
    """Delete the files of removed images that no other image or environment of the store needs.

    If converted images are kept in the image's own repository, an image that was deleted from its registry counts as
    removed. Images mounted on this node are kept. Mounts of other nodes are unknown: the grace period must be longer
    than such a node takes to fetch an image.

    \b
    bootseer image prune --store oci://registry:5000/team/train
    bootseer image prune --store /shared/images --grace 7d
    """
    uri = _uri(store or os.environ.get(STORE))
    with closing(open_store(uri, plain_http=plain_http)) as opened:
        check_folder(store, opened)
        done = images.prune(
            images.images_in(opened),
            time.time(),
            grace_s=parse_duration(grace, "--grace", zero=True),
            mounted=_mounted(),
            also_used=Catalog(opened).used_objects,
        )
    gone = [f"{digest} is no longer in its registry: removed" for digest in done.expired]
    left = f"{plural(done.num_waiting, 'removed image')} within the grace period"
    show_pruned(output, done, {"store": uri, "expired": done.expired}, left, *gone)


def _uri(store: str | None) -> str:
    """The given store, or this node's own store of converted images."""
    return store or str(own_folder(converted_folder(cache_root())))


def _mounted() -> dict[str, str]:
    """The digests of mounted images, and their mount points."""
    runtime = Runtime(runtime_root())
    return {state.details.get("digest", ""): state.target for state in runtime.all() if runtime.health(state) != "gone"}


@click.command("show")
@click.argument("reference", metavar="REF")
@with_options(CONVERTED)
@_HOTSETS
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
@_HOTSETS
def merge_command(reference: str, files: tuple[Path, ...], store: str | None, plain_http: bool, output: Output) -> None:
    """Merge exported hot sets into the known ones, and publish the result."""
    rows = []
    with _opened(reference, store, plain_http) as (found, sets):
        for path in files:
            with os_errors_as(UsageError, path, hint=_EXPORTED), path.open("rb") as file:
                data = file.read(MAX_STORED_BYTES + 1)
            try:
                given = parse_hot_set(data)
            except PermanentError as error:
                raise UsageError(f"{path}: {error}", hint=_EXPORTED) from error
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

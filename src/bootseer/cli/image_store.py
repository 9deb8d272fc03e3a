"""`bootseer image remove` and `prune`: remove converted images from a store, and delete their files."""

from __future__ import annotations

import os
import time
from contextlib import closing

import click

from bootseer.artifact.places import STORE, cache_root, converted_folder, own_folder, runtime_root
from bootseer.cli.env_options import parse_duration
from bootseer.cli.env_store import check_folder, show_pruned
from bootseer.cli.image_options import CONVERTED, PLAIN_HTTP, request_of_verb
from bootseer.cli.options import Option
from bootseer.cli.output import Output, styled
from bootseer.cli.verb_parts import json_option, with_options
from bootseer.env.life.catalog import Catalog
from bootseer.image import catalog as images
from bootseer.image.mounting.metadata import Metadata
from bootseer.image.mounting.resolve import converted_digest
from bootseer.launch.supervise import say
from bootseer.mounts.state import Runtime
from bootseer.store.open import open_store
from bootseer.units import plural


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
            grace_s=parse_duration(grace, "--grace"),
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

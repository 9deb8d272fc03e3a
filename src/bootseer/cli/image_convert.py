"""`bootseer image convert`: one image, or all that are pushed to a repository."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
from msgspec.structs import replace

from bootseer.artifact.places import STORE, cache_root, watch_folder
from bootseer.artifact.progress import shown_while
from bootseer.cli.env_options import parse_duration
from bootseer.cli.image_options import LAYER_LIMIT, PLAIN_HTTP, parse_layer_limits, signatures
from bootseer.cli.options import parse_size
from bootseer.cli.output import Output, Progress, shown
from bootseer.cli.verb_parts import Count, json_option, with_options
from bootseer.errors import BootseerError, Interrupted, PermanentError, UsageError
from bootseer.image.conversion.convert import convert
from bootseer.image.conversion.layer import ConvertOptions, LayerLimits
from bootseer.image.conversion.new_images import Watch, lock_state
from bootseer.image.reference import Reference, SourceKind, parse_reference, store_uri
from bootseer.image.sources.manifest import Platform
from bootseer.image.sources.source import open_source
from bootseer.launch.interrupt import interruptible
from bootseer.launch.supervise import say
from bootseer.store.open import open_registry, open_store
from bootseer.units import format_bytes, format_seconds, plural


class _Settings(NamedTuple):
    """What is converted, and how."""

    reference: Reference
    """An image, or with --watch a repository."""
    uri: str
    platform: Platform | None
    jobs: int | None
    options: ConvertOptions
    plain_http: bool


@click.command("convert")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="[DST]", required=False)
@click.option("--jobs", type=Count(1, 64), help="Layers to convert in parallel (default: two per CPU, up to 8).")
@click.option("--platform", metavar="OS/ARCH", help="Platform of a multi-platform image (default: this machine's).")
@click.option("--block-size", metavar="SIZE", default="256k", show_default=True, help="A power of two, 4k to 16m.")
@with_options((LAYER_LIMIT, PLAIN_HTTP))
@click.option("--sign", "keys", metavar="KEY", multiple=True, help="Sign with this private key (ed25519, PEM).")
@click.option("--watch", is_flag=True, help="SRC is a repository: convert its images, and new ones as they are pushed.")
@click.option("--interval", metavar="TIME", help="With --watch: how often to poll the tags (default: 1m).")
@click.option("--once", is_flag=True, help="With --watch: poll once, convert what is new, and exit.")
@click.option("--tag", "tags", metavar="PATTERN", multiple=True, help="With --watch: only tags such as v1.*.")
@click.option(
    "--state",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="With --watch: file that records converted digests (default: below the cache).",
)
@json_option("bootseer.convert/1")
def convert_command(
    source: str,
    target: str | None,
    jobs: int | None,
    platform: str | None,
    block_size: str,
    layer_limits: tuple[str, ...],
    keys: tuple[str, ...],
    plain_http: bool,
    watch: bool,
    interval: str | None,
    once: bool,
    tags: tuple[str, ...],
    state: Path | None,
    output: Output,
) -> None:
    """Convert the layers of the image SRC to block files in the store DST, by default $BOOTSEER_STORE, else the image's
    own repository.

    The image itself is unchanged and keeps its name. Layers that are already converted are skipped. With --watch, each
    image prints one line (a JSON document with --json), and one that fails is retried later.

    \b
    bootseer image convert registry:5000/team/train:7
    bootseer image convert oci:./layout s3://images/train
    bootseer image convert docker-archive:train.tar /shared/images
    bootseer image convert --watch registry:5000/team/train
    bootseer image convert --watch --once --tag 'v*' registry:5000/team/train s3://images/train
    """
    reference = parse_reference(source)
    uri = store_uri(reference, target or os.environ.get(STORE))
    if uri is None:
        raise UsageError(f"{source}: no store given", hint="bootseer image convert SRC DST")
    if not watch and (interval or once or tags or state):
        raise UsageError("--interval, --once, --tag and --state need --watch", hint="give --watch too")
    if once and interval:
        raise UsageError("--once polls once, without --interval", hint="give one of them")
    limits, signed = LayerLimits(**parse_layer_limits(layer_limits)), signatures({}, keys)
    options = ConvertOptions(parse_size(block_size, "--block-size"), limits=limits, signatures=signed)
    settings = _Settings(reference, uri, Platform.parse(platform) if platform else None, jobs, options, plain_http)
    if watch:
        repository = f"{reference.host}/{reference.repository}"
        if reference.kind is not SourceKind.REGISTRY or source.removeprefix("docker://") != repository:
            hint = f"--watch {repository}" if reference.host else "--watch registry:5000/team/train"
            raise UsageError(f"{source}: --watch takes a repository without tag or digest", hint=hint)
        _watch(settings, tags, state, None if once else parse_duration(interval or "1m", "--interval"), output)
        return
    with interruptible():
        document, line = _convert(settings)
    output(document, line)


def _convert(settings: _Settings) -> tuple[dict[str, object], str]:
    """Convert one image; the result as JSON and as a line of text."""
    began_s = time.monotonic()
    with Progress("converting") as progress:
        image, platform, plain_http = settings.reference, settings.platform, settings.plain_http
        # Not of a mirror, which may still have the image that a tag named before.
        with shown_while(shown, f"waiting for {image}"):
            opened = open_source(image, platform=platform, plain_http=plain_http, mirrored=False)
        layers = plural(len(opened.layers) or 1, "layer")
        with closing(opened), closing(open_store(settings.uri, plain_http=plain_http)) as store:
            report = partial(progress.show_bytes, note=layers)
            document = convert(opened, store, progress=report, jobs=settings.jobs, options=settings.options)
    took_s = time.monotonic() - began_s
    return (
        {
            "digest": document.digest,
            "store": settings.uri,
            "layers": len(document.layers),
            "size_bytes": document.size_bytes,
            "stored_bytes": document.stored_bytes,
            "seconds": round(took_s, 3),
        },
        f"{document.digest} in {settings.uri}: {plural(len(document.layers), 'layer')}, "
        f"{format_bytes(document.size_bytes)}, stored as {format_bytes(document.stored_bytes)}, "
        f"in {format_seconds(took_s)}",
    )


def _watch(
    settings: _Settings, tags: tuple[str, ...], state: Path | None, interval_s: float | None, output: Output
) -> None:
    """Convert the new images of a repository: once, or repeatedly with `interval_s` until a signal."""
    reference = settings.reference
    repository = f"{reference.host}/{reference.repository}"
    if state is None:
        name = hashlib.sha256(f"{repository} {settings.uri} {settings.platform or ''}".encode()).hexdigest()[:16]
        state = watch_folder(cache_root()) / f"{reference.repository.rpartition('/')[2]}-{name}.json"
    numbers = [0, 0]
    try:
        with (
            interruptible(),
            lock_state(state),
            closing(open_registry(reference.host, reference.repository, plain_http=settings.plain_http)) as registry,
        ):
            watched = Watch(registry, state, tags)
            while True:
                try:
                    _convert_new(watched, settings, output, numbers)
                except BootseerError as error:
                    if interval_s is None:
                        raise
                    say(f"{repository}: {error}; retrying in {format_seconds(interval_s)}")
                if interval_s is None:
                    break
                time.sleep(interval_s)
    except Interrupted as signal:  # the normal end of a watch
        say(f"{signal}: {plural(numbers[0], 'image')} converted, {numbers[1]} failed")
        return
    if numbers[1]:
        raise SystemExit(1)


def _convert_new(watched: Watch, settings: _Settings, output: Output, numbers: list[int]) -> None:
    """Convert what `watched` reports as new. `numbers` counts converted and failed images."""
    reference, unsaved = settings.reference, None
    for tag, digest in watched.find_new():
        name = f"{reference.host}/{reference.repository}:{tag}"
        try:
            if isinstance(digest, BootseerError):
                raise digest
            # By digest: the tag may move meanwhile.
            document, line = _convert(settings._replace(reference=replace(reference, tag=tag, digest=digest)))
        except BootseerError as error:
            numbers[1] += 1
            tagged = "" if isinstance(digest, BootseerError) else digest
            again_s = watched.record_failed(tagged or tag)
            output(
                {"image": name, "tagged": tagged, "error": str(error), "again_s": again_s},
                f"{name}: {error}; retrying in {format_seconds(again_s)}",
            )
            continue
        numbers[0] += 1
        output({"image": name, "tagged": digest, **document}, f"{name}: {line}")
        try:
            watched.record_converted(digest)
        except PermanentError as error:  # the state cannot be written: convert the others first
            unsaved = error
    if unsaved is not None:
        raise unsaved

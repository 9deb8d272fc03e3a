"""`bootseer image convert`: one image, or all that are pushed into a repository."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from bootseer.cli.command import json_option, listen_address
from bootseer.cli.env_options import parse_duration
from bootseer.cli.image_options import parse_layer_limits, parse_size, signatures
from bootseer.cli.output import Output, Progress
from bootseer.errors import BootseerError, Interrupted, PermanentError, UsageError
from bootseer.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from bootseer.image.conversion.layer_job import ConvertOptions
    from bootseer.image.conversion.watch import Watch
    from bootseer.image.reference import Reference
    from bootseer.image.sources.manifest import Platform


_SETTLE_S = 0.5
"""A push is several calls of a webhook."""


class _How(NamedTuple):
    """What is the same for all images of a watched repository."""

    uri: str
    platform: Platform | None
    jobs: int | None
    options: ConvertOptions
    plain_http: bool


@click.command("convert")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="[DST]", required=False)
@click.option("--jobs", type=click.IntRange(1, 64), help="Layers at once (default: up to 4, one per processor).")
@click.option("--platform", metavar="OS/ARCH", help="Of an image for several ones (default: this machine's).")
@click.option("--block-size", metavar="SIZE", default="256k", show_default=True, help="A power of two, 4k to 16m.")
@click.option(
    "--layer-limit",
    "layer_limits",
    metavar="NAME=VALUE",
    multiple=True,
    help="Let layers be larger: unpacked_bytes=128g, members=8000000, text_bytes=1g.",
)
@click.option("--sign", "keys", metavar="KEY", multiple=True, help="Sign with this private key (ed25519, PEM).")
@click.option("--plain-http", is_flag=True, help="Speak to the registry without encryption.")
@click.option(
    "--watch", is_flag=True, help="SRC is a repository: convert its images, and what is pushed, until a signal."
)
@click.option("--interval", metavar="TIME", help="With --watch: how often its tags are asked for (default: 1m).")
@click.option("--listen", metavar="HOST:PORT", help="With --watch: ask at once when a registry's webhook posts there.")
@click.option("--once", is_flag=True, help="With --watch: ask once, convert what is new, and end.")
@click.option("--tag", "tags", metavar="PATTERN", multiple=True, help="With --watch: only such tags, as v1.*.")
@click.option(
    "--state",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="With --watch: where converted digests are remembered (default: below the cache).",
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
    listen: str | None,
    once: bool,
    tags: tuple[str, ...],
    state: Path | None,
    output: Output,
) -> None:
    """Turn the layers of the image SRC into block files in the store DST, by default the image's own repository.

    The image stays as it is and keeps its name. Layers that were converted before are not converted again.
    With --watch each image is a line (a JSON document with --json), and one that fails is tried again later.

    \b
    bootseer image convert registry:5000/team/train:7
    bootseer image convert oci:./layout s3://images/train
    bootseer image convert docker-archive:train.tar /shared/images
    bootseer image convert --watch registry:5000/team/train
    bootseer image convert --watch --once --tag 'v*' registry:5000/team/train s3://images/train
    """
    from bootseer.artifact.places import STORE
    from bootseer.image.conversion.layer import LayerLimits
    from bootseer.image.conversion.layer_job import ConvertOptions
    from bootseer.image.reference import parse_reference, store_uri
    from bootseer.image.sources.manifest import Platform
    from bootseer.launch.interrupt import interruptible

    reference = parse_reference(source)
    uri = store_uri(reference, target or os.environ.get(STORE))
    if uri is None:
        raise UsageError(f"{source}: no store is named", hint="bootseer image convert SRC DST")
    if not watch and (interval or listen or once or tags or state):
        hint = "give --watch too"
        raise UsageError("--interval, --listen, --once, --tag and --state belong to --watch", hint=hint)
    limits = LayerLimits(**parse_layer_limits(layer_limits))
    how = _How(
        uri,
        Platform.parse(platform) if platform else None,
        jobs,
        ConvertOptions(
            parse_size(block_size, "--block-size"), limits=limits, signatures=signatures({}, os.environ, keys)
        ),
        plain_http,
    )
    if watch:
        _watch(
            source,
            reference,
            how,
            tags,
            state,
            None if once else parse_duration(interval or "1m", "--interval"),
            listen_address(listen, 8766) if listen else None,
            output,
        )
        return
    with interruptible():
        document, line = _convert(reference, how)
    output(document, line)


def _convert(reference: Reference, how: _How) -> tuple[dict[str, object], str]:
    """What came out, for programs and for people."""
    from bootseer.image.conversion.convert import all_layers, convert
    from bootseer.image.sources.open import open_source
    from bootseer.store.open import open_store

    began_s = time.monotonic()
    with Progress("converting") as progress:
        opened = open_source(reference, platform=how.platform, plain_http=how.plain_http)
        layers = f"{len(opened.layers) or 1} layers"
        report = all_layers(opened, lambda done, total: progress.show_bytes(done, total, layers))
        with closing(opened), closing(open_store(how.uri, plain_http=how.plain_http)) as store:
            document = convert(opened, store, progress=report, jobs=how.jobs, options=how.options)
    took_s = time.monotonic() - began_s
    return (
        {
            "digest": document.digest,
            "store": how.uri,
            "layers": len(document.layers),
            "size_bytes": document.size_bytes,
            "stored_bytes": document.stored_bytes,
            "seconds": round(took_s, 3),
        },
        f"{document.digest} in {how.uri}: {len(document.layers)} layers, {format_bytes(document.size_bytes)}, "
        f"stored as {format_bytes(document.stored_bytes)}, in {format_seconds(took_s)}",
    )


def _watch(
    source: str,
    reference: Reference,
    how: _How,
    tags: tuple[str, ...],
    state: Path | None,
    interval_s: float | None,
    listen: tuple[str, int] | None,
    output: Output,
) -> None:
    """Convert what a repository has that is new, once or (with an interval) until a signal."""
    from bootseer.artifact.places import cache_root
    from bootseer.image.conversion.watch import Watch, alone, woken
    from bootseer.image.reference import Place
    from bootseer.launch.interrupt import interruptible
    from bootseer.launch.supervise import say
    from bootseer.store.open import open_registry

    repository = f"{reference.host}/{reference.repository}"
    if reference.place is not Place.REGISTRY or source.removeprefix("docker://") != repository:
        hint = f"--watch {repository}" if reference.host else "--watch registry:5000/team/train"
        raise UsageError(f"{source}: --watch takes a repository, without tag or digest", hint=hint)
    if state is None:
        name = hashlib.sha256(f"{repository} {how.uri} {how.platform or ''}".encode()).hexdigest()[:16]
        state = cache_root(os.environ, os.getuid()) / "watch" / f"{reference.repository.rpartition('/')[2]}-{name}.json"
    numbers = [0, 0]
    try:
        with (
            interruptible(),
            alone(state),
            woken(listen) as called,
            closing(open_registry(reference.host, reference.repository, plain_http=how.plain_http)) as registry,
        ):
            watched = Watch(registry, state, tags)
            while True:
                called.clear()
                try:
                    _convert_new(watched, reference, how, output, numbers)
                except BootseerError as error:
                    if interval_s is None:
                        raise
                    say(f"{repository}: {error}; asked again in {format_seconds(interval_s)}")
                if interval_s is None:
                    break
                if called.wait(interval_s):
                    time.sleep(_SETTLE_S)
    except Interrupted as signal:  # how a watch ends
        say(f"{signal}: {plural(numbers[0], 'image')} converted, {numbers[1]} failed")
        return
    if numbers[1]:
        raise SystemExit(1)


def _convert_new(watched: Watch, reference: Reference, how: _How, output: Output, numbers: list[int]) -> None:
    def failed(tag: str, digest: str, error: BootseerError) -> None:
        numbers[1] += 1
        name, again_s = f"{reference.host}/{reference.repository}:{tag}", watched.failed(digest or tag)
        output(
            {"image": name, "tagged": digest, "error": str(error), "again_s": again_s},
            f"{name}: {error}; tried again in {format_seconds(again_s)}",
        )

    new, unkept = watched.new(), None
    for tag, error in watched.unknown.items():
        failed(tag, "", error)
    for tag, digest in new:
        name = f"{reference.host}/{reference.repository}:{tag}"
        try:
            # By its digest: the tag may move meanwhile.
            document, line = _convert(_at(reference, tag, digest), how)
        except BootseerError as error:
            failed(tag, digest, error)
            continue
        numbers[0] += 1
        output({"image": name, "tagged": digest, **document}, f"{name}: {line}")
        try:
            watched.converted(digest)
        except PermanentError as error:  # the others are converted all the same
            unkept = error
    if unkept is not None:
        raise unkept


def _at(reference: Reference, tag: str, digest: str) -> Reference:
    from dataclasses import replace

    return replace(reference, tag=tag, digest=digest)

"""`bootseer image convert`: make an image ready for lazy starts."""

from __future__ import annotations

import os
import time
from contextlib import closing

import click


@click.command("convert", short_help="Make an image ready for lazy starts.")
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
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema bootseer.convert/1).")
def command(
    source: str,
    target: str | None,
    jobs: int | None,
    platform: str | None,
    block_size: str,
    layer_limits: tuple[str, ...],
    keys: tuple[str, ...],
    plain_http: bool,
    as_json: bool,
) -> None:
    """Turn the layers of the image SRC into block files in the store DST, by default the image's own repository.

    The image stays as it is and keeps its name. Layers that were converted before are not converted again.

    \b
    bootseer image convert registry:5000/team/train:7
    bootseer image convert oci:./layout s3://images/train
    bootseer image convert docker-archive:train.tar /shared/images
    """
    from bootseer.cli.image_options import parse_layer_limits, parse_size
    from bootseer.cli.printing import print_json, terminal
    from bootseer.cli.progress import Progress
    from bootseer.cli.signing_options import signatures
    from bootseer.errors import UsageError
    from bootseer.image.conversion.convert import all_layers, convert
    from bootseer.image.conversion.layer import LayerLimits
    from bootseer.image.conversion.layer_job import ConvertOptions
    from bootseer.image.reference import parse_reference
    from bootseer.image.sources.manifest import Platform
    from bootseer.image.sources.source import open_source
    from bootseer.image.store_of import store_uri
    from bootseer.launch.interrupt import interruptible
    from bootseer.store.open import open_store
    from bootseer.units import format_bytes, format_seconds

    reference = parse_reference(source)
    uri = store_uri(reference, target, os.environ)
    if uri is None:
        raise UsageError(f"{source}: no store is named", hint="bootseer image convert SRC DST")
    signed = signatures({}, os.environ, keys)
    wanted = Platform.parse(platform) if platform else None
    limits = LayerLimits(**parse_layer_limits(layer_limits))
    began_s = time.monotonic()
    with interruptible(), Progress("converting") as progress:
        opened = open_source(reference, platform=wanted, plain_http=plain_http)
        layers = f"{len(opened.layers) or 1} layers"
        report = all_layers(opened, lambda done, total: progress.show_bytes(done, total, layers))
        with closing(opened), closing(open_store(uri, plain_http=plain_http)) as store:
            options = ConvertOptions(parse_size(block_size, "--block-size"), limits=limits, signatures=signed)
            document = convert(opened, store, progress=report, jobs=jobs, options=options)
    took_s = time.monotonic() - began_s
    if as_json:
        print_json(
            {
                "schema": "bootseer.convert/1",
                "digest": document.digest,
                "store": uri,
                "layers": len(document.layers),
                "size_bytes": document.size_bytes,
                "stored_bytes": document.stored_bytes,
                "seconds": round(took_s, 3),
            }
        )
        return
    with terminal() as console:
        console.print(
            f"{document.digest} in {uri}: {len(document.layers)} layers, {format_bytes(document.size_bytes)}, "
            f"stored as {format_bytes(document.stored_bytes)}, in {format_seconds(took_s)}",
            soft_wrap=True,
        )

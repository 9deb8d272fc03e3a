"""`bootseer image inspect`: what is known of an image, here and in its store."""

from __future__ import annotations

from typing import Any

import click


@click.command("inspect", short_help="What is known of an image.")
@click.argument("reference", metavar="REF")
@click.option("--store", metavar="URI", help="Where the converted image is (default: its own repository).")
@click.option("--plain-http", is_flag=True, help="Speak to the registry without encryption.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema bootseer.inspect/1).")
def command(reference: str, store: str | None, plain_http: bool, as_json: bool) -> None:
    """Show whether the image REF is converted, its layers, and how much of each is on this node.

    \b
    bootseer image inspect registry:5000/team/train:7
    """
    from rich.table import Table

    from bootseer.artifact.places import blocks_folder
    from bootseer.cache.cache import Cache
    from bootseer.cli.image_options import SOURCE, request
    from bootseer.cli.printing import print_json, terminal
    from bootseer.image.mounting.found import find
    from bootseer.launch.supervise import say
    from bootseer.units import format_bytes

    values = {option.name: option.start for option in SOURCE}
    wanted = request(reference, {**values, "store": store, "plain_http": plain_http, "fallback": "none"})
    found = find(wanted, say=say)
    document = found.document
    here = {entry.identity: entry.ready_bytes for entry in Cache(blocks_folder(wanted.cache)).entries()}
    layers: list[dict[str, Any]] = [
        {
            "source_digest": layer.source_digest or None,
            "identity": layer.file.identity,
            "size_bytes": layer.file.size_bytes,
            "stored_bytes": layer.file.stored_bytes,
            "stripes": len(layer.file.stripes),
            "here_bytes": here.get(layer.file.identity, 0),
        }
        for layer in document.layers
    ]
    if as_json:
        print_json(
            {
                "schema": "bootseer.inspect/1",
                "image": str(wanted.reference),
                "digest": document.digest,
                "store": found.store_uri,
                "size_bytes": document.size_bytes,
                "stored_bytes": document.stored_bytes,
                "config": document.config.get("config"),
                "layers": layers,
            }
        )
        return
    with terminal() as console:
        console.print(f"{document.digest} in {found.store_uri}", soft_wrap=True)
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("layer", "size", "stored", "here"):
            table.add_column(name, justify="left" if name == "layer" else "right")
        for row in layers:
            name = (row["source_digest"] or row["identity"]).removeprefix("sha256:")[:12]
            share = row["here_bytes"] / row["size_bytes"] if row["size_bytes"] else 1.0
            table.add_row(name, format_bytes(row["size_bytes"]), format_bytes(row["stored_bytes"]), f"{share:.0%}")
        console.print(table)
        console.print(f"{format_bytes(document.size_bytes)}, stored as {format_bytes(document.stored_bytes)}")

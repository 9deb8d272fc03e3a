"""`bootseer ckpt stat`: what a file consists of, and on which nodes it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from bootseer.checkpoint.catalog import Anatomy, PartFound

SCHEMA = "bootseer.checkpoint-file/1"


@click.command("stat", short_help="What a file consists of, and on which nodes it lies.")
@click.argument("file", metavar="FILE")
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}).")
def command(file: str, as_json: bool) -> None:
    """Show the segments and parts of a file, and where they lie: now, and where they were put when that differs.

    The exit code is 1 when a part is missing.

    \b
    bootseer ckpt stat hdfs://namenode/jobs/moe/step-1000/model.safetensors
    """
    from bootseer.checkpoint.catalog import anatomy
    from bootseer.cli.ckpt_place import files_at, split
    from bootseer.cli.printing import print_json, terminal

    folder, name = split(file)
    with files_at(folder) as files:
        found = anatomy(files, name)
        uri = f"{files.place.uri}/{name}"
    if as_json:
        print_json({"schema": SCHEMA, "file": uri, **_as_json(found)})
    else:
        from rich.text import Text

        from bootseer.render.clean import clean

        with terminal() as console:
            for line in _lines(uri, found):
                console.print(Text(clean(line)), soft_wrap=True)
    if any(part.problem for segment in found.segments for part in segment.parts):
        raise SystemExit(1)


def _as_json(found: Anatomy) -> dict[str, Any]:
    entry = found.info.entry
    return {
        "size_bytes": found.info.size_bytes,
        "striped": found.info.is_striped,
        "id": found.id,
        "mode": f"{entry.mode:04o}",
        "owner": entry.owner,
        "group": entry.group,
        "changed_at": entry.mtime_ns / 1e9,
        "bytes_by_node": dict(found.bytes_by_node),
        "segments": [
            {
                "start": segment.start,
                "size_bytes": segment.size_bytes,
                "parts": [
                    {
                        "name": part.part.name,
                        "kind": part.kind,
                        "size_bytes": part.part.size_bytes,
                        "sha256": part.part.sha256,
                        "nodes": list(part.nodes),
                        "put_on": list(part.part.nodes),
                        "problem": part.problem,
                    }
                    for part in segment.parts
                ],
            }
            for segment in found.segments
        ],
    }


def _lines(uri: str, found: Anatomy) -> list[str]:
    from bootseer.units import format_bytes

    entry = found.info.entry
    kind = "striped" if found.info.is_striped else "ordinary"
    lines = [
        f"{uri}: {kind}, {format_bytes(found.info.size_bytes)}, mode {entry.mode:04o}, {entry.owner}:{entry.group}"
    ]
    for node, size_bytes in sorted(found.bytes_by_node.items()):
        lines.append(f"  {node}  {format_bytes(size_bytes)}")
    for number, segment in enumerate(found.segments):
        lines.append(f"segment {number}: {format_bytes(segment.size_bytes)} from byte {segment.start:,} on")
        lines += [f"  {_part_words(part)}" for part in segment.parts]
    return lines


def _part_words(part: PartFound) -> str:
    from bootseer.units import format_bytes

    words = f"{part.part.name}  {part.kind}  {format_bytes(part.part.size_bytes)}"
    if part.problem:
        return f"{words}  {part.problem}; it was put on {', '.join(part.part.nodes) or 'a folder'}"
    was = ", ".join(part.part.nodes)
    moved = f"; it was put on {was}" if was and set(part.nodes) != set(part.part.nodes) else ""
    return f"{words}  {', '.join(part.nodes)}{moved}".rstrip()

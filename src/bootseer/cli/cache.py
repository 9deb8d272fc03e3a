"""The verbs of `bootseer cache`: this node's block cache."""

from __future__ import annotations

import time
from pathlib import Path

import click

from bootseer.artifact.cache_space import CacheSpace
from bootseer.artifact.places import blocks_folder, cache_root, runtime_root
from bootseer.artifact.unpacked import delete_idle_trees
from bootseer.cache.cache import Cache
from bootseer.cli.options import parse_size
from bootseer.cli.output import Output, Progress, styled, table
from bootseer.cli.verb_parts import Count, json_option
from bootseer.errors import UsageError
from bootseer.image.catalog import delete_idle
from bootseer.launch.supervise import say
from bootseer.mounts.shared_layers import unmount_idle
from bootseer.mounts.state import Runtime
from bootseer.units import format_bytes, format_seconds, plural

_FOLDER = click.option(
    "--cache",
    "folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the cache (default: this node's).",
)
_JSON = json_option("bootseer.cache/2")


@click.command("show")
@_FOLDER
@_JSON
def show_command(folder: Path | None, output: Output) -> None:
    """List the files of the cache."""
    cache = _cache(folder)
    entries = cache.entries()
    total = sum(entry.disk_bytes for entry in entries)
    rows = table("file", "on disk", "here", "last used", "state", right=("on disk", "here", "last used"))
    for entry in entries:
        state = [
            word
            for word, applies in (("damaged", entry.damaged), ("in use", entry.in_use), ("complete", entry.trusted))
            if applies
        ]
        rows.add_row(
            entry.identity[:12],
            format_bytes(entry.disk_bytes),
            f"{entry.ready_bytes / entry.size_bytes:.0%}" if entry.size_bytes else "-",
            f"{format_seconds(max(time.time() - entry.last_use_ns / 1e9, 0))} ago" if entry.last_use_ns else "never",
            styled(", ".join(state), "red" if entry.damaged else ""),
        )
    names = ("identity", "disk_bytes", "size_bytes", "ready_bytes", "in_use", "damaged", "trusted")
    files = [
        {
            **{name: getattr(entry, name) for name in names},
            "pids": list(entry.leases),
            "last_used_at": entry.last_use_ns / 1e9 or None,
        }
        for entry in entries
    ]
    output(
        {"folder": str(cache.root), "disk_bytes": total, "files": files},
        rows,
        f"{plural(len(entries), 'file')}, {format_bytes(total)} in {_root(folder)}",
    )


@click.command("verify")
@_FOLDER
@_JSON
@click.option("--threads", type=Count(1, 64), default=2, show_default=True, help="Number of threads.")
def verify_command(folder: Path | None, output: Output, threads: int) -> None:
    """Read everything and compare it with its digests. Damaged blocks are dropped and fetched again when needed.

    The exit code is 1 if something was dropped.
    """
    cache = _cache(folder)
    with Progress("verifying") as progress:
        damaged = cache.verify(
            threads=threads,
            progress=lambda identity, done, of: progress.show(done, of, f"{identity[:12]}, blocks"),
        )
    dropped = {identity: blocks for identity, blocks in damaged.items() if blocks}
    output(
        {"folder": str(cache.root), "files": len(damaged), "dropped_blocks": dropped},
        *(f"{identity[:12]}: {len(blocks)} damaged blocks dropped" for identity, blocks in dropped.items()),
        f"{plural(len(damaged), 'file')} verified, {sum(map(len, dropped.values()))} blocks dropped",
        failed=bool(dropped),
    )


@click.command("prune")
@_FOLDER
@_JSON
@click.option("--to", "to_size", metavar="SIZE", help="Target size, such as 200g (default: by how full the disk is).")
@click.option("--dry-run", "-n", is_flag=True, help="Only show what would be freed.")
def prune_command(folder: Path | None, output: Output, to_size: str | None, dry_run: bool) -> None:
    """Free disk space. Files in use are kept; of the others, those go first that were not used for the longest time."""
    cache, limit = _cache(folder), parse_size(to_size, "--to") if to_size is not None else None
    if not dry_run:
        # Layers that are kept mounted for the next start would keep their files in use.
        runtime = Runtime(runtime_root())
        unmount_idle(runtime, idle_s=0)
        delete_idle_trees(_root(folder), runtime, idle_s=0)
        delete_idle(_root(folder), cache, idle_s=CacheSpace(cache, say).idle_s if limit is None else 0)
    pruned = cache.prune(limit, dry_run=dry_run)
    kept = f", {plural(len(pruned.in_use), 'file')} in use" if pruned.in_use else ""
    output(
        {
            "folder": str(cache.root),
            "dry_run": dry_run,
            "used_bytes": pruned.used_bytes,
            "freed_bytes": pruned.freed_bytes,
            "evicted": [{"identity": one.identity, "disk_bytes": one.disk_bytes} for one in pruned.evicted],
            "in_use": list(pruned.in_use),
        },
        f"{'would free' if dry_run else 'freed'} {format_bytes(pruned.freed_bytes)} of "
        f"{format_bytes(pruned.used_bytes)}{kept}",
    )


def _cache(folder: Path | None) -> Cache:
    if folder is not None and not folder.is_dir():
        raise UsageError(f"{folder}: no such folder", hint="name the folder of a cache")
    return Cache(blocks_folder(_root(folder)))


def _root(folder: Path | None) -> Path:
    return folder or cache_root()

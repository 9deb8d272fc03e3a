"""The verbs of `bootseer image` that mount images. `list` is quick: what only other verbs need is imported by them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from bootseer.artifact.places import blocks_folder, cache_root, containers_folder, runtime_root
from bootseer.cli.image_options import CONTAINER, CONVERTED, SOURCE, request, request_of_verb, wanted
from bootseer.cli.output import Output, shown, styled, table
from bootseer.cli.verb_parts import MayHaveCommand, json_option, with_options
from bootseer.errors import UsageError
from bootseer.launch.interrupt import interruptible
from bootseer.launch.supervise import say
from bootseer.mounts import kernel
from bootseer.mounts.state import MountState, Runtime
from bootseer.units import format_bytes


@click.command("run", cls=MayHaveCommand)
@click.argument("reference", metavar="REF")
@with_options(SOURCE)
@with_options(CONTAINER)
@click.option("--gpus", metavar="GPUS", help="all (default if a CDI file describes them), numbers, or none.")
@click.pass_context
def run_command(ctx: click.Context, /, reference: str, gpus: str | None, **values: Any) -> int:
    """Run COMMAND (default: the image's own) in a container of the image REF. Exit code, signals and terminal are
    passed through.

    `bootseer run --image REF -- COMMAND` does the same and also measures it.

    \b
    bootseer image run registry:5000/team/train:7 -- python -c 'import torch'
    bootseer image run --gpus all --mount /data:/data:ro registry:5000/team/train:7
    """
    from bootseer.launch.command import Options
    from bootseer.launch.run import run

    options = Options(image=wanted(reference, values, gpus), quiet=True, show=shown)
    return run(ctx.meta.get("command", ()), options, {**os.environ, "BOOTSEER_DISABLE": "1"})


@click.command("inspect")
@click.argument("reference", metavar="REF")
@with_options(CONVERTED)
@json_option("bootseer.inspect/1")
def inspect_command(reference: str, store: str | None, plain_http: bool, output: Output) -> None:
    """Show whether the image REF is converted, its layers, and how much of each is cached on this node.

    \b
    bootseer image inspect registry:5000/team/train:7
    """
    from bootseer.cache.cache import Cache
    from bootseer.image.mounting.resolve import resolve_image

    asked = request_of_verb(reference, store, plain_http)
    found = resolve_image(asked, say=say, show=shown)
    document = found.document
    here = {entry.identity: entry.ready_bytes for entry in Cache(blocks_folder(asked.cache)).entries()}
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
    rows = table("layer", "size", "stored", "here")
    for row in layers:
        name = (row["source_digest"] or row["identity"]).removeprefix("sha256:")[:12]
        share = row["here_bytes"] / row["size_bytes"] if row["size_bytes"] else 1.0
        rows.add_row(name, format_bytes(row["size_bytes"]), format_bytes(row["stored_bytes"]), f"{share:.0%}")
    output(
        {
            "image": str(asked.reference),
            "digest": document.digest,
            "store": found.store_uri,
            "size_bytes": document.size_bytes,
            "stored_bytes": document.stored_bytes,
            "config": document.config.get("config"),
            "layers": layers,
        },
        f"{document.digest} in {found.store_uri}",
        rows,
        f"{format_bytes(document.size_bytes)}, stored as {format_bytes(document.stored_bytes)}",
    )


@click.command("mount")
@click.argument("reference", metavar="REF")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@with_options(SOURCE)
@click.option("--rw", "writable", is_flag=True, help="Mount it writable; changes are lost at the unmount.")
@click.option("--suid", is_flag=True, help="Honour set-uid bits of the image's programs on this machine.")
@click.option("--workload", metavar="NAME", help="Name of the hot set to prefetch and to record.")
@json_option("bootseer.mounts/1")
def mount_command(
    reference: str, folder: Path, writable: bool, suid: bool, workload: str | None, output: Output, **values: Any
) -> None:
    """Mount the file system of the image REF on the folder DIR. Files are visible at once; blocks are fetched on read.

    \b
    bootseer image mount registry:5000/team/train:7 /mnt/train
    bootseer image umount /mnt/train
    """
    from bootseer.artifact.owned_folder import OwnedFolder
    from bootseer.image.mounting.mount import mount_image
    from bootseer.image.mounting.mounted import check_unused

    if kernel.is_mount(folder.absolute()):  # first: one whose daemon is dead has no attributes
        raise UsageError(f"{folder}: already a mount point", hint=f"bootseer image umount {folder}")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"{folder}: not a folder", hint=f"name a folder to mount on: {os.path.realpath(folder)}")
    asked = request(reference, {**values, "workload": workload})
    changes = None
    if writable:
        # Also deletes those of mounts that ended with a reboot, or were unmounted by another program.
        check = partial(check_unused, Runtime(asked.runtime))
        changes = OwnedFolder.made(containers_folder(asked.cache), "mount-", check).path
    with interruptible():
        mounted = mount_image(asked, folder.absolute(), writable=changes, suid=suid, say=say, show=shown)
    facts = mounted.facts
    words = f"{folder}: {facts['digest']}, {facts['mode']} ({facts['reason']})"
    output({"target": str(folder.absolute()), **facts}, words)


@click.command("umount")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Unmount while in use; programs that use it get I/O errors.")
def umount_command(folder: Path, force: bool) -> None:
    """Unmount DIR, end its daemon and discard changes. Fetched blocks stay in the cache."""
    from bootseer.checkpoint.mount.mounted import runtime_of
    from bootseer.image.mounting.mounted import find_mount, unmount_recorded

    runtime = Runtime(runtime_root())
    if runtime.find(folder) is None and runtime_of(runtime.root).find(folder) is not None:
        raise UsageError(f"{folder}: checkpoints are mounted there", hint=f"bootseer ckpt umount {folder}")
    unmount_recorded(runtime, find_mount(runtime, folder), cache_root(), force=force)


@click.command("list")
@json_option("bootseer.mounts/1")
def list_command(output: Output) -> None:
    """List mounted images: folder, mode, share of the blocks on this node, state. The exit code is 1 if a daemon is
    dead."""
    runtime = Runtime(runtime_root())
    rows = [_row(runtime, state) for state in runtime.all() if runtime.health(state) != "gone"]
    shown_rows = table("folder", "image", "way", "here", "state", right=("here",))
    for row in rows:
        here = "?" if row["here"] is None else f"{row['here']:.0%}"
        state = styled(row["state"], "red" if row["state"] != "mounted" else "")
        shown_rows.add_row(row["target"], row["image"], row["mode"], here, state)
    is_dead = any(row["state"] != "mounted" for row in rows)
    output({"mounts": rows}, shown_rows if rows else "nothing is mounted", failed=is_dead)


def _row(runtime: Runtime, state: MountState) -> dict[str, Any]:
    from bootseer.image.mounting.mounted import local_share, status_of

    status = status_of(runtime, state)
    health = runtime.health(state)
    return {
        "target": state.target,
        "image": state.what,
        "digest": state.details.get("digest", ""),
        "mode": state.details.get("mode", ""),
        "state": health,
        "daemon_pid": state.daemon.pid if state.daemon is not None else None,
        # Without a daemon everything is local; for a dead daemon it is unknown.
        "here": 1.0 if state.daemon is None else local_share(status),
        "mounted_at": state.made_s,
        "log": runtime.log(state) or None,
        "daemon": status or None,
    }

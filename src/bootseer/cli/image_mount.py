"""`bootseer image mount`, `umount` and `list`: trees of images on folders of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bootseer.cli.command import with_options
from bootseer.cli.image_options import SOURCE

if TYPE_CHECKING:
    from bootseer.mounts.state import MountState, Runtime

SCHEMA = "bootseer.mounts/1"
_PATH = click.Path(path_type=Path)


@click.command("mount", short_help="Mount an image's tree on a folder.")
@click.argument("reference", metavar="REF")
@click.argument("folder", metavar="DIR", type=_PATH)
@with_options(SOURCE)
@click.option("--rw", "writable", is_flag=True, help="Let it be changed; the changes are gone with the mount.")
@click.option("--suid", is_flag=True, help="Let set-uid programs of the image have their effect on this machine.")
@click.option("--workload", metavar="NAME", help="Fetch this hot set first, and record into it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema bootseer.mounts/1).")
def mount(
    reference: str, folder: Path, writable: bool, suid: bool, workload: str | None, as_json: bool, **values: Any
) -> None:
    """Mount the tree of the image REF on the folder DIR. It is there at once; blocks come when they are read.

    \b
    bootseer image mount registry:5000/team/train:7 /mnt/train
    bootseer image umount /mnt/train
    """
    from bootseer.cli.image_options import request
    from bootseer.cli.printing import print_json, terminal
    from bootseer.cli.progress import shown
    from bootseer.errors import UsageError
    from bootseer.image.mounting.mount import mount_image
    from bootseer.launch.interrupt import interruptible
    from bootseer.launch.supervise import say
    from bootseer.mounts import kernel

    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: not a folder", hint="name a folder to mount on")
    if kernel.is_mount(folder.absolute()):
        raise UsageError(f"{folder}: something is mounted there", hint=f"bootseer image umount {folder}")
    wanted = request(reference, {**values, "workload": workload})
    changes = _changes(wanted.cache) if writable else None
    with interruptible():
        mounted = mount_image(wanted, folder.absolute(), writable=changes, suid=suid, say=say, show=shown)
    facts = mounted.facts
    if as_json:
        print_json({"schema": SCHEMA, "target": str(folder.absolute()), **facts})
        return
    with terminal() as console:
        console.print(f"{folder}: {facts['digest']}, {facts['mode']} ({facts['reason']})", soft_wrap=True)


def _changes(cache: Path) -> Path:
    import tempfile

    from bootseer.artifact.places import containers_folder, own_folder

    return Path(tempfile.mkdtemp(prefix="mount-", dir=own_folder(containers_folder(cache))))


@click.command("umount", short_help="Undo a mount.")
@click.argument("folder", metavar="DIR", type=_PATH)
def umount(folder: Path) -> None:
    """Take away what was mounted on DIR, its daemon and what was changed in it. The cache keeps what was fetched."""
    from bootseer.artifact.places import cache_root
    from bootseer.image.mounting.mounted import find_mount, unmount_written

    runtime = _runtime()
    unmount_written(runtime, find_mount(runtime, folder), cache_root(os.environ, os.getuid()))


@click.command("list", short_help="What is mounted, and whether it works.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema bootseer.mounts/1).")
def mounted(as_json: bool) -> None:
    """List the mounted images: where, by which daemon, how much is here. The exit code is 1 when a daemon is dead."""
    from rich.table import Table
    from rich.text import Text

    from bootseer.cli.printing import print_json, terminal

    runtime = _runtime()
    rows = [_row(runtime, state) for state in runtime.all() if runtime.health(state) != "gone"]
    if as_json:
        print_json({"schema": SCHEMA, "mounts": rows})
    else:
        with terminal() as console:
            table = Table(box=None, pad_edge=False, header_style="dim")
            for name in ("folder", "image", "way", "here", "state"):
                table.add_column(name, justify="right" if name == "here" else "left", overflow="fold")
            for row in rows:
                here = "?" if row["here"] is None else f"{row['here']:.0%}"
                bad = row["state"] != "mounted"
                table.add_row(
                    Text(row["target"]), Text(row["image"]), Text(row["mode"]), here, Text(row["state"], "red" * bad)
                )
            if rows:
                console.print(table)
            else:
                console.print("nothing is mounted")
    if any(row["state"] != "mounted" for row in rows):
        raise SystemExit(1)


def _row(runtime: Runtime, state: MountState) -> dict[str, Any]:
    from bootseer.image.mounting.mounted import share_here, status_of

    status = status_of(runtime, state)
    health = runtime.health(state)
    return {
        "target": state.target,
        "image": state.what,
        "digest": state.details.get("digest", ""),
        "mode": state.details.get("mode", ""),
        "state": health,
        "daemon_pid": state.daemon.pid if state.daemon is not None else None,
        # Of what the daemon serves; without one all of it is here, and of a dead one nobody knows.
        "here": 1.0 if state.daemon is None else share_here(status),
        "mounted_at": state.made_s,
        "log": runtime.log(state) or None,
        "daemon": status or None,
    }


def _runtime() -> Runtime:
    from bootseer.artifact.places import runtime_root
    from bootseer.mounts.state import Runtime

    return Runtime(runtime_root(os.environ, os.getuid()))

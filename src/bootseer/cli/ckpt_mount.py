"""`bootseer ckpt mount`, `umount` and `mounted`: folders of checkpoints as folders of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bootseer.checkpoint.layout import MAX_STRIPES

if TYPE_CHECKING:
    from bootseer.checkpoint.mount.mounted import MountedCheckpoint
    from bootseer.mounts.state import Runtime

MOUNT_SCHEMA = "bootseer.checkpoint-mount/1"
UMOUNT_SCHEMA = "bootseer.checkpoint-unmounted/1"
SCHEMA = "bootseer.checkpoint-mounts/1"
_PATH = click.Path(path_type=Path)


@click.command("mount", short_help="Mount a folder of checkpoints.")
@click.argument("uri", metavar="URI")
@click.argument("folder", metavar="DIR", type=_PATH)
@click.option("--read-only", is_flag=True, help="Mount it read-only.")
@click.option("--only-me", is_flag=True, help="Shut other users of this machine out of root's mount.")
@click.option("--cache/--no-cache", default=True, help="Keep what is read of striped files on this node's disk.")
@click.option("--memory", metavar="SIZE", help="What reading may hold in memory, as 512m (default: 256m).")
@click.option(
    "--stripes", metavar="N", type=click.IntRange(1, MAX_STRIPES), help="Parts of new files, whatever the policy says."
)
@click.option("--parity/--no-parity", default=None, help="Parity for new files, whatever the policy says.")
@click.option("--spool", metavar="DIR", type=_PATH, help="A local folder for what is written and not sent yet.")
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {MOUNT_SCHEMA}).")
def mount(
    uri: str, folder: Path, memory: str | None, cache: bool, spool: Path | None, as_json: bool, **values: Any
) -> None:
    """Mount the folder of checkpoints URI on the folder DIR: hdfs://…, file:///… or the path of a folder.

    Striped files are files like all others there, and new files become striped ones when they are closed.

    \b
    bootseer ckpt mount hdfs://namenode:9000/jobs/llm /mnt/ckpt
    bootseer ckpt umount /mnt/ckpt
    """
    from bootseer.artifact.places import cache_root, runtime_root
    from bootseer.checkpoint.mount.mounted import mount_checkpoint
    from bootseer.cli.ckpt_place import tell_fallback
    from bootseer.cli.image_options import parse_size
    from bootseer.cli.printing import print_json, terminal
    from bootseer.cli.progress import Progress
    from bootseer.launch.interrupt import interruptible
    from bootseer.launch.supervise import say

    with interruptible(), Progress(f"waiting for {uri}", line=not as_json) as progress:
        mounted = mount_checkpoint(
            uri,
            folder.absolute(),
            runtime=runtime_root(os.environ, os.getuid()),
            cache=cache_root(os.environ, os.getuid()) if cache else None,
            spool=None if spool is None else spool.absolute(),
            memory_bytes=parse_size(memory, "--memory") if memory else None,
            waiting=progress.wait,
            **values,
        )
    row = _row(mounted)
    tell_fallback((row["daemon"] or {}).get("place", {}))
    if os.geteuid() == 0 and not values["only_me"] and "://" in uri and not uri.startswith("file:"):
        say(
            "all users of this machine can use this mount: mode bits and names of this machine decide, ACLs do not"
            " count, and the file system sees one user, perhaps its superuser; --only-me shuts them out"
        )
    if as_json:
        print_json({"schema": MOUNT_SCHEMA, **row})
        return
    with terminal() as console:
        access = "read-only" if values["read_only"] else "writable"
        console.print(f"{folder}: {uri}, {access}; bootseer ckpt umount {folder} takes it away", soft_wrap=True)


@click.command("umount", short_help="Undo a mount.")
@click.argument("folder", metavar="DIR", type=_PATH)
@click.option("--force", is_flag=True, help="Also while it is in use: files being written are published as they are.")
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {UMOUNT_SCHEMA}).")
def umount(folder: Path, force: bool, as_json: bool) -> None:
    """Take away what was mounted on DIR, once everything that was written is where it belongs.

    Also cleans up after a daemon that died. The exit code is 1 when files could not be published.
    """
    from bootseer.checkpoint.mount.mounted import find_checkpoint
    from bootseer.cli.printing import print_json, terminal
    from bootseer.cli.progress import Progress
    from bootseer.launch.interrupt import interruptible

    found = find_checkpoint(_runtime(), folder.absolute())
    with interruptible(), Progress(found.ending(), line=not as_json) as progress:
        said = found.unmount(force=force, waiting=progress.wait)
    published, lost = said.get("published", []), said.get("lost", [])
    if as_json:
        print_json({"schema": UMOUNT_SCHEMA, "target": str(folder.absolute()), "published": published, "lost": lost})
    elif published or lost:
        with terminal() as console:
            for word, names in (("published as it was", published), ("NOT published", lost)):
                for name in names:
                    console.print(f"{word}: {name}", soft_wrap=True)
    if lost:
        raise SystemExit(1)


@click.command("mounted", short_help="What is mounted, and whether it works.")
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}).")
def mounted(as_json: bool) -> None:
    """List mounted folders of checkpoints. The exit code is 1 when a daemon is dead."""
    from rich.text import Text

    from bootseer.checkpoint.mount.mounted import all_mounted
    from bootseer.cli.printing import print_json, terminal

    rows = [_row(one) for one in all_mounted(_runtime())]
    if as_json:
        print_json({"schema": SCHEMA, "mounts": rows})
    else:
        with terminal() as console:
            for row in rows:
                bad = row["state"] != "mounted"
                line = Text.assemble(f"{row['target']}: {row['uri']}, ", (_words(row), "red" * bad))
                console.print(line, soft_wrap=True)
            if not rows:
                console.print("nothing is mounted")
    if any(row["state"] != "mounted" for row in rows):
        raise SystemExit(1)


def _words(row: dict[str, Any]) -> str:
    from bootseer.checkpoint.mount.mounted import PLAIN
    from bootseer.units import format_bytes

    state = row["state"]
    if state != "mounted":
        return f"{state}; bootseer ckpt umount {row['target']} takes it away"
    if row["access"] == PLAIN:
        return "as it lies there"
    access = "read-only" if row["access"] == "ro" else "writable"
    daemon = row["daemon"]
    if daemon is None:
        return f"{access}, does not answer"
    words = f"{access}, read {format_bytes(daemon['read_bytes'])}, {format_bytes(daemon['cache_bytes'])} from the cache"
    writing = daemon.get("unpublished", [])
    return f"{words}; being written: {', '.join(writing)}" if writing else words


def _row(one: MountedCheckpoint) -> dict[str, Any]:
    state = one.state
    return {
        "target": state.target,
        "uri": state.what,
        "access": state.details.get("access", ""),
        "state": one.health,
        "daemon_pid": None if state.daemon is None else state.daemon.pid,
        "mounted_at": state.made_s,
        "log": _runtime().log(state) or None,
        "daemon": one.status() or None,
    }


def _runtime() -> Runtime:
    from bootseer.artifact.places import runtime_root
    from bootseer.checkpoint.mount.mounted import runtime_of

    return runtime_of(runtime_root(os.environ, os.getuid()))

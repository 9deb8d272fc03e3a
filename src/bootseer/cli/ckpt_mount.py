"""`bootseer ckpt mount`, `umount` and `mounted`: folders of checkpoints mounted on local folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from bootseer.artifact.places import cache_root, runtime_root
from bootseer.checkpoint.mount.mounted import (
    MountedCheckpoint,
    all_mounted,
    find_checkpoint,
    mount_checkpoint,
    runtime_of,
)
from bootseer.checkpoint.mount.serving import MEMORY_BYTES, MountRequest
from bootseer.cli.ckpt_place import tell_fallback
from bootseer.cli.options import parse_size
from bootseer.cli.output import Output, Progress, styled
from bootseer.cli.verb_parts import json_option
from bootseer.errors import UsageError
from bootseer.launch.interrupt import interruptible
from bootseer.launch.supervise import say
from bootseer.units import format_bytes

_PATH = click.Path(path_type=Path)


@click.command("mount")
@click.argument("uri", metavar="URI")
@click.argument("folder", metavar="DIR", type=_PATH)
@click.option("--read-only", is_flag=True, help="Mount it read-only.")
@click.option("--only-me", is_flag=True, help="As root, deny other users of this machine access to the mount.")
@click.option("--cache/--no-cache", default=True, help="Cache blocks of striped files on this node (default: yes).")
@click.option("--memory", metavar="SIZE", help="Memory for read buffers, such as 512m (default: 256m).")
@click.option("--spool", metavar="DIR", type=_PATH, help="Folder for data not uploaded yet (default: in the cache).")
@json_option("bootseer.checkpoint-mount/1")
def mount_command(
    uri: str, folder: Path, memory: str | None, cache: bool, spool: Path | None, output: Output, **values: Any
) -> None:
    """Mount the folder of checkpoints URI (hdfs://…, s3://…, file:///… or a path) on the folder DIR.

    Striped files appear as ordinary files. New files become striped when they are closed, by the folder's policy
    (bootseer ckpt policy).

    \b
    bootseer ckpt mount hdfs://namenode:9000/jobs/llm /mnt/ckpt
    bootseer ckpt umount /mnt/ckpt
    """
    if values["read_only"] and spool is not None:
        raise UsageError("--spool has no effect with --read-only", hint="give one of them")
    with interruptible(), Progress(f"waiting for {uri}", line=not output.as_json) as progress:
        request = MountRequest(
            uri,
            cache=cache_root() if cache else None,
            spool=None if spool is None else spool.absolute(),
            memory_bytes=parse_size(memory, "--memory") if memory else MEMORY_BYTES,
            **values,
        )
        runtime = runtime_root()
        mounted = mount_checkpoint(request, folder.absolute(), runtime=runtime, waiting=progress.wait)
    row = _row(mounted)
    tell_fallback((row["daemon"] or {}).get("place", {}))
    if os.geteuid() == 0 and not values["only_me"] and "://" in uri and not uri.startswith("file:"):
        say(
            "all users of this machine can use this mount: access is checked by mode bits and this machine's user"
            " names, not by ACLs, and the storage sees a single user, perhaps its superuser; --only-me excludes them"
        )
    access = "read-only" if values["read_only"] else "writable"
    output(row, f"{folder}: {uri}, {access}; unmount with bootseer ckpt umount {folder}")


@click.command("umount")
@click.argument("folder", metavar="DIR", type=_PATH)
@click.option("--force", is_flag=True, help="Unmount while in use; files being written are published as they are.")
@json_option("bootseer.checkpoint-unmounted/1")
def umount_command(folder: Path, force: bool, output: Output) -> None:
    """Unmount DIR once everything that was written is published.

    Also cleans up after a daemon that died. The exit code is 1 if files could not be published.
    """
    found = find_checkpoint(runtime_of(runtime_root()), folder.absolute())
    with interruptible(), Progress(found.ending(), line=not output.as_json) as progress:
        answer = found.unmount(force=force, waiting=progress.wait)
    published, lost = answer.get("published", []), answer.get("lost", [])
    output(
        {"target": str(folder.absolute()), "published": published, "lost": lost},
        *(f"published while open: {name}" for name in published),
        *(f"NOT published: {name}" for name in lost),
        failed=bool(lost),
    )


@click.command("mounted")
@json_option("bootseer.checkpoint-mounts/1")
def mounted_command(output: Output) -> None:
    """List mounted folders of checkpoints. The exit code is 1 if a daemon is dead."""
    rows = [_row(one) for one in all_mounted(runtime_of(runtime_root()))]
    lines = [
        styled(f"{row['target']}: {row['uri']}, ", "").append(_words(row), "red" if row["state"] != "mounted" else "")
        for row in rows
    ]
    is_dead = any(row["state"] != "mounted" for row in rows)
    output({"mounts": rows}, *(lines if rows else ["nothing is mounted"]), failed=is_dead)


def _words(row: dict[str, Any]) -> str:
    state = row["state"]
    if state != "mounted":
        return f"{state}; clean up with bootseer ckpt umount {row['target']}"
    access = "read-only" if row["access"] == "ro" else "writable"
    daemon = row["daemon"]
    if daemon is None:
        return f"{access}, not responding"
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
        "log": one.runtime.log(state) or None,
        "daemon": one.status() or None,
    }

"""Snapshots in tests: changes from a folder in the role of the upper layer, and the image as a file for mounting.

A folder `upper` has the files that a setup wrote, at their paths; `below` the files from before.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bootseer.artifact.objects import read_all, read_index
from bootseer.blocks.block_file import BlockFile
from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.changes import Action, Change
from bootseer.env.snapshot.manifest import Manifest
from bootseer.env.snapshot.secret_check import SecretCheck
from bootseer.env.snapshot.write import Written, write_snapshot
from bootseer.erofs.reader import ErofsReader
from bootseer.image.conversion.convert import block_reader, open_layer
from bootseer.store.store import Store, Stored
from erofs_images import mounted
from once import compiled_secret_rules
from store_doubles import MemoryStore

BEGAN_S = 1_790_000_000.0
"""When all setups in tests began; `written` gives their files a later time."""


def load_manifest(store: Store, stored: Stored) -> Manifest:
    """Read a manifest from a store like a restore."""
    return Manifest.parse(read_all(store, stored.name, stored.size_bytes))


def changes_of(upper: Path, *, modified: tuple[str, ...] = (), opaque: tuple[str, ...] = ()) -> list[Change]:
    """Everything in a folder as additions, except the paths in `modified` and `opaque`."""
    found = []
    base = os.fsencode(upper)
    for folder, folders, files in os.walk(base):
        for name in folders + files:
            source = os.fsdecode(folder + b"/" + name)
            path = source[len(str(upper)) :]
            action = Action.MODIFIED if path in modified or path in opaque else Action.ADDED
            found.append(Change(path, action, source, opaque=path in opaque))
    return found


def deleted(path: str) -> Change:
    """A path that the setup removed."""
    return Change(path, Action.DELETED)


def written(folder: Path, *, seconds: float = BEGAN_S + 10) -> None:
    """Set the modification time of everything in a folder, by default to 10 s after the setup's begin."""
    for top, folders, files in os.walk(folder):
        for name in folders + files:
            os.utime(Path(top, name), (seconds, seconds), follow_symlinks=False)


@functools.cache
def secret_check() -> SecretCheck:
    """A check with the default rules."""
    return SecretCheck(Exclusions(), cache=compiled_secret_rules())


def snapshot(store: Store, upper: Path, **options: Any) -> Written:
    """Write a snapshot of everything in a folder, which is also the root of the paths."""
    given = {"began_s": BEGAN_S, "root": str(upper), "check": secret_check()} | options
    return write_snapshot(store, given.pop("changes", None) or changes_of(upper), **given)


def reader_of(store: Store, written_snapshot: Written) -> ErofsReader:
    """A reader of the snapshot's image."""
    return open_layer(store, written_snapshot.file)


def save_image(store: Store, file: BlockFile, path: Path) -> Path:
    """Save the image as a file."""
    read = block_reader(store, read_index(store, file))
    with path.open("wb") as image:
        for at in range(0, file.size_bytes, 1 << 20):
            image.write(read(at, min(1 << 20, file.size_bytes - at)))
    return path


@contextlib.contextmanager
def shown(upper: Path, scratch: Path, **options: Any) -> Iterator[Path]:
    """The snapshot of a folder, mounted by the kernel."""
    store = MemoryStore(str(scratch))
    found = snapshot(store, upper, **options)
    with mounted(save_image(store, found.file, scratch / "image"), scratch / "shown") as folder:
        yield folder


@contextlib.contextmanager
def overlay(lowers: list[Path], target: Path, *, upper: Path | None = None) -> Iterator[Path]:
    """An overlayfs mount of folders, the first one on top; writable with `upper`."""
    target.mkdir(exist_ok=True)
    options = "lowerdir=" + ":".join(map(str, lowers))
    if upper is not None:
        work = upper.with_name(upper.name + ".work")
        for folder in (upper, work):
            folder.mkdir(exist_ok=True)
        options += f",upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, target], check=True)
    try:
        yield target
    finally:
        subprocess.run(["umount", target], check=True)

"""The mounts that the mount methods use: layers, the overlay that merges them, a private copy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from bootseer.cache.cached_file import CachedFile
from bootseer.errors import BootseerError
from bootseer.io.tasks import Tasks
from bootseer.mounts import kernel, layers
from bootseer.mounts.shared_layers import mount_layer, unmount_own
from bootseer.mounts.state import Runtime

_COPY = "copy"
_AT_ONCE = 8


def mount_layers(runtime: Runtime, folder: Path, stack: Sequence[CachedFile], *, loop: bool) -> list[Path]:
    """Mount each layer; returns the mount points, lowest first.

    `folder` is this mount's own; a daemon serves the files of incomplete layers in it. `loop`: mount by loop devices.
    """
    # Mounting a layer reads its first block. In parallel, this costs one round trip to the store for all layers.
    with Tasks("bootseer-mount", min(len(stack), _AT_ONCE)) as pool:
        return list(pool.map(lambda layer: mount_layer(runtime, folder, layer, loop=loop), stack))


def mount_tree(
    lowers: Sequence[Path], above: Sequence[Path], target: Path, writable: Path | None, attributes: int
) -> None:
    """Mount an overlay of the layers and the folders `above` them. `attributes`: see `mount_overlay`."""
    target.mkdir(parents=True, exist_ok=True)
    upper, work = _upper(writable, lowers[-1])
    layers.mount_overlay([*lowers, *above], target, upper=upper, work=work, attributes=attributes)


def mount_over(tree: Path, above: Sequence[Path], target: Path, writable: Path | None, attributes: int) -> None:
    """Mount an overlay over a served or unpacked tree, which never changes."""
    target.mkdir(parents=True, exist_ok=True)
    upper, work = _upper(writable, tree)
    layers.mount_overlay([tree, *above], target, upper=upper, work=work, attributes=attributes, userxattr=True)


def mount_copy(write: Callable[[Path], None], target: Path, writable: Path, attributes: int) -> None:
    """Mount a private copy of the tree, created by `write`, for machines where no overlay can be mounted."""
    target.mkdir(parents=True, exist_ok=True)
    write(writable / _COPY)
    kernel.attach(kernel.clone_mount(writable / _COPY), target)
    kernel.restrict(target, attributes)


def unmount_tree(folder: Path, target: Path) -> None:
    """Undo the mounts of a method that failed."""
    with contextlib.suppress(BootseerError):
        if kernel.is_mount(target):
            kernel.unmount(target, lazy=True)
    unmount_own(folder)


def _upper(writable: Path | None, top: Path) -> tuple[Path, Path] | tuple[None, None]:
    """The overlay's upper and work folders; the upper one gets the owner and mode of the image's root."""
    if writable is None:
        return None, None
    upper, work = writable / "upper", writable / "work"
    for folder in (upper, work):
        folder.mkdir(parents=True, exist_ok=True)
    status = top.stat()
    os.chown(upper, status.st_uid, status.st_gid)
    upper.chmod(status.st_mode & 0o7777)
    return upper, work

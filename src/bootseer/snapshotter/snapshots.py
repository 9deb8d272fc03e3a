"""containerd's snapshots on this node: converted images lazily, everything else like the overlayfs snapshotter.

    <root>/state.db                    see `records`
    <root>/snapshots/<number>/fs       the files of one layer, or the changes of a container
    <root>/snapshots/<number>/work     overlayfs' work folder of a writable snapshot

Only converted images are mounted here (`lazy`): containerd and its shims mount what `mounts` returns.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bootseer.errors import BootseerError, PermanentError
from bootseer.io.files import delete_tree, discard
from bootseer.logs import logger
from bootseer.snapshotter.lazy import LazyImages, root_folder
from bootseer.snapshotter.records import ACTIVE, COMMITTED, VIEW, ExistsError, Record, Records, RefusedError

_LOG = logger(__name__)
_REF = "containerd.io/snapshot.ref"
"""The name under which containerd looks for a layer before fetching it: the chain id."""
_BLOCK_BYTES = 512


class Mount(NamedTuple):
    """A mount of a container, in the terms of mount(8)."""

    type: str
    source: str
    options: list[str]


class Snapshots:
    """The snapshots of a root folder. Safe for any thread."""

    def __init__(self, root: Path, images: LazyImages) -> None:
        """Open the folder. Raises `PermanentError` if it cannot be used."""
        self._folder = root_folder(root / "snapshots")
        self.records = Records(root / "state.db")
        self._images = images
        index = Path("/sys/module/overlay/parameters/index")
        self._options = ["index=off"] if index.exists() else []

    def prepare(self, key: str, parent: str, labels: Mapping[str, str], *, kind: int = ACTIVE) -> list[Mount]:
        """Create a writable snapshot, or with `VIEW` a read-only one. Raises as `Records.add`.

        `ExistsError` for a layer of a converted image tells containerd not to fetch it: it is committed under its chain
        id.
        """
        chain = labels.get(_REF, "") if kind == ACTIVE else ""
        if chain:
            known = self.records.find(chain)
            if known is not None and known.image and known.parent == parent:  # from another namespace of containerd
                raise ExistsError(f"snapshot {chain}: already exists")

            def record_layer(layer: str) -> None:
                with contextlib.suppress(ExistsError):  # another pull of the same image
                    self.records.add(chain, parent, COMMITTED, labels, layer)

            layer = self._images.layer(chain, parent, labels, record_layer) if known is None else None
            if layer is not None:
                raise ExistsError(f"snapshot {chain}: provided by the converted image sha256:{layer[:64]}")
        record = self.records.add(key, parent, kind, labels)
        folder = self._folder / str(record.id)
        try:
            self._make(folder, record)
            mounts = self.mounts(key)
        except (BootseerError, OSError) as error:
            self.remove(key)
            if isinstance(error, OSError):
                raise PermanentError(f"{error.filename or folder}: {error.strerror}") from error
            raise
        if not chain and parent and (image := self.records.get(parent).image):
            self._images.begin(image)
        return mounts

    def _make(self, folder: Path, record: Record) -> None:
        discard(folder)  # left by a snapshot whose record a power failure removed
        folder.mkdir(mode=0o700)
        files = folder / "fs"
        files.mkdir(mode=0o755)
        files.chmod(0o755)
        if record.kind == ACTIVE:
            (folder / "work").mkdir(mode=0o711)
        parent = self.records.find(record.parent)
        if parent is not None:
            status = (self._images.lowers(parent.image)[0] if parent.image else self._files(parent)).stat()
            os.chown(files, status.st_uid, status.st_gid)
            if parent.image:  # for other layers the differ sets it
                files.chmod(status.st_mode & 0o7777)

    def mounts(self, key: str) -> list[Mount]:
        """The mounts for a container of this snapshot. Mounts a converted image again if necessary (after a boot).

        Raises `NotFoundError`, and `BootseerError` if a converted image cannot be mounted.
        """
        record = self.records.get(key)
        if record.kind == COMMITTED:
            raise RefusedError(f"snapshot {key} is committed")
        lowers: list[str] = []
        for ancestor in self.records.ancestors(record.parent):
            if ancestor.image:  # includes all layers below it
                lowers += map(str, self._images.lowers(ancestor.image))
                break
            lowers.append(str(self._files(ancestor)))
        own = self._folder / str(record.id)
        if not lowers or (record.kind == VIEW and len(lowers) == 1):
            source = lowers[0] if lowers else str(own / "fs")
            return [Mount("bind", source, ["ro" if record.kind == VIEW else "rw", "rbind"])]
        options = [*self._options]
        if record.kind == ACTIVE:
            options += [f"workdir={own / 'work'}", f"upperdir={own / 'fs'}"]
        return [Mount("overlay", "overlay", [*options, f"lowerdir={':'.join(lowers)}"])]

    def commit(self, key: str, name: str, labels: Mapping[str, str]) -> None:
        """Turn the changes of an active snapshot into a layer. Raises as `Records.commit`."""
        size_bytes, inodes = self.usage(key)
        self.records.commit(key, name, labels, size_bytes, inodes)

    def usage(self, key: str) -> tuple[int, int]:
        """Disk usage in bytes, and inodes, of the snapshot alone; zero for a layer of a converted image.

        Blocks of converted images are in the node's cache, shared by images.
        """
        record = self.records.get(key)
        if record.kind == COMMITTED:
            return record.size_bytes, record.inodes
        seen: dict[tuple[int, int], int] = {}
        waiting = [self._files(record)]
        while waiting:  # `os.walk` of Python 3.11 ends at a thousand levels, which any container can make
            path = waiting.pop()
            with contextlib.suppress(OSError):  # a container may be changing the files, or its paths are too long
                status = path.lstat()
                seen[status.st_dev, status.st_ino] = status.st_blocks
                waiting += path.iterdir() if stat.S_ISDIR(status.st_mode) else ()
        return sum(seen.values()) * _BLOCK_BYTES, len(seen)

    def remove(self, key: str) -> None:
        """Remove a snapshot and its files; a converted image is unmounted with its last snapshot."""
        record = self.records.remove(key)
        if record.image:
            self.records.hand_over(record.image.partition("-")[0], self._images.same_layer)
            self._images.release(record.image, self.records.images)
        else:
            _delete(self._folder / str(record.id))

    def cleanup(self) -> None:
        """Delete folders without a snapshot, left by interrupted removals and pulls."""
        with self.records.change():  # excludes a snapshot in the making
            known = {str(record.id) for record in self.records.all()}
            left = [folder for folder in self._folder.iterdir() if folder.name not in known]
        for folder in left:
            _delete(folder)
        self._images.release_unknown(self.records.images)

    def remount(self) -> None:
        """Mount the converted images of all snapshots again. Failures are only logged."""
        for image in self.records.images():
            try:
                self._images.lowers(image)
            except (BootseerError, OSError) as error:
                _LOG.warning("image %s is not mounted: %s", image, error)

    def image_of(self, changes: Path) -> str:
        """The layer of a converted image (`LazyImages.layer`) on which the container with these changes runs, or ""."""
        with contextlib.suppress(BootseerError):
            for record in self.records.all():
                if record.kind == ACTIVE and record.parent and self._files(record) == changes:
                    return self.records.get(record.parent).image
        return ""

    def _files(self, record: Record) -> Path:
        return self._folder / str(record.id) / "fs"


def _delete(folder: Path) -> None:
    """Delete a folder. What cannot be deleted, because a shim is unmounting it right now, is left to `cleanup`."""
    try:
        delete_tree(folder)
    except OSError as error:
        _LOG.warning("%s cannot be deleted: %s", folder, error)

"""Convert a folder directly into an image of one layer.

Names are kept as they are: `.wh.NAME` is an ordinary file here, no whiteout. Sockets are left out, as in tar archives.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from bootseer.artifact.unpacked import read_sparse
from bootseer.erofs.merged import MergedLayers
from bootseer.erofs.writer import ErofsWriter, Extent
from bootseer.errors import PermanentError, UsageError
from bootseer.image.conversion.layer_tree import LayerTree
from bootseer.image.conversion.tar import HARD_LINK, Member
from bootseer.image.reference import Reference
from bootseer.image.sources.manifest import Platform
from bootseer.image.sources.source import ImageSource


def open_folder(reference: Reference, platform: Platform) -> ImageSource:
    """The folder as an image with an empty configuration. Raises `UsageError` if there is no such folder."""
    folder = Path(reference.path)
    if not folder.is_dir():
        hint = "name the folder of a root file system, or the image that a squashfs was made from"
        raise UsageError(f"{reference}: not a folder", hint=hint)
    config = {
        "architecture": platform.architecture,
        "os": platform.os,
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": []},
    }
    return ImageSource(str(reference), "", config, json.dumps(config, sort_keys=True).encode(), folder=folder)


def write_folder(writer: ErofsWriter, folder: Path, progress: Callable[[int], None]) -> None:
    """Write everything in a folder to `writer`. `progress` gets the bytes written so far.

    Raises `PermanentError` for files that cannot be read.
    """
    tree = LayerTree(writer, lower=MergedLayers([]), whiteouts=False)
    first_name: dict[tuple[int, int], bytes] = {}  # of each inode with several hard links
    try:
        for path, status in _walk(os.fsencode(folder)):
            full = os.path.join(os.fsencode(folder), path)  # noqa: PTH118 - bytes: names need not be text
            member = _member(full, path, status)
            if member is None:
                continue
            if member.kind != stat.S_IFDIR and status.st_nlink > 1:
                first = first_name.setdefault((status.st_dev, status.st_ino), path)
                if first != path:
                    member.kind, member.link = HARD_LINK, first
            extent = _store(writer, full) if member.kind == stat.S_IFREG else Extent(0, 0)
            tree.add(member, extent)
            progress(writer.position)
    except OSError as error:
        raise PermanentError(f"{os.fsdecode(error.filename or folder)}: {error.strerror}") from error


def _walk(root: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    """The root and everything in it, sorted by name, so that equal folders give equal images."""
    yield b"", os.lstat(root)
    waiting = [b""]
    while waiting:
        directory = waiting.pop()
        with os.scandir(os.path.join(root, directory)) as entries:  # noqa: PTH118
            found = sorted((entry.name, entry) for entry in entries)
        deeper = []
        for name, entry in found:
            path = directory + b"/" + name if directory else name
            status = entry.stat(follow_symlinks=False)
            yield path, status
            if stat.S_ISDIR(status.st_mode):
                deeper.append(path)
        waiting += reversed(deeper)


def _member(full: bytes, path: bytes, status: os.stat_result) -> Member | None:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFSOCK:
        return None
    return Member(
        path,
        kind,
        stat.S_IMODE(status.st_mode),
        status.st_uid,
        status.st_gid,
        status.st_mtime_ns,
        (os.major(status.st_rdev), os.minor(status.st_rdev)),
        os.readlink(full) if kind == stat.S_IFLNK else b"",  # noqa: PTH115 - Path would normalize the target
        status.st_size,
        _xattrs(full),
    )


def _xattrs(full: bytes) -> dict[bytes, bytes]:
    try:
        names = os.listxattr(full, follow_symlinks=False)
    except OSError:  # not supported by the file system
        return {}
    return {os.fsencode(name): os.getxattr(full, name, follow_symlinks=False) for name in names}


def _store(writer: ErofsWriter, full: bytes) -> Extent:
    """Write a file's data. Holes are not read. A file that shrinks meanwhile is stored with its new size."""
    descriptor = os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return writer.write_file(read_sparse(descriptor, os.fstat(descriptor).st_size))
    finally:
        os.close(descriptor)

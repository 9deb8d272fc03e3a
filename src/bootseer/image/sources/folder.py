"""A folder as an image of one layer, without a detour through tar.

Names are taken as they are, also those that would be whiteouts in a layer. Sockets are left out, as tar does.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from bootseer.artifact.unpacked import data_extents
from bootseer.erofs.writer import ErofsWriter, Extent
from bootseer.errors import PermanentError, UsageError
from bootseer.image.conversion.layer_tree import LayerTree, Lower
from bootseer.image.conversion.tar import HARD_LINK, Member
from bootseer.image.merged import MergedTree
from bootseer.image.reference import Reference
from bootseer.image.sources.manifest import Platform
from bootseer.image.sources.source import ImageSource

_PIECE = 1 << 20


def open_folder(reference: Reference, platform: Platform) -> ImageSource:
    """The folder as an image without any settings."""
    folder = Path(reference.path)
    if not folder.is_dir():
        raise UsageError(f"{reference}: no such folder", hint="name the root directory of a system")
    config = {
        "architecture": platform.architecture,
        "os": platform.os,
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": []},
    }
    return ImageSource(str(reference), "", config, json.dumps(config, sort_keys=True).encode(), folder=folder)


def write_folder(writer: ErofsWriter, folder: Path, progress: Callable[[int], None]) -> None:
    """Put everything below a folder into `writer`. `progress` gets the bytes of files that were read so far.

    Raises `PermanentError` for what cannot be read.
    """
    tree = LayerTree(writer, lower=Lower(MergedTree([])), whiteouts=False)
    first: dict[tuple[int, int], bytes] = {}
    try:
        for path, status in _walk(os.fsencode(folder)):
            full = os.path.join(os.fsencode(folder), path)  # noqa: PTH118 - bytes: names need not be text
            member = _member(full, path, status)
            if member is None:
                continue
            if member.kind != stat.S_IFDIR and status.st_nlink > 1:
                known = first.setdefault((status.st_dev, status.st_ino), path)
                if known != path:
                    member.kind, member.link = HARD_LINK, known
            extent = _store(writer, full) if member.kind == stat.S_IFREG else Extent(0, 0)
            tree.add(member, extent)
            progress(writer.position)
    except OSError as error:
        raise PermanentError(f"{os.fsdecode(error.filename or folder)}: {error.strerror}") from error


def _walk(root: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    """Everything below the root and itself, in an order that depends on names alone."""
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
        os.readlink(full) if kind == stat.S_IFLNK else b"",  # noqa: PTH115 - Path tidies what a link says
        status.st_size,
        _xattrs(full),
    )


def _xattrs(full: bytes) -> dict[bytes, bytes]:
    try:
        names = os.listxattr(full, follow_symlinks=False)
    except OSError:  # the file system has none
        return {}
    return {os.fsencode(name): os.getxattr(full, name, follow_symlinks=False) for name in names}


def _store(writer: ErofsWriter, full: bytes) -> Extent:
    """The data of a file. Holes are not read."""
    descriptor = os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size, at = os.fstat(descriptor).st_size, 0
        for begin, end in data_extents(descriptor, size):
            writer.write_zeros(begin - at)
            at = begin
            while at < end and (piece := os.pread(descriptor, min(_PIECE, end - at), at)):
                writer.write(piece)
                at += len(piece)
            if at < end:
                return writer.end_file()  # it became shorter meanwhile
        writer.write_zeros(size - at)
    finally:
        os.close(descriptor)
    return writer.end_file()

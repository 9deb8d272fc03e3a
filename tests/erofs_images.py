"""Make EROFS images in tests, mount them with the kernel, and describe trees of files.

`facts_of_folder` uses system calls and `facts_of_image` uses `ErofsReader`; for the same tree both return the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from bootseer.erofs.format import BLOCK, Attributes
from bootseer.erofs.reader import ErofsReader
from bootseer.erofs.writer import ErofsWriter

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting and owners of files need root")


@dataclass(frozen=True)
class Facts:
    """The visible state of one file. `content`: a digest, or a link's target; `same_file`: the file's first path."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    rdev: tuple[int, int]
    nlink: int
    size: int
    content: bytes
    xattrs: tuple[tuple[bytes, bytes], ...]
    same_file: bytes


Tree = Mapping[bytes, Facts]


def write_image(path: Path, fill: Callable[[ErofsWriter], None]) -> None:
    """Write an image file with the content that `fill` adds."""
    with path.open("wb") as file:
        file.seek(BLOCK)
        writer = ErofsWriter(file)
        fill(writer)
        head = writer.finish()
        file.seek(0)
        file.write(head)


def add_file(writer: ErofsWriter, attributes: Attributes, content: bytes) -> int:
    """Add a regular file, still without a name."""
    writer.write(content)
    extent = writer.end_file()
    return writer.tree.add(attributes, size=extent.size, first_block=extent.block)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[ErofsReader]:
    """A reader of an image file."""
    with path.open("rb") as file:
        yield ErofsReader(lambda offset, length: os.pread(file.fileno(), length, offset))


def fsck(path: Path) -> None:
    """Check the image with erofs-utils."""
    done = subprocess.run(["fsck.erofs", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def mounted(path: Path, target: Path) -> Iterator[Path]:
    """Mount the image with the kernel."""
    target.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "erofs", "-o", "ro,loop", path, target], check=True)
    try:
        yield target
    finally:
        subprocess.run(["umount", target], check=True)


@contextlib.contextmanager
def overlaid(layers: Sequence[Path], target: Path) -> Iterator[Path]:
    """A read-only overlayfs mount of folders, the last one on top."""
    target.mkdir(exist_ok=True)
    lowers = ":".join(str(layer) for layer in reversed(layers))
    empty = target.with_name(target.name + ".empty")  # overlayfs needs at least two lower layers
    empty.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", f"ro,lowerdir={lowers}:{empty}", target], check=True)
    try:
        yield target
    finally:
        subprocess.run(["umount", target], check=True)


def facts_of_folder(root: Path) -> dict[bytes, Facts]:
    """All files below a folder, and the folder itself (`b""`)."""
    found: dict[bytes, Facts] = {}
    first: dict[tuple[int, int], bytes] = {}
    base = os.fsencode(root)
    waiting = [b""]
    while waiting:
        path = waiting.pop()
        full = base + b"/" + path if path else base
        status = os.lstat(full)
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(full) as entries:
                names = sorted((entry.name for entry in entries), reverse=True)
            waiting += [path + b"/" + name if path else name for name in names]
        device = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
        found[path] = Facts(
            status.st_mode,
            status.st_uid,
            status.st_gid,
            status.st_mtime_ns,
            (os.major(status.st_rdev), os.minor(status.st_rdev)) if device else (0, 0),
            _links(status.st_mode, status.st_nlink),
            0 if stat.S_ISDIR(status.st_mode) else status.st_size,
            _content(full, status.st_mode),
            tuple(
                (os.fsencode(name), os.getxattr(full, name, follow_symlinks=False))
                for name in sorted(os.listxattr(full, follow_symlinks=False))
            ),
            first.setdefault((status.st_dev, status.st_ino), path),
        )
    return found


def facts_of_image(reader: ErofsReader) -> dict[bytes, Facts]:
    """The same for an image, from `ErofsReader`."""
    found: dict[bytes, Facts] = {}
    first: dict[int, bytes] = {}
    for path, inode in sorted(reader.walk(), key=lambda found: found[0].split(b"/")):
        content = b""
        if stat.S_ISREG(inode.mode):
            content = hashlib.sha256(b"".join(reader.read(inode))).digest()
        elif stat.S_ISLNK(inode.mode):
            content = reader.readlink(inode)
        found[path] = Facts(
            inode.mode,
            inode.uid,
            inode.gid,
            inode.mtime_ns,
            inode.rdev,
            _links(inode.mode, inode.nlink),
            0 if stat.S_ISDIR(inode.mode) else inode.size,
            content,
            tuple(sorted(reader.xattrs(inode).items())),
            first.setdefault(inode.number, path),
        )
    return found


def _links(mode: int, count: int) -> int:
    return 0 if stat.S_ISDIR(mode) else count  # file systems count a directory's links differently


def _content(path: bytes, mode: int) -> bytes:
    if stat.S_ISLNK(mode):
        return os.readlink(path)  # noqa: PTH115 - Path would normalize the target
    if stat.S_ISREG(mode):
        return hashlib.sha256(Path(os.fsdecode(path)).read_bytes()).digest()
    return b""

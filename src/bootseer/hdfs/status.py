"""What HDFS says of a name. Made by `names` and `lease`, read by the places and stores above."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bootseer.hdfs.protobuf import Message

_FOLDER: Final = 1


@dataclass(frozen=True, slots=True)
class FileStatus:
    """One file or folder as the NameNode knows it."""

    path: str
    """From the root of the file system on."""
    is_folder: bool
    size_bytes: int
    """0 for folders. Of a file that is being written: its finished blocks."""
    mtime_ms: int
    atime_ms: int
    """0 where the NameNode does not keep it."""
    mode: int
    """Permission bits."""
    owner: str
    group: str
    replication: int
    """0 for folders and for files of erasure coding."""
    block_size: int
    """0 for folders."""


def parse_status(path: str, told: Message) -> FileStatus:
    """A `HdfsFileStatusProto`. Raises `MalformedError`."""
    return FileStatus(
        path=path,
        is_folder=told.number(1) == _FOLDER,
        size_bytes=told.number(3),
        mtime_ms=told.number(7),
        atime_ms=told.number(8),
        mode=told.message(4).number(1) & 0o7777,
        owner=told.text(5),
        group=told.text(6),
        replication=told.number(10, 0),
        block_size=told.number(11, 0),
    )

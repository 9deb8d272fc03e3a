"""What HDFS says of a name. Made by `client`, read by the places and stores above it."""

from __future__ import annotations

from dataclasses import dataclass


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

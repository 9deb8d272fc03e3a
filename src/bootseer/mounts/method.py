"""The methods to mount block files."""

from __future__ import annotations

from enum import Enum


class MountMethod(Enum):
    """How layers become one file tree, the best method first. The value is the method's name in reports."""

    EROFS_FILE = "EROFS from files"
    """The kernel mounts EROFS directly from files: complete ones, or those that FUSE serves. Without FUSE, all layers
    are fetched before they are mounted."""
    EROFS_LOOP = "EROFS from loop devices"
    """The same through a loop device, for kernels before 6.12."""
    FUSE_TREE = "file trees through FUSE"
    """The daemon serves the merged tree of all layers; an overlay for changes is mounted in a user namespace."""
    UNPACK = "unpacked files"
    """Everything is fetched and unpacked into a folder."""

"""Choose the best method to mount block files on this machine, with the reasons why better ones do not work.

No I/O: the facts come from an attempt to mount or from the doctor's probes.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


class MountMethod(Enum):
    """How layers become one file tree, the best method first. The value is the method's name in reports."""

    EROFS_FILE = "EROFS from files"
    """The kernel mounts EROFS directly from files: complete ones, or those that FUSE serves."""
    EROFS_LOOP = "EROFS from loop devices"
    """The same through a loop device, for kernels before 6.12."""
    FUSE_TREE = "file trees through FUSE"
    """The daemon serves the merged tree of all layers; an overlay for changes is mounted in a user namespace."""
    UNPACK = "unpacked files"
    """Everything is fetched and unpacked into a folder."""


class Facts(Struct, frozen=True):
    """Facilities of this process on this machine: "" for one that works, else the reason why it does not."""

    mount: str = ""
    """Mount in the initial namespace, as root there."""
    namespace: str = ""
    """Create a user namespace, for a container without root."""
    fuse: str = ""
    erofs_file: str = ""
    loop: str = ""
    overlay: str = ""
    user_overlay: str = ""
    """Overlay in a user namespace; equal to `overlay` for root, which needs no namespace."""


class Choice(Struct, frozen=True):
    """The chosen method, and each better method with the reason why it does not work."""

    method: MountMethod
    refused: tuple[tuple[MountMethod, str], ...]


_NEEDS: tuple[tuple[MountMethod, tuple[str, ...]], ...] = (
    (MountMethod.EROFS_FILE, ("mount", "overlay", "erofs_file")),
    (MountMethod.EROFS_LOOP, ("mount", "overlay", "loop")),
    (MountMethod.FUSE_TREE, ("fuse", "user_overlay")),
)


def choose(facts: Facts) -> Choice:
    """The best method. EROFS needs no FUSE: without it, all layers are fetched before they are mounted."""
    refused: list[tuple[MountMethod, str]] = []
    for method, needs in _NEEDS:
        lacks = [reason for need in needs if (reason := getattr(facts, need))]
        if not lacks:
            return Choice(method, tuple(refused))
        refused.append((method, lacks[0]))
    return Choice(MountMethod.UNPACK, tuple(refused))

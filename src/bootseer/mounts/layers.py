"""Mount the layers of an image: each is an EROFS file, all together an overlay."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path

from bootseer.errors import AccessError, BootseerError, TransientError, UsageError, os_errors_as
from bootseer.fuse import syscalls
from bootseer.fuse.syscalls import MS_NODEV, MS_NOSUID, MS_RDONLY, number_of
from bootseer.logs import logger
from bootseer.mounts import kernel

_LOG = logger(__name__)
WHOLE_FILES = (("redirect_dir", "nofollow"), ("metacopy", "off"), ("index", "off"))
"""Options by which an upper layer holds only whole files and whiteouts, whatever the kernel's defaults are: redirects,
metadata-only copies and the index mean something only together with the layers below."""
_OF_LAYERS = MS_RDONLY | MS_NOSUID | MS_NODEV
"""Every user of the host may read a layer's mount. An overlay of layers has its own attributes."""

_LOOP_CONTROL = Path("/dev/loop-control")
_LOOP_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_READ_ONLY, _AUTOCLEAR = 1, 4
# struct loop_config: fd, block_size, struct loop_info64 (lo_flags at its byte 52), eight reserved words.
_LOOP_CONFIG = struct.Struct("=II52xI176x64x")
_ATTEMPTS = 64
_SPECIAL = re.compile(r".*[,:\\][^/]*", re.DOTALL)
"""The path as far as its last component with such a character."""


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


def mount_erofs(path: Path, target: Path, *, loop: bool | None = None) -> None:
    """Mount the EROFS file `path` on `target`, read-only, nodev and nosuid.

    Directly from the file where the kernel can (6.12), else through a loop device; `loop` forces one or the other.
    """
    if not loop:
        try:
            _mount_source(path, target, path)
            return
        except BootseerError as error:
            _LOG.info("not mounted as a file: %s", error)
            # ENOTBLK: this kernel requires a block device. Every other error would come with one too.
            if number_of(error) != errno.ENOTBLK or loop is False:
                raise
    device, held = _attach_loop(path)
    try:
        _mount_source(device, target, path)
    finally:
        os.close(held)


def _mount_source(source: Path, target: Path, path: Path) -> None:
    """Mount an EROFS file or device; errors name `path`."""
    try:
        options = [("source", str(source)), ("ro", None)]
        kernel.attach(kernel.create_mount("erofs", options, attributes=_OF_LAYERS), target)
    except BootseerError as error:
        raise type(error)(f"{path}: {error}") from error.__cause__  # which holds the errno


def mount_overlay(
    lowers: Sequence[Path],
    target: Path,
    *,
    upper: Path | None = None,
    work: Path | None = None,
    attributes: int = MS_NODEV,
    userxattr: bool = False,
    volatile: bool = False,
) -> None:
    """Stack folders with overlayfs: the first of `lowers` is the lowest.

    Writable with `upper` and `work` (an empty folder on the same file system), else read-only. overlayfs needs two
    layers, so a single one without `upper` is bind mounted: its whiteouts, which hide nothing, appear as devices 0/0.
    `attributes`: `MS_NODEV`, `MS_NOSUID`, ... `userxattr` is for user namespaces. `volatile`: neither unmount nor fsync
    sync the file system of `upper`.
    """
    if (upper is None) != (work is None):
        raise UsageError("an overlay takes upper and work folders together or neither")
    if upper is None and len(lowers) == 1:
        kernel.attach(kernel.clone_mount(lowers[0]), target)
        kernel.restrict(target, attributes | MS_RDONLY, allow=MS_NOSUID & ~attributes)
        return
    attributes |= 0 if upper else MS_RDONLY
    words = [name for name, given in (("userxattr", userxattr), ("volatile", volatile)) if given]
    with contextlib.ExitStack() as opened:
        if upper and work:
            changes = opened.enter_context(short_names([upper, work]))
            words += [f"upperdir={changes[0]}", f"workdir={changes[1]}", *map("=".join, WHOLE_FILES)]
        # The kernel takes all options in one page: some 200 layers fit by the numbers of their descriptors.
        for plain in (True, False):
            names = opened.enter_context(short_names(lowers[::-1], plain=plain))
            options = ",".join([*words, "lowerdir=" + ":".join(names)])
            if len(os.fsencode(options)) < os.sysconf("SC_PAGE_SIZE"):
                break
        syscalls.mount("overlay", "bootseer", target, flags=attributes, options=options)


def copy_attributes(source: Path | str, upper: Path) -> None:
    """Copy owner, mode, times and xattrs of `source` to `upper`, as far as permitted: an overlay's root shows these."""
    status = os.stat(source)  # noqa: PTH116
    with contextlib.suppress(PermissionError):
        os.chown(upper, status.st_uid, status.st_gid)
    for name in os.listxattr(os.fsencode(source)):
        if not os.fsencode(name).startswith((b"trusted.overlay.", b"user.overlay.")):
            with contextlib.suppress(OSError):  # of a security module, forbidden for this user, or not supported
                os.setxattr(upper, name, os.getxattr(source, name))
    upper.chmod(stat.S_IMODE(status.st_mode))
    os.utime(upper, ns=(status.st_atime_ns, status.st_mtime_ns))


@contextlib.contextmanager
def short_names(folders: Sequence[Path], *, plain: bool = True) -> Iterator[list[str]]:
    """A name for each folder that can be a mount option's value: its path (if `plain`), or that of a descriptor in
    /proc. Paths are preferred, because the mount table shows these names (`kernel.is_mounted_anywhere`)."""
    names, opened = [], []
    try:
        for folder in folders:
            name = str(folder.absolute())
            top = name
            if plain and len(os.fsencode(name)) <= kernel.MAX_STRING:
                # Special characters have a meaning in the options of some kernels.
                top = found[0] if (found := _SPECIAL.match(name)) else ""
            if top:
                opened.append(os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
                name = f"/proc/self/fd/{opened[-1]}{name[len(top) :]}"
            names.append(name)
        yield names
    except OSError as error:
        raise syscalls.failure(f"open layer {error.filename}", error.errno or errno.EIO) from error
    finally:
        for number in opened:
            os.close(number)


def _attach_loop(path: Path) -> tuple[Path, int]:
    """Attach `path` read-only to a free loop device, which is released with its last user.

    Returns the device and a descriptor that keeps it until it is mounted.
    """
    with os_errors_as(AccessError, f"cannot open {_LOOP_CONTROL}"):
        control = os.open(_LOOP_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    backing = -1
    try:
        backing = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        for _ in range(_ATTEMPTS):
            device = Path(f"/dev/loop{fcntl.ioctl(control, _LOOP_GET_FREE)}")
            try:
                return device, _configure_loop(device, backing)
            except OSError as error:
                if error.errno != errno.EBUSY:  # EBUSY: another process took it between the two calls
                    raise
        raise TransientError(f"no loop device was free for {path} in {_ATTEMPTS} attempts")
    except OSError as error:
        raise syscalls.failure(f"attach {path} to a loop device", error.errno or errno.EIO) from error
    finally:
        os.close(control)
        if backing >= 0:
            os.close(backing)


def _configure_loop(device: Path, backing: int) -> int:
    opened = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(opened, _LOOP_CONFIGURE, bytearray(_LOOP_CONFIG.pack(backing, 0, _READ_ONLY | _AUTOCLEAR)))
    except BaseException:
        os.close(opened)
        raise
    return opened

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
from pathlib import Path

from bootseer.errors import AccessError, BootseerError, TransientError, UsageError, os_errors_as
from bootseer.fuse import syscalls
from bootseer.fuse.syscalls import MS_NODEV, MS_NOSUID, MS_RDONLY, number_of
from bootseer.logs import logger
from bootseer.mounts import kernel

_LOG = logger(__name__)
MAX_LAYERS = 500
"""The limit of overlayfs."""
_OF_LAYERS = MS_RDONLY | MS_NOSUID | MS_NODEV
"""Every user of the host may read a layer's mount. An overlay of layers has its own attributes."""

_LOOP_CONTROL = Path("/dev/loop-control")
_LOOP_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_READ_ONLY, _AUTOCLEAR = 1, 4
# struct loop_config: fd, block_size, struct loop_info64 (lo_flags at its byte 52), eight reserved words.
_LOOP_CONFIG = struct.Struct("=II52xI176x64x")
_ATTEMPTS = 64
_PLAIN = re.compile(rb"[A-Za-z0-9_./+=@%~-]+")


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
    one_option: bool = True,
) -> None:
    """Stack folders with overlayfs: the first of `lowers` is the lowest.

    Writable with `upper` and `work` (an empty folder on the same file system), else read-only. overlayfs needs two
    layers, so a single one without `upper` is bind mounted: its whiteouts, which hide nothing, appear as devices 0/0.
    `attributes`: `MS_NODEV`, `MS_NOSUID`, ... `userxattr` is for user namespaces. `volatile`: neither unmount nor fsync
    sync the file system of `upper`. `one_option`: one mount option per layer (Linux 6.7) where the kernel has it.
    """
    if not 1 <= len(lowers) <= MAX_LAYERS:
        raise UsageError(f"{len(lowers)} layers", hint=f"overlayfs takes 1 to {MAX_LAYERS}")
    if (upper is None) != (work is None):
        raise UsageError("an overlay takes upper and work folders together or neither")
    if upper is None and len(lowers) == 1:
        kernel.attach(kernel.clone_mount(lowers[0]), target)
        kernel.restrict(target, attributes | MS_RDONLY, allow=MS_NOSUID & ~attributes)
        return
    attributes |= 0 if upper else MS_RDONLY
    folders = [*reversed(lowers), *([upper, work] if upper and work else [])]
    flags = [name for name, given in (("userxattr", userxattr), ("volatile", volatile)) if given]
    if one_option:
        with short_names(folders) as names:
            options: list[tuple[str, str | None]] = [("source", "bootseer")]
            options += [("lowerdir+", name) for name in names[: len(lowers)]]
            options += list(zip(("upperdir", "workdir"), names[len(lowers) :], strict=False))
            options += [(name, None) for name in flags]
            try:
                kernel.attach(kernel.create_mount("overlay", options, attributes=attributes), target)
                return
            except BootseerError as error:
                # EINVAL at the first layer: an older kernel does not have the option.
                if number_of(error) != errno.EINVAL or "option lowerdir+" not in str(error):
                    raise
    # mount(2) takes all options in one page: some 220 layers fit by the numbers of their descriptors.
    with short_names(folders, plain=False) as names:
        changes = zip(("upperdir", "workdir"), names[len(lowers) :], strict=False)
        words = ["lowerdir=" + ":".join(names[: len(lowers)]), *map("=".join, changes), *flags]
        syscalls.mount("overlay", "bootseer", target, flags=attributes, options=",".join(words))


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
    /proc."""
    names, opened = [], []
    try:
        for folder in folders:
            name = str(folder.absolute())
            # Backslashes, commas and colons have a meaning in the options of some kernels.
            if not plain or len(os.fsencode(name)) > kernel.MAX_STRING or not _PLAIN.fullmatch(os.fsencode(name)):
                opened.append(os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
                name = f"/proc/self/fd/{opened[-1]}"
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

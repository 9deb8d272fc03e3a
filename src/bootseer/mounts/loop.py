"""Loop devices: a file as a block device, for kernels that mount EROFS from block devices only.

Who calls: `layers`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

from bootseer.errors import AccessError, TransientError
from bootseer.fuse.syscalls import failure

_CONTROL = Path("/dev/loop-control")
_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A
_READ_ONLY, _AUTOCLEAR = 1, 4
# struct loop_config: fd, block_size, struct loop_info64 (lo_flags at its byte 52), eight reserved words.
_CONFIG = struct.Struct("=II52xI176x64x")
_ATTEMPTS = 64


def attach_loop(path: Path) -> tuple[Path, int]:
    """Tie `path` to a free loop device, read-only. The device frees itself when its last user is gone.

    Returns the device and a descriptor that keeps it until it is mounted.
    """
    try:
        control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise AccessError(f"cannot open {_CONTROL}: {error.strerror}") from error
    backing = -1
    try:
        backing = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        for _ in range(_ATTEMPTS):
            device = Path(f"/dev/loop{fcntl.ioctl(control, _GET_FREE)}")
            try:
                return device, _configure(device, backing)
            except OSError as error:
                if error.errno != errno.EBUSY:  # EBUSY: somebody took it between the two calls
                    raise
        raise TransientError(f"no loop device was free for {path} in {_ATTEMPTS} attempts")
    except OSError as error:
        raise failure(f"tie {path} to a loop device", error.errno or errno.EIO) from error
    finally:
        os.close(control)
        if backing >= 0:
            os.close(backing)


def _configure(device: Path, backing: int) -> int:
    opened = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(opened, _CONFIGURE, bytearray(_CONFIG.pack(backing, 0, _READ_ONLY | _AUTOCLEAR)))
    except BaseException:
        os.close(opened)
        raise
    return opened

"""What blocks leave free on a disk: room for the small files beside them.

Without it the first start that fills the disk would take from the next ones what they need to begin: states, snapshots,
the descriptions of images. A few pages of each file are enough; blocks that do not fit are served without being kept.
Called by `CachedFile.put`.
"""

from __future__ import annotations

import errno
import os

_RESERVE_BYTES = 16 << 20
_RESERVE_SHARE = 1 / 32
"""Of a small disk no more than this."""


def leave(fd: int, offset: int, length: int) -> None:
    """Raise `OSError` (ENOSPC) when writing there would use up the reserve. What has its room already may be written
    again."""
    disk = os.fstatvfs(fd)
    reserve = min(_RESERVE_BYTES, int(disk.f_blocks * disk.f_frsize * _RESERVE_SHARE))
    if disk.f_bavail * disk.f_frsize < reserve + length and _is_hole(fd, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _is_hole(fd: int, offset: int, length: int) -> bool:
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) >= offset + length
    except OSError as error:
        return error.errno == errno.ENXIO  # no data from there to the end

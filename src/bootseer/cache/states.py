"""The block states of a cached file: shared by live processes, and as a snapshot that survives a reboot.

`LiveMap` is shared by all processes of one boot: a file with one byte per block after a header with the boot id. It is
accessed by `pread` and `pwrite`, which are coherent through the page cache, return errors where a mapping would raise
SIGBUS (no space, truncated file), and cost 0.6 µs. It is only as durable as the page cache: after a machine crash it
may list blocks whose data was never written, so another boot ignores it.

`Durable` is for other boots: a snapshot of the live states written after the data was synced. Even its blocks are
verified before their first use.

The formats are in docs/formats/cache.md.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from blake3 import blake3
from msgspec import Struct
from msgspec.structs import astuple

from bootseer.blocks.codec import ZERO
from bootseer.blocks.index import Index
from bootseer.cache import disk
from bootseer.cache.disk import Damaged
from bootseer.io.files import sync_path, write_all
from bootseer.io.locks import HELD_BY_ANOTHER

MISSING = 0
UNVERIFIED = 1
"""Present according to a snapshot of an earlier boot."""
READY = 2
"""Written or verified in this boot."""

_LIVE_HEADER = struct.Struct("<8s32s16sQ")  # magic, identity, boot, blocks
_LIVE_MAGIC = b"BSLIVE01"
_DURABLE_HEADER = struct.Struct("<8s32sQ?7xQqqQ")  # magic, identity, blocks, whole, size, mtime, ctime, inode
_DURABLE_MAGIC = b"BSDURA01"
_DIGEST_BYTES = 32
SYNC_CLAIM = -1
"""A pseudo block number: the claim on writing the durable snapshot."""
_FLOCK = struct.Struct("@hhqqi4x")
"""struct flock: type, whence, start, length, pid. The native alignment is the kernel's."""
_FOLD = bytes([MISSING]) + bytes([UNVERIFIED]) * 255


class StatIdentity(Struct, frozen=True):
    """Attributes of a file that change when it is modified. Times in ns."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, fd: int) -> StatIdentity:
        status = os.fstat(fd)
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


class Durable(Struct, frozen=True):
    """A snapshot of the states, one byte per block. READY ones are stored as UNVERIFIED: another boot reads them.

    `whole`: the data file's identity when all blocks were verified and synced; None otherwise.
    """

    states: bytes
    whole: StatIdentity | None = None

    def encode(self, identity: str) -> bytes:
        numbers = (0, 0, 0, 0) if self.whole is None else astuple(self.whole)
        head = (_DURABLE_MAGIC, bytes.fromhex(identity), len(self.states), self.whole is not None)
        body = _DURABLE_HEADER.pack(*head, *numbers) + self.states.translate(_FOLD)
        return body + blake3(body).digest()

    @classmethod
    def parse(cls, data: bytes, index: Index) -> Durable | None:
        """None unless it is a valid snapshot of this file."""
        end = _DURABLE_HEADER.size + index.num_blocks
        if len(data) != end + _DIGEST_BYTES or blake3(data[:end]).digest() != data[end:]:
            return None
        magic, identity, num_blocks, whole, *numbers = _DURABLE_HEADER.unpack_from(data)
        if (magic, identity.hex(), num_blocks) != (_DURABLE_MAGIC, index.identity, index.num_blocks):
            return None
        return cls(data[_DURABLE_HEADER.size : end], StatIdentity(*numbers) if whole else None)

    @classmethod
    def of_new(cls, index: Index) -> Durable:
        """The states of a new file, which is one hole: all-zero blocks are present."""
        table = bytes(UNVERIFIED if codec == ZERO else MISSING for codec in range(256))
        return cls(index.codecs().translate(table))

    @classmethod
    def load(cls, entry: Path, index: Index) -> Durable | None:
        """The entry's snapshot; None if there is no valid one."""
        try:
            data = disk.read_file(entry / disk.DURABLE, _DURABLE_HEADER.size + index.num_blocks + _DIGEST_BYTES)
        except (FileNotFoundError, Damaged):
            return None
        return cls.parse(data, index)

    def store(self, entry: Path, index: Index) -> None:
        """Replace the entry's snapshot durably. The data must be synced before. Raises `OSError`."""
        disk.write_file(entry / disk.DURABLE, self.encode(index.identity), durable=True)
        sync_path(entry)


class LiveMap:
    """The states shared by the processes of this boot. Safe for all threads."""

    def __init__(self, fd: int, num_blocks: int) -> None:
        self.fd = fd
        self._num_blocks = num_blocks

    @classmethod
    def open(cls, entry: Path, index: Index, boot: str) -> LiveMap | None:
        """The map of an entry; None if it is of another boot or file."""
        try:
            fd = disk.open_file(entry / disk.LIVE)
        except (FileNotFoundError, Damaged):
            return None
        header = _live_header(index, boot)
        size = os.fstat(fd).st_size
        if size != len(header) + index.num_blocks or os.pread(fd, len(header), 0) != header:
            os.close(fd)
            return None
        return cls(fd, index.num_blocks)

    @staticmethod
    def create(entry: Path, index: Index, boot: str, states: bytes) -> None:
        """Create a new map, holding the root lock. Raises `OSError`.

        All bytes are written, so that later changes need no disk space. For the same reason the map of an earlier boot
        is overwritten in place, the header last: in between it is valid for no boot.
        """
        header, path = _live_header(index, boot), entry / disk.LIVE
        try:
            fd = disk.open_file(path)
        except (FileNotFoundError, Damaged):
            disk.write_file(path, header + states)
            return
        try:
            os.ftruncate(fd, len(header) + len(states))
            write_all(fd, bytes(len(header)) + states, 0)
            write_all(fd, header, 0)
        finally:
            os.close(fd)

    def get(self, block: int) -> int:
        """The state of one block; MISSING beyond a truncated end, and if the disk cannot read it."""
        try:
            state = os.pread(self.fd, 1, _LIVE_HEADER.size + block)
        except OSError:
            return MISSING
        return state[0] if state else MISSING

    def get_all(self, start: int = 0, stop: int | None = None) -> bytes:
        """The states of blocks `start` to `stop`."""
        count = (self._num_blocks if stop is None else stop) - start
        return os.pread(self.fd, count, _LIVE_HEADER.size + start).ljust(count, bytes([MISSING]))

    def set(self, block: int, state: int) -> None:
        """Set the state of one block for all processes. Raises `OSError`."""
        os.pwrite(self.fd, bytes((state,)), _LIVE_HEADER.size + block)

    def try_claim(self, block: int) -> bool:
        """Lock the byte of a block against other open file descriptions, without blocking. Raises `OSError`.

        OFD locks are released when their holder dies, however it dies. Classic POSIX record locks would be released
        whenever any descriptor of the file is closed in the process.
        """
        try:
            self._lock(fcntl.F_WRLCK, block)
        except OSError as error:
            if error.errno in HELD_BY_ANOTHER:
                return False
            raise
        return True

    def release_claim(self, block: int) -> None:
        """Undo `try_claim`. Nothing happens if it is not locked."""
        self._lock(fcntl.F_UNLCK, block)

    def any_claim(self, block: int | None = None) -> bool:
        """Whether another open file description claims a block, or any block. Raises `OSError`."""
        first, count = (0, self._num_blocks) if block is None else (block, 1)
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _LIVE_HEADER.size + first, count, 0)
        return bool(_FLOCK.unpack(fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)

    def _lock(self, kind: int, block: int) -> None:
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, _LIVE_HEADER.size + block, 1, 0))


def _live_header(index: Index, boot: str) -> bytes:
    digest = blake3(boot.encode()).digest()[:16]  # fixed length, whatever the boot id looks like
    return _LIVE_HEADER.pack(_LIVE_MAGIC, bytes.fromhex(index.identity), digest, index.num_blocks)

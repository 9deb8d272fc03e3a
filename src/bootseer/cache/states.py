"""Which blocks of a cached file are here, as several live processes see it and as it survives the machine.

`LiveMap` is the state that all processes of one boot share: a file with one byte per block behind a header that names
the boot. It is read and written with `pread` and `pwrite`, which see each other's bytes at once through the page cache,
raise an error where a mapping would raise SIGBUS (no room, file cut), and cost 0.6 µs. It is as good as the page cache:
after a crash of the machine it may claim blocks whose data was never written, so another boot does not read it.

`Durable` is what another boot reads: a snapshot of the live states that was written after the data was synced. Even
that is a claim only, and each block that rests on it is verified before its first use.

docs/formats/cache.md has the bytes.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from bootseer.blocks.codec import ZERO
from bootseer.blocks.index import Index
from bootseer.cache import disk
from bootseer.cache.disk import Damaged
from bootseer.io.locks import HELD_BY_ANOTHER

MISSING = 0
CLAIMED = 1
"""An earlier boot says that it is here: to be verified."""
READY = 2
"""Written or verified in this boot."""

_LIVE_HEADER = struct.Struct("<8s32s16sQ")  # magic, identity, boot, blocks
_LIVE_MAGIC = b"BSLIVE01"
_DURABLE_HEADER = struct.Struct("<8s32sQ?7xQqqQ")  # magic, identity, blocks, whole, size, mtime, ctime, inode
_DURABLE_MAGIC = b"BSDURA01"
_DIGEST_BYTES = 32
SYNC = -1
"""Instead of a block's number: the claim on writing the durable snapshot."""
_FLOCK = struct.Struct("@hhqqi4x")
"""struct flock: type, whence, start, length, pid. The native alignment is the kernel's."""
_FOLD = bytes([MISSING]) + bytes([CLAIMED]) * 255


@dataclass(frozen=True, slots=True)
class StatIdentity:
    """What changes when a file is written to. Times are in ns."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, fd: int) -> StatIdentity:
        status = os.fstat(fd)
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class Durable:
    """A snapshot of the states, one byte per block, MISSING or CLAIMED.

    `whole` is what the data file was when all its blocks had been verified and synced; None otherwise.
    """

    states: bytes
    whole: StatIdentity | None = None

    def encode(self, identity: str) -> bytes:
        whole = self.whole or StatIdentity(0, 0, 0, 0)
        body = (
            _DURABLE_HEADER.pack(
                _DURABLE_MAGIC,
                bytes.fromhex(identity),
                len(self.states),
                self.whole is not None,
                whole.size,
                whole.mtime_ns,
                whole.ctime_ns,
                whole.inode,
            )
            + self.states
        )
        return body + blake3(body).digest()

    @classmethod
    def parse(cls, data: bytes, index: Index) -> Durable | None:
        """None for all that is not a whole snapshot of this file: then nothing is known."""
        end = _DURABLE_HEADER.size + index.num_blocks
        if len(data) != end + _DIGEST_BYTES or blake3(data[:end]).digest() != data[end:]:
            return None
        magic, identity, num_blocks, whole, *numbers = _DURABLE_HEADER.unpack_from(data)
        if (magic, identity.hex(), num_blocks) != (_DURABLE_MAGIC, index.identity, index.num_blocks):
            return None
        return cls(data[_DURABLE_HEADER.size : end], StatIdentity(*numbers) if whole else None)

    @classmethod
    def of_new(cls, index: Index) -> Durable:
        """States of a file that is one hole: its blocks of zeros are there."""
        table = bytes(CLAIMED if codec == ZERO else MISSING for codec in range(256))
        return cls(index.codecs().translate(table))

    @classmethod
    def from_states(cls, states: bytes, whole: StatIdentity | None = None) -> Durable:
        return cls(states.translate(_FOLD), whole)

    @classmethod
    def load(cls, entry: Path, index: Index) -> Durable | None:
        """The snapshot of an entry, if it has one that can be believed."""
        try:
            data = disk.read_file(entry / disk.DURABLE, durable_bytes(index))
        except (FileNotFoundError, Damaged):
            return None
        return cls.parse(data, index)

    def store(self, entry: Path, index: Index) -> None:
        """Replace the entry's snapshot, durably. The data must have been synced before. Raises `OSError`."""
        disk.write_file(entry / disk.DURABLE, self.encode(index.identity), durable=True)
        disk.sync_path(entry)


def durable_bytes(index: Index) -> int:
    return _DURABLE_HEADER.size + index.num_blocks + _DIGEST_BYTES


class LiveMap:
    """The states that the processes of this boot share. All methods may be called from any thread."""

    def __init__(self, fd: int, num_blocks: int) -> None:
        self.fd = fd
        self._num_blocks = num_blocks

    @classmethod
    def open(cls, entry: Path, index: Index, boot: str) -> LiveMap | None:
        """The map of an entry; None when it is not of this boot and this file."""
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
        """Begin a new map, with the lock of the root held. Raises `OSError`.

        All bytes are written, so that later changes need no room. For the same reason the map of an earlier boot is
        overwritten in its place, the header last: until then it is the map of no boot.
        """
        header, path = _live_header(index, boot), entry / disk.LIVE
        try:
            fd = disk.open_file(path)
        except (FileNotFoundError, Damaged):
            disk.write_file(path, header + states)
            return
        try:
            os.ftruncate(fd, len(header) + len(states))
            disk.write_all(fd, bytes(len(header)) + states, 0)
            disk.write_all(fd, header, 0)
        finally:
            os.close(fd)

    def get(self, block: int) -> int:
        """State of one block; a map that was cut has none."""
        state = os.pread(self.fd, 1, _LIVE_HEADER.size + block)
        return state[0] if state else MISSING

    def get_all(self, start: int = 0, stop: int | None = None) -> bytes:
        """States of blocks `start` to `stop`, in one snapshot."""
        count = (self._num_blocks if stop is None else stop) - start
        return os.pread(self.fd, count, _LIVE_HEADER.size + start).ljust(count, bytes([MISSING]))

    def set(self, block: int, state: int) -> None:
        """Change the state of one block, for all processes at once. Raises `OSError`."""
        os.pwrite(self.fd, bytes((state,)), _LIVE_HEADER.size + block)

    def set_all(self, states: bytes) -> None:
        """Change all states. Only with the entry for oneself. Raises `OSError`."""
        disk.write_all(self.fd, states, _LIVE_HEADER.size)

    def try_claim(self, block: int) -> bool:
        """Lock the byte of a block against all other open file descriptions, without waiting. Raises `OSError`.

        Claims are locks of the open file description (OFD), which fall when their holder dies, however it dies.
        Classic POSIX record locks would fall when any descriptor of the file is closed anywhere in the process.
        """
        try:
            self._lock(fcntl.F_WRLCK, block)
        except OSError as error:
            if error.errno in HELD_BY_ANOTHER:
                return False
            raise
        return True

    def release_claim(self, block: int) -> None:
        """Undo `try_claim`. Nothing happens when it is not locked."""
        self._lock(fcntl.F_UNLCK, block)

    def any_claim(self, block: int | None = None) -> bool:
        """Whether another open file description holds a claim on a block, or on any. Raises `OSError`."""
        first, count = (0, self._num_blocks) if block is None else (block, 1)
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _LIVE_HEADER.size + first, count, 0)
        return bool(_FLOCK.unpack(fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)

    def _lock(self, kind: int, block: int) -> None:
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, _LIVE_HEADER.size + block, 1, 0))


def _live_header(index: Index, boot: str) -> bytes:
    digest = blake3(boot.encode()).digest()[:16]  # whatever the kernel's names of boots look like
    return _LIVE_HEADER.pack(_LIVE_MAGIC, bytes.fromhex(index.identity), digest, index.num_blocks)

"""One file in the cache: read present blocks, store fetched ones, and list missing ones.

Safe for many threads, and for many processes, each with its own `CachedFile`. Block states are shared through the live
map. That a block was verified is known per process, in a byte array whose elements only change under the GIL, so that
`read` takes no lock.

After a fork only one of the two processes may continue to use an open file, because both share the claims, which are
locks of the open file description. The other one closes it, which leaves the lease of the first intact. Fork while no
other thread is in a call.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from bootseer.blocks.codec import Buffer, digest_of
from bootseer.blocks.index import Index
from bootseer.cache import disk, entries
from bootseer.cache.disk import MissingBlocks, mapped
from bootseer.cache.states import MISSING, READY, SYNC_CLAIM, Durable, LiveMap, StatIdentity
from bootseer.errors import PermanentError, TransientError
from bootseer.io.files import sync_path, write_all
from bootseer.io.tasks import Tasks

_SYNC_DEADLINE_S = 60.0
_POLL_S = 0.01
_VERIFIED_AT_ONCE = 256
_RESERVE_BYTES = 16 << 20
"""Free space that blocks leave on a disk, for the small files beside them."""
_RESERVE_SHARE = 1 / 10
"""At most this share of a small disk."""

Progress = Callable[[int, int], None]
"""Called with blocks done and blocks in all."""


class CachedFile:
    """A lease on one cached file. Until `close` nothing of it is evicted."""

    def __init__(self, entry: Path, index: Index, *, lease: int, data: int, live: LiveMap) -> None:
        """Takes ownership of the descriptors; `lease` is locked."""
        self.index = index
        self.entry = entry
        self.path = entry / disk.DATA
        """A sparse file of full size: holes are missing blocks. Mount it only if `trusted`."""
        _devnull()  # opened now: `close` must not need a new descriptor
        self._fds = (lease, data, live.fd)
        self._data = data
        self._live = live
        self._size = index.size_bytes
        self._shift = index.block_size.bit_length() - 1
        self._verified = bytearray(index.num_blocks)
        self._claimed: set[int] = set()
        self._lock = threading.Lock()  # guards _claimed
        self._sync_lock = threading.Lock()  # one thread syncs at a time; guards _anchored
        self._unsynced = True  # another process may have died before it synced
        self._anchored = False
        self.is_use = False
        """Whether the entry counts as used until this is closed."""
        self._closed = False
        self._finalizer = weakref.finalize(self, _close_all, self._fds)
        # Not at interpreter exit: other threads may still use the numbers; the kernel closes them.
        self._finalizer.atexit = False

    def ready(self, block: int) -> bool:
        """Whether a block is present as far as known: `read` verifies it."""
        return self._verified[block] == 1 or self._live.get(block) != MISSING

    @property
    def num_ready(self) -> int:
        return self.index.num_blocks - self._live.get_all().count(MISSING)

    @property
    def complete(self) -> bool:
        return MISSING not in self._live.get_all()

    @property
    def trusted(self) -> bool:
        """Whether `path` may be mounted directly: complete, synced and verified, and not modified since."""
        with mapped("read", self.entry):
            durable = Durable.load(self.entry, self.index)
            whole = StatIdentity.of(self._data)
        states = self._live.get_all()
        return durable is not None and durable.whole == whole and states.count(READY) == len(states)

    def missing(self, offset: int, length: int) -> list[int]:
        blocks = self.index.blocks_of(offset, length)
        if self._verified.find(0, blocks.start, blocks.stop) < 0:
            return []
        states = self._live.get_all(blocks.start, blocks.stop)
        return [block for block, state in zip(blocks, states, strict=True) if state == MISSING]

    @property
    def missing_bytes(self) -> int:
        """Stored size of the missing blocks."""
        missing = self.missing(0, self._size)
        # Summing up a million blocks would take longer than it is worth.
        if len(missing) == self.index.num_blocks:
            return self.index.stored_bytes
        return sum(self.index.place(block).length for block in missing)

    def read(self, offset: int, length: int) -> bytes:
        """A range of the file, cut at its end. Raises `MissingBlocks` for blocks that are missing or damaged.

        A block is verified at its first use in this process, and dropped if its digest is wrong.
        """
        end = min(offset + length, self._size)
        if end <= offset or offset < 0:
            return b""
        first, last = offset >> self._shift, (end - 1) >> self._shift
        if self._verified.find(0, first, last + 1) < 0:
            try:
                data = os.pread(self._data, end - offset, offset)
            except OSError:
                data = b""
            if len(data) == end - offset:
                return data
            # Truncated by another program, or a disk error: previous verification is void.
            self._verified[first : last + 1] = bytes(last + 1 - first)
        checked = bytearray(end - offset)
        self.readinto(offset, memoryview(checked))
        return bytes(checked)

    def readinto(self, offset: int, into: memoryview) -> None:
        """Read a range inside the file into `into`, whose content is undefined after `MissingBlocks`. Whole blocks are
        read without a copy, and verified as in `read`."""
        end = offset + len(into)
        missing = []
        for block in self.index.blocks_of(offset, len(into)):
            start = block << self._shift
            low, high = max(start, offset), min(start + self.index.length(block), end)
            part = into[low - offset : high - offset]
            if not self.ready(block):
                missing.append(block)
            elif self._verified[block] or high - low == self.index.length(block):
                if not self._fill(block, low, part):
                    missing.append(block)
            else:
                whole = memoryview(bytearray(self.index.length(block)))
                if self._fill(block, start, whole):
                    part[:] = whole[low - start : high - start]
                else:
                    missing.append(block)
        self._check_open()
        if missing:
            raise MissingBlocks(missing)

    def descriptor(self) -> int:
        """A descriptor for `sendfile`; its content at missing blocks is undefined. Valid while this object exists: of
        /dev/null after `close`."""
        self._check_open()
        return self._data

    def put(self, block: int, data: Buffer, *, reserve_bytes: int = _RESERVE_BYTES) -> None:
        """Store a block whose digest the caller has verified. On `CacheFull`, which also says that less free space than
        `reserve_bytes` would be left, nothing changes.

        It survives the end of this process at once, and a machine crash after the next `sync`.
        """
        if len(data) != self.index.length(block):
            raise ValueError(f"{len(data)} bytes for block {block} of {self.index.length(block)}")
        self._check_open()
        if self._verified[block]:
            return
        with mapped("write to", self.path):
            _check_reserve(self._data, block << self._shift, len(data), reserve_bytes)
            write_all(self._data, data, block << self._shift)
            self._live.set(block, READY)
        self._verified[block] = 1
        self._unsynced = True  # set last: a concurrent sync could have reset it without seeing the block

    def claim(self, block: int) -> bool:
        """Claim the right to fetch this block among all processes; False if it is present or claimed.

        A claim is an OFD lock on the block's byte in the live map. It is released by the kernel when its process dies,
        so no lease has to expire: a process without the claim waits for `ready`, and tries to claim again now and then.
        `ready` is checked again under the lock: the last holder may have stored the block between the first check and
        our lock.
        """
        self._check_open()
        with self._lock, mapped("lock a block of", self.entry):
            if block in self._claimed or self.ready(block):
                return False
            if not self._live.try_claim(block):
                return False
            if self.ready(block):
                self._live.release_claim(block)
                return False
            self._claimed.add(block)
            return True

    def release(self, block: int) -> None:
        """Release a claim, after `put` or a failure. Nothing happens if it is not held."""
        with self._lock, mapped("unlock a block of", self.entry):
            if block in self._claimed:
                self._claimed.discard(block)
                self._live.release_claim(block)

    def is_claimed(self, block: int | None = None) -> bool:
        """Whether this block is claimed; without `block`, whether another process or `CachedFile` claims any."""
        self._check_open()
        with mapped("look at the locks of", self.entry):
            return block in self._claimed or self._live.any_claim(block)

    def sync(self) -> None:
        """Make everything stored here survive a machine crash. Cheap if nothing is new. Raises `CacheFull`.

        Includes blocks of other processes, but only if this one has new blocks too. A complete and verified file is
        `trusted` afterwards.
        """
        self._check_open()
        with self._sync_lock:
            if not self._unsynced:
                return
            self._unsynced = False
            try:
                with mapped("sync", self.entry), self._sync_claim():
                    self._sync()
            except BaseException:
                self._unsynced = True
                raise

    def verify_all(self, threads: int = 2, progress: Progress | None = None) -> list[int]:
        """Verify the digests of all present blocks and drop wrong ones; returns those.

        A complete file without damage is `trusted` afterwards.
        """
        self._check_open()
        blocks = [block for block, state in enumerate(self._live.get_all()) if state != MISSING]
        damaged = []
        with Tasks("bootseer-verify", threads) as pool:
            for start in range(0, len(blocks), _VERIFIED_AT_ONCE):
                batch = blocks[start : start + _VERIFIED_AT_ONCE]
                damaged += [
                    block for block, sound in zip(batch, pool.map(self._is_sound, batch), strict=True) if not sound
                ]
                if progress is not None:
                    progress(start + len(batch), len(blocks))
        self._unsynced = True  # include blocks of other processes
        self.sync()
        return damaged

    def close(self) -> None:
        """Release the lease and all claims. May be called twice, and while other threads read: they get errors."""
        if self._closed:
            return
        self._closed = True
        if self.is_use:
            entries.note_use(self.entry)  # it may have been open for weeks
        # Redirected, not closed: a concurrent call must not read another file opened under the same number. Order
        # matters, states first and lease last: a concurrent `put` must neither mark a block ready whose bytes went to
        # /dev/null, nor write to an entry that is being evicted.
        for fd in reversed(self._fds):
            os.dup2(_devnull(), fd, inheritable=False)

    def _check_open(self) -> None:
        if self._closed:
            raise PermanentError(f"{self.entry}: this file was closed")

    def _fill(self, block: int, offset: int, into: memoryview) -> bool:
        """Read a part of a verified block, or read and verify a whole block; returns success.

        A block that is cut or wrong is marked missing.
        """
        verified = self._verified[block]
        try:
            right = os.preadv(self._data, [into], offset) == len(into)
        except OSError:
            right = False
        if right and not verified:
            right = digest_of(into) == self.index.digest(block)
        if right:
            if not verified:
                self._verified[block] = 1
                self._set(block, READY)
            return True
        self._verified[block] = 0
        self._set(block, MISSING)
        return False

    def _is_sound(self, block: int) -> bool:
        self._verified[block] = 0
        whole = memoryview(bytearray(self.index.length(block)))
        return self._fill(block, block << self._shift, whole)

    def _set(self, block: int, state: int) -> None:
        # If this fails for lack of space, the map keeps the old state and the block is checked again.
        with contextlib.suppress(OSError):
            if self._live.get(block) != state:
                self._live.set(block, state)
                self._unsynced = True

    @contextlib.contextmanager
    def _sync_claim(self) -> Iterator[None]:
        """Serialize writers of the snapshot among processes, so that an older one never replaces a newer one."""
        until = time.monotonic() + _SYNC_DEADLINE_S
        while not self._live.try_claim(SYNC_CLAIM):
            if time.monotonic() >= until:
                raise TransientError(f"{self.entry}: another process has been syncing for {_SYNC_DEADLINE_S:.0f} s")
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            self._live.release_claim(SYNC_CLAIM)

    def _sync(self) -> None:
        if not os.path.samestat(self.path.lstat(), os.fstat(self._data)):
            raise PermanentError(f"{self.entry} was damaged and has been replaced; open it again")
        states = self._live.get_all()  # read before the data is synced: later blocks are not covered
        whole = states.count(READY) == len(states)
        try:
            # fsync for a whole file, because its times are part of the identity; otherwise data alone suffices.
            (os.fsync if whole else os.fdatasync)(self._data)
        except OSError:
            # The kernel reports lost writes only once: from now on no block of this file can be trusted.
            self._verified[:] = bytes(len(self._verified))
            for block, state in enumerate(states):
                if state != MISSING:
                    self._live.set(block, MISSING)
            raise
        if not self._anchored:
            for path in (self.entry / disk.INDEX, self.entry, self.entry.parent):
                sync_path(path)
            self._anchored = True
        Durable(states, StatIdentity.of(self._data) if whole else None).store(self.entry, self.index)


@cache
def _devnull() -> int:
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


def _check_reserve(fd: int, offset: int, length: int, reserve_bytes: int) -> None:
    """Raise `OSError` (ENOSPC) if new space for this range would use up the reserve.

    A start that filled the disk would deprive the next ones of space for states, snapshots and image metadata. Blocks
    that do not fit are served without being cached.
    """
    space = os.fstatvfs(fd)
    reserve = min(reserve_bytes, int(space.f_blocks * space.f_frsize * _RESERVE_SHARE))
    if space.f_bavail * space.f_frsize < reserve + length and _is_hole(fd, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _is_hole(fd: int, offset: int, length: int) -> bool:
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) >= offset + length
    except OSError as error:
        return error.errno == errno.ENXIO  # no data up to the end

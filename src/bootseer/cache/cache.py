"""The cache of a node: finds, creates, replaces and evicts the entries of cached files.

One folder per user and node on a local disk, used by any number of processes at once. Names in it change only under the
root lock, by single renames; a lease on an entry prevents its eviction. Nothing in it is trusted: an entry with a
truncated, foreign or otherwise invalid file is replaced, and never keeps a job from starting. The formats and the order
of all steps are in docs/formats/cache.md.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec import Struct

from bootseer.blocks.index import Index, is_identity
from bootseer.cache import disk, entries
from bootseer.cache.cached_file import CachedFile
from bootseer.cache.disk import Damaged, mapped
from bootseer.cache.entries import Entry
from bootseer.cache.eviction_plan import Candidate, goal_bytes, plan
from bootseer.cache.states import READY, Durable, LiveMap, StatIdentity
from bootseer.errors import NotFoundError, PermanentError, TransientError
from bootseer.io import locks
from bootseer.io.files import discard
from bootseer.io.trusted_folder import trusted_folder
from bootseer.logs import logger

_LOG = logger(__name__)
_POLL_S = 0.005
_CREATED_S = 600.0
"""An entry that another machine creates is complete after this time, also on a slow file system."""
_MAX_DAMAGED = 5  # After more replacements in a row, something damages the entry each time.


class Pruned(Struct, frozen=True):
    """The result of `Cache.prune`, or of a dry run."""

    used_bytes: int
    """Disk usage before."""
    freed_bytes: int
    evicted: tuple[Candidate, ...]
    in_use: tuple[str, ...]
    """Identities of entries that were skipped because they are in use."""


class Cache:
    """A folder of cached files. Its only state is the path: create as many instances as needed."""

    def __init__(self, root: Path, *, max_bytes: int | None = None, boot: str | None = None) -> None:
        """Create the folder if it is missing. Raises `PermanentError` and `CacheFull`, with advice.

        `max_bytes`: the limit of disk usage; None: all free space. `boot`: the kernel's boot id; block states of
        another boot are not trusted.
        """
        with mapped("make a cache in", root):
            self.root = trusted_folder(root, otherwise="set BOOTSEER_CACHE to another folder")
        self._max_bytes = max_bytes
        self._files = self.root / disk.FILES
        with mapped("make a cache in", self.root):
            self._boot = boot or disk.boot_id()
            for name in (disk.FILES, disk.NEW, disk.TRASH):
                (self.root / name).mkdir(mode=0o700, exist_ok=True)

    def open(self, index: Index) -> CachedFile:
        """A lease on the file of this index, which is created if it is missing.

        Raises `CacheFull`, `AccessError`, and `TransientError` when another process takes too long to evict the entry.
        """
        cached = self._open(index)
        cached.is_use = True
        entries.note_use(cached.entry)
        return cached

    def open_existing(self, identity: str) -> CachedFile:
        """`open` for a file that is in the cache already. Raises `NotFoundError` if it is not."""
        try:
            return self._open(entries.read_index_of(self._files / identity))
        except Damaged as error:
            raise NotFoundError(f"{self._files / identity}: {error}") from error

    def entries(self) -> list[Entry]:
        """All entries, the most recently used first."""
        with mapped("read", self._files):
            found = [entries.examine(path, self._boot) for path in self._paths()]
        return sorted((one for one in found if one), key=lambda one: one.last_use_ns, reverse=True)

    def verify(
        self, *, threads: int = 2, progress: Callable[[str, int, int], None] | None = None
    ) -> dict[str, list[int]]:
        """Verify the digests of all blocks here and drop wrong ones; returns the dropped blocks by identity.

        `progress` is called with the identity, the blocks done and the total of that file. Damaged entries are skipped:
        they are replaced at their next use.
        """
        dropped = {}
        for path in self._paths():
            with contextlib.suppress(Damaged):
                cached = self._open(entries.read_index_of(path))
                with contextlib.closing(cached):
                    report = None if progress is None else partial(progress, path.name)
                    dropped[path.name] = cached.verify_all(threads, report)
        return dropped

    def prune(self, to_bytes: int | None = None, *, dry_run: bool = False) -> Pruned:
        """Evict down to `to_bytes`, or by the watermarks if it is None; `dry_run` only plans.

        Entries in use stay. Damaged entries and leftovers of dead processes are removed in any case.
        """
        found = self.entries()
        used = sum(one.disk_bytes for one in found)
        goal = to_bytes if to_bytes is not None else self._goal(used)
        chosen: list[Candidate] = [one for one in found if one.damaged and not one.in_use]
        if goal is not None:
            sound = [one for one in found if not one.damaged]
            chosen += plan(sound, used - sum(one.disk_bytes for one in chosen), goal)
        in_use = tuple(one.identity for one in found if one.in_use)
        if dry_run:
            return Pruned(used, sum(one.disk_bytes for one in chosen), tuple(chosen), in_use)
        with mapped("evict from", self.root):
            done = [one for one in chosen if self._evict(self._files / one.identity)]
            for path in (self.root / disk.TRASH).iterdir():
                discard(path)
            with self._lock():
                # Machines that share the cache may see only their own locks.
                kept_s = time.time() - _CREATED_S
                for path in (self.root / disk.NEW).iterdir():
                    with contextlib.suppress(FileNotFoundError):
                        if path.name.startswith(self._boot[:8]) or path.lstat().st_mtime < kept_s:
                            discard(path)
            after = sum(one.disk_bytes for one in self.entries())
        _LOG.info("%s: %d bytes, %d after the eviction of %d entries", self.root, used, after, len(done))
        return Pruned(used, max(used - after, 0), tuple(done), in_use)

    def _paths(self) -> list[Path]:
        with mapped("read", self._files):
            return sorted(path for path in self._files.iterdir() if is_identity(path.name))

    def _open(self, index: Index) -> CachedFile:
        entry = self._files / index.identity
        until = time.monotonic() + disk.LOCK_S
        num_damaged = 0
        with mapped("open", entry):
            while True:
                try:
                    # Held open, so that no other folder can get the same inode number while this one is examined.
                    folder = os.open(entry, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
                except FileNotFoundError:
                    self._create(entry, index)
                    continue
                try:
                    cached = self._try_open(entry, folder, index)
                    if cached is not None:
                        return cached
                    time.sleep(_POLL_S)
                except (Damaged, FileNotFoundError, NotADirectoryError):
                    self._discard_damaged(entry, folder)
                    num_damaged += 1
                finally:
                    os.close(folder)
                if num_damaged > _MAX_DAMAGED:
                    raise PermanentError(f"{entry} is damaged repeatedly; check the disk, or use another folder")
                if time.monotonic() >= until:
                    raise TransientError(f"{entry} has been locked for {disk.LOCK_S:.0f} s")

    def _try_open(self, entry: Path, folder: int, index: Index) -> CachedFile | None:
        """None while another process evicts the entry. Raises `Damaged`, `OSError`."""
        if not stat.S_ISDIR(os.fstat(folder).st_mode):
            raise Damaged(f"{entry} is not a folder")
        with contextlib.ExitStack() as opened:
            lease = disk.open_file(entry / disk.LEASE)
            opened.callback(os.close, lease)
            # The folder may have been evicted since it was opened: then this lock protects nothing.
            if not locks.try_flock(lease, shared=True) or not locks.is_same(lease, entry / disk.LEASE):
                return None
            encoded = index.encode()
            if disk.read_file(entry / disk.INDEX, len(encoded)) != encoded:
                raise Damaged(f"{entry} has another index")
            data = disk.open_file(entry / disk.DATA)
            opened.callback(os.close, data)
            if os.fstat(data).st_size != index.size_bytes:
                raise Damaged(f"{entry} has data of another size")
            live = LiveMap.open(entry, index, self._boot) or self._new_live_map(entry, index, data)
            opened.callback(os.close, live.fd)
            cached = CachedFile(entry, index, lease=lease, data=data, live=live)
            opened.pop_all()
            return cached

    def _new_live_map(self, entry: Path, index: Index, data: int) -> LiveMap:
        """Initialize the states of this boot from the snapshot of an earlier one."""
        with self._lock():
            live = LiveMap.open(entry, index, self._boot)  # another process may have created it meanwhile
            if live is not None:
                return live
            durable = Durable.load(entry, index) or Durable.of_new(index)
            states = durable.states
            if durable.whole == StatIdentity.of(data):
                states = bytes([READY]) * index.num_blocks
            LiveMap.create(entry, index, self._boot, states)
            live = LiveMap.open(entry, index, self._boot)
        if live is None:
            raise Damaged(f"{entry} does not keep what is written to it")
        return live

    def _create(self, entry: Path, index: Index) -> None:
        with self._lock():
            if os.path.lexists(entry):
                return
            new = self.root / disk.NEW
            ours = f"{self._boot[:8]}-"  # machines that share the cache may see only their own locks
            for left_over in new.glob(f"{ours}*"):  # of processes that died while they held the lock
                discard(left_over)
            made = new / f"{ours}{entry.name}"
            made.mkdir(mode=0o700)
            try:
                disk.write_file(made / disk.INDEX, index.encode())
                for name, size in ((disk.DATA, index.size_bytes), (disk.LEASE, 0)):
                    os.close(disk.open_file(made / name, os.O_RDWR | os.O_CREAT))
                    os.truncate(made / name, size)
                # The file is one hole: its all-zero blocks are present and need no verification.
                zeros = Durable.of_new(index).states.translate(bytes([0]) + bytes([READY]) * 255)
                LiveMap.create(made, index, self._boot, zeros)
                made.rename(entry)
                _LOG.debug("%s: a new entry of %d bytes", entry, index.size_bytes)
            except BaseException as error:
                discard(made)
                if not (isinstance(error, OSError) and os.path.lexists(entry)):  # else another machine was faster
                    raise

    def _discard_damaged(self, entry: Path, folder: int) -> None:
        """Remove a damaged entry. Processes that have it open keep its files."""
        with self._lock():
            if not locks.is_same(folder, entry):
                return  # another process replaced it
            gone = self._move_to_trash(entry)
        _LOG.warning("%s was damaged and is replaced", entry)
        discard(gone)

    def _lock(self) -> contextlib.AbstractContextManager[int]:
        return locks.flocked(self.root / disk.ROOT_LOCK, deadline_s=disk.LOCK_S)

    def _goal(self, used: int) -> int | None:
        limit = self._max_bytes
        if limit is None:
            with mapped("examine", self.root):
                limit = used + shutil.disk_usage(self.root).free
        return goal_bytes(used, limit)

    def _evict(self, entry: Path) -> bool:
        """Delete an entry that is not in use; returns whether it was. Raises `OSError` and `TransientError`.

        A process that has a file of it open, unseen here, keeps the whole file: nothing is taken out of files.
        """
        with contextlib.ExitStack() as opened, contextlib.suppress(FileNotFoundError):  # another process evicted it
            # Held open: the entry may be replaced between any two steps, but the new one cannot have its inode number.
            folder = os.open(entry, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            opened.callback(os.close, folder)
            with contextlib.suppress(FileNotFoundError, Damaged):  # a missing file is not leased
                lease = disk.open_file(entry / disk.LEASE)
                opened.callback(os.close, lease)
                # From here on openers wait; then they find that the entry has moved, and create a new one.
                if not (locks.try_flock(lease) and locks.is_same(lease, entry / disk.LEASE)):
                    return False
            if entries.is_open(entry):
                return False
            with self._lock():
                if not locks.is_same(folder, entry):
                    return False
                gone = self._move_to_trash(entry)
            discard(gone)
            return True
        return False

    def _move_to_trash(self, entry: Path) -> Path:
        """Move an entry to the trash, holding the root lock. Raises `OSError`."""
        gone = self.root / disk.TRASH / f"{entry.name}.{os.getpid()}-{os.urandom(4).hex()}"
        entry.rename(gone)
        return gone

"""The cache of a node: finds, makes, replaces and evicts the entries of cached files.

One folder per user and node, on a local disk, used by any number of processes at once. Names in it change only under
the lock of the root, in single renames; a lease on an entry keeps it from being evicted. Nothing in it is believed: an
entry with a file that is cut, foreign or of another size is put aside and made anew, and never keeps a job from
starting. The formats and the order of all steps are in docs/formats/cache.md.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bootseer.blocks.index import Index
from bootseer.cache import disk, entries, evict
from bootseer.cache.disk import Damaged, mapped
from bootseer.cache.entries import Entry
from bootseer.cache.file import CachedFile
from bootseer.cache.prune import Candidate, Step, Watermarks, goal_bytes, plan
from bootseer.cache.states import READY, Durable, LiveMap, StatIdentity
from bootseer.errors import NotFoundError, PermanentError, TransientError
from bootseer.io import locks
from bootseer.io.trusted_folder import trusted_folder
from bootseer.logs import logger

_LOG = logger(__name__)
_POLL_S = 0.005
_MAX_SPOILED = 5  # Made anew more often than that, something else spoils the entry each time.


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """How a cache behaves."""

    max_bytes: int | None = None
    """What it may take on the disk; None: all that others leave free."""
    watermarks: Watermarks = field(default_factory=Watermarks)
    lock_deadline_s: float = 30.0
    """How long to wait for other processes. Their locks are short, and fall when they die."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `Cache.prune` did, or would do."""

    used_bytes: int
    """What the cache took before."""
    freed_bytes: int
    steps: tuple[Step, ...]
    in_use: tuple[str, ...]
    """Identities of entries that were left alone because they are in use."""


class Cache:
    """A folder of cached files. Keeps no state but its path: make as many as you like."""

    def __init__(self, root: Path, settings: CacheSettings | None = None, *, boot: str | None = None) -> None:
        """Make the folder when there is none. Raises `PermanentError` and `CacheFull`, saying what to do.

        `boot` names the time since the kernel started; states of another boot are not believed.
        """
        with mapped("make a cache in", root):
            self.root = trusted_folder(root, otherwise="set BOOTSEER_CACHE to another folder")
        self._settings = settings or CacheSettings()
        self._files = self.root / disk.FILES
        with mapped("make a cache in", self.root):
            self._boot = boot or disk.boot_id()
            for name in (disk.FILES, disk.NEW, disk.TRASH):
                (self.root / name).mkdir(mode=0o700, exist_ok=True)

    def open(self, index: Index) -> CachedFile:
        """A lease on the file of this index, which is made when it is not here yet.

        Raises `CacheFull`, `AccessError`, and `TransientError` when another process evicts the entry for too long.
        """
        cached = self._open(index)
        self._note_use(cached.entry)
        return cached

    def open_here(self, identity: str) -> CachedFile:
        """Like `open`, of a file that is here already. Raises `NotFoundError` where it is not."""
        try:
            return self._open(entries.read_index_of(self._files / identity))
        except Damaged as error:
            raise NotFoundError(f"{self._files / identity}: {error}") from error

    def entries(self) -> list[Entry]:
        """What is here, the most recently used first."""
        with mapped("read", self._files):
            found = [entries.examine(path, self._boot) for path in self._paths()]
        return sorted((one for one in found if one), key=lambda one: one.last_use, reverse=True)

    def recent(self, max_files: int) -> Iterator[tuple[Index, bytes]]:
        """Indexes of the files that were used last, each with a byte for each block: not zero if it is here.

        Cheaper than `entries`. Entries that are damaged or vanish meanwhile are left out.
        """
        with mapped("read", self._files):
            paths = sorted(self._paths(), key=entries.last_use, reverse=True)[:max_files]
        for path in paths:
            with contextlib.suppress(Damaged, OSError):
                index = entries.read_index_of(path)
                yield index, entries.states_of(path, index, self._boot)[0]

    def verify(
        self,
        identities: Iterable[str] | None = None,
        *,
        threads: int = 2,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> dict[str, list[int]]:
        """Compare what is here with its digests and drop what differs: the blocks that were dropped, by identity.

        `progress` is called with the identity, the blocks done and the blocks in all of its file. Entries that are
        damaged as a whole are replaced at their next use, and left out here.
        """
        dropped = {}
        chosen = None if identities is None else set(identities)
        for path in self._paths():
            if chosen is not None and path.name not in chosen:
                continue
            with contextlib.suppress(Damaged):
                cached = self._open(entries.read_index_of(path))
                with contextlib.closing(cached):
                    report = None if progress is None else _named(progress, path.name)
                    dropped[path.name] = cached.verify_all(threads, report)
        return dropped

    def prune(self, to_bytes: int | None = None, *, dry_run: bool = False) -> Pruned:
        """Evict down to `to_bytes`, or by the watermarks when it is None; `dry_run` only says what it would do.

        Entries in use stay. Damaged entries and leavings of processes that died go in any case.
        """
        found = self.entries()
        used = sum(one.disk_bytes for one in found)
        goal = to_bytes if to_bytes is not None else self._goal(used)
        steps = [Step(one.identity, True, one.disk_bytes) for one in found if one.damaged and not one.in_use]
        if goal is not None:
            sound = [one for one in found if not one.damaged]
            steps += plan(self._candidates(sound), used - sum(step.num_bytes for step in steps), goal)
        in_use = tuple(one.identity for one in found if one.in_use)
        if dry_run:
            return Pruned(used, sum(step.num_bytes for step in steps), tuple(steps), in_use)
        with mapped("evict from", self.root):
            done = [step for step in steps if self._evict(step)]
            for path in (self.root / disk.TRASH).iterdir():
                disk.discard(path)
            after = sum(one.disk_bytes for one in self.entries())
        _LOG.info("%s: %d bytes, %d after the eviction of %d entries or parts", self.root, used, after, len(done))
        return Pruned(used, max(used - after, 0), tuple(done), in_use)

    def unpin(self, identity: str, name: str) -> None:
        """Undo `CachedFile.pin`. Nothing happens when there is no such pin."""
        with mapped("unpin", self._files / identity):
            entries.remove_pin(self._files / identity, name)

    def _paths(self) -> list[Path]:
        with mapped("read", self._files):
            return sorted(path for path in self._files.iterdir() if disk.is_identity(path.name))

    def _open(self, index: Index) -> CachedFile:
        entry = self._files / index.identity
        until = time.monotonic() + self._settings.lock_deadline_s
        num_spoiled = 0
        with mapped("open", entry):
            while True:
                try:
                    # Held open, so that no other folder can have the same inode number while we judge this one.
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
                    self._put_aside(entry, folder)
                    num_spoiled += 1
                finally:
                    os.close(folder)
                if num_spoiled > _MAX_SPOILED:
                    raise PermanentError(f"{entry} is damaged again and again; check the disk, or give another folder")
                if time.monotonic() >= until:
                    raise TransientError(f"{entry} has been locked for {self._settings.lock_deadline_s:.0f} s")

    def _try_open(self, entry: Path, folder: int, index: Index) -> CachedFile | None:
        """None when another process evicts the entry at this moment. Raises `Damaged`, `OSError`."""
        if not stat.S_ISDIR(os.fstat(folder).st_mode):
            raise Damaged(f"{entry} is not a folder")
        with contextlib.ExitStack() as opened:
            lease = disk.open_file(entry / disk.LEASE)
            opened.callback(os.close, lease)
            # The lock may be one on a folder that was evicted since it was opened.
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
            cached = CachedFile(entry, index, self._boot, lease=lease, data=data, live=live)
            opened.pop_all()
            return cached

    def _new_live_map(self, entry: Path, index: Index, data: int) -> LiveMap:
        """Begin the states of this boot with what an earlier one left."""
        with self._lock():
            live = LiveMap.open(entry, index, self._boot)  # another process may have been faster
            if live is not None:
                return live
            disk.sweep(entry)
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
            for leaving in new.iterdir():  # of processes that died while they held the lock
                disk.discard(leaving)
            made = new / entry.name
            made.mkdir(mode=0o700)
            try:
                disk.write_file(made / disk.INDEX, index.encode())
                for name, size in ((disk.DATA, index.size_bytes), (disk.LEASE, 0)):
                    os.close(disk.open_file(made / name, os.O_RDWR | os.O_CREAT))
                    os.truncate(made / name, size)
                # A file that is one hole has all its blocks of zeros, and nothing about them needs to be verified.
                zeros = Durable.of_new(index).states.translate(bytes([0]) + bytes([READY]) * 255)
                LiveMap.create(made, index, self._boot, zeros)
                made.rename(entry)
                _LOG.debug("%s: a new entry of %d bytes", entry, index.size_bytes)
            except BaseException:
                disk.discard(made)
                raise

    def _put_aside(self, entry: Path, folder: int) -> None:
        """Make room for a new entry. Processes that still have this one open keep its files."""
        with self._lock():
            if not locks.is_same(folder, entry):
                return  # another process did
            gone = evict.move_to_trash(entry, self.root)
        _LOG.warning("%s was damaged and is made anew", entry)
        disk.discard(gone)

    def _lock(self) -> contextlib.AbstractContextManager[int]:
        return locks.flocked(self.root / disk.ROOT_LOCK, deadline_s=self._settings.lock_deadline_s)

    def _note_use(self, entry: Path) -> None:
        """Two processes may take the same number: then either was last. A full disk keeps no job from starting."""
        counter = self.root / disk.COUNTER
        try:
            number = disk.read_number(counter) + 1
        except (OSError, Damaged):
            disk.discard(counter)
            number = 1 + max(entries.last_use(path)[0] for path in self._paths())
        for path in (counter, entry / disk.LAST_USE):
            with contextlib.suppress(OSError):
                try:
                    disk.write_number(path, number)
                except Damaged:
                    disk.discard(path)
                    disk.write_number(path, number)

    def _goal(self, used: int) -> int | None:
        limit = self._settings.max_bytes
        if limit is None:
            with mapped("examine", self.root):
                limit = used + shutil.disk_usage(self.root).free
        return goal_bytes(used, limit, self._settings.watermarks)

    def _candidates(self, found: Iterable[Entry]) -> list[Candidate]:
        with mapped("examine", self.root):
            lock = os.open(self.root / disk.ROOT_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                can_punch = disk.can_punch(lock)
            finally:
                os.close(lock)
        return [
            Candidate(one.identity, one.last_use, one.in_use, one.disk_bytes, one.cold_bytes if can_punch else 0)
            for one in found
        ]

    def _evict(self, step: Step) -> bool:
        entry = self._files / step.identity
        with contextlib.suppress(FileNotFoundError):  # another process evicted it
            return evict.evict(entry, step, self.root, self._boot, lock_deadline_s=self._settings.lock_deadline_s)
        return False


def _named(progress: Callable[[str, int, int], None], name: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(name, done, total)

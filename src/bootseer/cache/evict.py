"""Execute one eviction step on an entry that is not in use.

The exclusive lock on the lease file blocks openers meanwhile; a blocked opener then finds the remaining blocks, or sees
that the entry was moved and creates a new one. Blocks are first marked missing, durably, and then punched: a crash at
any point leaves no state that claims lost bytes.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from bootseer.blocks.index import Index
from bootseer.cache import disk, entries
from bootseer.cache.disk import NO_SPACE, Damaged
from bootseer.cache.eviction_plan import Step, cold_blocks
from bootseer.cache.states import MISSING, Durable, LiveMap
from bootseer.io import locks
from bootseer.io.files import discard, punch, sync_path

_MISSING_RUN = re.compile(b"%c+" % MISSING)


def evict(entry: Path, step: Step, root: Path, boot: str) -> bool:
    """Returns whether the step was done; False if the entry is in use. Raises `OSError` and `TransientError`."""
    with contextlib.ExitStack() as opened:
        # Held open: the entry may be replaced between any two steps, but the new one cannot have its inode number.
        folder = os.open(entry, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        opened.callback(os.close, folder)
        with contextlib.suppress(FileNotFoundError, Damaged):  # a missing file is not leased
            lease = disk.open_file(entry / disk.LEASE)
            opened.callback(os.close, lease)
            if not (locks.try_flock(lease, shared=False) and locks.is_same(lease, entry / disk.LEASE)):
                return False
        if entries.pins_of(entry, boot):
            return False
        if not step.whole:
            return _punch_cold(entry, step.num_bytes, boot)
        with locks.flocked(root / disk.ROOT_LOCK, deadline_s=disk.LOCK_S):
            if not locks.is_same(folder, entry):
                return False
            gone = move_to_trash(entry, root)
        discard(gone)
        return True


def move_to_trash(entry: Path, root: Path) -> Path:
    """Move an entry to the trash, holding the root lock. Raises `OSError`."""
    gone = root / disk.TRASH / f"{entry.name}.{os.getpid()}-{os.urandom(4).hex()}"
    entry.rename(gone)
    return gone


def _punch_cold(entry: Path, num_bytes: int, boot: str) -> bool:
    try:
        index = entries.read_index_of(entry)
        states, _ = entries.states_of(entry, index, boot)
    except Damaged:
        return False
    data = disk.open_file(entry / disk.DATA)
    try:
        # Its pin is gone, but a container may have a copy of its mount in another mount namespace: it would read zeros.
        return not disk.has_other_users(data) and _punch(entry, index, states, data, num_bytes, boot)
    finally:
        os.close(data)


def _punch(entry: Path, index: Index, states: bytes, data: int, num_bytes: int, boot: str) -> bool:
    cold = cold_blocks(states, entries.use_of(entry, index.num_blocks), index.codecs())
    # From the end: most readers begin at the start of a file.
    evicted = list(reversed(cold))[: -(-num_bytes // index.block_size)]
    left = bytearray(states)
    for block in evicted:
        left[block] = MISSING
    live = LiveMap.open(entry, index, boot)
    if live is not None:
        try:
            live.set_all(bytes(left))
        finally:
            os.close(live.fd)
    durable = Durable.load(entry, index)
    if durable is not None:
        # Only blocks that were durable before stay durable: nothing was synced here.
        durable = Durable.from_states(bytes(map(min, durable.states, left)))
        _forget(entry, index, durable)
    # All missing blocks, including space written by a process that died before it marked them ready.
    for run in _MISSING_RUN.finditer(left):
        punch(data, run.start() * index.block_size, len(run[0]) * index.block_size)
    if durable is not None and not (entry / disk.DURABLE).exists():
        durable.store(entry, index)
    return True


def _forget(entry: Path, index: Index, durable: Durable) -> None:
    """Replace the snapshot; if the disk has no space for a second one, delete the first."""
    try:
        durable.store(entry, index)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        (entry / disk.DURABLE).unlink()
        sync_path(entry)

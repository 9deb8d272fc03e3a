"""What the daemon of a mounted place serves: the place, its reader and writer, and the file system.

`Serving` is the `open` of a `DaemonSpec`. Everything is created inside the daemon, because neither connections nor
threads survive a fork.

`Startup` prefetches what a job's start will read, and records what it reads. The checkpoint is the one that `latest`
names, or the mounted folder itself. The record is kept in the node's cache, for the next start of the same slot of the
job.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bootseer.artifact.places import blocks_folder
from bootseer.cache.cache import Cache
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.hot_list import MAX_BYTES, Range, Recorder, decode, encode, plan
from bootseer.checkpoint.latest import read_latest
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.locations import job_peers
from bootseer.checkpoint.mount.content import MountContext
from bootseer.checkpoint.mount.filesystem import CheckpointFiles
from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.checkpoint.writing.writing import Writing
from bootseer.errors import AccessError, BootseerError, CorruptError, NotFolderError, NotFoundError, PermanentError
from bootseer.fuse.session import Session, mount_writable
from bootseer.mounts.serve import OnError, Served
from bootseer.places import open_place

_FOLDER = "checkpoints"
_MAX_FILES = 100_000
_MAX_DEPTH = 8


class Startup:
    """The prefetch and the record of one start (a daemon's recorder). Safe to use from many threads."""

    def __init__(
        self, files: Files, reading: Reading, slot: str, cache: Path | None, memory_bytes: int, on_error: OnError
    ) -> None:
        """`slot`: the node's position in the job, "" for the only one; `cache`: the cache's root. Without a cache, at
        most `memory_bytes` are prefetched."""
        self._files = files
        self._reading = reading
        self._slot = slot
        self._cache = cache
        self._memory_bytes = memory_bytes
        self._on_error = on_error
        self._lock = threading.Lock()
        self._recorder: Recorder | None = Recorder()
        self._ranges: list[Range] = []
        self._checkpoint = ""
        self._ahead: dict[str, CheckpointFile] = {}

    def note(self, path: str, offset: int, length: int) -> None:
        with self._lock:
            if self._recorder is not None:
                self._recorder.read(path, offset, length)

    def begin(self) -> None:
        """Prefetch what the start will read, in order of need. Yields to readers."""
        self._checkpoint = read_latest(self._files.place, "") or ""
        files = list(self._walk(self._checkpoint, _MAX_DEPTH if self._checkpoint else 0))
        for one in plan(files, self._known(), alone=not self._slot, budget_bytes=self._budget_bytes()):
            try:
                file = self._opened(one.path)
                if file is None:
                    return
                file.prefetch(one.offset, one.length)
            except (NotFoundError, AccessError, CorruptError) as error:
                self._on_error(f"{one.path} is not prefetched: {error}")
            except PermanentError:
                if not self._is_over:  # closed meanwhile
                    raise

    @property
    def _is_over(self) -> bool:
        with self._lock:
            return self._recorder is None

    def _opened(self, path: str) -> CheckpointFile | None:
        """An open file, kept open during its prefetch; None when the start is over."""
        if self._is_over or path in self._ahead:
            return self._ahead.get(path)
        file = self._reading.open(path)
        with self._lock:
            if self._recorder is not None:
                self._ahead[path] = file
                return file
        file.close()
        return None

    def end(self) -> None:
        """The start is over: later reads are not recorded."""
        with self._lock:
            if self._recorder is not None:
                self._ranges = self._recorder.ranges()
                self._recorder = None

    def close(self) -> None:
        """Save the record for the next start."""
        path = self._path()
        if path is not None and self._ranges:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = path.with_suffix(f".{os.getpid()}")
            new.write_bytes(encode(self._ranges, self._checkpoint))
            new.replace(path)

    def drop(self) -> None:
        """Stop prefetching."""
        self.end()
        with self._lock:
            files = list(self._ahead.values())
        for file in files:
            file.close()

    def _walk(self, folder: str, depth: int) -> Iterator[tuple[str, int]]:
        for number, info in enumerate(self._files.list(folder)):
            if number >= _MAX_FILES:
                return
            if not info.is_folder:
                yield info.path, info.size_bytes
            elif depth > 0:
                yield from self._walk(info.path, depth - 1)

    def _known(self) -> list[Range]:
        path = self._path()
        if path is None:
            return []
        try:
            with path.open("rb") as file:
                return decode(file.read(MAX_BYTES + 1), self._checkpoint)
        except FileNotFoundError:
            return []
        except (OSError, BootseerError) as error:
            self._on_error(f"{path}: {error}; the start is recorded anew")
            return []

    def _path(self) -> Path | None:
        if self._cache is None:
            return None
        key = hashlib.sha256(f"{self._files.place.uri}\n{self._slot}".encode()).hexdigest()[:32]
        return self._cache / _FOLDER / f"{key}.json"

    def _budget_bytes(self) -> int:
        """Half of the free space of the cache's disk, which others need too."""
        if self._cache is not None:
            with contextlib.suppress(OSError):
                return shutil.disk_usage(self._cache).free // 2
        return self._memory_bytes


MEMORY_BYTES = 256 << 20
REWRITE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class MountRequest:
    """A place, and how to mount it. Paths are absolute."""

    uri: str
    """As `open_place` accepts it."""
    cache: Path | None = None
    """The root of the node's cache, for chunks of striped files; None: no cache."""
    spool: Path | None = None
    """A folder on a local disk for unsent data; None: one in the cache's root, or the temporary folder without a
    cache."""
    read_only: bool = False
    memory_bytes: int = MEMORY_BYTES
    """Memory for reads, of all files of the mount."""
    rewrite_bytes: int = REWRITE_BYTES
    """The largest published file that may be rewritten to change a part or to append."""
    stripes: int | None = None
    """For new files; None: as their folder's policy says."""
    parity: bool | None = None
    """For new files; None: as their folder's policy says."""

    only_me: bool = False
    """Whether other users are refused; mounts by others than root always are so."""
    slot: str | None = None
    """The node's position in a job, for a mount that prefetches what earlier starts read: "" for the only one. None: no
    prefetch."""

    def policy(self, folders: Policy) -> Policy:
        """The policy of a new file of this mount, in a folder with the policy `folders`."""
        return replace(
            folders,
            stripes=folders.stripes if self.stripes is None else self.stripes,
            parity=folders.parity if self.parity is None else self.parity,
        )


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MIB = 1 << 20


def keep_freed_memory() -> bool:
    """Have malloc keep up to 64 MiB of freed memory. Returns False without glibc."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    options = (
        # One arena: several would each keep memory, and Python's lock lets only one thread allocate at a time anyway.
        (_ARENA_MAX, 1),
        (_MMAP_THRESHOLD, 32 * _MIB),
        (_TRIM_THRESHOLD, 64 * _MIB),
        (_TOP_PAD, 16 * _MIB),
    )
    return all(set_option(option, value) == 1 for option, value in options)


_SPOOL = "spool"
_FIGURES = {
    "place_bytes": "place_bytes",
    "cache_bytes": "cache_bytes",
    "peer_bytes": "peer_bytes",
    "same_bytes": "donor_bytes",
    "rebuilt": "rebuilt",
    "refused": "wrong_chunks",
}
"""Names in the daemon's status, and the counters of `Reading` they show."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Opens everything when called. Raises errors of the place."""

    request: MountRequest

    def __call__(self, on_error: OnError) -> Served:
        keep_freed_memory()
        source = _MountedPlace(self.request, on_error)

        def mount(target: Path, label: str, on_error: OnError, device: int | None) -> Session:
            how = {"read_only": self.request.read_only, "shared": not self.request.only_me}
            return mount_writable(source.shown, target, label=label, on_error=on_error, **how)

        startup = source.startup
        if startup is None:
            return Served(source, mount, status=source.status, finish_writes=source.end)
        return Served(source, mount, startup, source.status, startup.begin, source.end)


def _ignore(path: str, offset: int, length: int) -> None:
    """Used where reads are not recorded."""


class _MountedPlace:
    """The parts of one mount, and their shutdown."""

    def __init__(self, request: MountRequest, on_error: OnError) -> None:
        self._request = request
        with contextlib.ExitStack() as opened:
            place = open_place(request.uri)
            opened.callback(place.close)
            if not place.stat("").is_folder:
                raise NotFolderError(f"{place.uri} is not a folder")
            files = Files(place)
            cache = None if request.cache is None else Cache(blocks_folder(request.cache))
            settings = ReadingSettings(memory_bytes=request.memory_bytes)
            self._reading = Reading(place, cache=cache, settings=settings, job=job_peers(request.uri, os.environ))
            opened.callback(self._reading.close)
            self.startup: Startup | None = None
            if request.slot is not None:
                budget_bytes = request.memory_bytes // 2
                self.startup = Startup(files, self._reading, request.slot, request.cache, budget_bytes, on_error)
                opened.callback(self.startup.drop)

            def policy_of(path: str) -> Policy:
                return request.policy(files.policy(path.rpartition("/")[0]))

            spool = request.spool or (None if request.cache is None else request.cache / _SPOOL)
            self._writing = Writing(files, policy_of=policy_of, spool=spool)
            opened.callback(self._writing.close)
            self.shown = CheckpointFiles(
                MountContext(
                    files=files,
                    open=self._reading.open,
                    begin=lambda path, mode: self._writing.open(path, mode=mode, is_checked=True),
                    rewrite_bytes=request.rewrite_bytes,
                    on_error=on_error,
                    on_read=_ignore if self.startup is None else self.startup.note,
                )
            )
            self._opened = opened.pop_all()

    def status(self) -> dict[str, object]:
        """Figures for `bootseer ckpt mounted`."""
        reading: Mapping[str, Any] = self._reading.facts()
        return {
            "uri": self._request.uri,
            "unpublished": self.shown.unpublished(),
            "lost": self.shown.lost(),
            **{name: reading[theirs] for name, theirs in _FIGURES.items()},
            **reading,
            "writing": self._writing.facts(),
            **self.shown.facts(),
        }

    def end(self) -> dict[str, object]:
        """Unmounted: publish what was being written."""
        published, lost = self.shown.publish_all()
        return {"published": published, "lost": lost}

    def close(self) -> None:
        """Release connections and files."""
        self._opened.close()

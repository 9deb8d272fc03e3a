"""What the daemon of a mounted place makes for itself: the place, what reads it, what writes it, and the file system.

`Serving` is the `open` of a `DaemonSpec`. Everything is made inside the daemon, because neither connections nor
threads survive a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bootseer.artifact.places import blocks_folder
from bootseer.cache.cache import Cache
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.mount.content import MountContext
from bootseer.checkpoint.mount.filesystem import CheckpointFiles
from bootseer.checkpoint.mount.startup import Startup
from bootseer.checkpoint.places.open import open_place
from bootseer.checkpoint.places.place import NotFolderError
from bootseer.checkpoint.policy import Policy
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.checkpoint.writing.writing import Writing
from bootseer.fuse.writable_session import WritableSession, mount_writable
from bootseer.mounts.daemon import OnError, Served

MEMORY_BYTES = 256 << 20
REWRITE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class MountRequest:
    """A place, and how it is to be shown. Paths are absolute."""

    uri: str
    """As `open_place` takes it."""
    cache: Path | None = None
    """The root of the node's cache, in which what was read of striped files stays; None reads all from the place."""
    spool: Path | None = None
    """A folder on a local disk for what is written and not sent yet; None: one in the cache's root, or without a cache
    where temporary files lie."""
    read_only: bool = False
    memory_bytes: int = MEMORY_BYTES
    """What reading holds in memory of its own, for all files of the mount."""
    rewrite_bytes: int = REWRITE_BYTES
    """The largest published file that may be changed in the middle or appended to, by writing it anew."""
    stripes: int | None = None
    """For new files, in the place of what their folder's policy says."""
    parity: bool | None = None
    """For new files, in the place of what their folder's policy says."""

    only_me: bool = False
    """Whether other users of the machine are shut out; a mount that is not root's is so in any case."""
    slot: str | None = None
    """Which of a job's nodes this is, for a mount that reads ahead what earlier starts read: "" for the only one. None
    reads nothing ahead."""

    def policy(self, folders: Policy) -> Policy:
        """What holds for a new file of this mount, in a folder with this policy."""
        return replace(
            folders,
            stripes=folders.stripes if self.stripes is None else self.stripes,
            parity=folders.parity if self.parity is None else self.parity,
        )


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MIB = 1 << 20


def keep_freed_memory() -> bool:
    """Keep up to 64 MiB. False where the C library is not GNU's, which needs to be told."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    options = (
        # Threads that have memory of their own would each keep some; Python's lock lets only one ask at a time anyway.
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
    "same_bytes": "donor_bytes",
    "rebuilt": "rebuilt",
    "refused": "wrong_chunks",
}
"""Figures of the daemon's status, and what `Reading` calls them."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Calling it opens everything. Raises what the place raises."""

    request: MountRequest

    def __call__(self, on_error: OnError) -> Served:
        keep_freed_memory()
        source = _MountedPlace(self.request, on_error)

        def show(target: Path, label: str, on_error: OnError) -> WritableSession:
            how = {"read_only": self.request.read_only, "shared": not self.request.only_me}
            return mount_writable(source.shown, target, label=label, on_error=on_error, **how)

        startup = source.startup
        if startup is None:
            return Served(source, show, status=source.status, end=source.end)
        return Served(source, show, startup, source.status, startup.begin, source.end)


def _ignore(path: str, offset: int, length: int) -> None:
    """Reads are not recorded."""


class _MountedPlace:
    """The parts of one mount, and their end."""

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
            self._reading = Reading(place, cache=cache, settings=settings)
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
        """The mount is gone: publish what was being written."""
        published, lost = self.shown.publish_all()
        return {"published": published, "lost": lost}

    def close(self) -> None:
        """Give back connections and room."""
        self._opened.close()

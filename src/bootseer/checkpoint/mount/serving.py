"""What the daemon of a mounted place serves: the place, its reader and writer, and the file system.

`MountedPlace` is the `open` of a `DaemonSpec`. Everything is created inside the daemon, because neither connections nor
threads survive a fork.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from bootseer.artifact.places import blocks_folder, spool_folder
from bootseer.cache.cache import Cache
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.locations import job_peers
from bootseer.checkpoint.mount.content import MountContext
from bootseer.checkpoint.mount.filesystem import CheckpointFiles
from bootseer.checkpoint.mount.startup import Startup
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.checkpoint.writing.spool import Spool
from bootseer.checkpoint.writing.writing import Writing
from bootseer.errors import NotFolderError
from bootseer.fuse.session import Session, mount_writable
from bootseer.io.memory import keep_freed_memory
from bootseer.mounts.serve import OnError, Served
from bootseer.places import open_place

MEMORY_BYTES = 256 << 20
_REWRITE_BYTES = 256 << 20


class MountRequest(Struct, frozen=True):
    """A place, and how to mount it. Paths are absolute; a `uri` may also be a relative path."""

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
    only_me: bool = False
    """Whether other users are refused; mounts by others than root always are so."""
    slot: str | None = None
    """The node's position in a job, for a mount that prefetches what earlier starts read: "" for the only one. None: no
    prefetch."""


def _ignore(path: str, offset: int, length: int) -> None:
    """Used where reads are not recorded."""


class MountedPlace(Served):
    """The parts of one mount, and their shutdown."""

    def __init__(self, request: MountRequest, on_error: OnError) -> None:
        """Raises errors of the place."""
        keep_freed_memory()
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
            self.recorder: Startup | None = None
            if request.slot is not None:
                budget_bytes = request.memory_bytes // 2
                self.recorder = Startup(files, self._reading, request.slot, request.cache, budget_bytes, on_error)
                opened.callback(self.recorder.end)
            if request.spool is not None:  # fail now, not at the first save
                Spool(request.spool).close()
            spool = request.spool or (None if request.cache is None else spool_folder(request.cache))
            self._writing = Writing(files, spool=spool)
            opened.callback(self._writing.close)
            self.shown = CheckpointFiles(
                MountContext(
                    files=files,
                    open=self._reading.open,
                    begin=lambda path, mode: self._writing.open(path, mode=mode, is_checked=True),
                    rewrite_bytes=_REWRITE_BYTES,
                    on_error=on_error,
                    on_read=_ignore if self.recorder is None else self.recorder.note,
                )
            )
            self._opened = opened.pop_all()

    def mount(self, target: Path, label: str, on_error: OnError, device: int | None) -> Session:
        how = {"read_only": self._request.read_only, "shared": not self._request.only_me}
        return mount_writable(self.shown, target, label=label, on_error=on_error, **how)

    def run_background(self) -> None:
        if self.recorder is not None:
            self.recorder.begin()

    def end_startup(self) -> None:
        if self.recorder is not None:
            self.recorder.training_began()

    def status(self) -> dict[str, object]:
        """Figures for `bootseer ckpt mounted`."""
        reading: Mapping[str, Any] = self._reading.facts()
        return {
            "uri": self._request.uri,
            "unpublished": self.shown.unpublished(),
            "lost": self.shown.lost(),
            "refused": reading["wrong_chunks"],
            **reading,
            "writing": self._writing.facts(),
            **self.shown.facts(),
        }

    def finish_writes(self) -> dict[str, object]:
        """Publish what was being written."""
        published, lost = self.shown.publish_all()
        return {"published": published, "lost": lost}

    def close(self) -> None:
        """Release connections and files."""
        self._opened.close()

"""What the daemon of a mounted place makes for itself: the place, what reads it, what writes it, and the file system.

`Serving` is the `open` of a `DaemonSpec`. Everything is made inside the daemon, because neither connections nor
threads survive a fork. Made by `mounted`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootseer.bring.places import blocks_folder
from bootseer.cache.cache import Cache
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.mount.content import Sources
from bootseer.checkpoint.mount.filesystem import CheckpointFiles
from bootseer.checkpoint.mount.freed_memory import keep_freed_memory
from bootseer.checkpoint.mount.request import MountRequest
from bootseer.checkpoint.mount.startup import Startup
from bootseer.checkpoint.places.open import open_place
from bootseer.checkpoint.places.place import NotFolderError
from bootseer.checkpoint.policy import Policy
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.checkpoint.writing.writing import Writing
from bootseer.fuse.writable_session import WritableSession, mount_writable
from bootseer.mounts.daemon import OnError, Served

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
        source = _Source(self.request, on_error)

        def show(target: Path, label: str, on_error: OnError) -> WritableSession:
            how = {"read_only": self.request.read_only, "shared": not self.request.only_me}
            return mount_writable(source.shown, target, label=label, on_error=on_error, **how)

        startup = source.startup
        if startup is None:
            return Served(source, show, status=source.status, end=source.end)
        return Served(source, show, startup, source.status, startup.begin, source.end)


def _ignore(path: str, offset: int, length: int) -> None:
    """Nobody wants to know what is read."""


class _Source:
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
                Sources(
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
        """Figures for whoever asks the daemon."""
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

"""A place mounted by the test's own process, which is fast and gives access to its internals.

Two of them with the same folder are like two machines with the same file system.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.mount.content import MountContext
from bootseer.checkpoint.mount.filesystem import CheckpointFiles
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.writing.lane import WritingSettings
from bootseer.checkpoint.writing.writing import Writing
from bootseer.errors import BootseerError
from bootseer.fuse.session import Session, mount_writable
from bootseer.places.folder import FolderPlace
from bootseer.places.place import Place

MIB = 1 << 20
DEADLINE_S = 120.0
STRIPED = Policy(stripes=3, part_bytes=2 * MIB, min_bytes_per_stripe=MIB)
"""Files of two or more chunks are striped, and those of seven have two segments."""


def number_of(call: Callable[[], object]) -> int | None:
    """The `errno` of a call's error, None without an error."""
    try:
        call()
    except OSError as error:
        return error.errno
    return None


class MountedPlace:
    """`root`: the folder of the place; `target`: its mount point; `said`: the lines of its log."""

    def __init__(
        self,
        root: Path,
        target: Path,
        *,
        rewrite_bytes: int = 64 * MIB,
        place: Place | None = None,
        settings: WritingSettings | None = None,
    ) -> None:
        target.mkdir(exist_ok=True)
        self.root = root
        self.target = target
        self.said: list[str] = []
        self.place = place or FolderPlace(root)
        self.files = Files(self.place)
        self.reading = Reading(self.place)
        self.files.policy = lambda path: STRIPED  # type: ignore[method-assign]
        self.writing = Writing(self.files, spool=target.parent / "spool", settings=settings)
        self.shown = CheckpointFiles(
            MountContext(
                files=self.files,
                open=self.reading.open,
                begin=lambda path, mode: self.writing.open(path, mode=mode, is_checked=True),
                rewrite_bytes=rewrite_bytes,
                on_error=self.said.append,
                on_read=lambda path, offset, length: None,
            )
        )
        self.session: Session = mount_writable(self.shown, target, on_error=self.said.append)

    def is_striped(self, path: str) -> bool:
        """Whether the file at a path is striped."""
        return self.files.stat(path).is_striped

    def close(self) -> None:
        """Unmount, even if it is in use."""
        with contextlib.suppress(BootseerError):
            self.session.close(force=True)
        self.writing.close()
        self.reading.close()
        if self.place is not None:
            self.place.close()

"""Where an image comes from: a registry, an OCI layout, a docker archive or a folder.

`open_source` reads manifest and configuration, verified by their digests; layers are streams that `convert` opens, and
verifies while they pass. The kinds of sources are in modules of their own.
"""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

from bootseer.errors import UsageError
from bootseer.image.reference import Place, Reference
from bootseer.image.sources.manifest import Platform

if TYPE_CHECKING:
    from pathlib import Path

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}


@dataclass(frozen=True, slots=True)
class SourceLayer:
    """A layer as the source has it."""

    digest: str
    """Of the bytes that `read` gives; empty when the source does not tell."""
    size_bytes: int
    diff_id: str
    """Digest of the uncompressed tar stream."""
    read: Callable[[int], Generator[bytes, None, None]]
    """The bytes from an offset on. After a `TransientError` it may be called again with the offset that was reached."""


@dataclass(frozen=True, slots=True)
class Source:
    """An image that can be converted. Call `close` at the end."""

    name: str
    """For people."""
    digest: str
    """Of the manifest. Empty for a folder, whose digest is known when it was read."""
    config: Mapping[str, object]
    config_data: bytes
    """The configuration to the byte."""
    layers: tuple[SourceLayer, ...] = ()
    """Bottom first; none for a folder."""
    folder: Path | None = None
    location: str = ""
    """URI of the store that holds the manifest, when it is one: the converted image can be attached to it there."""
    manifest: bytes = b""
    """To the byte; empty for a source that has none."""
    close: Callable[[], None] = field(default=lambda: None)


def this_platform() -> Platform:
    """What this machine runs."""
    machine = platform.machine()
    return Platform("linux", _MACHINES.get(machine, machine))


def open_plain(path: Path) -> IO[bytes]:
    """A file for reading, of which every part can be read again. Raises `UsageError` for a FIFO or a device, which
    could keep the reader waiting, and `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise UsageError(f"{path}: not a regular file", hint="write what comes from a pipe into a file first")


def open_source(reference: Reference, *, platform: Platform | None = None, plain_http: bool = False) -> Source:
    """Look at an image. `platform` chooses from images for several ones, this machine's by default.

    Raises `UsageError` when there is nothing of that name, `PermanentError` for what cannot be converted,
    `CorruptError` for documents that are not what their digests say, and what a store raises.
    """
    wanted = platform or this_platform()
    if reference.place is Place.REGISTRY:
        from bootseer.image.sources.registry import open_registry_image

        return open_registry_image(reference, wanted, plain_http=plain_http)
    if reference.place is Place.LAYOUT:
        from bootseer.image.sources.layout import open_layout

        return open_layout(reference, wanted)
    if reference.place is Place.ARCHIVE:
        from bootseer.image.sources.archive import open_archive

        return open_archive(reference)
    if reference.place is Place.FOLDER:
        from bootseer.image.sources.folder import open_folder

        return open_folder(reference, wanted)
    raise UsageError(f"{reference} is an image that is converted already", hint="name its source")

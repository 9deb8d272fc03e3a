"""The interface of image sources: manifest, configuration, and layers as streams that are verified while they are read.

`open_source` opens a registry, an OCI layout, a docker archive or a folder.
"""

from __future__ import annotations

import os
import platform as machine
import random
import stat
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import IO, TYPE_CHECKING

from msgspec import Struct, field

from bootseer.errors import CorruptError, UsageError
from bootseer.image.reference import Reference, SourceKind
from bootseer.image.sources.manifest import Descriptor, Manifest, Platform, checked, read_config, read_diff_ids
from bootseer.io.retry import retrying

if TYPE_CHECKING:
    from pathlib import Path


_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}
_STALL_S = 300.0
"""How long a layer's stream may deliver no bytes, retries included."""


class SourceLayer(Struct, frozen=True):
    """A layer in its source, usually compressed."""

    digest: str
    """Digest of the bytes that `read` yields; empty if the source does not state it."""
    size_bytes: int
    diff_id: str
    """Digest of the uncompressed tar stream."""
    read: Callable[[int], Generator[bytes, None, None]]
    """Yields the bytes from an offset on. After a `TransientError` it may be called again, with the offset reached."""


class ImageSource(Struct, frozen=True):
    """An image that can be converted. Call `close` at the end."""

    name: str
    """The reference, for messages."""
    digest: str
    """Digest of the manifest. Empty for a folder, whose digest is known only after it is read."""
    config: Mapping[str, object]
    config_data: bytes
    """The configuration's exact bytes, which its digest covers."""
    layers: tuple[SourceLayer, ...] = ()
    """Bottom first; empty for a folder."""
    folder: Path | None = None
    location: str = ""
    """URI of the registry repository that holds the manifest: the converted image is attached to it there. Empty for
    other sources."""
    manifest: bytes = b""
    """The manifest's exact bytes; empty for a source without one."""
    close: Callable[[], None] = field(default=lambda: None)


def source_of(
    where: str,
    digest: str,
    manifest: Manifest,
    config_data: bytes,
    read: Callable[[Descriptor, int], Generator[bytes, None, None]],
) -> ImageSource:
    """The image of a manifest; `read` as `SourceLayer.read`. Raises `CorruptError` for a wrong configuration."""
    config = read_config(checked(config_data, manifest.config, f"{where}: the configuration"), where)
    layers = tuple(
        SourceLayer(layer.digest, layer.size_bytes, diff_id, partial(read, layer))
        for layer, diff_id in zip(manifest.layers, read_diff_ids(config, len(manifest.layers), where), strict=True)
    )
    return ImageSource(where, digest, config, config_data, layers, manifest=manifest.data)


def open_plain(path: Path) -> IO[bytes]:
    """Open a regular file for reading. Raises `OSError`, and `UsageError` for a FIFO or a device: opening or reading
    these may block, and they cannot seek."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise UsageError(f"{path}: not a regular file", hint="write a pipe's output to a file first")


def read_resumed(layer: SourceLayer, progress: Callable[[int], None] = lambda done: None) -> Iterator[bytes]:
    """The bytes of a layer; `progress` gets their number so far. A broken stream is reopened at the offset it reached.

    Raises the last error when no byte arrived for `_STALL_S`, and `CorruptError` at the end if their number is not the
    declared size."""
    offset = 0
    stream: Generator[bytes, None, None] | None = None
    rng = random.Random()  # noqa: S311 - jitter, not a secret

    def next_piece(_left_s: float) -> bytes | None:
        nonlocal stream
        if stream is None:
            stream = layer.read(offset)
        try:
            return next(stream, None)
        except BaseException:
            stream.close()
            stream = None
            raise

    try:
        while offset < layer.size_bytes:
            piece = retrying(next_piece, attempts=None, deadline_s=_STALL_S, rng=rng)
            if piece is None:
                break
            offset += len(piece)
            progress(offset)
            yield piece
        if offset != layer.size_bytes:
            raise CorruptError(f"{offset} bytes received, {layer.size_bytes} expected")
    finally:
        if stream is not None:
            stream.close()


def this_platform() -> Platform:
    """The platform of this machine."""
    name = machine.machine()
    return Platform("linux", _MACHINES.get(name, name))


def open_source(
    reference: Reference, *, platform: Platform | None = None, plain_http: bool = False, mirrored: bool = True
) -> ImageSource:
    """Read an image's manifest and configuration. `platform` selects from a multi-platform image; default: this
    machine's.

    Raises `UsageError` for an image that does not exist, `PermanentError` for one that cannot be converted,
    `CorruptError` for a document that does not match its digest, and the store's errors.
    """
    wanted = platform or this_platform()
    if reference.kind is SourceKind.REGISTRY:
        from bootseer.image.sources.registry import open_registry_image

        return open_registry_image(reference, wanted, plain_http=plain_http, mirrored=mirrored)
    if reference.kind is SourceKind.LAYOUT:
        from bootseer.image.sources.local import open_layout

        return open_layout(reference, wanted)
    if reference.kind is SourceKind.ARCHIVE:
        from bootseer.image.sources.local import open_archive

        return open_archive(reference)
    if reference.kind is SourceKind.FOLDER:
        from bootseer.image.sources.folder import open_folder

        return open_folder(reference, wanted)
    raise UsageError(f"{reference} is already converted", hint="name its source image")

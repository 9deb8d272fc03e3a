"""Images in a registry."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, closing
from functools import partial

from msgspec.structs import replace

from bootseer.errors import CorruptError, NotFoundError
from bootseer.image.reference import Reference
from bootseer.image.sources.manifest import Descriptor, Platform, resolve_manifest
from bootseer.image.sources.source import ImageSource, source_of
from bootseer.io.retry import retrying
from bootseer.store.open import open_registry
from bootseer.store.registry import RangeIgnoredError, Registry

_RANGE_BYTES = 32 << 20
_RANGE_TIMEOUT_S = 120.0
"""32 MiB in two minutes is 2 Mbit/s; anything slower counts as broken. A range that times out is resumed."""
_WHOLE_TIMEOUT_S = 1800.0


def open_registry_image(reference: Reference, platform: Platform, *, plain_http: bool, mirrored: bool) -> ImageSource:
    """The image of a tag or digest. Raises as `source.open_source` does."""
    where = str(reference)
    registry = open_registry(reference.host, reference.repository, plain_http=plain_http, mirrored=mirrored)

    def read(version: str) -> tuple[bytes, str, str]:
        try:
            manifest = retrying(lambda left_s: registry.manifest(version, timeout_s=left_s))
        except NotFoundError as error:
            if version != reference.version:
                raise
            raise NotFoundError(f"no such tag or repository: {where}") from error
        return manifest.data, manifest.media_type, manifest.digest

    with ExitStack() as opened:
        opened.callback(registry.close)
        manifest, digest = resolve_manifest(read, reference.version, platform, where)
        data = retrying(lambda left_s: b"".join(_read_blob(registry, manifest.config, 0)))
        image = source_of(where, digest, manifest, data, partial(_read_blob, registry))
        return replace(image, location=f"oci://{registry}", close=opened.pop_all().close)


def _read_blob(registry: Registry, blob: Descriptor, start: int) -> Generator[bytes, None, None]:
    """Read in ranges, each with a deadline of its own, so that a stalled connection is detected early. Where ranges
    are ignored, the whole blob is read again, without what was read before. Never yields more than the blob's size."""
    try:
        while start < blob.size_bytes:
            length = min(_RANGE_BYTES, blob.size_bytes - start)
            with closing(registry.blob(blob.digest, start, length, timeout_s=_RANGE_TIMEOUT_S)) as pieces:
                for piece in pieces:
                    start += len(piece)
                    yield piece
    except RangeIgnoredError:
        left = blob.size_bytes
        with closing(registry.blob(blob.digest, timeout_s=_WHOLE_TIMEOUT_S)) as pieces:
            for piece in pieces:
                left -= len(piece)
                if left < 0:
                    raise CorruptError(f"{registry}: more than the {blob.size_bytes} bytes of {blob.digest}") from None
                if start < len(piece):
                    yield piece[start:]
                start = max(start - len(piece), 0)

"""Convert one layer, or find its earlier conversion in the store. Runs in a thread of `convert`.

A layer's tar stream becomes an EROFS image in one pass: file data is written as it arrives. Members are added to the
tree as they arrive, until one depends on the layers below, which other threads may still be converting. From that
member on, members are queued (their data is still written at once) and added after the lower layers are complete. So
layers are converted in parallel, with the same result as unpacking them one after the other.

The layer's document is published only after the uncompressed bytes were verified against their digest and all blocks
are stored.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from bootseer.artifact.objects import missing, put, read_all
from bootseer.artifact.signatures import UNSIGNED, Signatures, stored_limit
from bootseer.blocks.block_file import BlockFile
from bootseer.blocks.codec import FAST_LEVEL
from bootseer.blocks.writer import DEFAULT_BLOCK_SIZE, BlockWriter
from bootseer.erofs.format import BLOCK
from bootseer.erofs.merged import MergedLayers
from bootseer.erofs.writer import ErofsWriter, Extent
from bootseer.errors import BootseerError, CorruptError, NotFoundError, PermanentError, SignatureError
from bootseer.image.conversion.layer_document import MAX_BYTES, ConvertedLayer, encode, layer_name, parse
from bootseer.image.conversion.layer_tree import LayerTree, NeedsLowerError
from bootseer.image.conversion.tar import Member, TarReader, shown
from bootseer.image.sources.decompress import Stream, decompressed
from bootseer.image.sources.source import SourceLayer, read_resumed
from bootseer.io.retry import retrying
from bootseer.logs import logger
from bootseer.store.store import Store
from bootseer.units import format_bytes

_ATTEMPTS = 3
_LAYER_DEADLINE_S = 24 * 3600.0
_PUBLISH_S = 120.0
_BOMB_RATIO = 200
_BOMB_FLOOR = 64 << 30
_LOG = logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayerLimits:
    """Limits of one layer, against decompression bombs and exhausted memory."""

    unpacked_bytes: int = 0
    """Limit of all files' sizes, holes included, and of the tar stream. 0: 64 GiB or 200 times the compressed size,
    whichever is larger. Source code compresses 5 times, logs 20 times, empty database files up to 200 times."""
    members: int = 4_000_000
    """Number of files and directories, of 400 to 600 bytes of memory each. Large training images have 500,000."""
    text_bytes: int = 512 << 20
    """Size of all names, link targets and extended attributes, which are held in memory."""


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """How images are converted. Block size (bytes) and compression level are part of a layer's name."""

    block_size: int = DEFAULT_BLOCK_SIZE
    level: int = FAST_LEVEL
    limits: LayerLimits = field(default_factory=LayerLimits)
    signatures: Signatures = UNSIGNED
    """Keys that sign the documents of layers and images."""


def write_erofs(store: Store, options: ConvertOptions, fill: Callable[[ErofsWriter], T]) -> tuple[BlockFile, T]:
    """The block file of the EROFS image that `fill` writes, and the result of `fill`."""
    with BlockWriter(store, block_size=options.block_size, level=options.level, head_bytes=BLOCK) as blocks:
        writer = ErofsWriter(blocks)
        result = fill(writer)
        return blocks.finish(writer.finish()), result


class CancelledError(BootseerError):
    """The conversion ends because another layer failed or the user cancelled it."""


@dataclass(frozen=True, slots=True)
class LayerJob:
    """The conversion of one layer."""

    layer: SourceLayer
    store: Store
    options: ConvertOptions
    where: str
    """The layer's name in messages."""
    below: str
    """The digest of the layers below (`stack_digest`): part of the result's name if that depends on them."""
    lower: Callable[[], MergedLayers] | None
    """Waits for the layers below; None at the bottom."""
    progress: Callable[[int], None]
    """Called with the number of source bytes done. Raises `CancelledError` after the conversion was cancelled."""

    def run(self) -> ConvertedLayer:
        """The converted layer. Raises `CorruptError`, `PermanentError`, `CancelledError` and the store's errors."""
        found = self._find("") or self._find(self.below)
        if found is not None:
            _LOG.info("%s: converted before", self.where)
            self.progress(self.layer.size_bytes)
            return found
        # An upload cannot be resumed in the middle, so the whole layer is retried.
        return retrying(lambda _: self._convert(), attempts=_ATTEMPTS, deadline_s=_LAYER_DEADLINE_S)

    def _find(self, below: str) -> ConvertedLayer | None:
        """The layer's document, if the store has all objects that it refers to. `below`: see `layer_name`."""
        try:
            name = self._name(below)
            data = read_all(self.store, name, stored_limit(MAX_BYTES))
            found = parse(self.options.signatures.open(name, data, self.store.uri, reuse=True))
        except (NotFoundError, CorruptError, SignatureError):
            return None  # missing, damaged or not signed by a trusted key: converted again
        return None if missing(self.store, found.file.objects) else found

    def _convert(self) -> ConvertedLayer:
        file, tree = write_erofs(self.store, self.options, lambda writer: _Conversion(self, writer).run())
        converted = ConvertedLayer(file, tree.root, tree.root_opaque)
        _LOG.info(
            "%s: converted, %d bytes stored as %d%s",
            self.where,
            file.size_bytes,
            file.stored_bytes,
            ", depends on the layers below" if tree.depends_on_lower else "",
        )
        name = self._name(self.below if tree.depends_on_lower else "")
        data = self.options.signatures.seal(name, encode(converted))
        put(self.store, name, data, file.objects, timeout_s=_PUBLISH_S)
        return converted

    def _name(self, below: str) -> str:
        options = self.options
        return layer_name(self.layer.diff_id, block_size=options.block_size, level=options.level, below=below)


class _Conversion:
    """One attempt to convert a layer to `writer`."""

    def __init__(self, job: LayerJob, writer: ErofsWriter) -> None:
        self._job = job
        self._writer = writer
        self._tree = LayerTree(writer, lower=None if job.lower else MergedLayers([]))
        self._limits = job.options.limits
        self._unpacked_limit = self._limits.unpacked_bytes or max(_BOMB_FLOOR, _BOMB_RATIO * job.layer.size_bytes)
        self._too_large = f"larger than {format_bytes(self._unpacked_limit)} unpacked"
        self._queued: deque[tuple[Member, Extent]] = deque()
        self._text_bytes = 0
        self._current = b""  # name of the member being converted, for messages

    def run(self) -> LayerTree:
        """Convert the tar stream. It is read to its end before anything is looked up in lower layers.

        Raises `CorruptError` for a damaged archive and `PermanentError` for a member that cannot be converted, with the
        names of layer and member.
        """
        try:
            return self._read()
        except PermanentError as error:
            at = f"at {shown(self._current)}" if self._current else "at its beginning"
            raise type(error)(f"{self._job.where}, {at}: {error}") from error

    def _read(self) -> LayerTree:
        layer = self._job.layer
        stream = Stream(self._checked(decompressed(read_resumed(layer, self._job.progress)), layer.diff_id))
        reader = TarReader(stream)
        for number, member in enumerate(reader):
            self._current = member.name
            if number >= self._limits.members:
                raise _above("members", self._limits.members, f"more than {self._limits.members} files")
            self._count_text(member)
            extent = Extent(0, 0)
            if self._tree.keeps_content(member):
                if self._writer.position + member.size > self._unpacked_limit:
                    raise _above("unpacked_bytes", self._unpacked_limit, self._too_large)
                extent = self._writer.write_file(reader.content())
            if self._queued:
                self._queued.append((member, extent))
                continue
            try:
                self._add(member, extent)
            except NeedsLowerError:
                self._queued.append((member, extent))
        while stream.some(1 << 20):
            pass  # digests also cover the bytes after the end of the archive
        if self._queued and self._job.lower is not None:
            self._tree.lower = self._job.lower()
        while self._queued:
            member, extent = self._queued.popleft()
            self._current = member.name
            self._add(member, extent)
        return self._tree

    def _add(self, member: Member, extent: Extent) -> None:
        self._tree.add(member, extent)
        if len(self._writer.tree) > self._limits.members:  # counts parent directories without an entry, too
            raise _above("members", self._limits.members, f"more than {self._limits.members} files")

    def _count_text(self, member: Member) -> None:
        self._text_bytes += len(member.name) + len(member.link)
        if member.xattrs:
            self._text_bytes += sum(map(len, (*member.xattrs, *member.xattrs.values())))
        if self._text_bytes > self._limits.text_bytes:
            limit = self._limits.text_bytes
            raise _above("text_bytes", limit, f"names, links and attributes exceed {format_bytes(limit)}")

    def _checked(self, pieces: Iterator[bytes], diff_id: str) -> Iterator[bytes]:
        """Pass the tar stream on, with its headers and the bytes after the archive's end: limit it, and raise
        `CorruptError` at the end if it does not have the digest `diff_id`.

        The compressed bytes need no digest check: only this stream is used, and the manifest's digest covers the
        configuration, which has the `diff_id`.
        """
        total, digest = 0, hashlib.sha256()
        for piece in pieces:
            total += len(piece)
            if total > self._unpacked_limit:
                raise _above("unpacked_bytes", self._unpacked_limit, self._too_large)
            digest.update(piece)
            yield piece
        if "sha256:" + digest.hexdigest() != diff_id:
            raise CorruptError(f"the uncompressed bytes do not match {diff_id}")


def _above(name: str, limit: int, reason: str) -> PermanentError:
    return PermanentError(f"{reason}; to allow more: --layer-limit {name}={2 * limit}")

"""Read a layer's tar stream into an EROFS image that is being written.

Data goes straight to the writer as it arrives. Members go into the tree as they come, unless one needs to know the
layers below, which other threads may still be converting: from there on members wait, their data does not. So layers
are converted side by side, and still mean exactly what they mean when they are unpacked one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bootseer.erofs.format import Attributes
from bootseer.erofs.writer import ErofsWriter, Extent
from bootseer.errors import PermanentError
from bootseer.image.conversion.layer_tree import LayerTree, Lower, NeedsLowerError, Path
from bootseer.image.conversion.tar import Member, Stream, TarReader
from bootseer.image.merged import MergedTree
from bootseer.image.sources.decompress import decompressed
from bootseer.units import format_bytes

_BOMB_RATIO = 200
_BOMB_FLOOR = 64 << 30


@dataclass(frozen=True, slots=True)
class LayerLimits:
    """What one layer may cost. A hostile one is refused when it gets there, with a clear word."""

    unpacked_bytes: int = 0
    """Files with their holes, and the tar stream itself. 0: 64 GiB or 200 times the compressed size, what is more:
    source code compresses 5 times, logs 20 times, and a few empty database files may well be 200."""
    members: int = 4_000_000
    """Files and directories, about 400 bytes of memory each, 600 when they wait for lower layers. Large training images
    have 500,000."""
    text_bytes: int = 512 << 20
    """Names, targets of links and extended attributes, all of which are held in memory."""

    def unpacked_limit(self, compressed_bytes: int) -> int:
        """The limit in bytes for a layer of this compressed size."""
        return self.unpacked_bytes or max(_BOMB_FLOOR, _BOMB_RATIO * compressed_bytes)


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What is to be known of a layer besides its image."""

    root: Attributes | None
    """The attributes of the root directory, if the layer says them."""
    opaque: bool
    """Whether it hides everything below it."""
    asked: dict[Path, str]
    """Questions to the layers below, and their answers."""


def write_layer(
    writer: ErofsWriter,
    pieces: Iterator[bytes],
    *,
    where: str,
    lower: Callable[[], Lower] | None,
    limits: LayerLimits,
    compressed_bytes: int,
    uncompressed: Callable[[Iterator[bytes]], Iterator[bytes]] = lambda pieces: pieces,
) -> LayerFacts:
    """Put the layer behind `pieces` (compressed or not) into `writer`.

    `lower` waits for the layers below; None means that there are none. `uncompressed` sees the whole tar stream and may
    raise at its end: then nothing was asked of lower layers yet. Raises `CorruptError` for damaged archives and
    `PermanentError` for members that cannot be kept, naming `where` and the member.
    """
    return _LayerRun(writer, where, lower, limits, compressed_bytes).run(uncompressed(decompressed(pieces)))


class _LayerRun:
    def __init__(
        self,
        writer: ErofsWriter,
        where: str,
        lower: Callable[[], Lower] | None,
        limits: LayerLimits,
        compressed_bytes: int,
    ) -> None:
        self._writer = writer
        self._where = where
        self._wait_for_lower = lower
        self._tree = LayerTree(writer, lower=None if lower else Lower(MergedTree([])))
        self._limits = limits
        self._unpacked_limit = limits.unpacked_limit(compressed_bytes)
        self._waiting: deque[tuple[Member, Extent]] = deque()
        self._text_bytes = 0
        self._at = b""  # the member that is looked at

    def run(self, pieces: Iterator[bytes]) -> LayerFacts:
        try:
            return self._read(pieces)
        except PermanentError as error:
            at = f"at {_shown(self._at)}" if self._at else "at its beginning"
            raise type(error)(f"{self._where}, {at}: {error}") from error

    def _read(self, pieces: Iterator[bytes]) -> LayerFacts:
        stream = Stream(self._bounded(pieces))
        reader = TarReader(stream)
        for number, member in enumerate(reader):
            self._at = member.name
            if number >= self._limits.members:
                raise self._too_many()
            self._count_text(member)
            extent = self._store_content(reader, member) if self._tree.keeps_content(member) else Extent(0, 0)
            if self._waiting:
                self._waiting.append((member, extent))
                continue
            try:
                self._add(member, extent)
            except NeedsLowerError:
                self._waiting.append((member, extent))
        while stream.some(1 << 20):
            pass  # what follows the end of the archive belongs to the digests
        lower = self._tree.lower
        if self._waiting and self._wait_for_lower is not None:
            lower = self._tree.lower = self._wait_for_lower()
        while self._waiting:
            member, extent = self._waiting.popleft()
            self._at = member.name
            self._add(member, extent)
        return LayerFacts(self._tree.root, self._tree.root_opaque, lower.asked if lower is not None else {})

    def _add(self, member: Member, extent: Extent) -> None:
        self._tree.add(member, extent)
        if len(self._writer.tree) > self._limits.members:  # directories on the way count as well
            raise self._too_many()

    def _count_text(self, member: Member) -> None:
        self._text_bytes += len(member.name) + len(member.link)
        if member.xattrs:
            self._text_bytes += sum(map(len, (*member.xattrs, *member.xattrs.values())))
        if self._text_bytes > self._limits.text_bytes:
            limit = format_bytes(self._limits.text_bytes)
            raise PermanentError(
                f"names, links and attributes are longer than {limit};"
                f" if that is right: --layer-limit text_bytes={2 * self._limits.text_bytes}"
            )

    def _store_content(self, reader: TarReader, member: Member) -> Extent:
        writer = self._writer
        if writer.position + member.size > self._unpacked_limit:
            raise self._too_large()
        for piece in reader.content():
            if isinstance(piece, int):
                writer.write_zeros(piece)
            else:
                writer.write(piece)
        return writer.end_file()

    def _bounded(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """The tar stream, no more of it than a layer may have: headers and what follows the archive count too."""
        total = 0
        for piece in pieces:
            total += len(piece)
            if total > self._unpacked_limit:
                raise self._too_large()
            yield piece

    def _too_many(self) -> PermanentError:
        most = self._limits.members
        return PermanentError(f"more than {most} files; if that is right: --layer-limit members={2 * most}")

    def _too_large(self) -> PermanentError:
        limit = self._unpacked_limit
        return PermanentError(
            f"unpacked it is larger than {format_bytes(limit)};"
            f" if that is right: --layer-limit unpacked_bytes={2 * limit}"
        )


def _shown(name: bytes) -> str:
    return repr(name[:200].decode("utf-8", "backslashreplace"))

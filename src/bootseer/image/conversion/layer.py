"""Convert a layer's tar stream to an EROFS image in one pass.

File data is written as it arrives. Members are added to the tree as they arrive, until one depends on the layers below,
which other threads may still be converting. From that member on, members are queued (their data is still written at
once) and added after the lower layers are complete. So layers are converted in parallel, with the same result as
unpacking them one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bootseer.erofs.merged import MergedLayers
from bootseer.erofs.writer import ErofsWriter, Extent
from bootseer.errors import PermanentError
from bootseer.image.conversion.layer_tree import LayerTree, NeedsLowerError
from bootseer.image.conversion.tar import Stream, TarReader, shown
from bootseer.image.conversion.tar_header import Member
from bootseer.units import format_bytes

_BOMB_RATIO = 200
_BOMB_FLOOR = 64 << 30


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

    def unpacked_limit(self, compressed_bytes: int) -> int:
        """The limit in bytes for a layer of this compressed size."""
        return self.unpacked_bytes or max(_BOMB_FLOOR, _BOMB_RATIO * compressed_bytes)


class LayerConversion:
    """The conversion of one layer to `writer`."""

    def __init__(
        self,
        writer: ErofsWriter,
        *,
        where: str,
        lower: Callable[[], MergedLayers] | None,
        limits: LayerLimits,
        compressed_bytes: int,
    ) -> None:
        """`where`: the layer's name in errors. `lower` waits for the layers below and returns them; None for the bottom
        layer."""
        self._writer = writer
        self._where = where
        self._wait_for_lower = lower
        self._tree = LayerTree(writer, lower=None if lower else MergedLayers([]))
        self._limits = limits
        self._unpacked_limit = limits.unpacked_limit(compressed_bytes)
        self._queued: deque[tuple[Member, Extent]] = deque()
        self._text_bytes = 0
        self._current = b""  # name of the member being converted, for messages

    def run(self, pieces: Iterator[bytes]) -> LayerTree:
        """Convert the tar stream in `pieces`. It is read to its end before anything is looked up in lower layers.

        Raises `CorruptError` for a damaged archive and `PermanentError` for a member that cannot be converted, with the
        names of layer and member.
        """
        try:
            return self._read(pieces)
        except PermanentError as error:
            at = f"at {shown(self._current)}" if self._current else "at its beginning"
            raise type(error)(f"{self._where}, {at}: {error}") from error

    def _read(self, pieces: Iterator[bytes]) -> LayerTree:
        stream = Stream(self._bounded(pieces))
        reader = TarReader(stream)
        for number, member in enumerate(reader):
            self._current = member.name
            if number >= self._limits.members:
                raise self._too_many()
            self._count_text(member)
            extent = self._store_content(reader, member) if self._tree.keeps_content(member) else Extent(0, 0)
            if self._queued:
                self._queued.append((member, extent))
                continue
            try:
                self._add(member, extent)
            except NeedsLowerError:
                self._queued.append((member, extent))
        while stream.some(1 << 20):
            pass  # digests also cover the bytes after the end of the archive
        if self._queued and self._wait_for_lower is not None:
            self._tree.lower = self._wait_for_lower()
        while self._queued:
            member, extent = self._queued.popleft()
            self._current = member.name
            self._add(member, extent)
        return self._tree

    def _add(self, member: Member, extent: Extent) -> None:
        self._tree.add(member, extent)
        if len(self._writer.tree) > self._limits.members:  # counts parent directories without an entry, too
            raise self._too_many()

    def _count_text(self, member: Member) -> None:
        self._text_bytes += len(member.name) + len(member.link)
        if member.xattrs:
            self._text_bytes += sum(map(len, (*member.xattrs, *member.xattrs.values())))
        if self._text_bytes > self._limits.text_bytes:
            limit = format_bytes(self._limits.text_bytes)
            raise PermanentError(
                f"names, links and attributes exceed {limit};"
                f" to allow more: --layer-limit text_bytes={2 * self._limits.text_bytes}"
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
        """Limit the tar stream, with its headers and the bytes after the archive's end."""
        total = 0
        for piece in pieces:
            total += len(piece)
            if total > self._unpacked_limit:
                raise self._too_large()
            yield piece

    def _too_many(self) -> PermanentError:
        most = self._limits.members
        return PermanentError(f"more than {most} files; to allow more: --layer-limit members={2 * most}")

    def _too_large(self) -> PermanentError:
        limit = self._unpacked_limit
        return PermanentError(
            f"larger than {format_bytes(limit)} unpacked; to allow more: --layer-limit unpacked_bytes={2 * limit}"
        )

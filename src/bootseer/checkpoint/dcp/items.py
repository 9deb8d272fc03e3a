"""What a load plan needs from which bytes of which file, checked against the checkpoint's metadata; and which part of a
stored tensor a target wants, as bytes in a row.

Decides and reads nothing.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from bootseer.checkpoint.dcp.saved import Pieces, layout_of
from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.checkpoint.safetensors.header import Header, read_headers
from bootseer.checkpoint.tensors import dtype_of, is_plain
from bootseer.errors import CorruptError

_MAX_BYTES = 1 << 62


class Form(Enum):
    """How an object is stored."""

    BYTES = auto()
    """As it is."""
    SAVED = auto()
    """By `torch.save`."""
    SAFETENSORS = auto()
    """In a safetensors file, which begins where the item does and holds all tensors of the file."""
    BARE = auto()
    """As nothing but its elements."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An object in a file, and the requests that want it or parts of it."""

    file: str
    offset: int
    length: int
    form: Form
    descriptors: tuple[str, ...]
    """Names of the transformations to undo."""
    index: MetadataIndex
    sizes: tuple[int, ...]
    """Shape of a tensor; () for bytes."""
    dtype: torch.dtype
    """Of a tensor, as the metadata has it."""
    requests: tuple[ReadItem, ...]

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.length


def stored_items(plan: LoadPlan, metadata: Metadata, storage_data: Mapping[Any, Any], uri: str) -> list[Stored]:
    """Each object that the plan names, once. Raises `CorruptError` for metadata that contradicts itself."""
    wanted: dict[tuple[MetadataIndex, LoadItemType], list[ReadItem]] = {}
    for request in plan.items:
        wanted.setdefault((request.storage_index, request.type), []).append(request)
    chunks = _Chunks(metadata, uri)
    return [_stored(index, kind, tuple(requests), storage_data, chunks) for (index, kind), requests in wanted.items()]


def _stored(
    index: MetadataIndex,
    kind: LoadItemType,
    requests: tuple[ReadItem, ...],
    storage_data: Mapping[Any, Any],
    chunks: _Chunks,
) -> Stored:
    place = storage_data.get(index)
    if place is None:
        raise CorruptError(f"{chunks.where}: the metadata does not say where {index.fqn} is stored")
    found: list[Any] = [getattr(place, name, None) for name in ("relative_path", "offset", "length")]
    file, offset, length = found
    if not (_is_inside(file) and _is_count(offset) and _is_count(length)):
        raise CorruptError(f"{chunks.where}: the metadata places {index.fqn} at {file!r}, {offset!r}, {length!r}")
    descriptors = tuple(getattr(place, "transform_descriptors", None) or ())
    if kind == LoadItemType.BYTE_IO:
        return Stored(file, offset, length, Form.BYTES, descriptors, index, (), torch.uint8, requests)
    dtype, sizes = chunks.of(index)
    # torch.save never takes as little room as the elements alone.
    form = Form.SAFETENSORS if length == math.prod(sizes) * dtype.itemsize and not descriptors else Form.SAVED
    for request in requests:
        for first, count, size in zip(request.storage_offsets, request.lengths, sizes, strict=True):
            if first < 0 or count < 0 or first + count > size:
                raise CorruptError(f"{chunks.where}: {index.fqn} has the shape {sizes}; wanted is {count} from {first}")
    return Stored(file, offset, length, form, descriptors, index, sizes, dtype, requests)


class _Chunks:
    """The shapes of chunks, by tensor and offset."""

    def __init__(self, metadata: Metadata, uri: str) -> None:
        self.where = uri
        self._metadata = metadata
        self._known: dict[str, tuple[torch.dtype, dict[tuple[int, ...], tuple[int, ...]]]] = {}

    def of(self, index: MetadataIndex) -> tuple[torch.dtype, tuple[int, ...]]:
        if index.fqn not in self._known:
            tensor = self._metadata.state_dict_metadata.get(index.fqn)
            if not isinstance(tensor, TensorStorageMetadata):
                raise CorruptError(f"{self.where}: the metadata has no tensor {index.fqn}")
            by_offset = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in tensor.chunks}
            self._known[index.fqn] = tensor.properties.dtype, by_offset
        dtype, by_offset = self._known[index.fqn]
        offset = tuple(index.offset) if index.offset is not None else (0,) * len(next(iter(by_offset), ()))
        if offset not in by_offset:
            raise CorruptError(f"{self.where}: the metadata has no part of {index.fqn} at {offset}")
        return dtype, by_offset[offset]


def _is_inside(file: object) -> bool:
    """Whether this is the name of something in the checkpoint's own folder."""
    return isinstance(file, str) and bool(file) and not file.startswith("/") and ".." not in file.split("/")


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number < _MAX_BYTES


def bare_items(items: Iterable[Stored], open_file: Callable[[str], CheckpointFile]) -> list[Stored]:
    """The same items with the places of their elements. Raises `CorruptError` when they are not in the files."""
    by_begin: dict[tuple[str, int], list[Stored]] = {}
    for item in items:
        by_begin.setdefault((item.file, item.offset), []).append(item)
    headers = read_headers(list(by_begin), open_file)
    return [_bare(item, headers[begin]) for begin, own in by_begin.items() for item in own]


def _bare(item: Stored, header: Header) -> Stored:
    entry = header.tensors.get(item.index.fqn)
    if entry is None:
        raise CorruptError(f"{item.file}: has no tensor {item.index.fqn}")
    if entry.shape != item.sizes or dtype_of(entry.dtype) != item.dtype:
        raise CorruptError(
            f"{item.file}: {item.index.fqn} has the shape {entry.shape} of {entry.dtype}; the metadata says"
            f" {item.sizes} of {item.dtype}. Of several parts of one tensor PyTorch keeps only the last in such a file."
        )
    return replace(item, form=Form.BARE, offset=header.data + entry.start, length=entry.length)


class Part(NamedTuple):
    """Bytes of the elements that a target takes as they are."""

    start: int
    length: int
    total: int
    """Of all elements."""


def part_for(item: Stored, request: ReadItem, target: torch.Tensor) -> Part | None:
    """What to read straight into `target`, if what is stored has its type and the elements are in a row."""
    if not is_plain(target) or tuple(target.shape) != tuple(request.lengths):
        return None
    row = _row(item.sizes, request.storage_offsets, request.lengths)
    if row is None:
        return None
    size = target.element_size()
    return Part(row * size, target.numel() * size, math.prod(item.sizes) * size)


def _row(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> int | None:
    """Index of the first element of a box in a tensor, or None when its elements are not in a row."""
    inner = 1  # elements in one step of this dimension
    first = 0
    ended = False  # a dimension was cut: those further out must be of one step
    for size, offset, length in zip(reversed(sizes), reversed(offsets), reversed(lengths), strict=True):
        if ended and length != 1:
            return None
        ended = ended or length != size
        first += offset * inner
        inner *= size
    return first


class Expected:
    """Where `torch.save` puts elements: it depends on the lengths of numbers in its pickle, so that tensors of one
    kind have them at one place. What is wrong costs time and is noticed: `layout_of` has the last word."""

    def __init__(self) -> None:
        sample = io.BytesIO()
        torch.save(torch.zeros(1), sample)
        layout = layout_of(Pieces(len(sample.getbuffer()), [(0, sample.getbuffer())]))
        self._first = layout.at if layout else 0
        self._seen: dict[tuple[object, ...], int] = {}
        self.again = threading.Lock()
        """Held while an item is read as a whole that could not be taken straight: no budget counts that memory."""

    def of(self, item: Stored) -> int:
        """Where in the item its elements begin, by experience; 0 when they cannot be taken as they are."""
        return self._seen.get(_kind(item), self._first)

    def note(self, item: Stored, at: int) -> None:
        """Remember where they began, or 0. Safe from any thread: a lost note costs a little time."""
        self._seen[_kind(item)] = at
        self._first = at or self._first


def _kind(item: Stored) -> tuple[object, ...]:
    return (item.file, item.dtype, *(size.bit_length() // 8 for size in item.sizes))

"""What a load plan wants from which bytes of which file, checked against the checkpoint's metadata.

Decides and reads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.checkpoint.safetensors.header import Header, read_headers
from bootseer.checkpoint.tensors import dtype_of
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


def stored_items(plan: LoadPlan, metadata: Metadata, storage_data: Mapping[Any, Any], where: str) -> list[Stored]:
    """Each object that the plan wants, once. Raises `CorruptError` for metadata that contradicts itself."""
    wanted: dict[tuple[MetadataIndex, LoadItemType], list[ReadItem]] = {}
    for request in plan.items:
        wanted.setdefault((request.storage_index, request.type), []).append(request)
    chunks = _Chunks(metadata, where)
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

    def __init__(self, metadata: Metadata, where: str) -> None:
        self.where = where
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

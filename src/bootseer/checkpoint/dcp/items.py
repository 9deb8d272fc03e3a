"""The stored objects that a load plan needs, checked against the checkpoint's metadata; and which contiguous bytes of a
stored tensor a target needs.

Decides and reads nothing.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from bootseer.checkpoint.dcp.saved import Pieces, layout_of
from bootseer.checkpoint.locations import is_below
from bootseer.checkpoint.tensors import is_plain
from bootseer.errors import CorruptError, PermanentError

_MAX_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored object, and the requests for it or parts of it."""

    file: str
    offset: int
    length: int
    is_tensor: bool
    """Whether it is a tensor, stored by `torch.save`; otherwise raw bytes."""
    descriptors: tuple[str, ...]
    """Names of the transformations to be undone."""
    index: MetadataIndex
    sizes: tuple[int, ...]
    """Shape of a tensor; () for bytes."""
    dtype: torch.dtype
    """Of a tensor, by the metadata."""
    requests: tuple[ReadItem, ...]

    @property
    def end(self) -> int:
        return self.offset + self.length


def stored_items(plan: LoadPlan, metadata: Metadata, storage_data: Mapping[Any, Any], uri: str) -> list[Stored]:
    """The objects that the plan needs, each once. Raises `CorruptError` for inconsistent metadata."""
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
    if not (is_below(file) and _is_count(offset) and _is_count(length)):
        raise CorruptError(f"{chunks.where}: the metadata places {index.fqn} at {file!r}, {offset!r}, {length!r}")
    descriptors = tuple(getattr(place, "transform_descriptors", None) or ())
    if kind == LoadItemType.BYTE_IO:
        return Stored(file, offset, length, False, descriptors, index, (), torch.uint8, requests)
    dtype, sizes = chunks.of(index)
    if length == math.prod(sizes) * dtype.itemsize and not descriptors:  # torch.save takes more than the elements alone
        raise PermanentError(
            f"{chunks.where}/{file}: a safetensors file, which PyTorch's own reader of distributed checkpoints does not"
            " read either; bootseer.checkpoint.safetensors.load_file does"
        )
    for request in requests:
        for first, count, size in zip(request.storage_offsets, request.lengths, sizes, strict=True):
            if first < 0 or count < 0 or first + count > size:
                raise CorruptError(f"{chunks.where}: {index.fqn} has the shape {sizes}; wanted is {count} from {first}")
    return Stored(file, offset, length, True, descriptors, index, sizes, dtype, requests)


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


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number < _MAX_BYTES


class Part(NamedTuple):
    """The contiguous elements that a target takes unchanged."""

    start: int
    length: int
    total: int
    """Bytes of all elements of the tensor."""


def part_for(item: Stored, request: ReadItem, target: torch.Tensor) -> Part | None:
    """What to read straight into `target`, if the dtypes match and the elements are contiguous."""
    if not is_plain(target) or tuple(target.shape) != tuple(request.lengths):
        return None
    whole = torch.empty(item.sizes, device="meta")
    box = narrow_tensor_by_index(whole, request.storage_offsets, request.lengths)
    if not box.is_contiguous():
        return None
    size = target.element_size()
    return Part(int(box.storage_offset()) * size, target.numel() * size, whole.numel() * size)


class Expected:
    """Guesses where `torch.save` puts the elements: the offset depends on the lengths of numbers in its pickle, so that
    similar tensors have the same one. A wrong guess costs a second read: `layout_of` tells the true offset."""

    def __init__(self) -> None:
        sample = io.BytesIO()
        torch.save(torch.zeros(1), sample)
        layout = layout_of(Pieces(len(sample.getbuffer()), [(0, sample.getbuffer())]))
        self._first = layout.at if layout else 0
        self._seen: dict[tuple[object, ...], int] = {}
        self.again = threading.Lock()
        """Held while an item is read as a whole after a wrong guess: no budget covers that memory."""

    def of(self, item: Stored) -> int:
        """The expected offset of the elements in the item; 0 if they cannot be read directly."""
        return self._seen.get(_kind(item), self._first)

    def note(self, item: Stored, at: int) -> None:
        """Remember the true offset, or 0. Safe from any thread: a lost update costs a little time."""
        self._seen[_kind(item)] = at
        self._first = at or self._first


def _kind(item: Stored) -> tuple[object, ...]:
    return (item.file, item.dtype, *(size.bit_length() // 8 for size in item.sizes))

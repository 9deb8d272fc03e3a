"""Headers of safetensors files, validated before anything is allocated by them.

A file consists of the header's length (8 bytes, little endian), the header (JSON), and the tensors without gaps.
Independent of PyTorch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.errors import BootseerError, CorruptError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_FIRST_BYTES = 1 << 20
"""Read at once: most headers fit."""
_MAX_BYTES = 1 << 62
_LENGTH = struct.Struct("<Q")
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E4M3FNUZ": 8, "F8_E5M2": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file."""

    dtype: str
    """As the format calls it: F32, BF16, …"""
    shape: tuple[int, ...]
    start: int
    """Offset of its bytes from the end of the header."""
    length: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header."""

    data: int
    """Offset in the file at which the tensors begin."""
    tensors: Mapping[str, TensorEntry]
    """By name, in the order of the header."""
    metadata: Mapping[str, str] | None


def read_header(file: CheckpointFile, name: str) -> Header:
    """The header of a safetensors file, which errors call `name`. Raises `CorruptError`."""
    size = file.size_bytes
    if size < _LENGTH.size:
        raise CorruptError(f"{name}: {size} bytes are not a safetensors file")
    first = file.read(0, min(size, _FIRST_BYTES))
    (length,) = _LENGTH.unpack_from(first)
    if length > min(size - _LENGTH.size, MAX_HEADER_BYTES):
        raise CorruptError(f"{name}: not a safetensors file: a header of {length} bytes in a file of {size}")
    encoded = first[_LENGTH.size : _LENGTH.size + length]
    if len(encoded) < length:
        encoded += file.read(_LENGTH.size + len(encoded), length - len(encoded))
    try:
        return _parse(encoded, _LENGTH.size + length, size - _LENGTH.size - length)
    except BootseerError as error:
        raise CorruptError(f"{name}: {error}") from None


def _parse(encoded: bytes, data: int, size: int) -> Header:
    try:
        read = json.loads(encoded.decode(), object_pairs_hook=_unique)
        if not isinstance(read, dict):
            raise CorruptError("the safetensors header is not a JSON object")
        for name in read:
            name.encode()  # half of an escaped pair is not text
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"the safetensors header is damaged: {error}") from None
    metadata = read.pop("__metadata__", None)
    if metadata is not None and not _are_texts(metadata):
        raise CorruptError("the safetensors header has metadata that is not text")
    tensors = {name: _entry(name, entry) for name, entry in read.items()}
    end = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].length)):
        if entry.start != end:
            raise CorruptError(f"the safetensors header has {name} at byte {entry.start}, and not at {end}")
        end += entry.length
    if end != size:
        raise CorruptError(f"the safetensors header announces {end} bytes of tensors; there are {size}")
    return Header(data, tensors, metadata)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CorruptError("the safetensors header names something twice")
    return found


def _entry(name: str, entry: object) -> TensorEntry:
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        raise CorruptError(f"the safetensors header does not describe {name}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = _BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise CorruptError(f"the safetensors header gives {name} the unknown type {dtype!r}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptError(f"the safetensors header gives {name} an impossible shape or place")
    for size in shape:
        bits *= size
        if bits > 8 * _MAX_BYTES:
            raise CorruptError(f"the safetensors header gives {name} an impossible shape or place")
    length = offsets[1] - offsets[0]
    if bits != 8 * length:
        raise CorruptError(f"the safetensors header gives {name} {length} bytes; its shape takes {bits / 8:g}")
    return TensorEntry(dtype, tuple(shape), offsets[0], length)


def _are_texts(metadata: object) -> bool:
    return isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())


def _are_counts(numbers: object) -> bool:
    return isinstance(numbers, list) and all(type(one) is int and 0 <= one < _MAX_BYTES for one in numbers)

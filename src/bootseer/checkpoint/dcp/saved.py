"""The two pickled formats of a DCP checkpoint: `.metadata`, and tensors written by `torch.save`.

A saved tensor is a ZIP archive of uncompressed records: a pickle with dtype, shape and strides, the elements, and a few
short ones. With the offset of the elements they can be read to their destination, without `torch.load`, which allocates
and copies. Anything unusual is left to `torch.load`.

Security: nothing in the pickle of a tensor is executed except the four functions that build tensors, which here only
record their arguments. In `.metadata` only the classes that PyTorch puts there are instantiated, and those that the job
registered by `torch.serialization.add_safe_globals`.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import struct
import sys
import zipfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as former
from torch.distributed.checkpoint import filesystem, planner
from torch.distributed.checkpoint import metadata as current
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from bootseer.checkpoint.reading.file import CheckpointFile, PositionedRawIO
from bootseer.errors import AccessError, CorruptError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class ForeignName(pickle.UnpicklingError):
    """The pickle names a class or function that is not allowed."""


class RestrictedUnpickler(pickle.Unpickler):
    """Reads one pickle. `names` maps allowed names to objects; dtypes are always allowed."""

    def __init__(self, data: bytes, names: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in self._names:
            return self._names[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise ForeignName(f"{module}.{name}")


METADATA = ".metadata"
_MAX_METADATA_BYTES = 4 << 30
"""Metadata of checkpoints of tens of thousands of ranks has some hundred MB."""


def metadata_content(file: CheckpointFile, uri: str) -> bytes:
    """All of a metadata file. Raises `CorruptError` if it is too large to be one."""
    if file.size_bytes > _MAX_METADATA_BYTES:
        raise CorruptError(f"{uri}: {file.size_bytes} bytes are more than the metadata of any checkpoint")
    return file.read(0, file.size_bytes)


def parse_metadata(data: bytes, uri: str, load_id: str) -> Metadata:
    """Decode the metadata in the file `uri`. Raises `CorruptError`, `AccessError` for what could run code."""
    try:
        metadata = RestrictedUnpickler(data, _allowed_names()).load()
    except ForeignName as error:
        raise AccessError(
            f"{uri}: the checkpoint's metadata names {error}, which could run code and is not loaded;"
            " if you trust its writer, tell torch.serialization.add_safe_globals of it"
        ) from error
    except Exception as error:  # damaged pickles raise anything
        raise CorruptError(f"{uri}: the checkpoint's metadata is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CorruptError(f"{uri}: holds a {type(metadata).__name__} and not the metadata of a checkpoint")
    if not isinstance(metadata.state_dict_metadata, dict) or not isinstance(metadata.storage_data, dict):
        raise CorruptError(f"{uri}: the checkpoint's metadata does not say what is stored where")
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = load_id  # type: ignore[union-attr]
    return metadata


def _allowed_names() -> dict[tuple[str, str], Any]:
    """The objects for the allowed names in a metadata file."""
    declared: dict[tuple[str, str], Any] = {}
    for one in torch.serialization.get_safe_globals():
        made, name = one if isinstance(one, tuple) else (one, f"{one.__module__}.{one.__qualname__}")
        declared[tuple(name.rpartition(".")[::2])] = made  # type: ignore[index]
    return declared | _METADATA_NAMES


def _classes(module: Any, *names: str) -> dict[tuple[str, str], Any]:
    return {(module.__name__, name): getattr(module, name) for name in names if hasattr(module, name)}


_PATHS = ("PosixPath", "PurePosixPath")
_METADATA_NAMES: dict[tuple[str, str], Any] = {
    **_classes(current, "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    **_classes(current, "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata"),
    **_classes(former, "TensorProperties", "MEM_FORMAT_ENCODING"),
    **_classes(filesystem, "_StorageInfo", "_StoragePrefix"),
    # Megatron keeps the ranks' plans there. Its own `MCoreSavePlan` has to be declared.
    **_classes(planner, "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    # Python 3.13 calls it pathlib._local.
    **{(module, name): getattr(pathlib, name) for module in ("pathlib", "pathlib._local") for name in _PATHS},
}


class Pieces(PositionedRawIO):
    """A file of `length` bytes of which some pieces are in memory. Not safe for concurrent use."""

    def __init__(self, length: int, pieces: Iterable[tuple[int, memoryview]]) -> None:
        super().__init__(length)
        self._pieces = sorted(((at, view) for at, view in pieces if view), key=lambda piece: piece[0])
        self._starts = [at for at, _ in self._pieces]

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        into = memoryview(buffer).cast("B")
        done = 0
        wanted = min(len(into), self._length - self._at)
        while done < wanted:
            found = self.view(self._at, wanted - done)
            into[done : done + len(found)] = found
            done += len(found)
            self._at += len(found)
        return max(done, 0)

    def view(self, at: int, length: int) -> memoryview:
        """Up to `length` bytes from `at` on, within one piece. Raises `OSError` if they have not been read."""
        number = bisect_right(self._starts, at) - 1
        if number >= 0:
            start, piece = self._pieces[number]
            if at - start < len(piece):
                return piece[at - start : at - start + length]
        raise OSError(f"byte {at} of {self._length} was not read")


_MAX_PICKLE_BYTES = 1 << 16
_LOCAL = struct.Struct("<4s22xHH")  # signature, ..., length of the name, length of the extra field
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor whose elements are stored as they would be in memory."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    """Index of the tensor's first element in the record."""
    at: int
    """Offset of the record in the archive."""
    num_elements: int
    """Elements in the record."""

    @property
    def is_contiguous(self) -> bool:
        """Whether the record is exactly the tensor's elements, in order."""
        expected = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self.first == 0 and expected == self.num_elements


def layout_of(archive: Pieces) -> Layout | None:
    """The layout of the tensor in an archive, or None if only `torch.load` can read it. Reads no elements."""
    try:
        with zipfile.ZipFile(archive) as listed:
            records = {one.filename.partition("/")[2]: one for one in listed.infolist()}
        if any(one.compress_type != zipfile.ZIP_STORED for one in records.values()):
            return None
        order = records.get("byteorder")
        if order is not None and _content(archive, order, 16) != sys.byteorder.encode():
            return None
        noted = _ArgumentRecorder(_content(archive, records["data.pkl"], _MAX_PICKLE_BYTES), _NAMES).load()
        if not isinstance(noted, _Tensor):
            return None
        record = records[f"data/{noted.storage.key}"]
        return _checked(noted, record, _begin(archive, record))
    except Exception:  # torch.load has the same problem, and reports it
        return None


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: torch.dtype | None
    key: str
    length: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    dtype: torch.dtype
    first: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _tensor(
    storage: _Storage,
    first: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    _grad: bool,
    _hooks: object,
    dtype: torch.dtype | None = None,
) -> _Tensor:
    dtype = dtype or storage.dtype
    if not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError("elements of no type")
    return _Tensor(storage, dtype, first, size, stride)


def _parameter(tensor: _Tensor, _grad: bool, _hooks: object) -> _Tensor:
    return tensor


_NAMES: dict[tuple[str, str], object] = {
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch.storage", "UntypedStorage"): None,
}


class _ArgumentRecorder(RestrictedUnpickler):
    """Records what the tensor is built from, without building it."""

    def persistent_load(self, pid: Any, /) -> _Storage:
        kind, dtype, key, _device, length = pid
        if kind != "storage" or not isinstance(key, str) or not isinstance(length, int):
            raise pickle.UnpicklingError("not a storage")
        return _Storage(dtype, key, length)


def _checked(noted: _Tensor, record: zipfile.ZipInfo, at: int) -> Layout | None:
    """The layout, if the record contains all of the tensor."""
    numbers = (noted.first, *noted.size, *noted.stride)
    if len(noted.size) != len(noted.stride) or any(type(one) is not int or one < 0 for one in numbers):
        return None
    num_elements, rest = divmod(record.file_size, noted.dtype.itemsize)
    announced = noted.storage.length * (1 if noted.storage.dtype is None else noted.storage.dtype.itemsize)
    last = noted.first + sum((size - 1) * step for size, step in zip(noted.size, noted.stride, strict=True))
    if rest or record.file_size != announced or (0 not in noted.size and last >= num_elements):
        return None
    return Layout(noted.dtype, noted.size, noted.stride, noted.first, at, num_elements)


def _begin(archive: Pieces, record: zipfile.ZipInfo) -> int:
    """Where a record's bytes begin: after its local header, which may differ from the central directory's entry."""
    archive.seek(record.header_offset)
    signature, name, extra = _LOCAL.unpack(archive.read(_LOCAL.size))
    if signature != b"PK\3\4":
        raise zipfile.BadZipFile("no header where the list says")
    return int(record.header_offset + _LOCAL.size + name + extra)


def _content(archive: Pieces, record: zipfile.ZipInfo, limit: int) -> bytes:
    if record.file_size > limit:
        raise zipfile.BadZipFile("a record that is too large")
    archive.seek(_begin(archive, record))
    return archive.read(record.file_size)

"""The `.metadata` of a DCP checkpoint: a pickle, of which only the classes that PyTorch puts there are made.

Classes of a job's own (in a planner's data) are made when `torch.serialization.add_safe_globals` was told of them.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as former
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as current
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.errors import AccessError, CorruptError


class ForeignName(pickle.UnpicklingError):
    """The pickle names a class or function that does not belong to its kind."""


class Restricted(pickle.Unpickler):
    """Reads one pickle. `names` has what stands for each known name, types of elements are known in any case."""

    def __init__(self, data: bytes, names: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names

    def find_class(self, module: str, name: str, /) -> Any:
        """See `pickle.Unpickler.find_class`. Raises `ForeignName`."""
        if (module, name) in self._names:
            return self._names[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise ForeignName(f"{module}.{name}")


NAME = ".metadata"
MAX_BYTES = 4 << 30
"""Of a file of metadata. Checkpoints of tens of thousands of ranks have some hundred MB."""


def name_of(rank: int | None) -> str:
    """The file of a checkpoint's metadata, or of one rank's when each rank wrote its own."""
    return NAME if rank is None else f"__{rank}{NAME}"


def content(file: CheckpointFile, where: str) -> bytes:
    """All of a file of metadata. Raises `CorruptError` when it is too large to be one."""
    if file.size_bytes > MAX_BYTES:
        raise CorruptError(f"{where}: {file.size_bytes} bytes are more than the metadata of any checkpoint")
    return file.read(0, file.size_bytes)


def parse(data: bytes, where: str, load_id: str) -> Metadata:
    """The metadata in the content of the file `where`. Raises `CorruptError`, `AccessError` for what could run code."""
    try:
        metadata = Restricted(data, _names()).load()
    except ForeignName as error:
        raise AccessError(
            f"{where}: the checkpoint's metadata names {error}, which could run code and is not loaded;"
            " if you trust its writer, tell torch.serialization.add_safe_globals of it"
        ) from error
    except Exception as error:  # damaged pickles raise anything
        raise CorruptError(f"{where}: the checkpoint's metadata is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CorruptError(f"{where}: holds a {type(metadata).__name__} and not the metadata of a checkpoint")
    if not isinstance(metadata.state_dict_metadata, dict) or not isinstance(metadata.storage_data, dict):
        raise CorruptError(f"{where}: the checkpoint's metadata does not say what is stored where")
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = load_id  # type: ignore[union-attr]
    return metadata


def _names() -> dict[tuple[str, str], Any]:
    """What stands for each name in a file of metadata."""
    declared: dict[tuple[str, str], Any] = {}
    for one in torch.serialization.get_safe_globals():
        made, name = one if isinstance(one, tuple) else (one, f"{one.__module__}.{one.__qualname__}")
        declared[tuple(name.rpartition(".")[::2])] = made  # type: ignore[index]
    return declared | _NAMES


def _classes(module: Any, *names: str) -> dict[tuple[str, str], Any]:
    return {(module.__name__, name): getattr(module, name) for name in names if hasattr(module, name)}


_PATHS = ("PosixPath", "PurePosixPath")
_NAMES: dict[tuple[str, str], Any] = {
    **_classes(current, "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    **_classes(current, "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata"),
    **_classes(former, "TensorProperties", "MEM_FORMAT_ENCODING"),
    **_classes(filesystem, "_StorageInfo"),
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    # Python 3.13 calls it pathlib._local.
    **{(module, name): getattr(pathlib, name) for module in ("pathlib", "pathlib._local") for name in _PATHS},
}

"""The `.metadata` of a DCP checkpoint, read as PyTorch reads it: as a pickle.

A pickle can run code; PyTorch's own reader trusts it just as far. Load checkpoints of people you trust.
"""

from __future__ import annotations

import pickle

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.errors import CorruptError

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
    """The metadata in the content of the file `where`. Raises `CorruptError`."""
    try:
        metadata = pickle.loads(data)  # noqa: S301 - it is the format of PyTorch's checkpoints
    except Exception as error:  # damaged pickles raise anything
        raise CorruptError(
            f"{where}: the checkpoint's metadata is damaged, or needs code that is not installed:"
            f" {type(error).__name__}: {error}"
        ) from error
    if not isinstance(metadata, Metadata):
        raise CorruptError(f"{where}: holds a {type(metadata).__name__} and not the metadata of a checkpoint")
    if not isinstance(metadata.state_dict_metadata, dict) or not isinstance(metadata.storage_data, dict):
        raise CorruptError(f"{where}: the checkpoint's metadata does not say what is stored where")
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = load_id  # type: ignore[union-attr]
    return metadata

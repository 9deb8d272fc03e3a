"""The checkpoint of the benchmark: tensors of random bytes, as a safetensors file and as PyTorch's DCP writes them."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint_child import MIB, digest

_TENSOR = 16 * MIB
MODEL = "model.safetensors"
DCP = "dcp"


@dataclass(frozen=True, slots=True)
class Content:
    """A folder with both forms of the same tensors."""

    folder: Path
    model_bytes: int
    """Size of the safetensors file."""
    tensor_bytes: int
    """Of all tensors together."""
    tensors_digest: str
    first_bytes: int
    """Of the first tensors, which slow readers load."""
    first_digest: str

    @property
    def model(self) -> Path:
        return self.folder / MODEL

    def digest(self, offset: int, length: int, times: int = 1) -> str:
        """Of a range of the safetensors file, repeated `times` times."""
        with self.model.open("rb") as file:
            file.seek(offset)
            data = file.read(length)
        return digest(data, times)


def make(folder: Path, tensor_bytes: int, first_bytes: int) -> Content:
    """Create the files. All sizes are multiples of 16 MiB."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    tensors = empty(tensor_bytes)
    for tensor in tensors.values():
        tensor.view(-1).numpy().data.cast("B")[:] = os.urandom(tensor.nbytes)
    save_file(tensors, folder / MODEL)
    with warnings.catch_warnings():
        # It warns that it saves in one process, which is intended.
        warnings.simplefilter("ignore")
        dcp.save(tensors, checkpoint_id=folder / DCP)
    first = {name: tensors[name] for name in empty(first_bytes)}
    model_bytes = (folder / MODEL).stat().st_size
    return Content(folder, model_bytes, tensor_bytes, digest(tensors), first_bytes, digest(first))


def empty(tensor_bytes: int) -> dict[str, Any]:
    """The allocated tensors of a job before loading, without their values."""
    import torch

    return {
        f"layers.{number:03}.weight": torch.zeros(_TENSOR // 4 // 1024, 1024)
        for number in range(tensor_bytes // _TENSOR)
    }

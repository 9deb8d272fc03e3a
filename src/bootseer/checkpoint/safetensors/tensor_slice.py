"""A tensor in a file, of which parts are read by indexing it."""

from __future__ import annotations

import math
from typing import Any

import torch

from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.checkpoint.safetensors.box import box_of, is_box, runs_of, strides_of
from bootseer.checkpoint.safetensors.header import TensorEntry
from bootseer.checkpoint.tensors import PAIRS, arena, dtype_of, memory_of
from bootseer.errors import PermanentError


def shape_of(entry: TensorEntry) -> tuple[int, ...]:
    """The shape that PyTorch gives such a tensor. Raises `PermanentError` when it has none."""
    if entry.dtype == PAIRS:
        if not entry.shape or entry.shape[-1] % 2:
            raise PermanentError(f"PyTorch has no tensors of the shape {entry.shape} of {PAIRS}: two are one element")
        return (*entry.shape[:-1], entry.shape[-1] // 2)
    return entry.shape


class TensorSlice:
    """What `get_slice` returns: `[100:200, :64]` reads just that, in rows or, where it costs less, with what lies
    between. For all that is not made of numbers and slices, as `[[3, 5]]`, the whole tensor is read."""

    def __init__(self, file: CheckpointFile, data: int, entry: TensorEntry, device: str | int | torch.device) -> None:
        self._file = file
        self._begin = data + entry.start
        self._entry = entry
        self._device = device
        self._shape = shape_of(entry)

    def get_shape(self) -> list[int]:
        """Shape of the whole tensor."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Type of the elements, as the format calls it: F32, BF16, …"""
        return self._entry.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        if not is_box(index):
            return self[...][index]  # lists, masks, None: PyTorch knows what they mean
        box = box_of(self._shape, index)
        dtype = dtype_of(self._entry.dtype)
        if 0 in box.counts:
            return torch.empty(box.counts, dtype=dtype)[box.then].to(self._device)
        runs = runs_of(self._shape, box, dtype.itemsize)
        padded = -(-runs.length // 64) * 64
        buffer = arena(padded * len(runs.starts))
        view = memory_of(buffer)
        self._file.read_ranges(
            [
                (self._begin + start, view[number * padded : number * padded + runs.length])
                for number, start in enumerate(runs.starts)
            ]
        )
        # The runs lie one after the other in the buffer: the outer strides are those of runs, the others the file's.
        counts, outer = box.counts, runs.num_outer
        run_strides = tuple(one * (padded // dtype.itemsize) for one in strides_of(counts[:outer]))
        strides = (*run_strides, *strides_of(self._shape)[outer:])
        found = buffer.view(dtype).as_strided(counts, strides)[box.then]
        is_all = math.prod(found.shape) * dtype.itemsize == len(view)
        return (found if is_all else found.clone(memory_format=torch.contiguous_format)).to(self._device)

"""The memory of tensors as Python buffers, and the other way round: reads go straight into tensors.

Called by the readers of PyTorch checkpoints and of safetensors.
"""

from __future__ import annotations

import ctypes

import torch


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in main memory, writable. They live as long as the view does."""
    length = tensor.numel() * tensor.element_size()
    if not length:
        return memoryview(bytearray())
    array = (ctypes.c_char * length).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined] # the view holds the array, and the array the tensor
    return memoryview(array).cast("B")


def arena(length: int) -> torch.Tensor:
    """`length` bytes, not cleared, aligned for all kinds of numbers."""
    return torch.empty(length, dtype=torch.uint8)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements are just the bytes in main memory, one after the other."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )

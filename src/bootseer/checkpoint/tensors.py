"""The memory of tensors as Python buffers, and the other way round, so that reads go straight into tensors; the element
types of safetensors files, as PyTorch has them.
"""

from __future__ import annotations

import ctypes

import torch

from bootseer.errors import PermanentError


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in main memory, writable. They live as long as the view does."""
    length = tensor.numel() * tensor.element_size()
    if not length:
        return memoryview(bytearray())
    array = (ctypes.c_char * length).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined] # the view holds the array, and the array the tensor
    return memoryview(array).cast("B")


def empty_bytes(length: int) -> torch.Tensor:
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


_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""PyTorch may be too old for the last one."""


def dtype_of(name: str) -> torch.dtype:
    """PyTorch's type of this name. Raises `PermanentError` when it has none."""
    dtype = getattr(torch, _NAMES.get(name, ""), None)
    if not isinstance(dtype, torch.dtype):
        raise PermanentError(f"elements of the type {name} are not supported with PyTorch {torch.__version__}")
    return dtype

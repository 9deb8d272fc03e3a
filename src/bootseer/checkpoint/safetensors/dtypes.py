"""The element types of safetensors files, as PyTorch has them."""

from __future__ import annotations

import torch

from bootseer.errors import PermanentError

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
    "F4": "float4_e2m1fn_x2",
}
"""PyTorch may be too old for the last ones."""
PAIRS = "F4"
"""Two of these numbers are one element of PyTorch's type."""


def dtype_of(name: str) -> torch.dtype:
    """PyTorch's type of this name. Raises `PermanentError` when it has none."""
    dtype = getattr(torch, _NAMES.get(name, ""), None)
    if not isinstance(dtype, torch.dtype):
        raise PermanentError(f"PyTorch {torch.__version__} has no elements of the type {name}")
    return dtype

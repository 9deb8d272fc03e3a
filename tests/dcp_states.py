"""States to save and load in tests of PyTorch checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

State = dict[str, Any]
Make = Callable[..., torch.Tensor]

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
    torch.float8_e5m2,
)  # fmt: skip


def full() -> State:
    """A state with all kinds of values."""
    generator = torch.Generator().manual_seed(7)
    state = _like(lambda *shape: torch.randn(*shape, generator=generator))
    state["nested"] |= {"step": 7, "text": "words"}
    return state


def empty() -> State:
    """The same shapes with zeros."""
    state = _like(torch.zeros)
    state["nested"] |= {"step": 0, "text": ""}
    return state


def _like(make: Make) -> State:
    return {
        "large": make(700, 1000),
        "small": make(7),
        "scalar": make(()),
        "none": make(0, 4),
        "transposed": make(300, 500).t(),
        **{str(dtype): (make(33, 5) * 9).abs().to(dtype) for dtype in DTYPES},
        "nested": {"inner": make(5, 5), "list": [make(3), make(4)]},
    }


def assert_same(one: Any, other: Any, name: str = "state") -> None:
    """Assert that both have the same types, shapes and bytes."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), name
        for key in one:
            assert_same(one[key], other[key], f"{name}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), name
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{name}.{number}")
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert content(one) == content(other), name
    else:
        assert one == other, name


def content(tensor: torch.Tensor) -> bytes:
    """The elements as bytes, in order."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()

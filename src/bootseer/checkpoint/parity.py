"""XOR of chunks: what a parity part holds, and how one missing chunk of a row is computed from the others.

With numpy where it is installed, which is as fast as memory; otherwise with Python's long integers, several times
slower. Short chunks count as if zeros followed. Called by `writing` and `reading`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import ModuleType

Buffer = bytes | bytearray | memoryview


@cache
def _numpy() -> ModuleType | None:
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def make_ready() -> None:
    """Import numpy now: at the first rebuild it would hold up a thread that receives from DataNodes."""
    _numpy()


def xor_into(target: bytearray | memoryview, *others: Buffer) -> None:
    """Change `target` to its XOR with the others, none of which may be longer than it. All are bytes."""
    numpy = _numpy()
    view = memoryview(target)
    for other in others:
        length = len(other)
        if length > len(view):
            raise ValueError(f"{length} bytes do not fit into {len(view)}")
        if numpy is not None:
            part = numpy.frombuffer(view, numpy.uint8, length)
            numpy.bitwise_xor(part, numpy.frombuffer(other, numpy.uint8), out=part)
        else:
            mixed = int.from_bytes(view[:length], "little") ^ int.from_bytes(other, "little")
            view[:length] = mixed.to_bytes(length, "little")


def parity_chunk(chunks: Iterable[Buffer], chunk_bytes: int) -> bytearray:
    """What the parity part holds for a row of chunks: `chunk_bytes` bytes, whatever the chunks' lengths."""
    parity = bytearray(chunk_bytes)
    xor_into(parity, *chunks)
    return parity

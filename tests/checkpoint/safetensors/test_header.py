"""Headers of safetensors files, including damaged and hostile ones."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")  # imported by the package

from bootseer.checkpoint.safetensors.header import MAX_HEADER_BYTES, Header, read_header
from bootseer.errors import CorruptError


class MemoryFile:
    """A file in memory that records its reads."""

    def __init__(self, data: bytes, size_bytes: int | None = None) -> None:
        self.data = data
        self.size_bytes = len(data) if size_bytes is None else size_bytes
        self.reads: list[tuple[int, int]] = []
        self.is_closed = False

    def read(self, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        return self.data[offset : offset + length]

    def __enter__(self) -> MemoryFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True


def encoded(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def read(data: bytes) -> Header:
    return read_header(MemoryFile(data), "model")


def test_a_header_gives_the_positions_of_the_tensors() -> None:
    header = {"__metadata__": {"k": "v"}, "b": entry(offsets=(4, 12)), "a": entry("BF16", (1, 2), (0, 4))}
    data = encoded(header, bytes(12))
    found = read(data)
    assert found.data == len(data) - 12
    assert found.metadata == {"k": "v"}
    assert [(name, one.dtype, one.shape, one.start, one.length) for name, one in found.tensors.items()] == [
        ("b", "F32", (2,), 4, 8),
        ("a", "BF16", (1, 2), 0, 4),
    ]


def test_a_usual_header_takes_one_read_and_a_long_one_two() -> None:
    short = MemoryFile(encoded({"a": entry()}, bytes(8)))
    read_header(short, "model")
    assert len(short.reads) == 1
    names = {f"tensor-{number}": entry(shape=[0], offsets=[0, 0]) for number in range(30_000)}
    long = MemoryFile(encoded(names))
    assert len(read_header(long, "model").tensors) == 30_000
    assert len(long.reads) == 2


BAD: dict[str, bytes] = {
    "empty": b"",
    "too short": b"1234567",
    "longer than the file": encoded({}, length=100),
    "huge": encoded({}, length=(1 << 64) - 1),
    "no JSON": encoded(b"{nothing"),
    "no UTF-8": encoded(b'{"\xff": 1}'),
    "nested without end": encoded(b"[" * 100_000),
    "no object": encoded([1]),
    "a number": encoded(1),
    "no description": encoded({"a": 3}),
    "half a description": encoded({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "an unknown type": encoded({"a": entry("F99")}, bytes(8)),
    "a type that is not text": encoded({"a": entry(["F32"])}, bytes(8)),
    "a negative size": encoded({"a": entry(shape=[-2])}, bytes(8)),
    "a size that is not a number": encoded({"a": entry(shape=["2"])}, bytes(8)),
    "a size that is a truth": encoded({"a": entry(shape=[2, True])}, bytes(8)),
    "a broken size": encoded({"a": entry(shape=[2.0])}, bytes(8)),
    "an overflow": encoded({"a": entry(shape=[1 << 61, 1 << 61, 0], offsets=[0, 0])}),
    "an overflow to zero": encoded({"a": entry(shape=[1 << 32, 1 << 32, 1 << 32], offsets=[0, 0])}),
    "the wrong length": encoded({"a": entry(offsets=(0, 7))}, bytes(7)),
    "backwards": encoded({"a": entry(offsets=(8, 0))}, bytes(8)),
    "three offsets": encoded({"a": entry(offsets=(0, 8, 9))}, bytes(8)),
    "beyond the end": encoded({"a": entry()}, bytes(7)),
    "bytes left over": encoded({"a": entry()}, bytes(9)),
    "a gap": encoded({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
    "a gap that hides the end": encoded({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(16)),
    "an overlap": encoded({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "a name twice": encoded(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
    "metadata that is not text": encoded({"__metadata__": {"k": 1}}),
    "metadata that is a list": encoded({"__metadata__": ["k"]}),
    "metadata that is an empty list": encoded({"__metadata__": []}),
    "a name that is half a character": encoded(b'{"\\ud800":%b}' % json.dumps(entry()).encode(), bytes(8)),
}  # fmt: skip


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_invalid_headers_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match=r"^model: "):
        read(data)


def test_a_header_beyond_the_bound_is_refused_before_it_is_read() -> None:
    file = MemoryFile(encoded({}, length=MAX_HEADER_BYTES + 1), size_bytes=1 << 40)
    with pytest.raises(CorruptError, match="a header of 100000001 bytes"):
        read_header(file, "model")
    assert file.reads == [(0, 1 << 20)]


@given(st.binary(max_size=300), st.integers(0, 400))
def test_any_bytes_are_a_header_or_refused(text: bytes, length: int) -> None:
    try:
        found = read(encoded(text, length=length))
    except CorruptError:
        return
    assert not found.tensors or sum(one.length for one in found.tensors.values()) >= 0

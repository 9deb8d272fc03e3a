"""Tensors that PyTorch's writer put into safetensors files (`SerializationFormat.SAFETENSORS`).

The metadata then says only where the safetensors file begins, inside of the checkpoint's file; its header says where
the tensors are. Called by `reader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from bootseer.checkpoint.dcp.items import Form, Stored
from bootseer.checkpoint.safetensors.dtypes import dtype_of
from bootseer.checkpoint.safetensors.header import Header, HeaderFile, read_headers
from bootseer.errors import CorruptError


def bare_items(items: Iterable[Stored], open_file: Callable[[str], HeaderFile]) -> list[Stored]:
    """The same items with the places of their elements. Raises `CorruptError` when they are not in the files."""
    by_begin: dict[tuple[str, int], list[Stored]] = {}
    for item in items:
        by_begin.setdefault((item.file, item.offset), []).append(item)
    headers = read_headers(list(by_begin), open_file)
    return [_bare(item, headers[begin]) for begin, own in by_begin.items() for item in own]


def _bare(item: Stored, header: Header) -> Stored:
    entry = header.tensors.get(item.index.fqn)
    if entry is None:
        raise CorruptError(f"{item.file}: has no tensor {item.index.fqn}")
    if entry.shape != item.sizes or dtype_of(entry.dtype) != item.dtype:
        raise CorruptError(
            f"{item.file}: {item.index.fqn} has the shape {entry.shape} of {entry.dtype}; the metadata says"
            f" {item.sizes} of {item.dtype}. Of several parts of one tensor PyTorch keeps only the last in such a file."
        )
    return replace(item, form=Form.BARE, offset=header.data + entry.start, length=entry.length)

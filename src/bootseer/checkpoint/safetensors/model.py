"""Tensors from safetensors files, alone or as a model of many files.

All headers are read concurrently, then all tensors, straight into the memory that the tensors keep. Indexing a
`TensorSlice` reads parts of a tensor.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import operator
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple, Self

import torch

from bootseer.checkpoint.locations import Location, is_below, resolve
from bootseer.checkpoint.ranges import GAP_BYTES, Range, Span, join, spread
from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.checkpoint.safetensors.header import Header, TensorEntry, read_header
from bootseer.checkpoint.tensors import dtype_of, empty_bytes, memory_of
from bootseer.errors import CorruptError, NotFoundError, PermanentError, UsageError
from bootseer.io.tasks import Tasks


class TensorSlice:
    """Result of `get_slice`: `[100:200, :64]` reads just that, with gaps where that is cheaper. For indexes other than
    numbers and slices, as `[[3, 5]]`, the whole tensor is read."""

    def __init__(self, file: CheckpointFile, data: int, entry: TensorEntry, device: str | int | torch.device) -> None:
        self._file = file
        self._begin = data + entry.start
        self._entry = entry
        self._device = device

    def get_shape(self) -> list[int]:
        """Shape of the whole tensor."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Type of the elements, as the format calls it: F32, BF16, …"""
        return self._entry.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        dtype = dtype_of(self._entry.dtype)
        whole = torch.empty(self._entry.shape, dtype=torch.uint8, device="meta")
        try:
            view = whole[index]
            is_view = torch._C._is_alias_of(view, whole)  # type: ignore[attr-defined]
        except RuntimeError:  # a mask, for older PyTorch, or a fault that a tensor with memory describes better
            is_view = False
        if not is_view:
            return self[...][index]
        if not view.numel():
            return torch.empty(view.shape, dtype=dtype, device=self._device)
        runs = runs_of(view, dtype.itemsize)
        padded = -(-runs.length // _ALIGNMENT) * _ALIGNMENT
        buffer = empty_bytes(padded * len(runs.starts))
        memory = memory_of(buffer)
        self._file.read_ranges(
            [
                (self._begin + start, memory[number * padded : number * padded + runs.length])
                for number, start in enumerate(runs.starts)
            ]
        )
        # The runs are adjacent in the buffer: outer strides are those of runs, inner ones those of the file.
        outer = torch.empty(view.shape[: runs.num_outer], device="meta").stride()
        strides = (*(one * (padded // dtype.itemsize) for one in outer), *view.stride()[runs.num_outer :])
        found = buffer.view(dtype).as_strided(view.shape, strides)
        is_all = found.numel() * dtype.itemsize == len(memory)
        return (found if is_all else found.clone(memory_format=torch.contiguous_format)).to(self._device)


class Runs(NamedTuple):
    """Byte runs of equal length, one for each index of the outer dimensions of a slice."""

    starts: list[int]
    """Start of each run, in bytes from the tensor's first element, in the order of the outer indexes."""
    length: int
    num_outer: int
    """The number of outer dimensions."""


def runs_of(view: torch.Tensor, itemsize: int, gap_bytes: int = GAP_BYTES) -> Runs:
    """The runs with the elements of a slice, which is not empty: few requests, without reading much more than is
    needed. `view`: the slice of a tensor without memory. Gaps that cost less than a request are read too."""
    sizes, strides = view.shape, [stride * itemsize for stride in view.stride()]
    length = itemsize
    outer = len(sizes)
    while outer and (sizes[outer - 1] == 1 or strides[outer - 1] - length <= gap_bytes):
        outer -= 1
        length += (sizes[outer] - 1) * strides[outer]
    starts = [
        view.storage_offset() * itemsize + sum(map(operator.mul, numbers, strides))
        for numbers in itertools.product(*map(range, sizes[:outer]))
    ]
    return Runs(starts, length, outer)


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_INDEX_BYTES = 256 << 20
_SPAN_BYTES = 64 << 20
_THREADS = 8
_ALIGNMENT = 64

Device = str | int | torch.device


def load_file(
    uri: str | os.PathLike[str], device: Device = "cpu", names: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, or those of `names` only.

    Raises `NotFoundError` for a missing file or name, `CorruptError` for a damaged file.
    """
    file = resolve(uri).latest()
    wanted = None if names is None else {"": names}
    return _load(file, [""], device, wanted)


def load_sharded(
    uri: str | os.PathLike[str], device: Device = "cpu", names: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of a model in a folder: of the files in `model.safetensors.index.json`, or of its only file.

    With `names` only those tensors, and only their files are read. Raises as `load_file`.
    """
    folder = resolve(uri).latest()
    try:
        index = folder.read_bytes(INDEX, _MAX_INDEX_BYTES)
    except NotFoundError:
        return _load(folder, [SINGLE], device, None if names is None else {SINGLE: names})
    by_file = _files_of(index, folder.at(INDEX).uri, names)
    return _load(folder, sorted(by_file), device, by_file)


def _files_of(index: bytes, uri: str, names: Collection[str] | None) -> dict[str, list[str]]:
    try:
        weights = json.loads(index)["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(f"{uri}: not the index of a model: {type(error).__name__}: {error}") from None
    if not isinstance(weights, dict) or not all(is_below(file) for file in weights.values()):
        raise CorruptError(f"{uri}: names files outside its folder")
    by_file: dict[str, list[str]] = {}
    for name in weights if names is None else dict.fromkeys(names):
        if name not in weights:
            raise NotFoundError(f"{uri}: has no tensor {name}")
        by_file.setdefault(weights[name], []).append(name)
    return by_file


def _load(
    folder: Location, files: list[str], device: Device, names: Mapping[str, Collection[str]] | None
) -> dict[str, torch.Tensor]:
    with contextlib.ExitStack() as to_close:

        def begin(name: str) -> _File:
            file = folder.open(name)
            to_close.callback(file.close)
            uri = folder.at(name).uri if name else folder.uri
            header = read_header(file, uri)
            chosen = _chosen(header, None if names is None else names[name], uri)
            _check_types(chosen, uri)
            return _File(file, header, chosen)

        with Tasks("bootseer-safetensors", _THREADS) as threads:
            found = dict(zip(files, threads.map(begin, files), strict=True))
        return _read_all(found, device)


_Named = tuple[str, TensorEntry]


class _File(NamedTuple):
    file: CheckpointFile
    header: Header
    chosen: Mapping[str, TensorEntry]

    def spans(self) -> list[Span[_Named]]:
        """What to read for the chosen tensors."""
        begin = self.header.data
        ranges = (
            Range(begin + one.start, begin + one.start + one.length, (name, one)) for name, one in self.chosen.items()
        )
        return join(ranges, max_bytes=_SPAN_BYTES)


def _read_all(files: Mapping[str, _File], device: Device) -> dict[str, torch.Tensor]:
    def read(job: tuple[str, Span[_Named]]) -> dict[str, torch.Tensor]:
        of_file = files[job[0]]
        return _read_span(of_file.file, of_file.header.data, job[1], device)

    tensors = {name: torch.empty(0) for one in files.values() for name in one.chosen}
    with Tasks("bootseer-safetensors", _THREADS) as threads:
        for some in threads.map(read, spread({name: one.spans() for name, one in files.items()})):
            tensors.update(some)
    return tensors


def _chosen(header: Header, names: Iterable[str] | None, uri: str) -> dict[str, TensorEntry]:
    if names is None:
        return dict(header.tensors)
    missing = [name for name in names if name not in header.tensors]
    if missing:
        raise NotFoundError(f"{uri}: has no tensor {missing[0]}")
    return {name: header.tensors[name] for name in names}


def _check_types(tensors: Mapping[str, TensorEntry], uri: str) -> None:
    """Raise `PermanentError` for a type that PyTorch does not have, before anything is read."""
    for name, entry in tensors.items():
        try:
            dtype_of(entry.dtype)
        except PermanentError as error:
            raise PermanentError(f"{uri}: {name}: {error}; `names` selects other tensors") from None


def _read_span(file: CheckpointFile, data: int, span: Span[_Named], device: Device) -> dict[str, torch.Tensor]:
    # Writers align tensors relative to the end of the header. The alignment is kept, so that nothing has to be moved.
    shift = (span.start - data) % _ALIGNMENT
    view = memory_of(empty_bytes(shift + span.end - span.start))
    if span.end > span.start:
        file.read_ranges([(span.start, view[shift:])])
    found = {}
    for one in span.ranges:
        name, entry = one.item
        at = shift + one.start - span.start
        found[name] = _tensor(view[at : at + entry.length], entry, at).to(device)
    return found


def _tensor(content: memoryview, entry: TensorEntry, at: int) -> torch.Tensor:
    """A tensor of these bytes, without a copy if they are aligned. It has a storage of its own, so that saving it does
    not save its neighbours."""
    dtype = dtype_of(entry.dtype)
    if not content:
        return torch.empty(entry.shape, dtype=dtype)
    if at % dtype.itemsize:
        aligned = memory_of(empty_bytes(len(content)))
        aligned[:] = content
        content = aligned
    return torch.frombuffer(content, dtype=dtype).reshape(entry.shape)


class safe_open:  # noqa: N801 - the name that users know
    """A safetensors file whose tensors, or parts of them, are read on demand.

    As safetensors' own `safe_open`, with an address instead of a path. Use it as a context manager.
    """

    def __init__(self, uri: str | os.PathLike[str], framework: str = "pt", device: Device = "cpu") -> None:
        if framework not in ("pt", "torch", "pytorch"):
            raise UsageError(f"{framework}: tensors are made for PyTorch only", hint='framework="pt"')
        folder = resolve(uri).latest()
        self._where = folder.uri
        self._device = device
        self._file = folder.open()
        try:
            self._header = read_header(self._file, self._where)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return sorted(self._header.tensors)

    def offset_keys(self) -> list[str]:
        """The names in the order of the file."""
        return sorted(self._header.tensors, key=lambda name: self._header.tensors[name].start)

    def metadata(self) -> dict[str, str] | None:
        """The writer's metadata, if any."""
        return None if self._header.metadata is None else dict(self._header.metadata)

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor. Raises `NotFoundError`."""
        return self.get_slice(name)[...]

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, read concurrently."""
        return _read_all({"": _File(self._file, self._header, self._header.tensors)}, self._device)

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor to be indexed; reads nothing yet. Raises `NotFoundError`."""
        entry = _chosen(self._header, [name], self._where)[name]
        return TensorSlice(self._file, self._header.data, entry, self._device)

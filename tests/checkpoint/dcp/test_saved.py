"""Finding the elements in files written by torch.save."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from bootseer.checkpoint.dcp.saved import (  # noqa: E402
    Layout,
    Pieces,
    layout_of,
)
from dcp_states import DTYPES, content  # noqa: E402

pytestmark = pytest.mark.torch


def saved(tensor: object) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def layout(data: bytes) -> Layout | None:
    return layout_of(Pieces(len(data), [(0, memoryview(data))]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (40, 70), (3, 1, 5)], ids=str)
def test_the_layout_has_the_position_of_the_elements(dtype: object, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 50).abs().to(dtype)
    data = saved(tensor)
    found = layout(data)
    assert found is not None
    assert (found.dtype, found.size, found.is_contiguous) == (dtype, tuple(shape), True)
    assert data[found.at : found.at + tensor.nbytes] == content(tensor)


def test_a_parameter_is_a_tensor() -> None:
    found = layout(saved(torch.nn.Parameter(torch.ones(8))))
    assert found is not None
    assert found.size == (8,)


def test_a_tensor_in_another_order_is_recognized() -> None:
    found = layout(saved(torch.randn(4, 6).t()))
    assert found is not None
    assert (found.size, found.stride, found.is_contiguous) == ((6, 4), (1, 6), False)


def test_a_part_of_a_larger_storage_is_recognized() -> None:
    found = layout(saved(torch.arange(10.0)[3:7]))
    assert found is not None
    assert (found.first, found.num_elements, found.is_contiguous) == (3, 10, False)


@pytest.mark.parametrize("other", [{"a": 1}, [torch.ones(2)], "text", torch.ones(3, dtype=torch.complex64).conj()])
def test_other_objects_than_plain_tensors_are_left_to_torch(other: object) -> None:
    assert layout(saved(other)) is None


def test_nothing_in_the_pickle_is_executed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> object:
            return os.mkdir, (str(tmp_path / "sprung"),)

    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Trap(), protocol=2))
    assert layout(file.getvalue()) is None
    assert not (tmp_path / "sprung").exists()


def test_a_compressed_archive_is_left_to_torch() -> None:
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(torch.ones(100)))) as plain,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    assert layout(file.getvalue()) is None


def test_foreign_byte_order_is_left_to_torch() -> None:
    data = saved(torch.ones(100))
    assert layout(data) is not None
    assert layout(data.replace(b"little", b"bigger", 1)) is None


def test_a_storage_of_another_size_than_its_record_is_refused() -> None:
    data = saved(torch.ones(7))
    forged = data.replace(b"K\x07t", b"K\x08t", 1)
    assert forged != data
    assert layout(forged) is None


@pytest.mark.parametrize("size", [5, 2_000_000_000])
def test_a_tensor_larger_than_its_record_is_refused(size: int) -> None:
    data = saved(torch.ones(7))
    forged = data.replace(b"K\x07\x85", b"K\x09\x85", 1)
    assert forged != data
    assert layout(forged) is None
    assert layout(data[:-size]) is None

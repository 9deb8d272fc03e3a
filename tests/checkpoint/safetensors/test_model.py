"""Reading safetensors files, compared with the safetensors library."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
library = pytest.importorskip("safetensors")

import safetensors.torch  # noqa: E402

from bootseer.checkpoint.locations import resolve  # noqa: E402
from bootseer.checkpoint.safetensors import load_file, load_sharded, safe_open  # noqa: E402
from bootseer.checkpoint.tensors import _NAMES  # noqa: E402
from bootseer.errors import CorruptError, NotFoundError, PermanentError, UsageError  # noqa: E402
from dcp_states import content  # noqa: E402

pytestmark = pytest.mark.torch

MIB = 1 << 20


def filled(name: str) -> torch.Tensor:
    """A tensor of any type of the format, with random bits."""
    dtype = getattr(torch, name)
    if dtype == torch.bool:
        return torch.randint(0, 2, (6, 8)).bool()
    return torch.randint(0, 255, (6, 8 * dtype.itemsize), dtype=torch.uint8).view(dtype)


def assert_equal(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert content(one) == content(other)


@pytest.mark.parametrize("name", [name for name in _NAMES.values() if hasattr(torch, name)])
def test_all_types_are_read(tmp_path: Path, name: str) -> None:
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": filled(name), "none": filled(name)[:0]}
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert_equal(found[key], tensor)


def test_a_model_in_the_cache_of_a_hub_is_read_through_its_links(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5, 7)}
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots/main").mkdir(parents=True)
    safetensors.torch.save_file(tensors, tmp_path / "blobs/1")
    (tmp_path / "blobs/2").write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    (tmp_path / "snapshots/main/part.safetensors").symlink_to("../../blobs/1")
    (tmp_path / "snapshots/main/model.safetensors.index.json").symlink_to("../../blobs/2")
    assert_equal(load_sharded(tmp_path / "snapshots/main")["a"], tensors["a"])


def test_tensors_that_are_not_aligned_are_read(tmp_path: Path) -> None:
    header = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "wide": {"dtype": "F64", "shape": [2], "data_offsets": [3, 19]},
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [19, 23]},
    }
    text = json.dumps(header).encode()
    data = bytes(range(23))
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    found = load_file(path)
    assert {name: content(one) for name, one in found.items()} == {
        "odd": data[:3], "wide": data[3:19], "scalar": data[19:],
    }  # fmt: skip
    assert found["scalar"].shape == ()
    assert all(one.data_ptr() % one.element_size() == 0 for one in found.values())


def model(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {
        "large": torch.randn(3000, 700),
        "deep": torch.randn(3, 5, 300_000),
        "small": torch.arange(12.0).reshape(3, 4),
        "scalar": torch.tensor(2.5),
    }
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def test_a_tensor_does_not_keep_its_neighbours_in_memory(tmp_path: Path) -> None:
    model(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in found.values())


def test_only_the_named_tensors_are_read(tmp_path: Path) -> None:
    tensors = model(tmp_path)
    found = load_file(tmp_path / "model.safetensors", names=["small", "scalar"])
    assert found.keys() == {"small", "scalar"}
    assert_equal(found["small"], tensors["small"])
    assert place_bytes(tmp_path) < 6 * MIB  # of 26
    with pytest.raises(NotFoundError, match=r"model\.safetensors: has no tensor other"):
        load_file(tmp_path / "model.safetensors", names=["other"])


def place_bytes(folder: Path) -> int:
    return int(resolve(folder).system.reading.facts()["place_bytes"])  # type: ignore[call-overload]


def test_safe_open_is_equivalent_to_the_librarys(tmp_path: Path) -> None:
    model(tmp_path)
    path = tmp_path / "model.safetensors"
    with library.safe_open(path, "pt") as theirs, safe_open(path) as ours:
        assert ours.keys() == theirs.keys()
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata()
        for name in ours.keys():  # noqa: SIM118 - it is not a mapping
            assert_equal(ours.get_tensor(name), theirs.get_tensor(name))
            assert ours.get_slice(name).get_shape() == theirs.get_slice(name).get_shape()
            assert ours.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype()


def test_slices_equal_slices_of_the_tensor(tmp_path: Path) -> None:
    tensors = model(tmp_path)
    chance = random.Random(5)

    def index(size: int) -> int | slice:
        if chance.random() < 0.3:
            return chance.randrange(-size, size)
        low, high = sorted((chance.randrange(size + 1), chance.randrange(size + 1)))
        return slice(low, high, chance.choice((None, None, 1, 3)))

    with safe_open(tmp_path / "model.safetensors") as file:
        for name in ("large", "deep", "small"):
            for _ in range(25):
                shape = tensors[name].shape
                chosen = tuple(map(index, shape[: chance.randrange(len(shape) + 1)]))
                found = file.get_slice(name)[chosen or ...]
                assert_equal(found, tensors[name][chosen or ...])
                # Only the slice is kept in memory.
                assert found.untyped_storage().nbytes() < found.nbytes + 64
        assert file.get_slice("scalar")[...].item() == 2.5


@pytest.mark.parametrize(
    "index",
    [None, [2, 0], ([1, 2], slice(0, 3)), (..., ...), (None, 0), True, torch.tensor([3, 1]), torch.arange(7) > 3],
    ids=str,
)
def test_other_indexes_have_the_same_results_as_in_the_library(tmp_path: Path, index: Any) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.arange(35).reshape(7, 5)}, path)
    with library.safe_open(path, "pt") as theirs, safe_open(path) as ours:
        assert_equal(ours.get_slice("w")[index], theirs.get_slice("w")[index])


def test_four_bit_numbers_are_refused_and_the_other_tensors_of_their_file_read(tmp_path: Path) -> None:
    entries = {
        "w": {"dtype": "F4", "shape": [2, 4], "data_offsets": [0, 4]},
        "scale": {"dtype": "U8", "shape": [2], "data_offsets": [4, 6]},
    }
    header = json.dumps(entries).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(6)))
    said = "model.safetensors: w: elements of the type F4 are not supported .* `names` selects"
    with pytest.raises(PermanentError, match=said):
        load_file(path)
    assert load_file(path, names=["scale"])["scale"].tolist() == [4, 5]


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}], ids=str)
def test_all_tensors_of_an_open_file_and_its_metadata_equal_the_librarys(tmp_path: Path, metadata: Any) -> None:
    tensors = model(tmp_path)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path, metadata)
    with library.safe_open(path, "pt") as theirs, safe_open(path) as ours:
        assert ours.metadata() == theirs.metadata()
        found = ours.get_tensors()
        assert sorted(found) == ours.keys()
        for name, tensor in tensors.items():
            assert_equal(found[name], tensor)


def test_for_a_few_rows_or_distant_columns_few_bytes_are_read(tmp_path: Path) -> None:
    tensors = model(tmp_path)
    with safe_open(tmp_path / "model.safetensors") as file:
        rows = file.get_slice("large")[100:110]
        columns = file.get_slice("deep")[:, 1:3, 5:10]
        assert_equal(rows, tensors["large"][100:110])
        assert_equal(columns, tensors["deep"][:, 1:3, 5:10])
    assert place_bytes(tmp_path) < 10 * MIB  # of 26


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {f"layer.{number}": torch.full((50, 20), float(number)) for number in range(6)}
    weights = {}
    for number in range(3):
        file = f"model-{number}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[2 * number : 2 * number + 2]}
        safetensors.torch.save_file(part, folder / file)
        weights |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return tensors


def test_a_model_of_many_files_is_read_as_one(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    found = load_sharded(tmp_path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_equal(found[name], tensor)


def test_files_of_the_latest_checkpoint_are_read(tmp_path: Path) -> None:
    (tmp_path / "step-7").mkdir()
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "step-7" / "model.safetensors")
    (tmp_path / "latest").write_text("step-7\n")
    assert load_file(tmp_path / "latest" / "model.safetensors")["w"].tolist() == [1, 1, 1]
    assert load_sharded(tmp_path / "latest")["w"].tolist() == [1, 1, 1]
    with safe_open(tmp_path / "latest" / "model.safetensors") as file:
        assert file.get_tensor("w").tolist() == [1, 1, 1]


def test_files_of_tensors_that_are_not_requested_are_not_opened(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    assert load_sharded(tmp_path, names=["layer.0", "layer.5"]).keys() == {"layer.0", "layer.5"}
    with pytest.raises(NotFoundError, match=r"model-1\.safetensors"):
        load_sharded(tmp_path)
    with pytest.raises(NotFoundError, match=r"index\.json: has no tensor layer\.9"):
        load_sharded(tmp_path, names=["layer.9"])


def test_a_model_of_one_file_needs_no_index(tmp_path: Path) -> None:
    tensors = model(tmp_path)
    assert load_sharded(tmp_path).keys() == tensors.keys()


@pytest.mark.parametrize(
    "index",
    [
        *("", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": 1}}'),
        *(r'{"weight_map": {"a": "x\u0000"}}', r'{"weight_map": {"a": "\udc80"}}'),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CorruptError, match=r"model\.safetensors\.index\.json: "):
        load_sharded(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    model(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for read in (lambda: load_file(path), lambda: safe_open(path), lambda: load_sharded(tmp_path)):
        with pytest.raises(CorruptError, match=r"model\.safetensors: the safetensors header announces"):
            read()


def test_other_frameworks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="for PyTorch only"):
        safe_open(tmp_path, "jax")

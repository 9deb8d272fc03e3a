"""Loading checkpoints: PyTorch's own, ours, damaged ones."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed import checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import filesystem  # noqa: E402
from torch.distributed.checkpoint._extension import ZStandard  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.default_planner import (  # noqa: E402
    DefaultLoadPlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: E402
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem  # noqa: E402

from bootseer.checkpoint.dcp import LoadSettings, StripedReader, StripedWriter  # noqa: E402
from bootseer.checkpoint.dcp import load as load_module  # noqa: E402
from bootseer.checkpoint.locations import resolve  # noqa: E402
from bootseer.checkpoint.reading.file import CheckpointFile  # noqa: E402
from bootseer.checkpoint.reading.reading import Reading  # noqa: E402
from bootseer.errors import PermanentError, TransientError, UsageError  # noqa: E402
from bootseer.places.folder import FolderPlace  # noqa: E402
from dcp_states import assert_same, empty, full  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

MIB = 1 << 20


def save_plainly(state: dict[str, Any], folder: Path, **how: Any) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **how))


def load(state: dict[str, Any], folder: Path | str, **how: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=StripedReader(folder, **how))
    return state


def refusal(state: dict[str, Any], folder: Path) -> str:
    with pytest.raises(CheckpointException) as caught:
        load(state, folder)
    return str(caught.value)


SETTINGS = [
    LoadSettings(),
    LoadSettings(direct_bytes=1),
    LoadSettings(direct_bytes=1 << 40, span_bytes=1 << 16, threads=2, buffer_bytes=1),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["default", "all direct", "all copied, little memory"])
def test_what_pytorch_saved_is_loaded(tmp_path: Path, settings: LoadSettings) -> None:
    save_plainly(full(), tmp_path, thread_count=3)
    assert_same(full(), load(empty(), tmp_path, settings=settings))


@pytest.mark.parametrize("settings", SETTINGS, ids=["default", "all direct", "all copied, little memory"])
def test_what_we_saved_is_loaded(tmp_path: Path, settings: LoadSettings) -> None:
    dcp.save(full(), storage_writer=StripedWriter(tmp_path / "one"))
    assert_same(full(), load(empty(), tmp_path / "one", settings=settings))


def test_large_tensors_of_striped_files_are_loaded_without_a_copy(tmp_path: Path) -> None:
    state = {"large": torch.randn(3000, 1000), "half": torch.randn(1000, 1000).half()}
    dcp.save(state, storage_writer=StripedWriter(tmp_path / "one"))
    assert (tmp_path / "one" / ".stripes").is_dir()
    target = {"large": torch.zeros(3000, 1000), "half": torch.zeros(1000, 1000, dtype=torch.float16)}
    memory = {name: tensor.data_ptr() for name, tensor in target.items()}
    load(target, tmp_path / "one", settings=LoadSettings(buffer_bytes=1))
    assert_same(state, target)
    assert memory == {name: tensor.data_ptr() for name, tensor in target.items()}


def test_targets_of_another_order_or_type_get_the_right_elements(tmp_path: Path) -> None:
    state = {"turned": torch.randn(300, 500), "rounded": torch.randn(400, 400), "spread": torch.randn(200, 100)}
    save_plainly(state, tmp_path)
    wide = torch.zeros(200, 200)
    target = {
        "turned": torch.zeros(500, 300).t(),
        "rounded": torch.zeros(400, 400, dtype=torch.bfloat16),
        "spread": wide[:, ::2],
    }
    load(target, tmp_path, settings=LoadSettings(direct_bytes=1))
    assert torch.equal(target["turned"], state["turned"])
    assert torch.equal(target["rounded"], state["rounded"].bfloat16())
    assert torch.equal(wide[:, ::2], state["spread"])
    assert not wide[:, 1::2].any()


def test_parameters_are_filled_in_place(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(300, 200), torch.nn.Linear(300, 200)
    save_plainly({"model": model.state_dict()}, tmp_path)
    load({"model": other.state_dict()}, tmp_path)
    assert torch.equal(model.weight, other.weight)
    assert other.weight.requires_grad


def test_tied_weights_are_right_wherever_their_elements_are_in_the_file(tmp_path: Path) -> None:
    # The elements of this type are not at the expected offset, so that all are first read from the wrong place.
    weight = torch.randint(0, 255, (5000, 100), dtype=torch.uint8).view(torch.float8_e4m3fn)
    names = [f"layer.{number}" for number in range(16)]
    save_plainly({name: weight.clone() for name in names}, tmp_path)
    for span_bytes in (1 << 16, 32 * MIB):
        for _ in range(5):
            tied = torch.zeros_like(weight)
            load(dict.fromkeys(names, tied), tmp_path, settings=LoadSettings(span_bytes=span_bytes))
            assert_same({"tied": weight}, {"tied": tied})


def test_only_requested_tensors_are_read(tmp_path: Path) -> None:
    save_plainly({"a": torch.randn(2000, 1000), "b": torch.randn(200, 100), "c": torch.randn(2000, 1000)}, tmp_path)
    before = place_bytes(tmp_path)
    target = {"b": torch.zeros(200, 100)}
    load(target, tmp_path)
    assert target["b"].any()
    assert place_bytes(tmp_path) - before < 2 * MIB


def place_bytes(folder: Path) -> int:
    return int(resolve(folder).system.reading.facts()["place_bytes"])  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kind", ["plain", "striped", "turned"])
def test_a_few_rows_of_a_large_tensor_are_read_alone(tmp_path: Path, dtype: Any, kind: str) -> None:
    whole = torch.randn(12_000, 1000).to(dtype)
    saved = whole.t().contiguous().t() if kind == "turned" else whole  # its elements are not stored row by row
    if kind == "striped":
        dcp.save({"w": saved}, storage_writer=StripedWriter(tmp_path))
    else:
        save_plainly({"w": saved}, tmp_path)
    reader = StripedReader(tmp_path, settings=LoadSettings(direct_bytes=1))
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    index = MetadataIndex("w", [0, 0])
    rows = ReadItem(
        LoadItemType.TENSOR, index, torch.Size([0, 0]), index, torch.Size([7000, 0]), torch.Size([500, 1000])
    )
    target = torch.zeros(500, 1000).to(dtype)

    class Planner(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Any:
            return target

    before = place_bytes(tmp_path)
    reader.read_data(dcp.planner.LoadPlan([rows]), Planner())
    assert_same(whole[7000:7500], target)
    if kind != "turned":
        assert place_bytes(tmp_path) - before < whole.nbytes // 2


def test_the_planner_is_called_by_the_calling_thread_only(tmp_path: Path) -> None:
    save_plainly(full(), tmp_path, thread_count=2)
    threads = set()

    class Planner(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Any:
            threads.add(threading.get_ident())
            return super().resolve_tensor(read_item)

        def commit_tensor(self, read_item: Any, tensor: Any) -> None:
            threads.add(threading.get_ident())

        def load_bytes(self, read_item: Any, value: Any) -> None:
            threads.add(threading.get_ident())
            super().load_bytes(read_item, value)

    target = empty()
    dcp.load(target, storage_reader=StripedReader(tmp_path), planner=Planner())
    assert_same(full(), target)
    assert threads == {threading.get_ident()}


def test_transformations_of_objects_are_undone(tmp_path: Path) -> None:
    save_plainly(full(), tmp_path, _extensions=[ZStandard()])
    assert_same(full(), load(empty(), tmp_path))


def test_safetensors_inside_a_checkpoint_are_refused(tmp_path: Path) -> None:
    state = {"w": torch.randn(400, 300), "step": 3}
    save_plainly(state, tmp_path, serialization_format=filesystem.SerializationFormat.SAFETENSORS)
    with pytest.raises(CheckpointException, match=r"__0_0\.distcp: a safetensors file"):
        load({"w": torch.zeros(400, 300), "step": 0}, tmp_path)


def test_tensors_in_pytorchs_old_format_are_loaded(tmp_path: Path) -> None:
    state = {"w": torch.randn(30, 20)}
    save_plainly(state, tmp_path)
    old = io.BytesIO()
    torch.save(state["w"], old, _use_new_zipfile_serialization=False)
    (tmp_path / "__0_0.distcp").write_bytes(old.getvalue())
    change_metadata(tmp_path, lambda metadata: set_place(metadata, "w", offset=0, length=len(old.getvalue())))
    assert_same(state, load({"w": torch.zeros(30, 20)}, tmp_path))


def change_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - written by this test
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def set_place(metadata: Any, name: str, **to: Any) -> None:
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == name)
    for field, value in to.items():
        setattr(place, field, value)


def test_the_checkpoint_may_be_named_by_load(tmp_path: Path) -> None:
    save_plainly(full(), tmp_path / "one")
    target = empty()
    dcp.load(target, checkpoint_id=f"file://{tmp_path}/one", storage_reader=StripedReader())
    assert_same(full(), target)


def test_latest_loads_the_checkpoint_that_it_names(tmp_path: Path) -> None:
    for step in (1, 2):
        state = {"step": torch.full((3,), float(step))}
        dcp.save(state, storage_writer=StripedWriter(tmp_path / f"step-{step}", move_latest=step == 1))
    target = {"step": torch.zeros(3)}
    load(target, tmp_path / "latest")
    assert target["step"].tolist() == [1, 1, 1]


def test_a_load_continues_with_the_checkpoint_that_it_began_with(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save({"w": torch.full((3,), float(step))}, storage_writer=StripedWriter(tmp_path / f"step-{step}"))
    (tmp_path / "latest").write_text("step-1\n")

    class Planner(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            (tmp_path / "latest").write_text("step-2\n")
            return super().create_local_plan()

    reader = StripedReader(tmp_path / "latest")
    target = {"w": torch.zeros(3)}
    dcp.load(target, storage_reader=reader, planner=Planner())
    assert target["w"].tolist() == [1, 1, 1]
    dcp.load(target, storage_reader=reader)
    assert target["w"].tolist() == [2, 2, 2]


def test_ranks_that_would_load_different_checkpoints_fail(tmp_path: Path) -> None:
    plans = []
    for step in (1, 2):
        dcp.save({"w": torch.zeros(3)}, storage_writer=StripedWriter(tmp_path / f"step-{step}"))
        (tmp_path / "latest").write_text(f"step-{step}\n")
        reader = StripedReader(tmp_path / "latest")
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(dcp.planner.LoadPlan([])))
    assert reader.prepare_global_plan(plans[1:]) == plans[1:]
    with pytest.raises(TransientError, match=r"step-1 and .*step-2; load again"):
        reader.prepare_global_plan(plans)


def test_ranks_may_reach_one_checkpoint_by_different_paths(tmp_path: Path) -> None:
    dcp.save({"w": torch.zeros(3)}, storage_writer=StripedWriter(tmp_path / "node-1" / "step-1"))
    shutil.copytree(tmp_path / "node-1", tmp_path / "node-2")
    plans = []
    for node in ("node-1", "node-2"):
        reader = StripedReader(tmp_path / node / "step-1")
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(dcp.planner.LoadPlan([])))
    assert reader.prepare_global_plan(plans) == plans


@pytest.mark.parametrize("again", [True, False], ids=["replaced", "removed"])
def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_refused(tmp_path: Path, again: bool) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=StripedWriter(tmp_path / "new"))
    dcp.save({"w": torch.zeros(3)}, storage_writer=StripedWriter(tmp_path / "step-1"))

    class Planner(DefaultLoadPlanner):
        def commit_tensor(self, read_item: Any, tensor: Any) -> None:
            (tmp_path / "step-1").rename(tmp_path / "old")
            if again:
                (tmp_path / "new").rename(tmp_path / "step-1")

    reader = StripedReader(tmp_path / "step-1")
    with pytest.raises(CheckpointException, match=r"step-1: the checkpoint was replaced or removed"):
        dcp.load({"w": torch.zeros(3)}, storage_reader=reader, planner=Planner())


def test_a_reader_without_a_checkpoint_is_a_usage_error() -> None:
    with pytest.raises(CheckpointException, match="the reader has no checkpoint"):
        dcp.load({"w": torch.zeros(1)}, storage_reader=StripedReader())
    with pytest.raises(UsageError, match="has no checkpoint yet"):
        StripedReader("/x").read_data(dcp.planner.LoadPlan([]), DefaultLoadPlanner())


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}: no checkpoint of PyTorch's DCP" in refusal({"w": torch.zeros(1)}, tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 300])
def test_truncated_metadata_is_reported_as_damaged(tmp_path: Path, keep: int) -> None:
    save_plainly(full(), tmp_path)
    path = tmp_path / ".metadata"
    path.write_bytes(path.read_bytes()[:keep])
    assert f"{path}: the checkpoint's metadata is damaged" in refusal(empty(), tmp_path)


class Runs:
    """Runs a function when it is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.place,)

    def __init__(self, place: str) -> None:
        self.place = place


def test_metadata_that_would_run_code_is_refused(tmp_path: Path) -> None:
    save_plainly(full(), tmp_path)
    path, place = tmp_path / ".metadata", tmp_path / "ran"
    change_metadata(tmp_path, lambda metadata: setattr(metadata, "planner_data", Runs(str(place))))
    assert f"{path}: the checkpoint's metadata names posix.mkdir, which could run code" in refusal(empty(), tmp_path)
    assert not place.exists()


class Named(str):
    """A class that a job may have in its planner's data."""

    __slots__ = ()


def test_registered_classes_of_the_job_are_loaded(tmp_path: Path) -> None:
    save_plainly(full(), tmp_path)
    change_metadata(tmp_path, lambda metadata: metadata.planner_data.update(own=Named("data")))
    assert f"the checkpoint's metadata names {__name__}.Named" in refusal(empty(), tmp_path)
    with torch.serialization.safe_globals([Named]):
        state = empty()
        load(state, tmp_path)
    assert_same(state, full())


def test_metadata_with_the_plans_of_the_save_is_read(tmp_path: Path) -> None:
    """Megatron stores the plans of its ranks there."""
    save_plainly(full(), tmp_path)
    plan = create_default_local_save_plan(full(), is_coordinator=True)
    change_metadata(tmp_path, lambda metadata: setattr(metadata, "all_local_plans", [plan]))
    assert_same(full(), load(empty(), tmp_path))


def test_a_rank_with_damaged_common_metadata_does_not_use_its_own(tmp_path: Path) -> None:
    # Ranks that can read the common one would wait in collectives for one that continued alone.
    save_plainly(full(), tmp_path)
    (tmp_path / "__0.metadata").write_bytes((tmp_path / ".metadata").read_bytes())
    (tmp_path / ".metadata").write_bytes(b"cut")
    assert "the checkpoint's metadata is damaged" in refusal(empty(), tmp_path)


def test_a_file_that_cannot_be_opened_ends_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like in a folder whose server does not answer."""
    save_plainly(full(), tmp_path)
    is_over, opened = threading.Event(), Reading.open

    def open_file(reading: Reading, path: str) -> CheckpointFile:
        if path.endswith(".distcp"):
            is_over.wait(120)
        return opened(reading, path)

    monkeypatch.setattr(Reading, "open", open_file)
    monkeypatch.setattr(load_module, "_OPEN_S", 0.05)
    said = refusal(empty(), tmp_path)
    assert not is_over.is_set()
    is_over.set()
    assert "no complete answer within" in said


def test_a_file_that_is_open_only_after_the_end_of_the_load_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x")
    is_opening, may_open, reading = threading.Event(), threading.Event(), Reading(FolderPlace(tmp_path))

    def open_file(name: str) -> CheckpointFile:
        is_opening.set()
        assert may_open.wait(120)
        return reading.open(name)

    files = load_module._Files(open_file, Counter(["data"]))
    read: list[str] = []

    def use() -> None:
        with pytest.raises(PermanentError, match="the load has ended"), files.use("data"):
            read.append("data")

    reader = threading.Thread(target=use)
    reader.start()
    assert is_opening.wait(120)
    files.close()
    may_open.set()
    reader.join(120)
    assert read == []
    reading.close()


def test_metadata_of_single_ranks_is_not_a_checkpoint(tmp_path: Path) -> None:
    save_plainly(full(), tmp_path)
    (tmp_path / ".metadata").rename(tmp_path / "__0.metadata")
    assert "no checkpoint of PyTorch's DCP" in refusal(empty(), tmp_path)


def test_metadata_of_another_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    assert "holds a dict and not the metadata" in refusal(empty(), tmp_path)


@pytest.mark.parametrize(
    ("to", "says"),
    [
        ({"offset": -1}, "the metadata places w at"),
        ({"length": 1 << 70}, "the metadata places w at"),
        ({"relative_path": "../other"}, "the metadata places w at"),
        ({"relative_path": "/etc/passwd"}, "the metadata places w at"),
        ({"relative_path": 7}, "the metadata places w at"),
        ({"offset": 1 << 40}, "the metadata places objects up to"),
        ({"relative_path": "none.distcp"}, "none.distcp"),
        ({"offset": 100}, "is not a saved tensor"),
        ({"length": 500}, "is not a saved tensor"),
    ],
)
def test_forged_places_are_refused(tmp_path: Path, to: dict[str, Any], says: str) -> None:
    save_plainly({"w": torch.randn(400, 300), "v": torch.randn(400, 300)}, tmp_path)
    change_metadata(tmp_path, lambda metadata: set_place(metadata, "w", **to))
    assert says in refusal({"w": torch.zeros(400, 300), "v": torch.zeros(400, 300)}, tmp_path)


def test_an_object_without_a_place_is_named(tmp_path: Path) -> None:
    save_plainly({"w": torch.randn(4)}, tmp_path)
    change_metadata(tmp_path, lambda metadata: metadata.storage_data.clear())
    assert "does not say where w is stored" in refusal({"w": torch.zeros(4)}, tmp_path)


def test_a_tensor_whose_shape_contradicts_the_metadata_is_refused(tmp_path: Path) -> None:
    save_plainly({"w": torch.randn(400, 300)}, tmp_path)
    other = io.BytesIO()
    torch.save(torch.randn(300, 400), other)
    path = tmp_path / "__0_0.distcp"
    assert len(path.read_bytes()) == len(other.getvalue())
    path.write_bytes(other.getvalue())
    for direct_bytes in (1, 1 << 40):
        with pytest.raises(CheckpointException, match=r"w, bytes 0 to \d+, has the shape \(300, 400\)"):
            load({"w": torch.zeros(400, 300)}, tmp_path, settings=LoadSettings(direct_bytes=direct_bytes))


def test_a_target_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_plainly({"w": torch.randn(40, 30)}, tmp_path)
    with pytest.raises(CheckpointException):
        load({"w": torch.zeros(30, 40)}, tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    save_plainly({"w": torch.randn(400, 300)}, tmp_path)
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:1000])
    assert "__0_0.distcp has 1000 bytes; the metadata places objects up to" in refusal(
        {"w": torch.zeros(400, 300)}, tmp_path
    )


def test_flipped_bytes_of_a_striped_file_never_become_a_tensor(tmp_path: Path) -> None:
    dcp.save({"w": torch.randn(3000, 1000)}, storage_writer=StripedWriter(tmp_path / "one"))
    part = next(path for path in (tmp_path / "one" / ".stripes").rglob("*") if path.is_file())
    data = bytearray(part.read_bytes())
    data[MIB + 77] ^= 1
    part.chmod(0o644)
    part.write_bytes(data)
    message = refusal({"w": torch.zeros(3000, 1000)}, tmp_path / "one")
    assert "CorruptError" in message
    assert part.name in message or "__0_0.distcp" in message


def test_after_an_error_no_thread_is_left_waiting(tmp_path: Path) -> None:
    save_plainly(full(), tmp_path, thread_count=2)
    (tmp_path / "__0_1.distcp").unlink()
    before = {thread for thread in threading.enumerate() if thread.name == "bootseer-dcp"}
    refusal(empty(), tmp_path)
    for thread in threading.enumerate():
        if thread.name == "bootseer-dcp" and thread not in before:
            thread.join(120)
            assert not thread.is_alive()

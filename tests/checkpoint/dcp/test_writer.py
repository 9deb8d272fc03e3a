"""Saving checkpoints that PyTorch can load, completely or not at all."""

from __future__ import annotations

import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec")
torch = pytest.importorskip("torch")

from torch.distributed import checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint._extension import ZStandard  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402

from bootseer.checkpoint.dcp import StripedReader, StripedWriter  # noqa: E402
from bootseer.checkpoint.writing.spool import Read  # noqa: E402
from bootseer.checkpoint.writing.writing import Writing  # noqa: E402
from bootseer.errors import PermanentError, UsageError  # noqa: E402
from dcp_states import assert_same, empty, full  # noqa: E402
from waiting import DEADLINE_S  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def save(state: dict[str, Any], folder: Path, **how: Any) -> None:
    dcp.save(state, storage_writer=StripedWriter(folder, **how))


def loaded_plainly(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
    return state


def loaded(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    dcp.load(state, storage_reader=StripedReader(folder))
    return state


@pytest.mark.parametrize("how", [{}, {"thread_count": 5}, {"single_file_per_rank": False}], ids=str)
def test_pytorch_loads_what_was_saved(tmp_path: Path, how: dict[str, Any]) -> None:
    save(full(), tmp_path / "one", **how)
    assert_same(full(), loaded_plainly(empty(), tmp_path / "one"))


def test_views_are_saved_without_the_rest_of_their_storage(tmp_path: Path) -> None:
    large = torch.randn(1000, 1000)
    state = {"row": large[3], "column": large[:, 3], "turned": large[:5].t()}
    save(state, tmp_path / "one")
    assert sum(path.stat().st_size for path in (tmp_path / "one").iterdir()) < 100_000
    target = {"row": torch.zeros(1000), "column": torch.zeros(1000), "turned": torch.zeros(1000, 5)}
    assert_same(state, loaded_plainly(target, tmp_path / "one"))


def test_a_tensor_that_consists_of_others_is_saved(tmp_path: Path) -> None:
    """Such as quantized tensors, which have no memory of their own."""
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    first, second = torch.randn(100, 200), torch.randn(100, 200)
    save({"w": two(first, second)}, tmp_path / "one")
    target = {"w": two(torch.zeros(100, 200), torch.zeros(100, 200))}
    with torch.serialization.safe_globals([two]):
        loaded(target, tmp_path / "one")
    assert torch.equal(target["w"].a, first)
    assert torch.equal(target["w"].b, second)


class Doubling(DefaultSavePlanner):
    """Creates a new tensor for each request."""

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 - the name in the base class
        made = super().transform_object(write_item, object)
        return made * 2 if isinstance(made, torch.Tensor) else made


def test_planners_may_create_tensors_when_they_are_written(tmp_path: Path) -> None:
    state = {"w": torch.randn(3000, 1000), "step": 4}
    dcp.save(state, storage_writer=StripedWriter(tmp_path / "one"), planner=Doubling())
    target = {"w": torch.zeros(3000, 1000), "step": 0}
    assert_same({"w": state["w"] * 2, "step": 4}, loaded(target, tmp_path / "one"))


def test_objects_may_be_transformed(tmp_path: Path) -> None:
    save(full(), tmp_path / "one", extensions=[ZStandard()])
    assert_same(full(), loaded_plainly(empty(), tmp_path / "one"))


def test_saving_in_the_background_saves_the_state_at_its_begin(tmp_path: Path) -> None:
    state = {"w": torch.full((2000, 1000), 3.0)}
    saving = dcp.async_save(state, storage_writer=StripedWriter(tmp_path / "one"))
    state["w"].fill_(4.0)
    saving.result(60)
    target = loaded({"w": torch.zeros(2000, 1000)}, tmp_path / "one")
    assert torch.equal(target["w"], torch.full((2000, 1000), 3.0))


def test_the_checkpoint_may_be_named_by_save(tmp_path: Path) -> None:
    dcp.save(full(), checkpoint_id=f"file://{tmp_path}/one", storage_writer=StripedWriter())
    assert_same(full(), loaded(empty(), tmp_path / "one"))


def test_a_writer_without_a_checkpoint_is_a_usage_error() -> None:
    with pytest.raises(CheckpointException, match="the writer has no checkpoint"):
        dcp.save({"w": torch.zeros(1)}, storage_writer=StripedWriter())


def test_a_checkpoint_is_replaced_with_a_warning(tmp_path: Path) -> None:
    save({"w": torch.zeros(2000, 1000)}, tmp_path)
    with pytest.warns(UserWarning, match="Detected an existing checkpoint"):
        save({"w": torch.ones(2000, 1000)}, tmp_path)
    assert torch.equal(loaded({"w": torch.zeros(2000, 1000)}, tmp_path)["w"], torch.ones(2000, 1000))


def test_a_checkpoint_is_not_replaced_without_overwrite(tmp_path: Path) -> None:
    save({"w": torch.zeros(3)}, tmp_path)
    with pytest.raises(CheckpointException, match="already exists"):
        save({"w": torch.ones(3)}, tmp_path, overwrite=False)
    assert not loaded({"w": torch.ones(3)}, tmp_path)["w"].any()


class Failing(DefaultSavePlanner):
    """Fails for one of the tensors."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "bad":
            raise ValueError("this tensor is gone")
        return super().resolve_data(write_item)


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_an_error_in_any_thread_fails_the_save_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    state = {"good": torch.randn(100, 100), "bad": torch.randn(200, 100), "other": torch.randn(2000, 1000)}
    save(state, tmp_path)
    with pytest.raises(CheckpointException, match="this tensor is gone"):
        dcp.save(state, storage_writer=StripedWriter(tmp_path, thread_count=3), planner=Failing())
    assert not (tmp_path / ".metadata").exists()


def test_an_error_in_one_file_ends_the_others_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    other_began = threading.Event()

    def write_file(writing: Writing, path: str, size_bytes: int, read: Read, **how: Any) -> None:
        if path.endswith("_1.distcp"):
            other_began.wait(DEADLINE_S)
            raise PermanentError("this file cannot be written")
        other_began.set()
        for _ in range(2000):
            try:
                read(0, 1)
            except PermanentError:
                ended.append(path)
                raise
            time.sleep(0.01)

    monkeypatch.setattr(Writing, "write_file", write_file)
    with pytest.raises(CheckpointException, match="this file cannot be written"):
        save({"large": torch.randn(200, 100), "small": torch.randn(10)}, tmp_path)
    assert len(ended) == 1


def test_latest_moves_when_the_checkpoint_is_complete(tmp_path: Path) -> None:
    save({"w": torch.zeros(3)}, tmp_path / "step-1", move_latest=True)
    with pytest.raises(CheckpointException):
        dcp.save(
            {"bad": torch.zeros(3)}, storage_writer=StripedWriter(tmp_path / "step-2", move_latest=True),
            planner=Failing(),
        )  # fmt: skip
    assert (tmp_path / "latest").read_text() == "step-1\n"
    save({"w": torch.zeros(3)}, tmp_path / "step-2", move_latest=True)
    assert (tmp_path / "latest").read_text() == "step-2\n"
    with pytest.warns(UserWarning, match="`latest` still names step-2, which is later than step-0"):
        save({"w": torch.zeros(3)}, tmp_path / "step-0", move_latest=True)


def test_a_checkpoint_is_saved_even_if_latest_cannot_be_moved(tmp_path: Path) -> None:
    (tmp_path / ".attempts").write_bytes(b"not a folder")
    with pytest.raises(CheckpointException, match="step-1 is published, but `latest` does not name it"):
        save({"w": torch.ones(3)}, tmp_path / "step-1", move_latest=True)
    assert loaded({"w": torch.zeros(3)}, tmp_path / "step-1")["w"].tolist() == [1, 1, 1]


def test_the_umask_applies_to_checkpoints(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        save({"w": torch.randn(3 << 20), "note": "x"}, tmp_path / "job" / "step-1")
        with fsspec.open(f"bootseer+file://{tmp_path}/job/more/file", "wb") as file:
            file.write(b"x")
    finally:
        os.umask(before)
    made = [tmp_path / "job", *(tmp_path / "job").rglob("*")]
    assert len(made) > 6
    assert [path for path in made if path.stat().st_mode & 0o077 and path.parent.name != ".stripes"] == []


def test_a_save_without_collectives_is_refused_before_it_touches_the_older_checkpoint(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=StripedWriter(tmp_path))
    with pytest.raises(UsageError, match="use_collectives=False is not supported"):
        dcp.save({"w": torch.zeros(3)}, storage_writer=StripedWriter(tmp_path), use_collectives=False)
    target = {"w": torch.zeros(3)}
    dcp.load(target, storage_reader=StripedReader(tmp_path))
    assert target["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("move_latest", [True, False], ids=["moving it", "over it"])
def test_no_checkpoint_is_saved_over_the_file_latest(tmp_path: Path, move_latest: bool) -> None:
    if not move_latest:
        dcp.save({"w": torch.zeros(3)}, storage_writer=StripedWriter(tmp_path / "step-1", move_latest=True))
    with pytest.raises(CheckpointException, match=r"latest: this is the file `latest`, not a checkpoint"):
        dcp.save({"w": torch.zeros(3)}, storage_writer=StripedWriter(tmp_path / "latest", move_latest=move_latest))


def test_a_users_own_folder_may_be_named_latest(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    dcp.save({"w": torch.ones(3)}, storage_writer=StripedWriter(tmp_path / "latest"))
    target = {"w": torch.zeros(3)}
    dcp.load(target, storage_reader=StripedReader(tmp_path / "latest"))
    assert target["w"].tolist() == [1, 1, 1]


def test_a_writer_can_be_sent_to_another_process(tmp_path: Path) -> None:
    writer = StripedWriter(tmp_path / "one")
    dcp.save(full(), storage_writer=writer)
    sent = pickle.loads(pickle.dumps(writer))  # noqa: S301 - written by this test
    dcp.save(full(), storage_writer=sent, checkpoint_id=str(tmp_path / "two"))
    assert_same(full(), loaded(empty(), tmp_path / "two"))

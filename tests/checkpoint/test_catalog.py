"""Listing and removing the checkpoints of a job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.checkpoint.catalog import checkpoints, flaw, missing_parts, newest_whole, remove, walk
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.head import ATTEMPTS
from bootseer.checkpoint.latest import read_latest, set_latest
from bootseer.errors import AccessError, NoSpaceError, NotEmptyError, NotFoundError, UsageError
from checkpoint.striped_files import content_of, part_paths, put_striped
from stepwise_place import StepwisePlace

_MIB = 1 << 20


def make(job: Path, name: str, **sizes: int) -> None:
    """Create a checkpoint without striped files."""
    for file, size_bytes in sizes.items():
        path = job / name / file.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size_bytes))


def test_checkpoints_of_other_programs_are_listed_by_step(files: Files, job: Path) -> None:
    make(job, "step-1000", model=10, optimizer__state=5)
    make(job, "step-200", model=3)
    make(job, "final", model=1)
    (job / "epoch=3-step=500.ckpt").write_bytes(b"1234")
    for name in ("log.txt", "config.json", "events.out"):
        (job / name).write_bytes(b"x")
    (job / ".git").mkdir()
    (job / "latest").write_text("step-200\n")
    found = [(one.name, one.step, one.size_bytes, one.num_files, one.is_latest) for one in checkpoints(files, "")]
    assert found == [
        ("final", None, 1, 1, False),
        ("step-200", 200, 3, 1, True),
        ("epoch=3-step=500.ckpt", 500, 4, 1, False),
        ("step-1000", 1000, 15, 2, False),
    ]


def test_single_files_are_listed_with_any_extension(files: Files, job: Path) -> None:
    for name in ("step-1", "step-2.odd", "README", "notes.txt"):
        (job / name).write_bytes(b"x")
    set_latest(files, "", "step-2.odd")
    assert [(one.name, one.is_latest) for one in checkpoints(files, "")] == [("step-1", False), ("step-2.odd", True)]
    assert newest_whole(files, "") == "step-2.odd"


def test_striped_files_count_with_their_content(files: Files) -> None:
    put_striped(files.place, "step-1/model", content_of(3 * _MIB), stripes=2)
    files.place.write_bytes("step-1/config", b"12")
    (found,) = checkpoints(files, "")
    assert (found.size_bytes, found.num_files, found.num_striped) == (3 * _MIB + 2, 2, 1)
    assert {info.path for info in walk(files, "step-1")} == {"step-1/model", "step-1/config"}
    assert [info.path for info in walk(files, "step-1/model")] == ["step-1/model"]


def test_an_invalid_latest_does_not_hide_the_list(files: Files, job: Path) -> None:
    make(job, "step-1", model=1)
    (job / "latest").write_text("a/b")
    assert [(one.name, one.is_latest) for one in checkpoints(files, "")] == [("step-1", False)]


def test_a_checkpoint_that_is_removed_meanwhile_is_left_out(files: Files, job: Path) -> None:
    make(job, "step-1", model=1)
    make(job, "step-2", model=1)
    place = StepwisePlace(files.place)

    def vanish(step: str, path: str) -> None:
        if step == "list" and path == "step-1":
            (job / "step-1" / "model").unlink()
            (job / "step-1").rmdir()

    place.before = vanish
    assert [one.name for one in checkpoints(Files(place), "")] == ["step-2"]  # type: ignore[arg-type]


def test_missing_parts_are_named_and_the_newest_whole_one_is_found(files: Files, job: Path) -> None:
    for step in (1, 2, 3):
        head = put_striped(files.place, f"step-{step}/model", content_of(3 * _MIB, step), stripes=2)
    assert newest_whole(files, "") == "step-3"
    lost = part_paths("step-3/model", head)[1]
    (job / lost).unlink()
    assert missing_parts(files, "step-3") == [lost]
    assert newest_whole(files, "") == "step-2"
    assert newest_whole(files, "", without="step-2") == "step-1"
    os.truncate(next((job / "step-2/.stripes").glob("*/*")), 5)
    assert newest_whole(files, "") == "step-1"
    head_bytes = (job / "step-1/model").read_bytes()
    for damaged in (head_bytes[:20] + b"x" + head_bytes[21:], head_bytes[:-1] + b"x"):
        (job / "step-1/model").write_bytes(damaged)
        assert newest_whole(files, "") is None


def test_a_checkpoint_that_pytorch_has_only_begun_is_not_whole(files: Files, job: Path) -> None:
    make(job, "step-1", model=1)
    make(job, "step-2", **{"0_0.distcp": 1})
    assert newest_whole(files, "") == "step-1"
    make(job, "step-2", **{"optimizer__.metadata": 1})
    assert flaw(files, "step-2") == "was not saved completely: PyTorch's .metadata is missing"
    make(job, "step-2", **{".metadata": 1})
    assert newest_whole(files, "") == "step-2"
    (job / "step-3").mkdir()
    assert newest_whole(files, "") == "step-2"
    assert [flaw(files, f"step-{step}") for step in (2, 3, 4)] == ["", "is empty", "does not exist"]


def test_a_head_that_was_copied_without_its_parts_names_what_is_missing(files: Files, job: Path) -> None:
    head = put_striped(files.place, "step-1/model", content_of(3 * _MIB), stripes=2)
    (job / "copy").mkdir()
    (job / "copy" / "model").write_bytes((job / "step-1" / "model").read_bytes())
    assert missing_parts(files, "copy") == part_paths("copy/model", head)


def test_removing_hides_first_and_leaves_nothing(files: Files, job: Path) -> None:
    put_striped(files.place, "step-1/model", content_of(3 * _MIB), stripes=2)
    place = StepwisePlace(files.place)
    seen: list[bool] = []
    place.before = lambda step, path: seen.append((job / "step-1").exists()) if step == "delete" else None
    assert remove(Files(place), "", "step-1") == 3 * _MIB  # type: ignore[arg-type]
    assert seen[0] is False
    assert [path for path in job.rglob("*") if path.is_file()] == []
    put_striped(files.place, "step-2.pt", content_of(2 * _MIB), stripes=2)
    assert remove(files, "", "step-2.pt") == 2 * _MIB
    assert [path for path in job.rglob("*") if path.is_file()] == []
    with pytest.raises(NotFoundError):
        remove(files, "", "step-1")


def test_a_checkpoint_that_can_be_hidden_but_not_deleted_is_shown_again(files: Files, job: Path) -> None:
    make(job, "step-1", model=1)
    place = StepwisePlace(files.place)

    def refuse(step: str, path: str) -> None:
        if step == "delete" and path.endswith(".gone"):
            raise AccessError("it is another user's")

    place.before = refuse
    files = Files(place)  # type: ignore[arg-type]
    for drop in (lambda: remove(files, "", "step-1"), lambda: files.remove_folder("step-1", recursive=True)):
        with pytest.raises(AccessError):
            drop()
        assert (job / "step-1" / "model").exists()
    make(job, "step-0", model=1)
    set_latest(files, "", "step-1")
    with pytest.raises(AccessError):
        remove(files, "", "step-1", force=True)
    assert read_latest(files.place, "") == "step-1"

    def move(step: str, path: str) -> None:
        if step == "delete" and path.endswith(".gone"):  # another writer moves `latest` first
            make(job, "step-2", model=1)
            set_latest(files, "", "step-2")
        refuse(step, path)

    place.before = move
    with pytest.raises(AccessError):
        remove(files, "", "step-1", force=True)
    assert read_latest(files.place, "") == "step-2"


def test_a_checkpoint_can_be_removed_without_free_space(files: Files, job: Path) -> None:
    make(job, "step-1", model=1)
    place = StepwisePlace(files.place)

    def refuse(step: str, path: str) -> None:
        if step in ("make_folder", "write_bytes", "create_bytes"):
            raise NoSpaceError("make room and try again")

    place.before = refuse
    assert remove(Files(place), "", "step-1") == 1  # type: ignore[arg-type]
    assert list(job.iterdir()) == []


def test_files_that_nfs_keeps_while_they_are_open_do_not_fail_a_removal(files: Files, job: Path) -> None:
    """NFS renames a file that is removed while it is open, and keeps it in its folder until it is closed."""
    make(job, "step-1", model=1)
    put_striped(files.place, "model", content_of(2 * _MIB), stripes=2)
    place = StepwisePlace(files.place)

    def refuse(step: str, path: str) -> None:
        if step == "delete" and (path.endswith(".gone") or "/" in path):
            raise NotEmptyError(path)

    place.before = refuse
    files = Files(place)  # type: ignore[arg-type]
    remove(files, "", "step-1")
    files.remove("model")
    assert [entry.path for entry in files.names("")] == []


def test_the_latest_checkpoint_is_removed_only_by_force_and_latest_is_moved(files: Files, job: Path) -> None:
    for step in (1, 2, 3):
        make(job, f"step-{step}", model=1)
    set_latest(files, "", "step-3")
    with pytest.raises(UsageError, match="latest"):
        remove(files, "", "step-3")
    assert (job / "step-3" / "model").exists()
    remove(files, "", "step-3", force=True)
    assert read_latest(files.place, "") == "step-2"
    remove(files, "", "step-1")
    remove(files, "", "step-2", force=True)
    assert read_latest(files.place, "") is None


def test_a_job_is_not_removed_like_a_checkpoint(files: Files, job: Path) -> None:
    """Neither one with checkpoints put by BootSeer, nor one with checkpoints written by other programs."""
    make(job, "moe/step-1", model=1)
    make(job, "gpt/global_step9", model=1)
    make(job, "put/best", model=1)
    (job / "put" / ATTEMPTS).mkdir()
    for name in ("moe", "gpt", "put"):
        with pytest.raises(UsageError, match="job"):
            remove(files, "", name)
        assert (job / name).exists()
        remove(files, "", name, force=True)
        assert not (job / name).exists()


def test_checkpoints_with_folders_of_ranks_or_of_deepspeed_are_not_jobs(files: Files, job: Path) -> None:
    make(job, "final", **{"rank-0__model": 1, "mp_rank_00__model": 1})
    make(job, "checkpoint-9", global_step9__model=1)
    for name in ("final", "checkpoint-9"):
        remove(files, "", name)
        assert not (job / name).exists()


def test_a_folder_without_read_permission_does_not_hide_the_others(files: Files, job: Path) -> None:
    for step in (1, 2):
        make(job, f"step-{step}", model=1)
    place = StepwisePlace(files.place)

    def refuse(step: str, path: str) -> None:
        if (step, path) == ("list", "step-1"):
            raise AccessError("not yours")

    place.before = refuse
    refused: list[str] = []
    found = checkpoints(Files(place), "", refused.append)  # type: ignore[arg-type]
    assert [one.name for one in found] == ["step-2"]
    assert refused == ["step-1"]


@pytest.mark.parametrize("kind", ["folder", "long"])
def test_a_users_own_folder_called_latest_is_ignored(files: Files, job: Path, kind: str) -> None:
    make(job, "step-1", model=1)
    if kind == "folder":
        make(job, "latest", model=1)
    else:
        (job / "latest").write_bytes(b"x" * 5000)
    assert [one.name for one in checkpoints(files, "")] == (["latest"] if kind == "folder" else []) + ["step-1"]
    remove(files, "", "step-1")
    assert not (job / "step-1").exists()

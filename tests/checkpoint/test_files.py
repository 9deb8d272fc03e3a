"""The tree that users see: striped files are ordinary files, and their parts are hidden."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.checkpoint.files import Files, OtherFolderError
from bootseer.checkpoint.head import encode_head, parts_folder
from bootseer.checkpoint.layout import Policy
from bootseer.errors import (
    AccessError,
    CorruptError,
    IsFolderError,
    NotEmptyError,
    NotFolderError,
    NotFoundError,
    PermanentError,
    TransientError,
)
from bootseer.places.folder import FolderPlace
from checkpoint.heads import some_head
from checkpoint.striped_files import content_of, part_paths, put_striped
from stepwise_place import StepwisePlace

_MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "job").mkdir(parents=True)
    return tmp_path / "root"


@pytest.fixture
def files(root: Path) -> Iterator[Files]:
    place = FolderPlace(root)
    yield Files(place)
    place.close()


@pytest.fixture
def content() -> bytes:
    return content_of(3 * _MIB + 5)


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_a_striped_file_has_the_size_of_its_content_and_its_parts_are_hidden(files: Files, content: bytes) -> None:
    head = put_striped(files.place, "job/model", content, stripes=2)
    files.place.write_bytes("job/plain", b"123")
    info = files.stat("job/model")
    assert (info.size_bytes, info.is_striped, info.is_folder) == (len(content), True, False)
    assert {(one.path, one.size_bytes, one.is_striped) for one in files.list("job")} == {
        ("job/model", len(content), True),
        ("job/plain", 3, False),
    }
    assert {entry.path for entry in files.names("job")} == {"job/model", "job/plain"}
    assert files.head("job/model") == head
    assert files.head("job/plain") is None
    for path in ("job/.stripes", *part_paths("job/model", head), ".attempts", ".attempts/x", "job/.stripes-x"):
        with pytest.raises(NotFoundError):
            files.stat(path)
        with pytest.raises(NotFoundError):
            list(files.list(path))
        with pytest.raises(NotFoundError):
            files.remove(path)
        with pytest.raises(NotFoundError):
            files.rename(path, "job/new")


@pytest.mark.parametrize("name", [".stripes", ".attempts", ".stripes.txt", ".attempts-1"])
def test_hidden_names_cannot_be_created(files: Files, name: str) -> None:
    files.place.write_bytes("job/file", b"x")
    with pytest.raises(PermanentError, match="own"):
        files.make_folder(f"job/{name}")
    with pytest.raises(PermanentError, match="own"):
        files.rename("job/file", f"job/{name}")
    with pytest.raises(PermanentError, match="own"):
        files.make_folder(f"job/{name}/below")


def test_a_file_that_only_looks_like_a_head_is_an_ordinary_file(files: Files) -> None:
    for name, data in (("zeros", bytes(4083)), ("text", b"BSSTRIPE" + b"x" * 4075)):
        files.place.write_bytes(f"job/{name}", data)
        assert not files.stat(f"job/{name}").is_striped
        assert files.stat(f"job/{name}").size_bytes == 4083
        assert files.head(f"job/{name}") is None


def test_a_damaged_head_is_an_error_and_can_be_removed(files: Files, root: Path, content: bytes) -> None:
    put_striped(files.place, "job/model", content, stripes=2)
    data = bytearray((root / "job/model").read_bytes())
    data[100] ^= 1
    (root / "job/model").write_bytes(data)
    with pytest.raises(CorruptError, match="job/model"):
        files.head("job/model")
    files.remove("job/model")
    with pytest.raises(NotFoundError):
        files.stat("job/model")


def test_parts_are_removed_even_if_the_version_equals_that_of_an_earlier_file(
    files: Files, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in HDFS, where a version is the size and the time, which programs can set."""
    monkeypatch.setattr("bootseer.places.folder.version_of", lambda status: "same")
    for seed in (1, 2):
        put_striped(files.place, "job/model", content_of(3 * _MIB, seed), stripes=2)
        assert files.stat("job/model").is_striped
        files.remove("job/model")
        assert everything(root) == set()


def test_removing_a_file_removes_its_parts_after_it_is_hidden(files: Files, root: Path, content: bytes) -> None:
    head = put_striped(files.place, "job/model", content, stripes=2)
    steps: list[tuple[str, str]] = []
    place = StepwisePlace(files.place)
    place.before = lambda step, path: steps.append((step, path))
    Files(place).remove("job/model")  # type: ignore[arg-type]
    deleted = [path for step, path in steps if step == "delete"]
    assert deleted == ["job/model", parts_folder("job/model", head.id)]
    assert everything(root) == set()
    with pytest.raises(IsFolderError):
        files.remove("job")


def test_parts_are_kept_while_another_programs_copy_of_the_head_refers_to_them(
    files: Files, root: Path, content: bytes
) -> None:
    head = put_striped(files.place, "job/best", content, stripes=2)
    parts = set(part_paths("job/best", head))
    for name in ("copy", "last", "other"):
        shutil.copy(root / "job/best", root / "job" / name)
    files.remove("job/best")
    files.rename("job/other", "job/copy")
    files.place.write_bytes("job/plain", b"x")
    files.rename("job/plain", "job/copy")
    assert everything(root) == {"job/copy", "job/last", *parts}
    files.remove("job/last")
    assert everything(root) == {"job/copy"}


def test_renaming_in_a_folder_replaces_the_target_and_its_parts(files: Files, root: Path, content: bytes) -> None:
    put_striped(files.place, "job/old", content, stripes=2)
    head = put_striped(files.place, "job/new", content_of(2 * _MIB, 7), stripes=2)
    files.rename("job/new", "job/old")
    assert files.head("job/old") == head
    assert everything(root) == {"job/old", *part_paths("job/old", head)}
    files.rename("job/old", "job/old")
    files.place.write_bytes("job/plain", b"x")
    files.rename("job/plain", "job/old")
    assert everything(root) == {"job/old"}


def test_a_striped_file_cannot_be_moved_to_another_folder_but_folders_can(files: Files, content: bytes) -> None:
    head = put_striped(files.place, "job/step/model", content, stripes=2)
    files.place.write_bytes("job/step/plain", b"x")
    with pytest.raises(OtherFolderError):
        files.rename("job/step/model", "job/model")
    files.rename("job/step/plain", "job/plain")
    files.make_folder("other")
    files.rename("job/step", "other/step")
    assert files.head("other/step/model") == head
    assert [files.place.stat(path).size_bytes for path in part_paths("other/step/model", head)]


def test_a_folder_with_only_hidden_content_counts_as_empty(files: Files, root: Path) -> None:
    for name in ("a", "b"):
        files.make_folder(name)
        files.place.make_folder(f"{name}/.stripes")
        files.place.make_folder(f"{name}/.attempts")
        files.set_policy(name, Policy(stripes=2))
    files.remove_folder("a")
    files.place.write_bytes("b/file", b"x")
    with pytest.raises(NotEmptyError):
        files.remove_folder("b")
    files.make_folder("c")
    with pytest.raises(NotEmptyError):
        files.rename("c", "b")
    files.remove("b/file")
    files.rename("c", "b")
    assert sorted(path.name for path in root.iterdir()) == ["b", "job"]
    with pytest.raises(NotFolderError):
        files.place.write_bytes("file", b"")
        files.remove_folder("file")
    with pytest.raises(PermanentError):
        files.remove_folder("")


def test_a_file_created_while_its_folder_is_removed_is_not_lost(files: Files, root: Path) -> None:
    files.make_folder("a")
    files.place.make_folder("a/.stripes")
    place = StepwisePlace(files.place)

    def comes(step: str, path: str) -> None:
        if step == "rename" and path == "a":
            (root / "a" / "file").write_bytes(b"x")

    place.before = comes
    with pytest.raises(NotEmptyError):
        Files(place).remove_folder("a")  # type: ignore[arg-type]
    assert files.place.read_bytes("a/file", 9) == b"x"
    assert {path.name for path in root.iterdir()} == {"a", "job"}


def test_a_file_whose_parts_another_user_owns_is_removed_without_an_error(files: Files, content: bytes) -> None:
    put_striped(files.place, "job/model", content, stripes=2)
    place = StepwisePlace(files.place)

    def refuse(step: str, path: str) -> None:
        if step == "delete" and ".stripes/" in path:
            raise AccessError("only their owner may delete them")

    place.before = refuse
    Files(place).remove("job/model")  # type: ignore[arg-type]
    with pytest.raises(NotFoundError):
        files.stat("job/model")


def test_removing_a_folder_recursively_hides_it_first(files: Files, root: Path, content: bytes) -> None:
    put_striped(files.place, "job/a/model", content, stripes=2)
    place = StepwisePlace(files.place)
    seen: list[bool] = []
    place.before = lambda step, path: seen.append((root / "job" / "a").exists()) if step == "delete" else None
    Files(place).remove_folder("job/a", recursive=True)  # type: ignore[arg-type]
    assert seen == [False]
    assert everything(root) == set()


def test_permissions_of_a_file_apply_to_its_parts(files: Files, root: Path, content: bytes) -> None:
    head = put_striped(files.place, "job/model", content, stripes=2, parity=True)
    files.set_mode("job/model", 0o600)
    for path in ["job/model", *part_paths("job/model", head)]:
        assert files.place.stat(path).mode == 0o600
    files.set_owner("job/model", str(os.getuid()), None)
    files.set_mode("job", 0o700)
    assert files.stat("job").entry.mode == 0o700
    files.set_mtime("job/model", 1_700_000_000_000_000_000)
    assert files.stat("job/model").entry.mtime_ns == 1_700_000_000_000_000_000


def test_a_large_folder_is_listed_and_each_head_is_read_once(files: Files, root: Path) -> None:
    for number in range(300):
        head = some_head((number + 1) * _MIB, 64 * _MIB, seed=number)
        (root / f"job/{number}").write_bytes(encode_head(head))
        (root / f"job/plain{number}").write_bytes(b"x")
    place = StepwisePlace(files.place)
    peeked: list[str] = []
    first = place.inner.read_first
    place.inner.read_first = lambda path, length: (peeked.append(path), first(path, length))[1]  # type: ignore[method-assign]
    seen = Files(place)  # type: ignore[arg-type]
    for _ in range(2):
        listed = {info.path: info.size_bytes for info in seen.list("job")}
        assert len(listed) == 600
        assert all(listed[f"job/{number}"] == (number + 1) * _MIB for number in range(300))
    assert len(peeked) == 300


def test_of_a_large_folder_not_each_head_is_waited_for_when_the_storage_does_not_answer(
    files: Files, root: Path
) -> None:
    for number in range(300):
        (root / f"job/{number}").write_bytes(encode_head(some_head(_MIB, 64 * _MIB, seed=number)))
    place = StepwisePlace(files.place)
    waited: list[str] = []

    def read_first(path: str, length: int) -> bytes:
        waited.append(path)
        time.sleep(0.1)
        raise TransientError("not read within a minute")

    place.inner.read_first = read_first  # type: ignore[method-assign]
    with pytest.raises(TransientError, match="within a minute"):
        list(Files(place).list("job"))  # type: ignore[arg-type]
    assert len(waited) < 300


def test_a_replaced_file_has_its_new_size_at_once(files: Files) -> None:
    for size in (3, 9, 4):
        put_striped(files.place, "job/model", content_of(size * _MIB, size), stripes=2)
        assert files.stat("job/model").size_bytes == size * _MIB
        assert [info.size_bytes for info in files.list("job")] == [size * _MIB]


def test_policies_apply_to_subfolders_even_from_above_the_place(files: Files, root: Path) -> None:
    files.make_folder("job/a")
    assert files.policy_and_folder("job/a")[0] == Policy()
    files.set_policy("job", Policy(stripes=8))
    assert files.policy("job/a") == Policy(stripes=8)
    assert files.policy("") == Policy()
    files.set_policy("job/a", Policy(stripes=2, parity=True))
    assert files.policy_and_folder("job/a") == (Policy(stripes=2, parity=True), f"{files.place.uri}/job/a")
    below = Files(FolderPlace(root / "job" / "a"))
    assert below.policy("") == Policy(stripes=2, parity=True)
    files.set_policy("job/a", None)
    files.set_policy("job/a", None)
    assert Files(FolderPlace(root / "job" / "a")).policy_and_folder("") == (Policy(stripes=8), f"file://{root}/job")
    with pytest.raises(NotFoundError):
        files.set_policy("nothing", Policy())
    (root / "job/.stripes/policy.json").write_text("nonsense")
    with pytest.raises(CorruptError, match=r"policy\.json"):
        Files(files.place).policy("job")


def test_within_a_hidden_folder_its_own_content_is_visible(files: Files, content: bytes) -> None:
    put_striped(files.place, ".attempts/1/model", content, stripes=2)
    inside = Files(files.place, within=".attempts/1")
    assert inside.stat(".attempts/1").is_folder
    assert [info.size_bytes for info in inside.list(".attempts/1")] == [len(content)]
    for path in (".attempts/1/.stripes", ".attempts", ".attempts/2", ".attempts/12"):
        with pytest.raises(NotFoundError):
            inside.stat(path)

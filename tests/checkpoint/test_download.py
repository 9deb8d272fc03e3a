"""Copying checkpoints to a local disk: complete and verified, or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.checkpoint.download import DownloadResult, get_checkpoint
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.reading.reading import Reading
from bootseer.errors import BootseerError, TransientError, UsageError
from bootseer.mounts import kernel
from checkpoint.striped_files import content_of, part_paths, put_striped
from stepwise_place import StepwisePlace

_MIB = 1 << 20


@pytest.fixture
def reading(files: Files) -> Iterator[Reading]:
    with contextlib.closing(Reading(files.place)) as opened:
        yield opened


def test_a_folder_is_copied_with_all_its_content(files: Files, reading: Reading, tmp_path: Path) -> None:
    content = content_of(5 * _MIB + 3)
    put_striped(files.place, "ckpt/a/model", content, stripes=3)
    files.place.write_bytes("ckpt/.metadata", b"meta", mode=0o600)
    files.place.write_bytes("ckpt/nothing", b"")
    files.make_folder("ckpt/empty/below", parents=True)
    files.set_mode("ckpt/empty", 0o700)
    heard: list[tuple[int, int]] = []
    target = tmp_path / "far" / "out"
    got = get_checkpoint(files, reading, "ckpt", target, progress=lambda done, of: heard.append((done, of)))
    total = len(content) + 4
    assert got == DownloadResult(total, 3)
    assert heard[-1] == (total, total)
    assert (target / "a/model").read_bytes() == content
    assert (target / ".metadata").stat().st_mode & 0o777 == 0o600
    assert (target / "nothing").read_bytes() == b""
    assert (target / "empty/below").is_dir()
    assert (target / "empty").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_the_umask_applies_to_copies(files: Files, reading: Reading, tmp_path: Path) -> None:
    files.make_folder("ckpt")
    files.place.write_bytes("ckpt/model", b"x", mode=0o664)
    before = os.umask(0o077)
    try:
        get_checkpoint(files, reading, "ckpt", tmp_path / "out")
        get_checkpoint(files, reading, "ckpt/model", tmp_path / "model")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model", tmp_path / "out" / "model")} == {0o600}


def test_only_files_that_a_pattern_matches_are_copied(files: Files, reading: Reading, tmp_path: Path) -> None:
    for name in ("rank-0/a", "rank-0/b/c", "rank-1/a", "config.json", "sub/more.json"):
        files.place.make_folder(f"step-1/{name}".rpartition("/")[0], parents=True)
        files.place.write_bytes(f"step-1/{name}", name.encode())

    def got(target: str, *only: str) -> list[str]:
        get_checkpoint(files, reading, "step-1", tmp_path / target, only=only)
        found = [path for path in (tmp_path / target).rglob("*") if path.is_file()]
        assert all(path.read_text() == path.relative_to(tmp_path / target).as_posix() for path in found)
        return sorted(path.relative_to(tmp_path / target).as_posix() for path in found)

    assert got("one", "rank-0*", "*.json") == ["config.json", "rank-0/a", "rank-0/b/c", "sub/more.json"]
    assert got("two", "rank-?") == ["rank-0/a", "rank-0/b/c", "rank-1/a"]
    assert [path.name for path in (tmp_path / "two").iterdir()] != []
    assert not (tmp_path / "two/sub").exists()
    with pytest.raises(UsageError, match="matches no file") as refused:
        got("three", "rank-*", "confg.json")
    assert refused.value.hint.startswith("the nearest are config.json")
    with pytest.raises(UsageError, match="is a file"):
        get_checkpoint(files, reading, "step-1/config.json", tmp_path / "four", only=["*"])
    assert not (tmp_path / "three").exists()


def test_a_file_is_copied(files: Files, reading: Reading, tmp_path: Path) -> None:
    content = content_of(2 * _MIB)
    put_striped(files.place, "model", content, stripes=2)
    assert get_checkpoint(files, reading, "model", tmp_path / "out") == DownloadResult(2 * _MIB, 1)
    assert (tmp_path / "out").read_bytes() == content


def test_an_existing_target_is_kept_unless_it_is_to_be_replaced(files: Files, reading: Reading, tmp_path: Path) -> None:
    files.place.write_bytes("model", b"new")
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").write_bytes(b"old")
    with pytest.raises(UsageError, match="already"):
        get_checkpoint(files, reading, "model", target)
    assert (target / "old").read_bytes() == b"old"
    get_checkpoint(files, reading, "model", target, replace=True)
    assert target.read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "out"]


def test_with_a_wrong_byte_nothing_is_copied_and_the_old_target_is_kept(
    files: Files, reading: Reading, job: Path, tmp_path: Path
) -> None:
    head = put_striped(files.place, "ckpt/model", content_of(4 * _MIB), stripes=2)
    path = job / part_paths("ckpt/model", head)[0]
    data = bytearray(path.read_bytes())
    data[_MIB + 5] ^= 1
    path.write_bytes(data)
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(BootseerError):
        get_checkpoint(files, reading, "ckpt", tmp_path / "out", replace=True)
    assert (tmp_path / "out").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "out"]


def test_an_impossible_target_is_a_usage_error(files: Files, reading: Reading, tmp_path: Path) -> None:
    files.place.write_bytes("model", b"x" * 5000)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BootseerError, match="file"):
        get_checkpoint(files, reading, "model", tmp_path / "file" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "job"]


@pytest.mark.parametrize("target", ["/", "..", "below/.."])
def test_a_target_without_a_name_is_refused(files: Files, reading: Reading, target: str) -> None:
    files.place.write_bytes("model", b"x")
    for replace in (False, True):
        with pytest.raises(UsageError):
            get_checkpoint(files, reading, "model", Path(target), replace=replace)


def test_a_folder_that_contains_the_source_or_the_working_directory_is_never_replaced(
    files: Files, reading: Reading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.place.write_bytes("model", b"x")
    (tmp_path / "here" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "here" / "below")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(BootseerError):
        get_checkpoint(files, reading, "model", tmp_path / "loop" / "model", replace=True)
    for target in (tmp_path / "job", tmp_path, tmp_path / "link", tmp_path / "here", Path()):
        with pytest.raises(UsageError, match="is not replaced"):
            get_checkpoint(files, reading, "model", target, replace=True)
    assert files.place.read_bytes("model", 9) == b"x"
    get_checkpoint(files, reading, "model", Path("../new"))
    assert (tmp_path / "here" / "new").read_bytes() == b"x"


def test_a_mount_point_is_not_replaced(
    files: Files, reading: Reading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would refuse it only after everything was copied to the file system of its parent."""
    files.place.write_bytes("model", b"x")
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(kernel, "mounts_at", lambda target: [target] if target == tmp_path / "volume" else [])
    with pytest.raises(UsageError, match="is a mount point") as refused:
        get_checkpoint(files, reading, "model", tmp_path / "volume", replace=True)
    assert refused.value.hint == f"name a folder in it: {tmp_path}/volume/NAME"


def test_a_copy_into_its_own_source_is_refused(files: Files, reading: Reading, job: Path) -> None:
    """It would count as a change of the source, and would stay there."""
    files.make_folder("step-1")
    files.place.write_bytes("step-1/model", b"x")
    with pytest.raises(UsageError, match="lies in what is copied"):
        get_checkpoint(files, reading, "step-1", job / "step-1" / "step-1")
    assert [path.name for path in (job / "step-1").iterdir()] == ["model"]
    get_checkpoint(files, reading, "step-1", job / "step-2")


def test_a_file_that_another_program_moved_without_its_parts_is_reported_as_such(
    files: Files, reading: Reading, job: Path, tmp_path: Path
) -> None:
    put_striped(files.place, "model", content_of(4 * _MIB), stripes=2)
    (job / "archive").mkdir()
    (job / "model").rename(job / "archive" / "model")
    with pytest.raises(TransientError, match="it came from another folder without its parts"):
        get_checkpoint(files, reading, "archive/model", tmp_path / "out")


def test_a_name_of_maximum_length_is_copied(files: Files, reading: Reading, tmp_path: Path) -> None:
    name = "ü" * 127
    files.place.write_bytes(name, b"x")
    get_checkpoint(files, reading, name, tmp_path / name)
    assert (tmp_path / name).read_bytes() == b"x"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_checkpoint_that_is_replaced_while_it_is_copied_is_not_mixed(
    files: Files, job: Path, tmp_path: Path, is_there: bool
) -> None:
    """Whether the new one is already published, or a moment later."""
    for version in ("old", "new"):
        for name in ("a", "b", "c"):
            files.make_folder(f"{version}/below", parents=True)
            files.place.write_bytes(f"{version}/below/{name}", version.encode())
    place = StepwisePlace(files.place)
    opened: list[str] = []

    def replace(step: str, path: str) -> None:
        if step == "open":
            opened.append(path)
        if len(opened) == 2:
            place.before = lambda step, path: None
            (job / "old").rename(job / "away")
            if is_there:
                (job / "new").rename(job / "old")

    place.before = replace
    with contextlib.closing(Reading(place)) as reading:  # type: ignore[arg-type]
        with pytest.raises(TransientError, match="was changed while it was copied"):
            get_checkpoint(files, reading, "old", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        if not is_there:
            (job / "new").rename(job / "old")
        get_checkpoint(files, reading, "old", tmp_path / "out")
    assert {path.read_text() for path in (tmp_path / "out/below").iterdir()} == {"new"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "out"]


@pytest.mark.slow
def test_an_interrupted_copy_is_resumed(files: Files, job: Path, tmp_path: Path) -> None:
    for name, size in (("a", 40 * _MIB), ("b", 20 * _MIB), ("c", 18 * _MIB)):
        put_striped(files.place, f"step/{name}", content_of(size), stripes=2)
    for name in ("d", "e"):
        (job / "step" / name).write_bytes(content_of(17 * _MIB))
    place = StepwisePlace(files.place)
    read: set[str] = set()
    is_cut = False

    def cut(step: str, path: str) -> None:
        if step == "open":
            read.add(path)
            if is_cut and path == "step/e":
                raise TransientError("no answer")

    place.before = cut
    with contextlib.closing(Reading(place)) as reading:  # type: ignore[arg-type]
        is_cut = True
        with pytest.raises(TransientError, match="no answer"):
            get_checkpoint(files, reading, "step", tmp_path / "out")
        is_cut = False
        (left,) = tmp_path.glob(".bootseer-get-*")
        with (left / "copy/b").open("r+b") as file:  # as if the disk had lost it
            file.seek(17 * _MIB + 5)
            file.write(b"lost")
        os.truncate(left / "copy/c", 5)
        with (left / "copy/d").open("r+b") as file:  # as if it were incomplete
            file.truncate(17 * _MIB - 1)
        again = files.stat("step/a").entry.mtime_ns
        put_striped(files.place, "step/a", content_of(40 * _MIB, 1), stripes=2)  # another one of the same size
        files.set_mtime("step/a", again)
        read.clear()
        got = get_checkpoint(files, reading, "step", tmp_path / "out")
    assert got.kept_bytes == 16 * _MIB  # the first piece of b
    for name in "abcde":
        wanted = content_of(files.stat(f"step/{name}").size_bytes, 1 if name == "a" else 0)
        assert (tmp_path / "out" / name).read_bytes() == wanted, name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "out"]


def test_complete_files_are_not_read_again(files: Files, job: Path, tmp_path: Path) -> None:
    put_striped(files.place, "step/a", content_of(18 * _MIB), stripes=2)
    (job / "step/b").write_bytes(content_of(17 * _MIB))
    (job / "step/c").write_bytes(b"small")
    place = StepwisePlace(files.place)

    def cut(step: str, path: str) -> None:
        if (step, path) == ("open", "step/c"):
            raise TransientError("no answer")

    place.before = cut
    with contextlib.closing(Reading(place)) as reading:  # type: ignore[arg-type]
        with pytest.raises(TransientError, match="no answer"):
            get_checkpoint(files, reading, "step", tmp_path / "out")
        place.before = lambda step, path: None
        assert get_checkpoint(files, reading, "step", tmp_path / "out").kept_bytes == 35 * _MIB
    assert (tmp_path / "out/a").read_bytes() == content_of(18 * _MIB)
    assert (tmp_path / "out/b").read_bytes() == content_of(17 * _MIB)


def test_large_and_small_files_are_copied_concurrently(files: Files, reading: Reading, tmp_path: Path) -> None:
    large = content_of(17 * _MIB)
    put_striped(files.place, "ckpt/large", large)
    for number in range(50):
        files.place.write_bytes(f"ckpt/{number}", b"%d" % number)
    assert get_checkpoint(files, reading, "ckpt", tmp_path / "out").num_files == 51
    assert (tmp_path / "out/large").read_bytes() == large
    assert all((tmp_path / f"out/{number}").read_bytes() == b"%d" % number for number in range(50))

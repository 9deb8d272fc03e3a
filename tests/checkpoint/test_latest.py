"""The file `latest`."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from bootseer.checkpoint import latest
from bootseer.checkpoint.attempts import collect
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.latest import _is_old, drop_latest, move_latest, read_latest, set_latest, step_of
from bootseer.checkpoint.publish import PutSettings, put_checkpoint
from bootseer.errors import CorruptError, NotFoundError, PermanentError
from bootseer.places import open_place
from bootseer.places.folder import FolderPlace
from s3_server import S3Server


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-100", 100),
        ("global_step20", 20),
        ("iter_0000500", 500),
        ("epoch=3-step=1200.ckpt", 1200),
        ("step-7.tar.gz", 7),
        ("final", None),
        ("v2-final", None),
        ("100", 100),
        ("ckpt_7", 7),
        ("Epoch3.pt", 3),
        ("hf2", None),
        ("llama3.pt", None),
        ("writer5", None),
        ("step-1.5", None),
        ("step-" + "9" * 30, int("9" * 18)),
    ],
)
def test_the_step_is_the_number_at_the_end(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_latest_moves_forward_only(files: Files, job: Path) -> None:
    for step in (90, 100, 1000):
        (job / f"step-{step}").mkdir()
    assert read_latest(files.place, "") is None
    assert move_latest(files, "", "step-100") == "step-100"
    assert (job / "latest").read_text() == "step-100\n"
    assert move_latest(files, "", "step-90") == "step-100"
    assert move_latest(files, "", "step-1000") == "step-1000"
    assert move_latest(files, "", "step-1000") == "step-1000"
    set_latest(files, "", "step-90")
    assert read_latest(files.place, "") == "step-90"


def test_without_steps_the_time_of_publication_decides(files: Files, job: Path) -> None:
    for name, time_ns in (("old", 1_000_000_000_000), ("new", 2_000_000_000_000)):
        (job / name).mkdir()
        os.utime(job / name, ns=(time_ns, time_ns))
    assert move_latest(files, "", "new") == "new"
    assert move_latest(files, "", "old") == "new"


def test_latest_is_moved_if_its_checkpoint_does_not_exist(files: Files, job: Path) -> None:
    (job / "final").mkdir()
    (job / "latest").write_text("gone\n")
    assert move_latest(files, "", "final") == "final"
    (job / "step-60").mkdir()
    (job / "latest").write_text("step-100\n")
    assert move_latest(files, "", "step-60") == "step-60"


def test_latest_never_names_an_unpublished_checkpoint(files: Files) -> None:
    for move in (move_latest, set_latest):
        with pytest.raises(NotFoundError):
            move(files, "", "step-1")
        for name in ("", "..", "a/b", "latest", ".attempts"):
            with pytest.raises(PermanentError):
                move(files, "", name)
    assert read_latest(files.place, "") is None


@pytest.mark.parametrize("text", ["", "\n", "a/b", "..", "a\nb", ".attempts/x", "x" * 5000])
def test_an_invalid_latest_is_an_error_until_it_is_moved(files: Files, job: Path, text: str) -> None:
    (job / "latest").write_text(text)
    (job / "step-1").mkdir()
    with pytest.raises(PermanentError):
        read_latest(files.place, "")
    if len(text) < 4096:
        with pytest.raises(CorruptError, match="ckpt latest"):
            read_latest(files.place, "")
        assert move_latest(files, "", "step-1") == "step-1"
    set_latest(files, "", "step-1")
    assert read_latest(files.place, "") == "step-1"


def test_a_latest_written_by_training_code_is_read(files: Files, job: Path) -> None:
    (job / "latest").write_text("global_step100")
    assert read_latest(files.place, "") == "global_step100"


def test_of_many_writers_at_once_the_highest_step_wins(files: Files, job: Path) -> None:
    for step in range(24):
        (job / f"step-{step}").mkdir()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda step: move_latest(files, "", f"step-{step}"), [*range(0, 24, 2), *range(23, 0, -2)]))
    assert read_latest(files.place, "") == "step-23"
    assert [path.name for path in (job / ".attempts").iterdir()] == []


def test_the_lock_of_a_dead_writer_is_ignored(files: Files, job: Path) -> None:
    (job / "step-1").mkdir()
    (job / ".attempts").mkdir()
    lock = job / ".attempts" / "latest.lock-1"
    lock.write_text("dead")
    os.utime(lock, ns=(1, 1))
    for _ in range(2):
        assert move_latest(files, "", "step-1") == "step-1"
        assert [path.name for path in (job / ".attempts").iterdir()] == [lock.name]
    collect(files.place, "")
    assert [path.name for path in (job / ".attempts").iterdir()] == []


def test_only_one_of_two_writers_that_find_a_stale_lock_gets_the_next_lock(files: Files, job: Path) -> None:
    (job / ".attempts").mkdir()
    lock = job / ".attempts" / "latest.lock-9"
    lock.write_text("dead")
    os.utime(lock, ns=(1, 1))
    free = [latest._free_lock(files.place, ".attempts") for _ in range(2)]
    assert free == 2 * [".attempts/latest.lock-10"]
    assert [files.place.create_bytes(path or "", b"") for path in free] == [True, False]
    assert latest._free_lock(files.place, ".attempts") is None


@pytest.mark.slow
def test_the_lock_of_a_dead_writer_is_ignored_in_a_bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="extra s3")
    s3_server.make_bucket("locks")
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(latest, "LOCK_S", 2.0)
    with closing(open_place("s3://locks/job")) as place:
        place.make_folder("step-1", parents=True)
        place.make_folder(".attempts", parents=True)
        for number in (1, 2):
            assert place.create_bytes(f".attempts/latest.lock-{number}", b"dead")
            until = time.monotonic() + 60
            while not _is_old(place, place.stat(f".attempts/latest.lock-{number}")):
                assert time.monotonic() < until
                time.sleep(0.1)
            assert move_latest(Files(place), "", "step-1") == "step-1"
            assert not any(entry.path == f".attempts/latest.lock-{number + 1}" for entry in place.list(".attempts"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_storages_clock_is_used_even_if_its_root_is_not_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like with DCP, whose place is the machine's root or the root of HDFS."""
    wrong = SimpleNamespace(time=lambda: time.time() + 3600, monotonic=time.monotonic)
    monkeypatch.setattr("bootseer.places.place.time", wrong)
    with TemporaryDirectory() as root:
        for name, mode in (("", 0o755), ("job", 0o777)):
            Path(root, name).mkdir(exist_ok=True)
            Path(root, name).chmod(mode)
        Path(root, "job/lock").write_bytes(b"a live holder")
        place = FolderPlace(Path(root))
        os.seteuid(65534)
        try:
            is_old = _is_old(place, place.stat("job/lock"))
        finally:
            os.seteuid(0)
        place.close()
    assert not is_old


@pytest.mark.parametrize("name", ["latest.lock-1", "latest.lock"], ids=["", "of an earlier version"])
def test_a_held_lock_is_waited_for_and_not_removed(files: Files, job: Path, name: str) -> None:
    (job / "step-1").mkdir()
    (job / ".attempts").mkdir()
    lock = job / ".attempts" / name
    files.place.write_bytes(f".attempts/{name}", b"somebody")
    with ThreadPoolExecutor(1) as threads:
        moving = threads.submit(move_latest, files, "", "step-1")
        assert read_latest(files.place, "") is None
        lock.unlink()
        assert moving.result(timeout=180) == "step-1"


def test_dropping_latest_moves_it_or_deletes_it(files: Files, job: Path) -> None:
    for step in (1, 2):
        (job / f"step-{step}").mkdir()
    set_latest(files, "", "step-2")
    drop_latest(files, "", "step-1", None)
    assert read_latest(files.place, "") == "step-2"
    drop_latest(files, "", "step-2", "step-1")
    assert read_latest(files.place, "") == "step-1"
    drop_latest(files, "", "step-1", None)
    assert read_latest(files.place, "") is None


def test_a_latest_that_is_a_large_file_is_an_error_and_a_folder_is_ignored(files: Files, job: Path) -> None:
    (job / "step-1").mkdir()
    (job / "latest").write_bytes(b"step-1\n" + b" " * 5000)
    with pytest.raises(CorruptError, match="names no checkpoint"):
        read_latest(files.place, "")
    assert move_latest(files, "", "step-1") == "step-1"
    (job / "latest").unlink()
    (job / "latest").mkdir()
    assert read_latest(files.place, "") is None


@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("link", ["latest", "step-2"])
def test_a_link_of_the_user_is_not_replaced(files: Files, job: Path, tmp_path: Path, kind: str, link: str) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "model").write_bytes(b"x")
    what = tmp_path / "source" / ("." if kind == "folder" else "model")
    put_checkpoint(files.place, what, "step-1", settings=PutSettings(move_latest=False))
    (job / link).symlink_to("step-1")
    for settings in (PutSettings(dry_run=True), PutSettings(replace=True)):
        with pytest.raises(PermanentError, match=f"{link} is a symbolic link"):
            put_checkpoint(files.place, what, "step-2", settings=settings)
    with pytest.raises(PermanentError, match="latest is a symbolic link") if link == "latest" else nullcontext():
        set_latest(files, "", "step-1")
    put_checkpoint(files.place, what, "step-3", settings=PutSettings(move_latest=False))
    assert (job / link).readlink() == Path("step-1")

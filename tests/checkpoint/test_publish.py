"""Putting checkpoints: completely or not at all, even with killed or concurrent writers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest

from bootseer.checkpoint import attempts
from bootseer.checkpoint.attempts import collect
from bootseer.checkpoint.catalog import checkpoints, remove, walk
from bootseer.checkpoint.download import get_checkpoint
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.latest import read_latest, set_latest
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.publish import Put, PutSettings, put_checkpoint
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.verify import verify
from bootseer.checkpoint.writing.writing import Writing
from bootseer.errors import AlreadyExistsError, BootseerError, IsFolderError, PermanentError, UsageError
from bootseer.places.folder import FolderPlace
from killed_steps import is_killed
from stepwise_place import StepwisePlace

_TESTS = Path(__file__).parents[1]
_MIB = 1 << 20
_STRIPED = PutSettings(policy=Policy(stripes=2, parity=True, min_bytes_per_stripe=_MIB))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "optimizer").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "model").write_bytes(os.urandom(3 * _MIB + 7))
    (folder / "optimizer" / "state").write_bytes(os.urandom(2 * _MIB))
    (folder / ".metadata").write_bytes(b"meta")
    (folder / "nothing").write_bytes(b"")
    (folder / "optimizer" / "secret").write_bytes(b"s")
    (folder / "optimizer" / "secret").chmod(0o600)
    return folder


def hidden(job: Path) -> list[str]:
    """The files in folders of attempts, and in the job's folder of parts."""
    found = [*(job / ".attempts").rglob("*"), *(job / ".stripes").rglob("*")]
    return [str(path.relative_to(job)) for path in found if path.is_file()]


def test_a_folder_is_put_with_all_its_content(files: Files, job: Path, source: Path) -> None:
    heard: list[tuple[int, int]] = []
    total = 5 * _MIB + 7 + 4 + 1
    (source / "optimizer").chmod(0o555)
    put = put_checkpoint(
        files.place, source, "step-10", settings=_STRIPED, progress=lambda done, of: heard.append((done, of))
    )
    assert put == Put("step-10", total, 5, 2, "step-10", [])
    assert heard[-1] == (total, total)
    assert {info.path for info in files.list("step-10")} == {
        "step-10/model", "step-10/optimizer", "step-10/empty", "step-10/.metadata", "step-10/nothing",
    }  # fmt: skip
    assert files.stat("step-10/model").is_striped
    assert files.stat("step-10/optimizer/secret").entry.mode == 0o600
    assert files.stat("step-10/optimizer").entry.mode == 0o755  # writable, so that its owner can remove its content
    assert verify(files, "step-10").problems == []
    assert read_latest(files.place, "") == "step-10"
    assert hidden(job) == []


def test_a_file_is_put_under_another_name(files: Files, job: Path, source: Path) -> None:
    put = put_checkpoint(files.place, source / "model", "step-3.pt", settings=_STRIPED)
    assert put == Put("step-3.pt", 3 * _MIB + 7, 1, 1, "step-3.pt", [])
    assert verify(files, "step-3.pt").problems == []
    put_checkpoint(files.place, source / ".metadata", "small.pt")
    assert files.place.read_bytes("small.pt", 10) == b"meta"
    assert [path for path in hidden(job) if path.startswith(".attempts")] == []


def test_the_folders_policy_applies_unless_another_one_is_given(files: Files, source: Path) -> None:
    files.set_policy("", Policy(stripes=3, min_bytes_per_stripe=_MIB))
    put_checkpoint(files.place, source, "a")
    put_checkpoint(files.place, source, "b", settings=PutSettings(policy=Policy(stripes=1)))
    head = files.head("a/model")
    assert head is not None
    assert head.segments[0].stripes == 3
    assert files.head("b/model") is None


def test_an_existing_name_is_refused_and_its_checkpoint_is_kept(files: Files, job: Path, source: Path) -> None:
    put_checkpoint(files.place, source, "step-1", settings=_STRIPED)
    put_checkpoint(files.place, source / "model", "step-2", settings=_STRIPED)
    for name in ("step-1", "step-2"):
        for what in (source, source / "model"):
            with pytest.raises(AlreadyExistsError, match="replace it"):
                put_checkpoint(files.place, what, name, settings=_STRIPED)
    assert verify(files, "step-1").problems == verify(files, "step-2").problems == []
    assert [path for path in hidden(job) if path.startswith(".attempts")] == []


def test_a_folder_or_a_file_can_be_replaced(files: Files, job: Path, source: Path) -> None:
    replace = PutSettings(replace=True, policy=_STRIPED.policy)
    put_checkpoint(files.place, source, "step-1", settings=_STRIPED)
    (source / "nothing").unlink()
    put_checkpoint(files.place, source, "step-1", settings=replace)
    assert not (job / "step-1" / "nothing").exists()
    put_checkpoint(files.place, source / "model", "step-2.pt", settings=replace)
    put_checkpoint(files.place, source / ".metadata", "step-2.pt", settings=replace)
    assert files.place.read_bytes("step-2.pt", 9) == b"meta"
    put_checkpoint(files.place, source / "model", "step-3", settings=replace)
    put_checkpoint(files.place, source, "step-3", settings=replace)  # a folder instead of a striped file
    assert verify(files, "step-1").problems == verify(files, "step-3").problems == []
    assert hidden(job) == []


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_of_two_concurrent_puts_of_one_name_one_succeeds(files: Files, job: Path, source: Path, kind: str) -> None:
    what = source if kind == "folder" else source / "model"
    barrier = threading.Barrier(2)

    def put(number: int) -> str:
        place = StepwisePlace(FolderPlace(job))

        def meet(step: str, path: str) -> None:
            # Publish only when both have written everything.
            if step == "rename" and (path.count("/") == 1 if kind == "folder" else path.endswith("model")):
                barrier.wait(timeout=180)
                place.before = lambda step, path: None

        place.before = meet
        try:
            put_checkpoint(place, what, "step-1", settings=_STRIPED)  # type: ignore[arg-type]
        except AlreadyExistsError as error:
            return str(error)
        return "won"

    with ThreadPoolExecutor(2) as threads:
        ended = sorted(threads.map(put, range(2)))
    assert ended[1] == "won"
    assert "already exists" in ended[0]
    assert verify(files, "step-1").problems == []
    assert [path for path in hidden(job) if path.startswith(".attempts")] == []


@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.slow
def test_a_put_that_is_killed_at_any_step_keeps_a_checkpoint_and_is_collected(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "LEASE_S", 0.0)
    monkeypatch.setattr(attempts, "_NO_LEASE_S", 0.0)
    program = [sys.executable, Path(__file__).with_name("killed_put.py"), tmp_path, kind]
    subprocess.run(program, check=True, timeout=300, env={**os.environ, "PYTHONPATH": str(_TESTS)})
    runs = sorted((tmp_path / "runs").iterdir(), key=lambda path: int(path.name))
    assert len(runs) > 20
    seen: list[object] = []
    for run in runs:
        files = Files(FolderPlace(run))
        before = state_of(files)
        collect(files.place, "")
        after = state_of(files)
        # Only after moving the old one away and before publishing the new one there is none; then it is restored.
        assert before in (after, None)
        assert after is not None
        seen.append(after)
        assert verify(files, "step-1").problems == []
        assert read_latest(files.place, "") == "step-1"
        rests = {path.split("/")[1] for path in hidden(run)}
        head = files.head("step-1") if kind == "file" else None
        assert rests == ({head.id} if head else set())
    assert [seen.index(2), seen.count(1) + seen.count(2)] == [seen.count(1), len(runs)]
    assert seen.count(1) > 10


def state_of(files: Files) -> object:
    """Which of the two checkpoints exists."""
    try:
        info = files.stat("step-1")
    except BootseerError:
        return None
    head = files.head("step-1/model" if info.is_folder else "step-1")
    assert head is not None
    path = f"{'step-1/' if info.is_folder else ''}.stripes/{head.id}/{head.segments[0].parts[0].name}"
    return files.place.read_first(path, 1)[0]


def test_a_failed_put_leaves_nothing(files: Files, job: Path, source: Path) -> None:
    place = StepwisePlace(files.place)

    def fail(step: str, path: str) -> None:
        if step == "write_bytes" and path.endswith("/.metadata"):
            raise PermanentError("the disk is full")

    place.before = fail
    with pytest.raises(PermanentError, match="full"):
        put_checkpoint(place, source, "step-1", settings=_STRIPED)  # type: ignore[arg-type]
    assert hidden(job) == []
    assert list(files.list("")) == []


@pytest.mark.parametrize("mode", ["ab", "r+b"])
def test_a_source_that_changes_while_it_is_written_is_refused(files: Files, job: Path, source: Path, mode: str) -> None:
    def change(done: int, total: int) -> None:
        with (source / "model").open(mode) as file:
            file.write(b"more")

    with pytest.raises(PermanentError, match="changed while"):
        put_checkpoint(files.place, source / "model", "step-1", settings=_STRIPED, progress=change)
    assert hidden(job) == []


def test_links_to_files_are_followed_and_other_special_files_refused(files: Files, source: Path) -> None:
    (source / "link").symlink_to(source / ".metadata")
    put_checkpoint(files.place, source, "step-1")
    assert files.place.read_bytes("step-1/link", 9) == b"meta"
    (source / "folder-link").symlink_to(source / "optimizer")
    with pytest.raises(UsageError, match="folder-link"):
        put_checkpoint(files.place, source, "step-2")
    (source / "folder-link").unlink()
    os.mkfifo(source / "pipe")
    with pytest.raises(UsageError, match="pipe"):
        put_checkpoint(files.place, source, "step-2")
    (source / "pipe").unlink()
    (source / "dangling").symlink_to(source / "nowhere")
    with pytest.raises(BootseerError, match="dangling"):
        put_checkpoint(files.place, source, "step-2")


@pytest.mark.parametrize("name", ["", "a/b", "..", "latest", ".attempts", ".stripes-x"])
def test_invalid_names_are_refused_before_anything_is_written(files: Files, source: Path, name: str) -> None:
    with pytest.raises(BootseerError):
        put_checkpoint(files.place, source, name)
    assert list(files.place.list("")) == []


def test_empty_missing_and_hidden_sources_are_refused(files: Files, tmp_path: Path, source: Path) -> None:
    (tmp_path / "void").mkdir()
    (source / ".stripes").mkdir()
    for what in (tmp_path / "void", tmp_path / "nowhere", source):
        with pytest.raises(BootseerError):
            put_checkpoint(files.place, what, "step-1")
    assert list(files.list("")) == []


@pytest.mark.parametrize(
    "name", ["", "..", "a/b", "latest", "two\nlines", " space ", "bad\udcff", "x" * 256, ".stripes", ".best"]
)
def test_a_name_that_cannot_be_in_latest_or_a_list_is_refused_before_anything_is_written(
    files: Files, job: Path, source: Path, name: str
) -> None:
    with pytest.raises(UsageError, match="cannot be the name"):
        put_checkpoint(files.place, source, name)
    assert list(job.iterdir()) == []


def test_a_file_too_large_to_be_striped_is_refused_before_anything_is_written(
    files: Files, job: Path, source: Path
) -> None:
    os.truncate(source / "model", 9 << 40)
    with pytest.raises(PermanentError, match="too large to be striped"):
        put_checkpoint(files.place, source, "step-1", settings=_STRIPED, progress=lambda *_: fail())
    with closing(Writing(files)) as writing, pytest.raises(PermanentError, match="too large to be striped"):
        writing.write_file("model", 9 << 40, lambda offset, length: fail(), policy=_STRIPED.policy)
    assert list(job.iterdir()) == []


def test_a_file_added_to_the_source_meanwhile_is_an_error(files: Files, job: Path, source: Path) -> None:
    place = StepwisePlace(files.place)

    def add(step: str, path: str) -> None:
        if path.endswith("/.metadata"):
            (source / "late").write_bytes(b"x")

    place.before = add
    with pytest.raises(PermanentError, match="was changed"):
        put_checkpoint(place, source, "step-1", settings=_STRIPED)  # type: ignore[arg-type]
    assert not (job / "step-1").exists()


def test_a_place_inside_the_source_is_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    place = FolderPlace(source / "job")
    for what in (source, tmp_path / "link"):
        with pytest.raises(UsageError, match="lies in"):
            put_checkpoint(place, what, "step-1")
    place.close()
    assert not (source / "job").exists()


@pytest.mark.slow
def test_folders_may_be_deep(files: Files, source: Path) -> None:
    deep = source.joinpath(*["d"] * 300)
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"x")
    put_checkpoint(files.place, source, "step-1", settings=_STRIPED)
    assert files.stat(f"step-1/{'d/' * 300}file").size_bytes == 1


def test_the_head_of_a_striped_file_is_not_taken_for_its_content(files: Files, job: Path, source: Path) -> None:
    put_checkpoint(files.place, source / "model", "step-1.pt", settings=_STRIPED)
    with pytest.raises(PermanentError, match="head of a striped file"):
        put_checkpoint(files.place, job / "step-1.pt", "step-2.pt")
    put_checkpoint(files.place, source, "step-1", settings=_STRIPED)
    with pytest.raises(UsageError, match="own storage"):
        put_checkpoint(files.place, job / "step-1", "step-2")


def test_the_error_of_a_latest_that_cannot_be_moved_reports_that_the_checkpoint_is_published(
    files: Files, job: Path, source: Path
) -> None:
    (job / "latest").mkdir()
    with pytest.raises(PermanentError, match="step-1 is published, but"):
        put_checkpoint(files.place, source, "step-1", settings=_STRIPED)
    assert verify(files, "step-1").problems == []


def test_a_job_is_not_replaced_by_a_checkpoint(files: Files, job: Path, source: Path) -> None:
    for step in (1, 2):
        put_checkpoint(files.place, source, f"step-{step}", folder="moe", settings=_STRIPED)
    with pytest.raises(UsageError, match="moe is a job"):
        put_checkpoint(files.place, source, "moe", settings=PutSettings(replace=True))
    assert verify(files, "moe").num_files == 11
    assert verify(files, "moe").problems == []


def test_a_file_that_is_to_replace_a_folder_is_refused_before_anything_is_written(
    files: Files, job: Path, source: Path
) -> None:
    put_checkpoint(files.place, source, "step-1", settings=_STRIPED)
    with pytest.raises(IsFolderError, match="a file does not replace"):
        put_checkpoint(
            files.place,
            source / "model",
            "step-1",
            settings=PutSettings(replace=True),
            progress=lambda done, of: fail(),
        )
    assert verify(files, "step-1").problems == []


def fail() -> NoReturn:
    raise AssertionError("something was written")


def test_a_name_that_the_place_cannot_store_is_refused_before_anything_is_written(
    files: Files, job: Path, source: Path
) -> None:
    place = StepwisePlace(files.place)
    place.name_problem = lambda name: "no colons" if ":" in name else ""  # type: ignore[attr-defined]
    (source / "optimizer" / "12:30").write_bytes(b"x")
    for what, name in ((source, "step-1"), (source / "model", "step-1:2")):
        with pytest.raises(UsageError, match="no colons"):
            put_checkpoint(place, what, name)  # type: ignore[arg-type]
    (source / "empty" / os.fsdecode(b"\xff")).write_bytes(b"")
    with pytest.raises(UsageError, match="not UTF-8"):
        put_checkpoint(files.place, source, "step-1")
    assert list(job.iterdir()) == []
    put_checkpoint(place, source / "optimizer" / "12:30", "step-1")  # type: ignore[arg-type]
    assert (job / "step-1").read_bytes() == b"x"


def test_older_checkpoints_with_similar_names_are_removed_when_one_is_published(
    files: Files, job: Path, source: Path
) -> None:
    def put(name: str, keep_last: int | None = None, *, dry_run: bool = False) -> list[str]:
        settings = PutSettings(keep_last=keep_last, dry_run=dry_run)
        return [name for name, _ in put_checkpoint(files.place, source, name, settings=settings).removed]

    def there() -> set[str]:
        return {one.name for one in checkpoints(files, "")}

    others = {"best", "tokenizer-32", "step-3-ema"}
    for name in (*others, "step-1", "step-2", "step-4", "step-10"):
        put(name)
    assert put("step-11", 3, dry_run=True) == ["step-1", "step-2"]
    assert there() == {*others, "step-1", "step-2", "step-4", "step-10"}
    assert put("step-11", 3) == ["step-1", "step-2"]
    assert there() == {*others, "step-4", "step-10", "step-11"}
    for keep in range(4, 10):  # more than there are
        assert put("step-12", keep, dry_run=True) == []
    set_latest(files, "", "step-4")
    with pytest.raises(UsageError, match="does not end with a step number"):
        put("better", 1)
    settings = PutSettings(keep_last=1, move_latest=False)
    removed = put_checkpoint(files.place, source, "step-12", settings=settings).removed
    assert removed == [("step-10", 5 * _MIB + 12), ("step-11", 5 * _MIB + 12)]  # and not what `latest` names
    assert put("step-5", 1) == ["step-4"]  # and nothing that is newer
    assert put("step-13", 2) == ["step-5"]
    assert there() == {*others, "step-12", "step-13"}


def test_a_job_is_not_removed_like_an_older_checkpoint(files: Files, job: Path, source: Path) -> None:
    put_checkpoint(files.place, source, "step-1", folder="exp-1")
    (source / "step-9").mkdir()  # which alone does not make a job of what was put
    put_checkpoint(files.place, source, "exp-2")
    assert put_checkpoint(files.place, source, "exp-3", settings=PutSettings(keep_last=1)).removed[0][0] == "exp-2"
    assert (job / "exp-1/step-1").is_dir()


def _left_by_a_killed_put(job: Path, source: Path, *, after: int) -> None:
    """Put `source` in a child process that is killed when `after` files are complete."""

    def put() -> None:
        place = StepwisePlace(FolderPlace(job))
        heads = 0

        def kill(step: str, path: str) -> None:
            nonlocal heads
            heads += step == "write_bytes" and path.rpartition("/")[2].startswith("shard")
            if heads > after:
                os.kill(os.getpid(), signal.SIGKILL)

        place.before = kill
        put_checkpoint(place, source, "step-1", settings=_STRIPED)  # type: ignore[arg-type]

    assert is_killed(put)


@pytest.mark.slow
def test_a_killed_put_is_resumed_with_its_complete_files(files: Files, job: Path, tmp_path: Path) -> None:
    source = tmp_path / "shards"
    (source / "sub").mkdir(parents=True)
    for number in range(8):
        (source / ("sub" if number % 2 else ".") / f"shard{number}").write_bytes(os.urandom(2 * _MIB + number))
    _left_by_a_killed_put(job, source, after=5)
    first = {path.name for path in (job / ".attempts").rglob("shard*")}
    _left_by_a_killed_put(job, source, after=0)  # and again, after some of its files were reused
    kept = {path.name for path in (job / ".attempts").rglob("shard*")}
    assert kept >= first
    assert len(first) > 1
    # The source has changed meanwhile: the new content must be published.
    changed = next(path for path in sorted(source.rglob("shard*")) if path.name in kept)
    data = bytearray(changed.read_bytes())
    data[_MIB + 5] ^= 1
    changed.write_bytes(data)
    changed.chmod(0o600)
    put = put_checkpoint(files.place, source, "step-1", settings=_STRIPED)
    kept.remove(changed.name)
    whole = sum(path.stat().st_size for path in source.rglob("shard*") if path.name in kept)
    # It may have been killed while the parts of four files, the number of concurrent files, were being moved.
    assert whole - 4 * (2 * _MIB + 8) <= put.kept_bytes <= whole
    assert verify(files, "step-1").problems == []
    with contextlib.closing(Reading(files.place)) as reading:
        get_checkpoint(files, reading, "step-1", tmp_path / "out")
    for path in source.rglob("shard*"):
        copy = tmp_path / "out" / path.relative_to(source)
        assert copy.read_bytes() == path.read_bytes()
        assert copy.stat().st_mode == path.stat().st_mode
    assert hidden(job) == []
    in_it = {path.name for path in (job / "step-1").iterdir()}
    assert not [name for name in in_it if name.startswith(".attempts")]
    heads_there = [files.head(info.path) for info in walk(files, "step-1")]
    parts = {path.parent.name for path in (job / "step-1").rglob(".stripes/*/*")}
    assert parts == {head.id for head in heads_there if head is not None}


def test_a_killed_put_is_resumed_if_a_file_has_taken_the_place_of_a_folder(
    files: Files, job: Path, tmp_path: Path
) -> None:
    source = tmp_path / "shards"
    (source / "sub").mkdir(parents=True)
    for name in ("shard0", "shard1", "sub/shard2"):
        (source / name).write_bytes(os.urandom(2 * _MIB))
    _left_by_a_killed_put(job, source, after=1)
    shutil.rmtree(source / "sub")
    (source / "sub").write_bytes(b"a file")
    put_checkpoint(files.place, source, "step-1", settings=_STRIPED)
    assert (job / "step-1/sub").read_bytes() == b"a file"


def test_files_of_a_living_writer_or_with_another_policy_are_not_reused(files: Files, job: Path, source: Path) -> None:
    attempts = []

    def meet(done: int, total: int) -> None:
        if not attempts:
            attempts.append(1)
            put = put_checkpoint(files.place, source, "step-1", settings=_STRIPED)
            assert put.kept_bytes == 0

    with pytest.raises(AlreadyExistsError):
        put_checkpoint(files.place, source, "step-1", settings=_STRIPED, progress=meet)
    (source / "shard1").write_bytes(os.urandom(2 * _MIB))
    (source / "shard2").write_bytes(os.urandom(2 * _MIB))
    remove(files, "", "step-1", force=True)
    _left_by_a_killed_put(job, source, after=1)
    other = PutSettings(policy=Policy(stripes=2, min_bytes_per_stripe=_MIB))
    assert put_checkpoint(files.place, source, "step-1", settings=other).kept_bytes == 0

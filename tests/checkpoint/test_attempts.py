"""Attempts, and the removal of what dead writers leave."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.checkpoint import attempts
from bootseer.checkpoint.attempts import LEASE_NAME, Attempt, collect, lease_bytes
from bootseer.checkpoint.head import STRIPES
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.publish import PutSettings, put_checkpoint
from bootseer.errors import AccessError, CorruptError, PermanentError, TransientError
from bootseer.places.folder import FolderPlace
from bootseer.places.place import Entry, Place
from checkpoint.striped_files import content_of, put_striped
from stepwise_place import StepwisePlace

_HOUR_S = 3600


@pytest.fixture
def place(job: Path) -> Iterator[Place]:
    opened = FolderPlace(job)
    yield opened
    opened.close()


def age(path: Path, seconds: float) -> None:
    then_ns = path.stat().st_mtime_ns - round(seconds * 1e9)
    os.utime(path, ns=(then_ns, then_ns))


def test_an_attempt_is_kept_as_long_as_its_writer_lives(place: Place, job: Path) -> None:
    with Attempt(place, "step-1") as attempt:
        place.write_bytes(f"{attempt.path}/file", b"x")
        age(job / attempt.path, 2 * _HOUR_S)
        assert collect(place, "") == 0
        attempt.publish()
    assert place.read_bytes("step-1/file", 9) == b"x"
    assert collect(place, "") == 0
    assert list((job / ".attempts").iterdir()) == []


def test_an_attempt_that_begins_while_attempts_are_listed_is_kept(place: Place, job: Path) -> None:
    with Attempt(place, "step-1") as attempt:

        class Listing(FolderPlace):
            """Lists the attempt's folder and not its lease, which is created after the listing has passed its name."""

            def list(self, path: str) -> Iterator[Entry]:
                return (entry for entry in super().list(path) if not entry.path.endswith(".lease"))

        with closing(Listing(job)) as other:
            assert collect(other, "") == 0
        attempt.publish()
    assert (job / "step-1").is_dir()


def test_a_new_file_whose_head_cannot_be_read_is_not_published_without_its_parts(place: Place, job: Path) -> None:
    with Attempt(place, "model") as attempt:
        put_striped(place, f"{attempt.path}/model", content_of(4 << 20), stripes=2)
        with (job / attempt.path / "model").open("r+b") as head:
            head.seek(20)
            head.write(b"damaged")
        with pytest.raises(CorruptError):
            attempt.publish_file("model")
    assert not (job / "model").exists()


def test_a_striped_file_whose_head_is_damaged_can_be_replaced_and_its_parts_stay(place: Place, job: Path) -> None:
    put_striped(place, "step-1", content_of(4 << 20), stripes=2)
    with (job / "step-1").open("r+b") as head:
        head.seek(20)
        head.write(b"damaged")
    parts = set((job / STRIPES).rglob("*"))
    for publish in (lambda attempt: attempt.publish_file("new", replace=True), lambda it: it.publish(replace=True)):
        with Attempt(place, "step-1") as attempt:
            place.write_bytes(f"{attempt.path}/new", b"x")
            publish(attempt)
    assert (job / "step-1/new").read_bytes() == b"x"
    assert parts <= set((job / STRIPES).rglob("*"))


def test_users_of_a_job_share_the_folder_of_attempts(place: Place, job: Path) -> None:
    job.chmod(0o2775)
    with Attempt(place, "step-1"):
        assert (job / ".attempts").stat().st_mode & 0o7777 == 0o2775


def test_a_lease_is_renewed(place: Place, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "LEASE_S", 0.5)
    with Attempt(place, "step-1") as attempt:
        lease = job / f"{attempt.path}.lease"
        first = lease.stat().st_mtime_ns
        until_s = time.monotonic() + 120
        while lease.stat().st_mtime_ns == first:
            assert time.monotonic() < until_s, "it was not renewed"


def test_a_writer_that_was_taken_for_dead_cannot_publish(place: Place, job: Path) -> None:
    with Attempt(place, "step-1") as attempt:
        place.write_bytes(f"{attempt.path}/file", b"x")
        age(job / f"{attempt.path}.lease", _HOUR_S)
        assert collect(place, "") == 1
        with pytest.raises(PermanentError, match="its lease went stale"):
            attempt.publish()
    assert sorted(path.name for path in job.iterdir()) == [".attempts"]


def test_a_checkpoint_is_restored_if_its_replacement_was_never_published(place: Place, job: Path) -> None:
    place.make_folder("step-1")
    place.write_bytes("step-1/file", b"old")
    with Attempt(place, "step-1") as attempt:
        place.rename("step-1", f"{attempt.path}.old")
        lease = (job / f"{attempt.path}.lease").read_bytes()
    path = job / f"{attempt.path}.lease"
    path.write_bytes(lease)
    assert collect(place, "") == 0
    assert not (job / "step-1").exists()
    age(path, _HOUR_S)
    collect(place, "")
    assert place.read_bytes("step-1/file", 9) == b"old"
    assert list((job / ".attempts").iterdir()) == []


def test_the_version_that_a_writer_of_this_machine_had_hidden_is_restored_as_soon_as_that_has_ended(
    place: Place, job: Path
) -> None:
    place.make_folder("step-1")
    place.write_bytes("step-1/file", b"old")
    with Attempt(place, "step-1") as attempt:
        write_attempt(place, attempt, b"new")
        place.rename("step-1", f"{attempt.path}.old")
        lease = json.loads((job / f"{attempt.path}.lease").read_bytes())
        # An earlier process with this pid.
        machine, pid, started = lease["process"].rsplit(" ", 2)
        lease["process"] = f"{machine} {pid} {int(started) - 1}"
        place.write_bytes(f"{attempt.path}.lease", json.dumps(lease).encode())
        assert collect(place, "") == 1
        assert place.read_bytes("step-1/file", 9) == b"old"
        assert list((job / ".attempts").iterdir()) == []


def write_attempt(place: Place, attempt: Attempt, data: bytes) -> None:
    place.write_bytes(f"{attempt.path}/file", data)


def test_of_two_that_replace_the_same_name_the_last_one_wins_and_nothing_is_left(place: Place, job: Path) -> None:
    place.make_folder("step-1")
    place.write_bytes("step-1/file", b"old")
    stepwise = StepwisePlace(place)
    with Attempt(stepwise, "step-1") as one, Attempt(place, "step-1") as two:  # type: ignore[arg-type]
        write_attempt(place, one, b"one")
        write_attempt(place, two, b"two")
        shows: list[str] = []

        def interfere(step: str, path: str) -> None:
            shows.extend([path] if step == "rename" and path == one.path else [])
            if len(shows) == 2:  # the old one was moved away, and the new one is not published yet
                stepwise.before = lambda step, path: None
                two.publish(replace=True)
                assert place.read_bytes("step-1/file", 9) == b"two"

        stepwise.before = interfere
        one.publish(replace=True)
        assert len(shows) == 2
    assert place.read_bytes("step-1/file", 9) == b"one"
    assert list((job / ".attempts").iterdir()) == []


def test_a_checkpoint_that_another_writer_has_just_removed_can_be_replaced(place: Place, job: Path) -> None:
    place.make_folder("step-1/below", parents=True)
    stepwise = StepwisePlace(place)

    def interfere(step: str, path: str) -> None:
        if (step, path) == ("rename", "step-1"):
            place.delete("step-1", recursive=True)

    with Attempt(stepwise, "step-1") as attempt:  # type: ignore[arg-type]
        write_attempt(place, attempt, b"new")
        stepwise.before = interfere
        attempt.publish(replace=True)
    assert place.read_bytes("step-1/file", 9) == b"new"
    assert list((job / ".attempts").iterdir()) == []


def test_a_checkpoint_that_could_not_be_restored_at_once_is_restored_by_collecting(place: Place, job: Path) -> None:
    place.make_folder("step-1")
    place.write_bytes("step-1/file", b"old")
    stepwise = StepwisePlace(place)

    def fail(step: str, path: str) -> None:
        if step == "rename" and not (job / "step-1").exists():
            raise TransientError("no NameNode answers")

    stepwise.before = fail
    hidden = pytest.raises(TransientError, match=r"no NameNode answers; the previous version is hidden.*ckpt clean")
    with hidden, Attempt(stepwise, "step-1") as attempt:  # type: ignore[arg-type]
        write_attempt(place, attempt, b"new")
        attempt.publish(replace=True)
    assert not (job / "step-1").exists()
    age(job / f"{attempt.path}.lease", _HOUR_S)
    # The collector may have opened the storage at another folder.
    above = FolderPlace(job.parent)
    collect(above, "job")
    above.close()
    assert place.read_bytes("step-1/file", 9) == b"old"
    assert list((job / ".attempts").iterdir()) == []


def test_a_replaced_checkpoint_is_never_restored_incompletely(place: Place, job: Path) -> None:
    place.make_folder("step-1")
    place.write_bytes("step-1/file", b"old")
    stepwise = StepwisePlace(place)
    deleted: list[str] = []
    stepwise.before = lambda step, path: deleted.extend([path] if step == "delete" else [])
    with Attempt(stepwise, "step-1") as attempt:  # type: ignore[arg-type]
        write_attempt(place, attempt, b"new")
        attempt.publish(replace=True)
        assert [path.endswith(".gone") for path in deleted] == [True]
    # The same if the writer died before it deleted the old one.
    place.make_folder(".attempts/dead.old")
    place.write_bytes(".attempts/dead.lease", lease_bytes("step-1"))
    age(job / ".attempts/dead.lease", _HOUR_S)
    deleted.clear()
    collect(stepwise, "")  # type: ignore[arg-type]
    assert [path.rpartition(".")[2] for path in deleted] == ["gone", "lease"]
    assert list((job / ".attempts").iterdir()) == []


def test_a_writer_that_continues_after_it_was_taken_for_dead_cannot_publish_the_rest(place: Place, job: Path) -> None:
    with Attempt(place, "step-1") as attempt:
        write_attempt(place, attempt, b"first half")
        age(job / f"{attempt.path}.lease", _HOUR_S)
        assert collect(place, "") == 1
        # Beginning a part creates its folder again.
        place.make_folder(attempt.path)
        write_attempt(place, attempt, b"second half")
        with pytest.raises(PermanentError, match="its lease went stale"):
            attempt.publish()
    assert not (job / "step-1").exists()


def test_collect_skips_what_belongs_to_other_users(place: Place, job: Path) -> None:
    for name in ("0123.gone", "4567.gone"):
        place.make_folder(f".attempts/{name}", parents=True)
    stepwise = StepwisePlace(place)

    def refuse(step: str, path: str) -> None:
        if step == "delete" and "0123" in path:
            raise AccessError("not yours")

    stepwise.before = refuse
    assert collect(stepwise, "") == 1  # type: ignore[arg-type]
    assert [path.name for path in (job / ".attempts").iterdir()] == ["0123.gone"]


def test_parts_are_kept_while_a_head_cannot_be_read(place: Place, job: Path) -> None:
    head = put_striped(place, "kept", content_of(2 << 20), stripes=2)
    age(job / STRIPES / head.id, 9 * 24 * _HOUR_S)
    stepwise = StepwisePlace(place)

    def refuse(*args: object) -> bytes:
        raise AccessError("not yours")

    stepwise.read_first = refuse  # type: ignore[attr-defined]
    assert collect(stepwise, "") == 0  # type: ignore[arg-type]
    assert (job / STRIPES / head.id).exists()
    damaged = bytearray((job / "kept").read_bytes())
    damaged[3] ^= 1
    (job / "kept").write_bytes(damaged)
    assert collect(place, "") == 0
    assert (job / STRIPES / head.id).exists()


def test_a_lease_whose_target_is_outside_moves_nothing_there(place: Place, job: Path) -> None:
    place.make_folder(".attempts/0.old", parents=True)
    place.write_bytes(".attempts/0.lease", b'{"target": "../../evil"}')
    age(job / ".attempts/0.lease", _HOUR_S)
    collect(place, "")
    assert not (job.parent / "evil").exists()
    place.rename("evil", ".attempts/0.old")
    for text in (b"", b"[]", b'{"target": 5}', b'{"target": "a/.."}', b'{"target": ".stripes"}'):
        place.write_bytes(".attempts/0.lease", text)
        age(job / ".attempts/0.lease", _HOUR_S)
        collect(place, "")
        assert (job / ".attempts" / "0.old").is_dir()
        assert sorted(path.name for path in job.iterdir()) == [".attempts"]


def test_interrupted_deletions_are_completed(place: Place, job: Path) -> None:
    place.make_folder(".attempts/1.gone/below", parents=True)
    place.make_folder(".attempts-2.gone/below", parents=True)
    assert collect(place, "") == 2
    assert list((job / ".attempts").iterdir()) == []


def test_old_temporary_files_are_deleted(place: Place, job: Path) -> None:
    for name in (".attempts-old", ".attempts-new"):
        place.write_bytes(name, b"x")
    place.make_folder(".attempts-folder/.stripes", parents=True)
    place.make_folder(".attempts-with-a-file")
    place.write_bytes(".attempts-with-a-file/visible", b"x")
    for name in (".attempts-old", ".attempts-folder", ".attempts-with-a-file"):
        age(job / name, _HOUR_S)
    assert collect(place, "") == 2
    assert sorted(path.name for path in job.iterdir()) == [".attempts-new", ".attempts-with-a-file"]


def test_parts_without_a_head_are_deleted_after_a_day_or_when_their_lease_is_stale(place: Place, job: Path) -> None:
    head = put_striped(place, "kept", content_of(2 << 20), stripes=2)
    folders = {name: job / STRIPES / (name * 32) for name in "abcd"}
    for folder in folders.values():
        folder.mkdir()
    (folders["b"] / LEASE_NAME).write_bytes(b"")
    (folders["c"] / LEASE_NAME).write_bytes(b"")
    age(folders["c"] / LEASE_NAME, _HOUR_S)
    for name in "bcd":
        age(folders[name], _HOUR_S)
    age(job / STRIPES / head.id, 9 * 24 * _HOUR_S)
    assert collect(place, "") == 1
    assert not folders["c"].exists()
    age(folders["d"], 24 * _HOUR_S)
    assert collect(place, "") == 1
    assert sorted(path.name for path in (job / STRIPES).iterdir()) == sorted(["a" * 32, "b" * 32, head.id])


def test_leftovers_of_writers_in_a_checkpoints_folder_are_removed_with_its_jobs(place: Place, job: Path) -> None:
    """For example of PyTorch, which was killed."""
    kept = put_striped(place, "team/step-1/model/kept", content_of(2 << 20), stripes=2)
    parts = job / "team/step-1/model" / STRIPES
    for folder in (parts / ("a" * 32), parts / kept.id, job / "team/.attempts/1"):
        folder.mkdir(parents=True, exist_ok=True)
        age(folder, 25 * _HOUR_S)
    (job / "team/step-1/.attempts-old").write_bytes(b"x")
    age(job / "team/step-1/.attempts-old", _HOUR_S)
    stepwise = StepwisePlace(place)

    def refuse(step: str, path: str) -> None:
        if (step, path) == ("list", "private"):
            raise AccessError("another user's")

    stepwise.before = refuse
    place.make_folder("private")
    assert collect(stepwise, "") == 0  # type: ignore[arg-type]
    assert collect(stepwise, "", below=True) == 3  # type: ignore[arg-type]
    assert sorted(path.name for path in job.rglob("*") if path.is_dir()) == sorted(
        ["private", "team", ".attempts", "step-1", "model", STRIPES, kept.id]
    )


@pytest.mark.parametrize("name", ["y" * 300, "a\0b", "\udcff" * 300])
def test_a_lease_with_an_impossible_name_does_not_stop_a_collector(place: Place, job: Path, name: str) -> None:
    place.make_folder(".attempts/0.old", parents=True)
    place.write_bytes(".attempts/0.lease", json.dumps({"target": name}).encode())
    age(job / ".attempts/0.lease", _HOUR_S)
    place.make_folder(".attempts/1.gone")
    assert collect(place, "") == 1
    assert (job / ".attempts/0.old").is_dir()


def test_putting_works_without_a_routers_free_space(place: FolderPlace, tmp_path: Path) -> None:
    """A router returns the sum over all clusters, and an error while any of them is down."""

    def ask() -> tuple[int, int]:
        raise TransientError("no NameNode of another cluster is active")

    place.uri, place.space = "hdfs://router/job", ask  # type: ignore[method-assign]
    (tmp_path / "model").write_bytes(b"x")
    put = put_checkpoint(place, tmp_path / "model", "step-1", settings=PutSettings(policy=Policy(stripes=1)))
    assert put.num_files == 1

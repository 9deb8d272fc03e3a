"""While a file is being published, which takes as long as the place does not answer, other operations continue."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import BootseerError, PermanentError
from bootseer.places.folder import FolderPlace
from checkpoint.mount.conftest import Mounts
from checkpoint.mounted_place import DEADLINE_S, MountedPlace, number_of
from stepwise_place import StepwisePlace
from waiting import until

pytestmark = pytest.mark.fuse
PATIENCE_S = 30.0
"""Limit for calls that must not wait."""


class Held:
    """A mounted place that blocks the publishing of one file until `go_on`."""

    def __init__(self, mounts: Mounts, root: Path, path: str) -> None:
        self._path = path
        self._reached, self._may_go_on = threading.Event(), threading.Event()
        self.error: BootseerError | None = None
        """The error with which the publishing ends."""
        self._threads = ThreadPoolExecutor(2)
        place = StepwisePlace(FolderPlace(root))
        self.mounted: MountedPlace = mounts(place=place)
        self._place = place

    def begin(self, publish: Callable[[], object]) -> Any:
        """Run a function that publishes the file, and return when the place blocks it."""
        self._place.before = self._before
        running = self._threads.submit(publish)
        assert self._reached.wait(DEADLINE_S)
        return running

    def now(self, call: Callable[[], Any]) -> Any:
        """The result of a call that must not wait for the publishing."""
        return self._threads.submit(call).result(PATIENCE_S)

    def go_on(self) -> None:
        self._may_go_on.set()

    def end(self) -> None:
        self.go_on()
        self._threads.shutdown()

    def _before(self, step: str, path: str) -> None:
        if step == "write_bytes" and path == self._path:
            self._reached.set()
            self._may_go_on.wait(DEADLINE_S)
            if self.error is not None:
                raise self.error


class FairTurn:
    """A fair `RLock`: the longest waiting thread gets it."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._waiting: list[int] = []
        self._owner: int | None = None
        self._depth = 0

    def acquire(self, timeout: float) -> bool:
        me = threading.get_ident()
        with self._change:
            if self._owner != me:
                self._waiting.append(me)
                is_free = self._change.wait_for(lambda: self._owner is None and self._waiting[0] == me, DEADLINE_S)
                self._waiting.remove(me)
                if not is_free:
                    self._change.notify_all()
                    return False
                self._owner = me
            self._depth += 1
            return True

    def release(self) -> None:
        with self._change:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._change.notify_all()

    def has_waiter(self) -> bool:
        return bool(self._waiting)


@pytest.fixture
def held(mounts: Mounts, tmp_path: Path) -> Iterator[Held]:
    made = Held(mounts, tmp_path / "place", "f")
    yield made
    made.end()


def test_while_a_close_publishes_everything_else_continues(held: Held) -> None:
    root = held.mounted.target
    (root / "f").write_text("old")
    (root / "other").write_text("other")
    writer = os.open(root / "f", os.O_RDWR)
    os.write(writer, b"new")
    closing = held.begin(lambda: os.close(writer))
    assert held.now((root / "f").read_text) == "new"
    assert held.now(lambda: (root / "f").stat().st_size) == 3
    another = held.now(lambda: os.open(root / "f", os.O_RDWR | os.O_APPEND))
    assert held.now(lambda: sorted(path.name for path in root.iterdir())) == ["f", "other"]
    assert held.now((root / "other").read_text) == "other"
    held.now(lambda: (root / "another").write_text("another"))
    assert (held.mounted.root / "another").read_text() == "another"
    assert not closing.done() and (held.mounted.root / "f").read_text() == "old"
    held.go_on()
    closing.result(DEADLINE_S)
    assert (held.mounted.root / "f").read_text() == "new"
    os.close(another)


def test_while_a_rename_publishes_the_old_target_is_read(held: Held) -> None:
    root = held.mounted.target
    (root / "g").write_text("old")
    reader = os.open(root / "g", os.O_RDONLY)
    writer = os.open(root / "f", os.O_RDWR | os.O_CREAT)
    os.write(writer, b"new")
    renaming = held.begin(lambda: (root / "f").rename(root / "g"))
    assert held.now(lambda: os.pread(writer, 3, 0)) == b"new"
    assert held.now((root / "g").read_text) == "old"
    assert held.now(lambda: (root / "g").stat().st_size) == 3
    assert not renaming.done()
    held.go_on()
    renaming.result(DEADLINE_S)
    assert (root / "g").read_text() == (held.mounted.root / "g").read_text() == "new"
    os.close(writer)
    os.close(reader)
    assert (held.mounted.root / "g").read_text() == "new"


def test_attributes_that_are_set_while_a_close_publishes_are_kept(held: Held) -> None:
    root = held.mounted.target
    writer = os.open(root / "f", os.O_RDWR | os.O_CREAT, 0o644)
    os.write(writer, b"new")
    closing = held.begin(lambda: os.close(writer))
    held.now(lambda: (root / "f").chmod(0o600))
    held.now(lambda: os.utime(root / "f", (0, 1_000_000_000)))
    assert not closing.done()
    held.go_on()
    closing.result(DEADLINE_S)
    status = (held.mounted.root / "f").stat()
    assert (status.st_mode & 0o777, status.st_mtime) == (0o600, 1_000_000_000)
    status = (root / "f").stat()
    assert (status.st_mode & 0o777, status.st_mtime) == (0o600, 1_000_000_000)


def test_a_file_that_is_removed_while_it_is_published_is_gone(held: Held) -> None:
    root = held.mounted.target
    writer = os.open(root / "f", os.O_RDWR | os.O_CREAT)
    os.write(writer, b"new")
    closing = held.begin(lambda: os.close(writer))
    removing = threading.Thread(target=(root / "f").unlink)
    removing.start()
    assert not closing.done()
    held.go_on()
    closing.result(DEADLINE_S)
    removing.join(DEADLINE_S)
    assert not list(root.iterdir()) and not list(held.mounted.root.iterdir())


def test_a_file_that_is_synced_is_read_and_published_again(held: Held) -> None:
    root = held.mounted.target
    (root / "f").write_text("old")
    writer = os.open(root / "f", os.O_RDWR)
    os.write(writer, b"new")
    syncing = held.begin(lambda: number_of(lambda: os.fsync(writer)))
    assert held.now((root / "f").read_text) == "new"
    held.go_on()
    assert syncing.result(DEADLINE_S) is None
    os.pwrite(writer, b"newer", 0)
    os.close(writer)
    assert (held.mounted.root / "f").read_text() == (root / "f").read_text() == "newer"


def test_attributes_that_are_reset_after_a_sync_apply_to_the_published_file(one: MountedPlace) -> None:
    with (one.target / "f").open("wb") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(b"new")
        file.flush()
        os.fsync(file.fileno())
        for mode in (0o600, 0o644):
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
            assert (one.root / "f").stat().st_mode & 0o777 == mode
    assert (one.root / "f").stat().st_mode & 0o777 == 0o644
    assert (one.target / "f").stat().st_mode & 0o777 == 0o644


def test_a_close_that_cannot_publish_keeps_the_writes_of_others(held: Held) -> None:
    root = held.mounted.target
    (root / "f").write_text("old")
    until(lambda: held.mounted.shown.facts()["open_files"] == 0, "no thread holds the turn that is replaced below")
    writer = os.open(root / "f", os.O_RDWR)
    turn = FairTurn()
    node = held.mounted.shown._nodes.at("f")
    assert node is not None and node.content is not None
    node.content._turn = turn  # type: ignore[assignment]
    os.write(writer, b"new")
    closing = held.begin(lambda: number_of(lambda: os.close(writer)))
    other = held.now(lambda: os.open(root / "f", os.O_RDWR))
    writing = threading.Thread(target=os.pwrite, args=(other, b"NEW", 0))
    writing.start()
    until(turn.has_waiter, "it waits for its turn")
    held.error = PermanentError("the place refuses it")
    held.go_on()
    assert closing.result(DEADLINE_S) is not None, "close reports the error"
    writing.join(DEADLINE_S)
    held.error = None
    os.close(other)
    assert (held.mounted.root / "f").read_text() == (root / "f").read_text() == "NEW"


def test_of_two_concurrent_closes_both_report_a_failed_publication(held: Held) -> None:
    """Both are the last ones: each has seen that the other has ended."""
    root = held.mounted.target
    (root / "f").write_text("old")
    until(lambda: held.mounted.shown.facts()["open_files"] == 0, "no thread holds the turn that is replaced below")
    writer = os.open(root / "f", os.O_RDWR)
    os.write(writer, b"new")
    held.error = PermanentError("the place refuses it")
    node = held.mounted.shown._nodes.at("f")
    assert node is not None and node.content is not None
    turn = FairTurn()
    node.content._turn = turn  # type: ignore[assignment]
    told: list[BootseerError] = []

    def publish() -> None:
        try:
            held.mounted.shown._open._publish_if_last(node.content, discard=True)
        except BootseerError as error:
            told.append(error)

    closing = held.begin(lambda: number_of(lambda: os.close(writer)))
    other = threading.Thread(target=publish)
    other.start()
    until(turn.has_waiter, "it waits for its turn")
    held.go_on()
    assert closing.result(DEADLINE_S) is not None
    other.join(DEADLINE_S)
    assert told == [held.error]
    assert (root / "f").read_text() == "old"


def test_a_lost_file_that_is_still_read_is_listed_by_its_name(held: Held) -> None:
    root = held.mounted.target
    writer = os.open(root / "f", os.O_WRONLY | os.O_CREAT)
    reader = os.open(root / "f", os.O_RDONLY)
    os.write(writer, b"new")
    held.error = PermanentError("the place refuses it")
    held.go_on()
    assert held.begin(lambda: number_of(lambda: os.close(writer))).result(DEADLINE_S) == errno.EIO
    until(lambda: held.mounted.shown.facts()["open_files"] == 1, "the writer's end is told")
    assert held.mounted.shown.lost() == ["f"]
    assert number_of(lambda: os.pread(reader, 9, 0)) == errno.ESTALE
    os.close(reader)


def test_a_file_that_is_moved_elsewhere_right_after_its_publication_was_closed_well(
    one: MountedPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = one.place.write_bytes

    def publish_and_move(path: str, data: bytes, *, mode: int) -> object:
        done = publish(path, data, mode=mode)
        (one.root / path).rename(one.root / "moved")
        return done

    with (one.target / "f").open("wb", buffering=0) as file:
        file.write(b"new")
        os.utime(file.fileno(), (0, 1_000_000_000))
        monkeypatch.setattr(one.place, "write_bytes", publish_and_move)
    assert (one.root / "moved").read_bytes() == (one.target / "moved").read_bytes() == b"new"
    until(lambda: not (one.target / "f").exists(), "it is not known any more")
    until(lambda: one.shown.facts()["open_files"] == 0, "the writer's end is told")
    assert (one.shown.lost(), one.said) == ([], [])


def test_a_truncate_that_reports_an_error_has_changed_nothing(mounts: Mounts, tmp_path: Path) -> None:
    place = StepwisePlace(FolderPlace(tmp_path / "place"))
    one = mounts(place=place)
    (one.target / "f").write_bytes(b"old")
    until(lambda: one.shown.facts()["open_files"] == 0, "closed")
    refused: list[str] = []

    def refuse_once(step: str, path: str) -> None:
        if (step, path) == ("write_bytes", "f") and not refused:
            refused.append(path)
            raise PermanentError("not now")

    place.before = refuse_once
    assert number_of(lambda: os.truncate(one.target / "f", 9)) == errno.EIO
    assert (one.root / "f").read_bytes() == (one.target / "f").read_bytes() == b"old"

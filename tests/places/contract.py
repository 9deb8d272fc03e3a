"""What every place must do. The subclasses in the test modules provide the place (fixture `place`)."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    IsFolderError,
    NotEmptyError,
    NotFolderError,
    NotFoundError,
    PermanentError,
)
from bootseer.io.pooled_reads import ReadOutcome
from bootseer.places.place import OpenFile, Place

_WAIT_S = 120.0


def read(file: OpenFile, offset: int, length: int) -> bytes:
    """Read from an open file; raises the outcome's error."""
    data = bytearray(length)
    outcomes: list[ReadOutcome] = []
    ended = threading.Event()

    def done(outcome: ReadOutcome) -> None:
        outcomes.append(outcome)
        ended.set()

    file.read_into(offset, memoryview(data), done)
    assert ended.wait(_WAIT_S)
    if outcomes[0].error is not None:
        raise outcomes[0].error
    return bytes(data)


@contextlib.contextmanager
def opened(place: Place, path: str) -> Iterator[OpenFile]:
    file = place.open(path)
    try:
        yield file
    finally:
        file.close()


def names(place: Place, path: str) -> set[str]:
    return {entry.path for entry in place.list(path)}


class PlaceContract:
    """Inherited by the tests of each place."""

    keeps_modes = True
    """Whether modes and times can be set."""
    lists_removed_folders = False
    """Whether removed folders are listed for a while."""

    def test_a_small_file_is_read_as_it_was_written_and_replaced_as_a_whole(self, place: Place) -> None:
        place.make_folder("a")
        place.write_bytes("a/file", b"first", mode=0o640)
        assert place.read_bytes("a/file", 100) == b"first"
        entry = place.stat("a/file")
        assert (entry.path, entry.is_folder, entry.size_bytes) == ("a/file", False, 5)
        assert entry.mode == (0o640 if self.keeps_modes else 0o644)
        assert place.write_bytes("a/file", b"the second") == place.stat("a/file")
        assert place.read_bytes("a/file", 100) == b"the second"
        assert place.read_first("a/file", 3) == b"the"
        assert place.read_first("a/file", 300) == b"the second"
        assert place.stat("a/file").version != entry.version
        assert names(place, "a") == {"a/file"}

    def test_an_empty_file_is_a_file(self, place: Place) -> None:
        place.write_bytes("empty", b"")
        assert place.read_bytes("empty", 0) == b""
        assert place.read_first("empty", 64) == b""
        assert place.stat("empty").size_bytes == 0

    def test_a_file_longer_than_the_limit_is_refused(self, place: Place) -> None:
        place.write_bytes("file", b"12345")
        with pytest.raises(PermanentError, match="more than the 4"):
            place.read_bytes("file", 4)

    def test_of_many_creators_one_wins(self, place: Place) -> None:
        with ThreadPoolExecutor(8) as threads:
            made = list(threads.map(lambda number: place.create_bytes("lock", b"%d" % number), range(8)))
        assert made.count(True) == 1
        assert place.read_bytes("lock", 10) == b"%d" % made.index(True)
        assert names(place, "") == {"lock"}

    def test_nothing_is_written_into_a_folder_that_does_not_exist(self, place: Place) -> None:
        with pytest.raises(NotFoundError):
            place.write_bytes("gone/file", b"")
        with pytest.raises(NotFoundError):
            place.create_bytes("gone/file", b"")
        with pytest.raises(NotFoundError):
            place.stat("gone")

    def test_parts_are_read_back_whole_and_in_ranges(self, place: Place) -> None:
        data = os.urandom(3 << 20)
        paths = [f"x/.stripes/1/{number}" for number in range(3)]
        writers = place.begin_parts(paths, part_bytes=4 << 20, mode=0o600)
        for number, writer in enumerate(writers):
            assert writer.path.endswith(paths[number])
            writer.write(data[: 1 << 20])
            writer.write(data[1 << 20 :])
        lie = [writer.close() for writer in writers]
        for path, nodes in zip(paths, lie, strict=True):
            assert place.stat(path).mode == (0o600 if self.keeps_modes else 0o644)
            with opened(place, path) as file:
                assert file.size_bytes == len(data)
                assert set(file.nodes(0)) == set(nodes)
                assert read(file, 0, len(data)) == data
                assert read(file, 1_000_001, 77) == data[1_000_001:1_000_078]

    def test_a_part_that_is_dropped_is_gone(self, place: Place) -> None:
        kept, dropped = place.begin_parts(["x/kept", "x/dropped"], part_bytes=1 << 20)
        kept.write(b"abc")
        dropped.write(b"abc")
        dropped.abort()
        dropped.abort()
        kept.close()
        kept.abort()
        assert names(place, "x") == {"x/kept"}

    def test_an_open_file_stays_the_version_that_was_opened_or_fails(self, place: Place) -> None:
        place.write_bytes("file", b"old content")
        with opened(place, "file") as file:
            place.write_bytes("file", b"new content")
            with contextlib.suppress(BootseerError):
                assert read(file, 0, 11) == b"old content"

    def test_rename_replaces_a_file_and_moves_a_folder_with_all_that_it_has(self, place: Place) -> None:
        place.write_bytes("one", b"1")
        place.write_bytes("two", b"2")
        place.rename("one", "two")
        assert place.read_bytes("two", 9) == b"1"
        place.make_folder("a/b", parents=True)
        place.write_bytes("a/b/file", b"x")
        place.make_folder("c")
        place.make_folder("d")
        place.rename("a", "c/a")
        assert place.read_bytes("c/a/b/file", 9) == b"x"
        place.rename("c/a", "d")
        assert names(place, "d") == {"d/b"}
        assert names(place, "") == {"two", "c", "d"}

    def test_rename_refuses_what_it_would_destroy(self, place: Place) -> None:
        place.write_bytes("file", b"1")
        place.make_folder("full")
        place.make_folder("empty")
        place.write_bytes("full/file", b"2")
        with pytest.raises(NotEmptyError):
            place.rename("empty", "full")
        with pytest.raises(IsFolderError):
            place.rename("file", "empty")
        with pytest.raises(NotFolderError):
            place.rename("empty", "file")
        with pytest.raises(NotFoundError):
            place.rename("nothing", "new")
        with pytest.raises(NotFoundError):
            place.rename("file", "nowhere/new")
        with pytest.raises(PermanentError):
            place.rename("full", "full/below")

    def test_rename_without_replacing_gives_a_name_to_one(self, place: Place) -> None:
        for number in range(6):
            place.write_bytes(f"file{number}", b"%d" % number)

        def take(number: int) -> bool:
            try:
                place.rename(f"file{number}", "name", replace=False)
            except AlreadyExistsError:
                return False
            return True

        with ThreadPoolExecutor(6) as threads:
            won = list(threads.map(take, range(6)))
        assert won.count(True) == 1
        assert place.read_bytes("name", 9) == b"%d" % won.index(True)
        assert len(names(place, "")) == 6
        place.make_folder("folder")
        for taken in ("name", "folder"):
            with pytest.raises(AlreadyExistsError):
                place.rename("folder" if taken == "name" else "name", taken, replace=False)

    def test_delete(self, place: Place) -> None:
        place.make_folder("a/b", parents=True)
        place.write_bytes("a/b/file", b"x")
        with pytest.raises(NotEmptyError):
            place.delete("a")
        place.delete("a", recursive=True)
        with pytest.raises(NotFoundError):
            place.delete("a")
        place.write_bytes("file", b"x")
        place.delete("file")
        place.make_folder("empty")
        place.delete("empty")
        for path in names(place, "") if self.lists_removed_folders else ():
            with pytest.raises(NotFoundError):
                place.stat(path)
        assert self.lists_removed_folders or names(place, "") == set()
        with pytest.raises(PermanentError):
            place.delete("", recursive=True)

    def test_folders(self, place: Place) -> None:
        place.make_folder("a", mode=0o700)
        assert (place.stat("a").is_folder, place.stat("a").mode) == (True, 0o700 if self.keeps_modes else 0o755)
        with pytest.raises(AlreadyExistsError):
            place.make_folder("a")
        place.make_folder("a", parents=True)
        with pytest.raises(NotFoundError):
            place.make_folder("b/c")
        place.make_folder("b/c", parents=True)
        place.write_bytes("file", b"")
        with pytest.raises(AlreadyExistsError):
            place.make_folder("file", parents=True)
        with pytest.raises(NotFolderError):
            place.make_folder("file/below")
        assert place.stat("").is_folder

    def test_files_and_folders_are_not_taken_for_each_other(self, place: Place) -> None:
        place.make_folder("folder")
        place.write_bytes("file", b"x")
        with pytest.raises((IsFolderError, NotFoundError)):
            place.open("folder")
        with pytest.raises((IsFolderError, NotFoundError)):
            place.read_bytes("folder", 10)
        with pytest.raises(NotFolderError):
            list(place.list("file"))
        with pytest.raises(NotFoundError):
            place.stat("file/below")
        with pytest.raises(NotFoundError):
            list(place.list("nothing"))

    def test_modes_and_times(self, place: Place) -> None:
        place.write_bytes("file", b"x")
        place.set_mode("file", 0o600)
        place.set_mtime("file", 1_700_000_000_123_000_000)
        entry = place.stat("file")
        if self.keeps_modes:
            assert (entry.mode, entry.mtime_ns) == (0o600, 1_700_000_000_123_000_000)
        place.set_owner("file", entry.owner, None)
        with pytest.raises(NotFoundError):
            place.set_mode("nothing", 0o600)

    def test_the_clock_is_that_of_new_files(self, place: Place) -> None:
        slack_s = 10.0  # on a busy machine, the time is returned late
        place.make_folder("a")
        before = place.now_s("a")
        place.write_bytes("file", b"")
        assert before - slack_s <= place.stat("file").mtime_ns / 1e9 <= place.now_s() + slack_s
        assert names(place, "") == {"a", "file"}
        assert names(place, "a") == set()

    def test_asking_for_the_time_in_a_folder_does_not_make_it(self, place: Place) -> None:
        with pytest.raises(NotFoundError):
            place.now_s("nothing")
        assert names(place, "") == set()

    @pytest.mark.parametrize("path", ["..", "../other", "a/../..", "/etc", "a//b", ".", "a/", "nul\0"])
    def test_a_path_cannot_leave_the_place(self, place: Place, path: str) -> None:
        place.make_folder("a")
        for ask in (place.stat, place.open, place.delete, place.make_folder, lambda one: list(place.list(one))):
            with pytest.raises(NotFoundError):
                ask(path)
        with pytest.raises(NotFoundError):
            place.write_bytes(path, b"")
        with pytest.raises(NotFoundError):
            place.rename("a", path)

    def test_space_and_statistics_are_reported(self, place: Place) -> None:
        total, free = place.space()
        assert total >= free > 0
        place.write_bytes("file", b"x" * 1000)
        with opened(place, "file") as file:
            read(file, 0, 1000)
        nodes = place.facts()["nodes"]
        assert isinstance(nodes, dict)
        assert sum(node["bytes"] for node in nodes.values()) >= 1000

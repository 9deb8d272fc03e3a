"""Disks without room: a small tmpfs under the place, and one under the spool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.cache.cache import Cache
from bootseer.checkpoint.reading.reading import Reading
from bootseer.errors import NoSpaceError
from bootseer.places.folder import FolderPlace
from checkpoint.striped_files import content_of, in_memory, put_striped
from small_disks import small_disk

from .conftest import MIB, SMALL, Desk

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a tmpfs")]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=6m") as folder:
        yield folder


def test_a_file_that_does_not_fit_leaves_what_was_there_and_its_room(disk: Path, tmp_path: Path) -> None:
    desk = Desk(disk / "root", tmp_path / "spool")
    with contextlib.closing(desk.writing):
        desk.writing.write_file("job/file", *in_memory(b"o" * 2 * MIB), policy=SMALL)
        with pytest.raises(NoSpaceError):
            desk.writing.write_file("job/file", *in_memory(b"n" * 9 * MIB), policy=SMALL)
        writer = desk.writing.open("job/file", policy=SMALL)
        with contextlib.suppress(NoSpaceError):  # if the sending has failed before all of it is spooled
            writer.write_at(0, b"n" * 9 * MIB)
        with pytest.raises(NoSpaceError):
            writer.commit()
        assert desk.read("job/file") == b"o" * 2 * MIB
        assert desk.leftovers() == []
        desk.writing.write_file("job/file", *in_memory(b"n" * 3 * MIB), policy=SMALL)
        assert desk.read("job/file") == b"n" * 3 * MIB


def test_a_spool_without_room_refuses_a_write_and_keeps_the_others(disk: Path, tmp_path: Path) -> None:
    desk = Desk(tmp_path / "root", disk)
    with contextlib.closing(desk.writing):
        writer = desk.writing.open("job/file", policy=SMALL)
        writer.write_at(3 * MIB, b"x" * MIB)  # after a gap, so it must be kept
        with pytest.raises(NoSpaceError, match="spool"):
            writer.write_at(4 * MIB, b"x" * 20 * MIB)
        writer.truncate(6 * MIB)
        writer.commit()
        assert desk.read("job/file") == bytes(3 * MIB) + b"x" * MIB + bytes(2 * MIB)
        assert desk.writing.facts()["spool_bytes"] == 0


def test_a_file_written_front_to_back_needs_less_room_than_its_size(disk: Path, tmp_path: Path) -> None:
    desk = Desk(tmp_path / "root", disk)
    data = os.urandom(30 * MIB)
    with contextlib.closing(desk.writing):
        writer = desk.writing.open("job/file", policy=SMALL)
        for at in range(0, len(data), MIB // 2):
            writer.write_at(at, data[at : at + MIB // 2])
        writer.commit()
        assert desk.read("job/file") == data
        assert desk.writing.facts()["spool_bytes"] == 0


def test_chunks_that_were_read_leave_space_for_files_that_are_written(tmp_path: Path) -> None:
    """The spool of a mount is on the cache's disk. The reserve is a tenth of a small disk, here 20 MiB."""
    (tmp_path / "root").mkdir()
    place = FolderPlace(tmp_path / "root")
    put_striped(place, "file", content := content_of(30 * MIB))
    with small_disk(tmp_path / "disk", "size=200m") as disk:
        with (disk / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 172 * MIB)
        reading = Reading(place, cache=Cache(disk / "cache"))
        assert reading.open("file").read(0, len(content)) == content
        reading.close()
        room = os.statvfs(disk)
        assert room.f_bavail * room.f_frsize >= 20 * MIB
        assert reading.facts()["kept_chunks"] > 0

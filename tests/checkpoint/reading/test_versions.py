"""Files that are replaced, have a damaged head or none, and files that a forked child continues to read."""

from __future__ import annotations

import os

import pytest

from bootseer.cache.cache import Cache
from bootseer.checkpoint.reading.reading import Reading
from bootseer.errors import BootseerError, CorruptError, NotFoundError
from bootseer.places.folder import FolderPlace
from checkpoint.striped_files import content_of, put_striped

MIB = 1 << 20


@pytest.fixture
def own(tmp_path):
    return FolderPlace(tmp_path / "own") if (tmp_path / "own").mkdir() is None else None


def test_a_striped_file_that_is_replaced_while_it_is_open_is_never_mixed(own):
    old, new = content_of(8 * MIB, 1), content_of(8 * MIB, 2)
    put_striped(own, "file", old)
    reading = Reading(own)
    file = reading.open("file")
    assert file.read(0, 100) == old[:100]
    own.delete(".stripes", recursive=True)
    put_striped(own, "file", new)
    again = reading.open("file")
    assert again.version != file.version
    assert again.read(0, 8 * MIB) == new
    for at in range(0, 8 * MIB, MIB):
        try:
            assert file.read(at, MIB) == old[at : at + MIB]
        except BootseerError as error:
            assert "replaced or removed" in str(error)
    reading.close()


def test_an_ordinary_file_that_is_replaced_while_it_is_open_keeps_its_version(own):
    own.write_bytes("file", b"old" * 1000)
    reading = Reading(own)
    file = reading.open("file")
    own.write_bytes("file", b"new" * 1000)
    assert file.read(0, 3000) == b"old" * 1000
    assert reading.open("file").read(0, 3000) == b"new" * 1000
    reading.close()


def test_a_damaged_head_is_an_error_and_not_an_ordinary_file(own):
    put_striped(own, "file", content_of(3 * MIB))
    head = bytearray(own.read_bytes("file", 1 << 20))
    head[100] ^= 1
    own.write_bytes("file", bytes(head))
    with pytest.raises(CorruptError, match=r"^file: .*digest"):
        Reading(own).open("file")


def test_a_file_with_only_the_length_of_a_head_is_ordinary(own):
    data = content_of(4083)
    own.write_bytes("file", data)
    with Reading(own).open("file") as file:
        assert file.read(0, 5000) == data


def test_a_missing_file_is_not_found(own):
    with pytest.raises(NotFoundError):
        Reading(own).open("nothing")


def test_a_forked_child_reads_files_opened_by_the_parent(own, tmp_path):
    content = content_of(9 * MIB)
    put_striped(own, "file", content, parity=True)
    own.write_bytes("plain", content)
    reading = Reading(own, cache=Cache(tmp_path / "cache"))
    files = [reading.open(name) for name in ("file", "plain")]
    assert all(file.read(0, 3 * MIB) == content[: 3 * MIB] for file in files)
    pid = os.fork()
    if pid == 0:
        try:
            right = all(file.read(at, 2 * MIB) == content[at : at + 2 * MIB] for file in files for at in (0, 5 * MIB))
            right = right and reading.open("file").read(0, 9 * MIB) == content
            os._exit(0 if right else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert all(file.read(0, 9 * MIB) == content for file in files)
    reading.close()

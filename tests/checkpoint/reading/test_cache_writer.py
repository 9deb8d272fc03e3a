from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from bootseer.cache.cache import Cache
from bootseer.cache.disk import CacheFull
from bootseer.checkpoint.reading.node_cache import CacheWriter
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.reading.transfer import Counters
from bootseer.errors import BootseerError
from checkpoint.striped_files import content_of, part_paths, put_striped

MIB = 1 << 20


class Disk:
    """A cached file whose writes block until the test sets `go`."""

    def __init__(self, error=None):
        self.go = threading.Event()
        self.put_blocks, self.released = [], []
        self.synced = self.closed = 0
        self.has_closed = threading.Event()
        self._error = error

    def put(self, block, data, *, reserve_bytes):
        assert self.go.wait(120)
        if self._error is not None:
            raise self._error
        self.put_blocks.append(block)

    def release(self, block):
        self.released.append(block)

    def sync(self):
        self.synced += 1

    def close(self):
        self.closed += 1
        self.has_closed.set()


@pytest.mark.parametrize("parity", [False, True])
def test_the_next_process_reads_chunks_from_the_cache(empty, reading_of, parity):
    content = content_of(9 * MIB + 77)
    put_striped(empty, "file", content, parity=parity, segment_rows=1)
    reading = reading_of()
    memory = bytearray(len(content))
    reading.open("file").readinto(0, memory)
    assert memory == content
    reading.close()
    assert reading.facts()["kept_chunks"] == 10
    other = reading_of()
    with other.open("file") as file:
        memory = bytearray(len(content))
        file.readinto(0, memory)
        assert memory == content
        assert file.read(3 * MIB - 5, 10) == content[3 * MIB - 5 : 3 * MIB + 5]
    facts = other.facts()
    assert facts["place_bytes"] == 0
    assert facts["cache_bytes"] == len(content) + 10


def test_small_reads_are_cached_too(empty, reading_of):
    content = content_of(4 * MIB)
    put_striped(empty, "file", content)
    reading = reading_of()
    reading.open("file").read(0, 10)
    reading.close()
    assert reading.facts()["kept_chunks"] >= 1
    other = reading_of()
    assert other.open("file").read(100, 10) == content[100:110]
    assert other.facts()["cache_bytes"] == 10


def test_damage_in_the_cache_is_found_and_read_from_the_place(empty, reading_of, cache):
    content = content_of(5 * MIB)
    put_striped(empty, "file", content)
    reading = reading_of()
    reading.open("file").read(0, 5 * MIB)
    reading.close()
    (data,) = cache.root.glob("files/*/data")
    damaged = bytearray(data.read_bytes())
    damaged[2 * MIB + 100] ^= 1
    data.write_bytes(damaged)
    other = reading_of()
    file = other.open("file")
    memory = bytearray(5 * MIB)
    file.readinto(0, memory)
    assert memory == content
    assert other.facts()["place_bytes"] == MIB
    assert file.read(2 * MIB + 90, 20) == content[2 * MIB + 90 : 2 * MIB + 110]


def test_reads_work_with_a_cache_that_cannot_be_written(empty, tmp_path, monkeypatch):
    content = content_of(5 * MIB)
    put_striped(empty, "file", content)
    cache = Cache(tmp_path / "cache")
    (tmp_path / "cache" / "files").chmod(0)
    (tmp_path / "cache" / "files").rmdir()
    reading = Reading(empty, cache=cache)
    assert reading.open("file").read(0, 5 * MIB) == content
    reading.close()
    assert reading.facts()["kept_chunks"] == 0


def test_a_disk_that_is_slower_than_the_readers_never_delays_them():
    facts, disk, ended = Counters(), Disk(), []
    cache_writer = CacheWriter(facts)
    data = memoryview(bytearray(8 * MIB))
    for block in range(20):
        cache_writer.put(disk, block, data, lambda block=block: ended.append(block))
    assert 11 <= len(ended) <= 12, "those that do not fit are released at once"
    assert facts.all()["not_kept_chunks"] == len(ended)
    cache_writer.close_file(disk)
    assert not cache_writer.settle(60, 0.05)
    disk.go.set()
    assert cache_writer.settle(60, 10)
    assert disk.has_closed.wait(120)
    assert len(disk.put_blocks) == 20 - facts.all()["not_kept_chunks"]
    assert sorted(disk.released) == sorted(ended) == list(range(20))
    assert (disk.synced, disk.closed) == (1, 1)


@pytest.mark.parametrize("error", [CacheFull("no room"), BootseerError("broken")])
def test_nothing_is_written_to_a_full_disk_for_a_while(error):
    facts, disk = Counters(), Disk(error)
    disk.go.set()
    cache_writer = CacheWriter(facts)
    ended = threading.Event()
    cache_writer.put(disk, 0, memoryview(b"data"), ended.set)
    assert ended.wait(120)
    assert cache_writer.settle(60, 10)
    assert facts.all()["not_kept_chunks"] == 1
    assert disk.released == [0]
    assert cache_writer.has_room(1) != isinstance(error, CacheFull)


def test_parts_are_not_read_for_cached_chunks(empty, reading_of):
    head = put_striped(empty, "file", content_of(4 * MIB))
    reading = reading_of()
    reading.open("file").read(0, 4 * MIB)
    reading.close()
    empty.log.clear()
    reading_of().open("file").read(0, 4 * MIB)
    assert not {read.path for read in empty.log} & set(part_paths("file", head))


def test_closing_does_not_wait_for_a_stalled_disk():
    facts, disk, ended = Counters(), Disk(), []
    cache_writer = CacheWriter(facts)
    data = memoryview(bytearray(MIB))
    for block in range(10):
        cache_writer.put(disk, block, data, lambda block=block: ended.append(block))
    cache_writer.close_file(disk)
    began = time.monotonic()
    cache_writer.close(60, 0.05)
    assert time.monotonic() - began < 30
    cache_writer.put(disk, 10, data, lambda: ended.append(10))
    assert ended[-1] == 10
    disk.go.set()
    assert disk.has_closed.wait(120)
    assert len(disk.put_blocks) <= 1
    assert sorted(disk.released) == sorted(ended) == list(range(11))


LOADER = """
import sys
from bootseer.cache.cache import Cache
from bootseer.places.folder import FolderPlace
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.reading.settings import ReadingSettings
from pathlib import Path

settings = ReadingSettings(keep_s=60.0, keep_still_s=60.0)
reading = Reading(FolderPlace(Path(sys.argv[1])), cache=Cache(Path(sys.argv[2])), settings=settings)
file = reading.open("file")
file.readinto(0, bytearray(file.size_bytes))
"""


@pytest.mark.slow
def test_a_process_that_ends_right_after_its_read_has_cached_everything(empty, reading_of, tmp_path):
    content = content_of(48 * MIB)
    put_striped(empty, "file", content)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-c", LOADER, str(tmp_path / "own"), str(tmp_path / "cache")], check=True, timeout=120, env=env
    )
    reading = reading_of()
    with reading.open("file") as file:
        memory = bytearray(len(content))
        file.readinto(0, memory)
    assert memory == content
    assert reading.facts()["place_bytes"] == 0

from __future__ import annotations

import threading

import pytest

from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.errors import PermanentError
from checkpoint.faulty_place import ERROR, GOOD
from checkpoint.striped_files import content_of, put_striped
from waiting import until

MIB = 1 << 20
SIZE = 20 * MIB + 99
SMALL = ReadingSettings(memory_bytes=8 * MIB)


def prefetch(file, size=SIZE, at_once=3 * MIB):
    """Prefetch the beginning of a file, a few MiB at a time, like a mount."""
    offset = 0
    while offset < size:
        ended = threading.Event()
        offset += file.prefetch(offset, min(at_once, size - offset), lambda _, ended=ended: ended.set())
        assert ended.wait(120)


@pytest.fixture
def content(empty):
    content = content_of(SIZE)
    put_striped(empty, "file", content)
    empty.write_bytes("plain", content)
    return content


def test_a_whole_file_is_prefetched_into_the_cache_with_little_memory(empty, reading_of, content):
    reading = reading_of(settings=SMALL)
    file = reading.open("file")
    empty.log.clear()
    prefetch(file)
    until(lambda: reading.facts()["kept_chunks"] == 21)
    assert not any(read.urgent for read in empty.log)
    assert reading.facts()["most_memory_bytes"] <= SMALL.memory_bytes
    before = reading.facts()["place_bytes"]
    assert file.read(0, SIZE) == content
    assert reading.facts()["place_bytes"] == before


def test_prefetch_skips_cached_chunks(empty, reading_of, content):
    reading = reading_of()
    file = reading.open("file")
    file.read(0, 10 * MIB)
    until(lambda: reading.facts()["kept_chunks"] >= 10)
    prefetch(file)
    until(lambda: reading.facts()["kept_chunks"] == 21)
    assert reading.facts()["place_bytes"] == SIZE


@pytest.mark.parametrize("name", ["file", "plain"])
def test_without_a_cache_a_file_is_prefetched_into_memory_up_to_the_limit(empty, content, name):
    reading = Reading(empty, settings=ReadingSettings(memory_bytes=8 * MIB, idle_s=600.0))
    file = reading.open(name)
    prefetch(file, 4 * MIB)
    before = reading.facts()["place_bytes"]
    assert file.read(2 * MIB, 100) == content[2 * MIB : 2 * MIB + 100]
    assert reading.facts()["place_bytes"] == before == 4 * MIB
    requested: list[int] = []
    assert (
        file.prefetch(4 * MIB, 4 * MIB, requested.append) == 2 * MIB
    )  # a quarter of the memory is reserved for readers
    until(lambda: requested == [2 * MIB])
    assert file.prefetch(6 * MIB, 2 * MIB, requested.append) == 0
    assert file.prefetch(0, 4 * MIB, requested.append) == 4 * MIB
    until(lambda: requested == [2 * MIB, 0, 0])
    reading.close()
    assert reading.facts()["memory_bytes"] == 0


def test_errors_of_a_prefetch_are_ignored(empty, reading_of, content):
    reading = reading_of(settings=SMALL)
    file = reading.open("file")
    empty.decide = lambda _: ERROR
    prefetch(file)
    empty.decide = lambda _: GOOD
    assert file.read(5 * MIB, 10) == content[5 * MIB : 5 * MIB + 10]


def test_closing_the_file_ends_its_prefetch(empty, reading_of, content):
    reading = reading_of(settings=SMALL)
    file = reading.open("file")
    empty.decide = lambda _: 0.05
    ended = threading.Event()
    assert file.prefetch(0, 4 * MIB, lambda _: ended.set()) == 4 * MIB
    file.close()
    reading.close()
    assert ended.wait(120)
    assert empty.under_way == 0
    with pytest.raises(PermanentError):
        file.prefetch(0, MIB)


def test_prefetch_stops_at_the_end_of_the_file(empty, reading_of, content):
    reading = reading_of()
    file = reading.open("file")
    assert file.prefetch(SIZE, MIB) == file.prefetch(SIZE - 10, MIB) == MIB
    until(lambda: reading.facts()["kept_chunks"] == 1)

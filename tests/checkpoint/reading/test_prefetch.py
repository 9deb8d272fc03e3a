from __future__ import annotations

import threading
import time

import pytest

from bootseer.checkpoint.reading.buffer import ChunkBuffer, Key, PieceRequest, Prefetch
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.checkpoint.reading.transfer import Counters
from bootseer.errors import TransientError
from bootseer.io.timer import Timer
from checkpoint.faulty_place import ERROR, GOOD
from checkpoint.striped_files import content_of, put_striped

MIB = 1 << 20
SIZE = 20 * MIB + 99
SMALL = ReadingSettings(memory_bytes=8 * MIB, prefetch_bytes=3 * MIB)


def until(condition):
    end = time.monotonic() + 120
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


@pytest.fixture
def content(empty):
    content = content_of(SIZE)
    put_striped(empty, "file", content)
    empty.write_bytes("plain", content)
    return content


def test_a_whole_file_comes_into_the_cache_through_little_memory(empty, reading_of, content):
    reading = reading_of(settings=SMALL)
    file = reading.open("file")
    empty.log.clear()
    file.prefetch(0, SIZE)
    until(lambda: reading.facts()["kept_chunks"] == 21)
    assert not any(read.urgent for read in empty.log)
    assert empty.most_under_way <= SMALL.prefetch_bytes
    assert reading.facts()["most_memory_bytes"] <= SMALL.memory_bytes
    before = reading.facts()["place_bytes"]
    assert file.read(0, SIZE) == content
    assert reading.facts()["place_bytes"] == before


def test_prefetch_skips_what_is_cached(empty, reading_of, content):
    reading = reading_of()
    file = reading.open("file")
    file.read(0, 10 * MIB)
    until(lambda: reading.facts()["kept_chunks"] >= 10)
    file.prefetch(0, SIZE)
    until(lambda: reading.facts()["kept_chunks"] == 21)
    assert reading.facts()["place_bytes"] == SIZE


@pytest.mark.parametrize("name", ["file", "plain"])
def test_without_a_cache_the_beginning_comes_into_memory(empty, content, name):
    reading = Reading(empty, settings=SMALL)
    file = reading.open(name)
    empty.log.clear()
    file.prefetch(0, SIZE)
    until(lambda: reading.facts()["chunks"] == 4)
    assert file.read(2 * MIB, 100) == content[2 * MIB : 2 * MIB + 100]
    assert sum(read.length for read in empty.log if read.offset < 4 * MIB) >= 4 * MIB
    reading.close()
    assert reading.facts()["memory_bytes"] == 0


def test_errors_of_a_prefetch_are_ignored(empty, reading_of, content):
    reading = reading_of(settings=SMALL)
    file = reading.open("file")
    empty.decide = lambda _: ERROR
    file.prefetch(0, SIZE)
    until(lambda: empty.under_way == 0)
    empty.decide = lambda _: GOOD
    assert file.read(5 * MIB, 10) == content[5 * MIB : 5 * MIB + 10]


def test_closing_the_file_ends_its_prefetch(empty, reading_of, content):
    reading = reading_of(settings=SMALL)
    file = reading.open("file")
    empty.decide = lambda _: 0.05
    file.prefetch(0, SIZE)
    file.close()
    reading.close()
    assert empty.under_way == 0
    assert reading.facts()["kept_chunks"] < 21


def test_prefetch_stops_at_the_end_of_the_file(empty, reading_of, content):
    reading = reading_of()
    file = reading.open("file")
    file.prefetch(SIZE, MIB)
    file.prefetch(SIZE - 10, MIB)
    until(lambda: reading.facts()["kept_chunks"] == 1)


def test_prefetch_lists_its_pieces_lazily():
    listed = []

    def requests():
        for number in range(1_000_000):  # a terabyte
            listed.append(number)
            yield PieceRequest(Key(1, number * MIB), number * MIB, MIB)

    timer = Timer()
    run = Prefetch(
        requests(),
        buffer=ChunkBuffer(8 * MIB, 60.0, timer, Counters()),
        timer=timer,
        load=lambda pieces, urgent: None,
        is_wanted=lambda request: True,
        has_room=lambda num_bytes: True,
        max_bytes=3 * MIB,
        consumed=True,
        ended=lambda run: None,
    )
    run.pump()
    assert 3 <= len(listed) < 20
    run.cancel()
    timer.close()


def test_a_prefetch_without_memory_that_no_thread_can_wait_for_ends():
    class NoThread(Timer):
        def after(self, delay_s, call):
            raise TransientError("the system refuses to start a thread")

    timer, over = Timer(), []
    buffer = ChunkBuffer(8 * MIB, 60.0, timer, Counters())
    assert buffer.reserve(8 * MIB, demand=True)
    run = Prefetch(
        iter([PieceRequest(Key(1, 0), 0, MIB)]),
        buffer=buffer,
        timer=NoThread(),
        load=lambda pieces, urgent: None,
        is_wanted=lambda request: True,
        has_room=lambda num_bytes: True,
        max_bytes=3 * MIB,
        consumed=True,
        ended=over.append,
    )
    going = threading.Thread(target=run.pump, daemon=True)
    going.start()
    going.join(10)
    run.cancel()
    assert not going.is_alive()
    assert over == [run]
    timer.close()

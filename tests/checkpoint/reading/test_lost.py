"""Reads that never complete, and interrupted readers: all end, and nothing is written to their memory afterwards. The
memory of reads that have ended is free."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from bootseer.cache.cache import Cache
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.errors import PermanentError, TransientError
from bootseer.io import executor
from checkpoint.faulty_place import ERROR, GOOD, LOST, NEVER
from checkpoint.striped_files import content_of, put_striped
from waiting import until

pytestmark = pytest.mark.slow

MIB = 1 << 20
SIZE = 12 * MIB
PATIENCE_S = 120.0
LARGE = ReadingSettings(direct_min_bytes=2 * MIB)


@pytest.fixture
def content():
    return content_of(SIZE)


@pytest.fixture(params=["plain", "striped", "parity"])
def name(request, empty, content):
    """A file of each kind."""
    if request.param == "plain":
        empty.write_bytes("plain", content)
    else:
        put_striped(empty, request.param, content, stripes=2, parity=request.param == "parity")
    return request.param


@pytest.mark.parametrize("length", [MIB, SIZE], ids=["small", "large"])
def test_a_read_that_never_completes_fails_and_the_stacks_of_all_threads_are_shown(
    empty, name, length, capfd, monkeypatch
):
    monkeypatch.setattr(executor, "_shown_s", -1e9)
    quick = ReadingSettings(direct_min_bytes=2 * MIB, deadline_s=0.5, stall_s=0.5)
    reading = Reading(empty, settings=quick)
    with reading.open(name) as file:
        empty.decide = lambda _: LOST
        with pytest.raises(TransientError, match=f"{name}.*no answer within 1 s"):
            file.readinto(0, bytearray(length))
    said = capfd.readouterr().err
    assert f"{name}" in said
    assert "its threads:" in said
    assert "MainThread: show_threads" in said


def test_a_head_whose_read_never_completes_is_an_error(empty, content):
    put_striped(empty, "file", content)
    empty.decide = lambda _: LOST
    with pytest.raises(TransientError, match=r"file: not read within 1 s"):
        Reading(empty, settings=ReadingSettings(deadline_s=0.5, stall_s=0.5)).open("file")


def test_nothing_is_written_to_the_memory_of_a_reader_that_was_interrupted_at_its_begin(empty, name):
    reading = Reading(empty, settings=LARGE)
    with reading.open(name) as file:
        file.readinto(0, bytearray(SIZE))  # its parts are open now, so reads begin in this thread
        begun = []

        def decide(read):
            begun.append(read)
            if len(begun) == 3:
                assert threading.current_thread() is threading.main_thread()
                raise KeyboardInterrupt
            return 0.2

        empty.decide = decide
        memory = bytearray(b"\7" * SIZE)
        with pytest.raises(KeyboardInterrupt):
            file.readinto(0, memory)
        before = bytes(memory)
        until = time.monotonic() + PATIENCE_S
        while empty.under_way:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert memory == before
    reading.close()


def test_all_reads_that_wait_for_memory_are_answered_if_every_read_is_refused(empty, content):
    empty.write_bytes("plain", content)
    reading = Reading(empty, settings=ReadingSettings(memory_bytes=8 * MIB))
    answers, over = [], threading.Semaphore(0)

    def done(answer):
        answers.append(answer)
        over.release()

    with reading.open("plain") as file:
        empty.decide = lambda _: ERROR if len(empty.log) > 12 else 0.5
        for number in range(1000):
            file.read_async(number * 4099 % (SIZE - MIB), MIB - 1, done)
        for _ in range(1000):
            assert over.acquire(timeout=PATIENCE_S)
        empty.decide = lambda _: GOOD
        assert file.read(5, 10) == content[5:15]
    assert len(answers) == 1000
    reading.close()


class SlowCache(Cache):
    """Opening a second file blocks until the test sets `pump`."""

    def __init__(self, root):
        super().__init__(root)
        self.opened = 0
        self.waits = threading.Event()
        self.pump = threading.Event()

    def open(self, index):
        self.opened += 1
        if self.opened > 1:
            self.waits.set()
            assert self.pump.wait(PATIENCE_S)
        return super().open(index)


def test_readers_of_one_segment_do_not_wait_while_the_cache_opens_another_one(empty, content, tmp_path):
    put_striped(empty, "file", content, stripes=2, segment_rows=2)
    cache = SlowCache(tmp_path / "slow")
    reading = Reading(empty, cache=cache)
    with reading.open("file") as file:
        assert file.read(0, 100) == content[:100]
        other = threading.Thread(target=file.read, args=(8 * MIB, 100))
        other.start()
        assert cache.waits.wait(PATIENCE_S)
        here = threading.Thread(target=file.read, args=(0, 100))
        here.start()
        here.join(PATIENCE_S)
        waits = here.is_alive()
        cache.pump.set()
        other.join(PATIENCE_S)
    reading.close()
    assert not waits


def test_nothing_is_written_to_the_memory_of_a_reader_whose_file_was_closed(empty, name):
    """Like a load that has failed, after which the same tensors are loaded from another checkpoint."""
    reading = Reading(empty, settings=LARGE)
    file = reading.open(name)
    file.readinto(0, bytearray(SIZE))  # its parts are open now
    empty.log.clear()
    empty.decide = lambda _: NEVER
    memory, said = bytearray(b"\7" * SIZE), []

    def read():
        with pytest.raises(PermanentError) as error:
            file.readinto(0, memory)
        said.append(str(error.value))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    until(lambda: empty.log, "the read has begun")
    file.close()
    reader.join(30)
    assert said == [f"{name}: this file was closed"]
    assert empty.under_way == 0
    assert memory == b"\7" * SIZE
    reading.close()


class Memory(bytearray):
    """Memory with support for weak references."""


@pytest.mark.parametrize("is_damaged", [False, True], ids=["healthy", "damaged"])
def test_the_memory_of_a_large_read_is_free_before_the_garbage_collection(empty, name, content, tmp_path, is_damaged):
    if is_damaged:
        if name != "parity":
            pytest.skip("it cannot be read")
        part = next((tmp_path / "own").rglob("0-1"))
        part.chmod(0o644)
        part.write_bytes(bytes(part.stat().st_size))
    reading = Reading(empty.inner, settings=LARGE)
    gc.disable()
    try:
        with reading.open(name) as file:
            memory = Memory(SIZE)
            is_held = weakref.ref(memory)
            file.read_ranges([(0, memory)])
            assert memory == content
            del memory
            until(lambda: not is_held(), "it is free")
    finally:
        gc.enable()
        reading.close()

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from bootseer.checkpoint.reading.buffer import ChunkBuffer, Key, PieceRequest
from bootseer.checkpoint.reading.transfer import Counters
from bootseer.errors import TransientError, UsageError
from bootseer.io.timer import Timer

MIB = 1 << 20


class Loads:
    """Records pieces to load, which the test finishes."""

    def __init__(self):
        self.begun = []
        self.urgent = []

    def __call__(self, pieces, urgent):
        self.begun += pieces
        self.urgent += [urgent] * len(pieces)


@contextlib.contextmanager
def reported(kind):
    """Assert that an exception of this kind is reported like an uncaught one of a thread, and not raised."""
    kinds = []
    before, threading.excepthook = threading.excepthook, lambda args: kinds.append(args.exc_type)
    try:
        yield
    finally:
        threading.excepthook = before
    assert set(kinds) == {kind}


@pytest.fixture
def timer():
    timer = Timer()
    yield timer
    timer.close()


@pytest.fixture
def buffer(timer):
    return ChunkBuffer(8 * MIB, 60.0, timer, Counters())


def request(number, file=1, length=MIB):
    return PieceRequest(Key(file, number * MIB), number * MIB, length)


def test_a_piece_is_loaded_once_for_all_its_readers(buffer):
    load, got = Loads(), []
    buffer.acquire([request(0)], load, got.append)
    buffer.acquire([request(0)], load, got.append)
    assert (len(load.begun), got) == (1, [])
    buffer.finish(load.begun[0], None)
    assert got == [load.begun[0]] * 2
    buffer.acquire([request(0)], load, got.append)
    assert len(got) == 3
    assert len(load.begun) == 1


def test_a_piece_that_failed_is_loaded_again_for_the_next(buffer):
    load, got = Loads(), []
    buffer.acquire([request(0)], load, got.append)
    buffer.finish(load.begun[0], TransientError("no"))
    assert str(got[0].error) == "no"
    buffer.release(got[0])
    assert buffer.used_bytes == 0
    buffer.acquire([request(0)], load, got.append)
    assert len(load.begun) == 2


def test_readers_wait_in_turn_when_all_memory_is_held(buffer):
    load, got = Loads(), []
    buffer.acquire([request(number) for number in range(8)], load, got.append)
    buffer.acquire([request(8), request(9)], load, got.append)
    assert len(load.begun) == 8
    for piece in list(load.begun):
        buffer.finish(piece, None)
    assert len(load.begun) == 8, "held pieces were dropped"
    buffer.release(got[3])
    assert [piece.offset for piece in load.begun[8:]] == [8 * MIB]
    assert not buffer.contains(request(3).key)
    assert buffer.peak_bytes == 8 * MIB


def test_reading_ahead_leaves_room_for_readers_and_drops_only_consumed_pieces(buffer):
    load = Loads()
    done, num_begun = buffer.read_ahead([request(number) for number in range(8)], load)
    assert (done, num_begun) == (6, 6)
    assert not any(load.urgent)
    for piece in load.begun:
        buffer.finish(piece, None)
    assert buffer.read_ahead([request(20)], load) == (0, 0)
    used = []
    buffer.acquire([request(0)], load, used.append)
    buffer.release(used[0], consumed=True)
    assert buffer.read_ahead([request(20)], load) == (1, 1)
    assert not buffer.contains(request(0).key)
    assert buffer.contains(request(1).key)


def test_readers_drop_the_least_recently_used_pieces(buffer):
    load, got = Loads(), []
    for number in range(8):
        buffer.acquire([request(number)], load, got.append)
        buffer.finish(load.begun[-1], None)
        buffer.release(got[-1])
    buffer.acquire([request(0)], load, got.append)
    buffer.release(got[-1])
    buffer.acquire([request(9)], load, got.append)
    assert buffer.contains(request(0).key)
    assert not buffer.contains(request(1).key)


def test_nothing_is_left_of_a_closed_file(buffer):
    load, got = Loads(), []
    buffer.acquire([request(0), request(1)], load, got.append)
    buffer.read_ahead([request(2), request(0, file=2)], load)
    ready, loading, ahead, other = load.begun
    buffer.finish(ready, None)
    buffer.release(ready)
    buffer.drop(1)
    assert not buffer.contains(ready.key)
    buffer.finish(ahead, None)
    buffer.finish(loading, None)
    assert not buffer.has(1) or buffer.contains(loading.key)
    buffer.release(loading)
    assert not buffer.has(1)
    buffer.finish(other, None)
    assert buffer.has(2)
    assert buffer.used_bytes == MIB


def test_unused_pieces_are_dropped_when_idle(timer):
    buffer = ChunkBuffer(8 * MIB, 0.05, timer, Counters())
    load = Loads()
    buffer.read_ahead([request(0), request(1)], load)
    for piece in load.begun:
        buffer.finish(piece, None)
    assert buffer.used_bytes == 2 * MIB
    assert buffer.wait_empty(10.0)


def test_memory_for_other_purposes_counts(buffer):
    assert buffer.reserve(6 * MIB, demand=False)
    assert not buffer.reserve(MIB, demand=False)
    assert buffer.reserve(2 * MIB, demand=True)
    load, got = Loads(), []
    buffer.acquire([request(0)], load, got.append)
    assert not load.begun
    buffer.free(8 * MIB)
    assert len(load.begun) == 1


def test_private_pieces_are_dropped_after_use(buffer):
    load, got = Loads(), []
    buffer.acquire([PieceRequest(Key(1, -1), 12345, 100)], load, got.append)
    buffer.finish(load.begun[0], None)
    buffer.release(got[0])
    assert buffer.used_bytes == 0


def test_too_little_memory_is_refused(timer):
    with pytest.raises(UsageError, match="reading needs"):
        ChunkBuffer(MIB, 1.0, timer, Counters())


def test_calls_are_made_in_the_order_of_their_times(timer):
    called = []
    began = time.monotonic()
    timer.after(0.10, lambda: called.append("late"))
    timer.after(0.02, lambda: called.append("early"))
    until = began + 10
    while len(called) < 2 and time.monotonic() < until:
        time.sleep(0.005)
    assert called == ["early", "late"]
    assert time.monotonic() - began >= 0.10


def test_a_piece_that_is_released_before_its_load_has_ended_is_dropped_once(buffer):
    load, got = Loads(), []
    buffer.read_ahead([request(0), request(1)], load)
    first, second = load.begun
    release = buffer.retain(first)
    buffer.drop(1)
    release()
    assert buffer.used_bytes == 2 * MIB, "memory that is being written to was freed"
    buffer.finish(first, None)
    buffer.finish(second, None)
    assert buffer.used_bytes == 0
    buffer.acquire([request(0)], load, got.append)
    assert len(load.begun) == 3


def test_one_reader_at_a_time_may_exceed_the_memory_limit(buffer):
    assert buffer.reserve(8 * MIB, demand=True)
    assert not buffer.reserve(MIB, demand=True)
    assert buffer.overdraw(3 * MIB)
    assert not buffer.overdraw(MIB)
    buffer.free(3 * MIB, overdrawn=True)
    assert buffer.overdraw(MIB)
    assert buffer.used_bytes == 9 * MIB


def test_calls_that_reads_wait_for_are_also_made_after_close(timer):
    made = threading.Semaphore(0)
    timer.after(0.05, made.release)
    timer.close()
    timer.after(0.05, made.release)
    assert made.acquire(timeout=180)
    assert made.acquire(timeout=180)


def test_a_thousand_readers_wait_while_every_load_ends_at_once_and_all_are_answered(buffer):
    """Each failed load frees memory for the next one, which also fails."""
    held, got = Loads(), []

    def refuse(pieces, urgent):
        for piece in pieces:
            buffer.finish(piece, TransientError("no node has it"))

    def arrived(piece):
        got.append(str(piece.error))
        buffer.release(piece)

    buffer.acquire([request(number) for number in range(8)], held, buffer.release)
    for number in range(1000):
        buffer.acquire([request(number, file=2)], refuse, arrived)
    assert got == []
    buffer.finish(held.begun[0], None)
    assert got == ["no node has it"] * 1000
    assert buffer.used_bytes == 7 * MIB


@pytest.mark.parametrize("error", [MemoryError(), ValueError("unforeseen"), KeyboardInterrupt()], ids=repr)
def test_a_load_that_raises_ends_its_pieces_and_the_next_reader_tries_again(buffer, error):
    load, got = Loads(), []

    def broken(pieces, urgent):
        raise error

    with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else reported(type(error)):
        buffer.acquire([request(0), request(1)], broken, got.append)
    assert [type(piece.error) for piece in got] == [TransientError] * 2
    for piece in got:
        buffer.release(piece)
    assert buffer.used_bytes == 0
    buffer.acquire([request(0)], load, got.append)
    assert len(load.begun) == 1

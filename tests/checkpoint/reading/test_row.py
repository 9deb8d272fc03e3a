from __future__ import annotations

import threading
from types import SimpleNamespace

from bootseer.checkpoint.reading.buffer import ChunkBuffer
from bootseer.checkpoint.reading.row import Row
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.checkpoint.reading.transfer import Counters
from bootseer.errors import TransientError
from bootseer.io.pooled_reads import ReadOutcome
from bootseer.io.timer import Timer

CHUNK = b"\7" * 1000


class OneChunk:
    """A segment of one chunk and its parity, which is its copy; also in the roles of its parts and open files."""

    def length(self, chunk):
        return len(CHUNK)

    def place_of(self, chunk):
        return self, 0

    parity_of = place_of

    def nodes(self, offset):
        return ()

    def delay_s(self, offset, length):
        return 0.0

    def when_open(self, call):
        call(self, None)

    def read_into(self, offset, into, done, **_):
        into[:] = CHUNK
        done(ReadOutcome(None, ""))
        return self

    def cancel(self):
        pass

    def remaining_s(self):
        return 0.0


class LateChunk:
    """A chunk whose own part does not answer until the chunk is cancelled, which happens while it is computed."""

    chunk = 0
    num_bytes = len(CHUNK)
    started_s = 0.0
    expected_s = 0.0
    urgent = True
    problem = TransientError("no")

    def __init__(self, row, segment):
        self.segment = segment
        self.into = memoryview(bytearray(len(CHUNK)))
        self.is_cancelled = False
        self.ends = []
        self.ended_early = False
        self.ended = threading.Semaphore(0)
        self._row = row

    def read_own(self):
        pass

    def is_right(self, data):
        self.is_cancelled = True
        self._row.own_ended(self, self.problem, keep=False)
        self.ended_early = bool(self.ends)
        return data == CHUNK

    def stop(self):
        pass

    def remaining_s(self):
        return 0.0

    def finish(self, error, *, keep=True):
        self.ends.append(error)
        self.ended.release()


def context_of(segment, settings, facts, timer, buffer):
    return SimpleNamespace(
        path="file", settings=settings, facts=facts, timer=timer, buffer=buffer, cache_writer=None, peers=None,
        acquire=lambda chunk: segment, retain=lambda segment: None, release=lambda segment: None,
    )  # fmt: skip


def test_a_chunk_that_is_cancelled_while_it_is_computed_ends_once_and_not_before():
    segment, timer, facts = OneChunk(), Timer(), Counters()
    buffer = ChunkBuffer(8 << 20, 60.0, timer, facts)
    context = context_of(segment, ReadingSettings(late_s=0.01, row_check_s=0.01), facts, timer, buffer)
    row = Row(context, range(1))
    job = LateChunk(row, segment)
    row.add(job)
    row.begin(job)
    assert job.ended.acquire(timeout=180)
    assert not job.ended_early, "its memory would be returned to its owner while it is written to"
    assert job.ends == [None]
    assert job.into == CHUNK
    assert buffer.wait_empty(120)
    timer.close()


class Refused(LateChunk):
    """A chunk whose read could not begin, so that it is rebuilt."""

    started_s = None

    def is_right(self, data):
        return data == CHUNK


def test_rebuilding_a_chunk_whose_read_could_not_begin_leaves_no_memory_reserved():
    segment, timer, facts = OneChunk(), Timer(), Counters()
    buffer = ChunkBuffer(8 << 20, 60.0, timer, facts)
    context = context_of(segment, ReadingSettings(), facts, timer, buffer)
    row = Row(context, range(1))
    job = Refused(row, segment)
    row.add(job)
    row.own_ended(job, job.problem, keep=False)
    assert job.ends == [None]
    assert job.into == CHUNK
    assert buffer.used_bytes == 0
    timer.close()


def test_a_callback_that_raises_leaves_no_memory_reserved(monkeypatch):
    reported = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_type))
    segment, timer, facts = OneChunk(), Timer(), Counters()
    buffer = ChunkBuffer(8 << 20, 60.0, timer, facts)
    context = context_of(segment, ReadingSettings(row_check_s=0.01), facts, timer, buffer)
    row = Row(context, range(1))
    job = Refused(row, segment)

    def broken(error, *, keep=True):
        raise ValueError("the reader")

    job.finish = broken
    row.add(job)
    row.begin(job)
    row.own_ended(job, job.problem, keep=False)
    assert buffer.wait_empty(30)
    assert reported == [ValueError]
    timer.close()


class HeldParity(OneChunk):
    """A segment of two equal chunks, whose first read (of the parity) ends only when the test calls `end_first`."""

    path = "part"

    def __init__(self):
        self.requested, self.cancelled = threading.Event(), threading.Event()
        self.end_first = None

    def read_into(self, offset, into, done, **_):
        into[:] = bytes(len(CHUNK))  # the parity of two equal chunks is zero
        if self.end_first is None:
            self.end_first = lambda: done(ReadOutcome(TransientError("the read was cancelled"), ""))
            self.requested.set()
        else:
            done(ReadOutcome(None, ""))
        return self

    def cancel(self):
        self.cancelled.set()


def test_parity_that_was_cancelled_is_read_again_for_a_chunk_that_starts_before_the_cancelled_read_has_ended():
    segment, timer, facts = HeldParity(), Timer(), Counters()
    buffer = ChunkBuffer(8 << 20, 60.0, timer, facts)
    row = Row(context_of(segment, ReadingSettings(late_s=0.01, row_check_s=0.01), facts, timer, buffer), range(2))
    late, failed = LateChunk(row, segment), Refused(row, segment)
    failed.chunk, failed.started_s = 1, 0.0
    row.add(late)
    row.add(failed)
    row.begin(late)
    assert segment.requested.wait(60)
    late.into[:] = CHUNK
    row.own_ended(late, None, keep=False)  # no chunk is active
    assert segment.cancelled.wait(60)
    row.begin(failed)
    row.own_ended(failed, failed.problem, keep=False)
    assert not failed.ends
    segment.end_first()
    assert failed.ended.acquire(timeout=60)
    assert failed.ends == [None]
    assert failed.into == CHUNK
    assert buffer.wait_empty(120)
    timer.close()

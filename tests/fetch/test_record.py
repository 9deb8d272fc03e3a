from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import CorruptError, PermanentError
from bootseer.fetch import record as record_module
from bootseer.fetch.hotset import Availability, Need, Record
from bootseer.fetch.record import RecordWriter, read_record
from waiting import until

FILE, OTHER = "ab" * 32, "cd" * 32


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "record"


def test_needs_come_back_with_their_times_until_training_began(path, clock):
    writer = RecordWriter(path, started_s=1700000000.5, clock=clock)
    writer.need(FILE, 5, Availability.MISSING)
    clock.now += 1.5
    writer.need(OTHER, 5, Availability.READY)
    writer.need(FILE, 6, Availability.IN_FLIGHT)
    clock.now += 2
    writer.end()
    writer.need(FILE, 7, Availability.MISSING)
    writer.close()
    assert read_record(path) == Record(
        1700000000.5,
        3500,
        (
            Need(FILE, 5, 0, Availability.MISSING),
            Need(OTHER, 5, 1500, Availability.READY),
            Need(FILE, 6, 1500, Availability.IN_FLIGHT),
        ),
    )


def test_needs_reach_the_file_by_themselves(path):
    writer = RecordWriter(path, started_s=0)
    writer.need(FILE, 3, Availability.MISSING)
    until(lambda: read_record(path).needs)
    writer.close()


def test_a_killed_process_leaves_what_it_wrote(path):
    code = (
        "import sys, time; from pathlib import Path; from bootseer.fetch.record import *\n"
        "writer = RecordWriter(Path(sys.argv[1]), started_s=7)\n"
        "for block in range(1000): writer.need('ab' * 32, block, Availability.MISSING)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, path]) as child:
        try:
            until(lambda: path.exists() and path.stat().st_size > 1000)
            until(lambda: len(read_record(path).needs) == 1000)
        finally:
            os.kill(child.pid, signal.SIGKILL)
    assert [need.block for need in read_record(path).needs] == list(range(1000))


@given(cut=st.integers(0, 400))
def test_a_torn_tail_costs_only_itself(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("record") / "record"
    writer = RecordWriter(path, started_s=1)
    for block in range(20):
        writer.need(FILE if block % 3 else OTHER, block, Availability.MISSING)
    writer.close()
    whole = path.read_bytes()
    kept = whole[: max(len(whole) - cut, whole.index(b"\n") + 1)]
    path.write_bytes(kept)
    num_lines = kept[whole.index(b"\n") + 1 :].count(b"\n[") + 0
    needs = read_record(path).needs
    assert [need.block for need in needs] == list(range(len(needs)))
    assert num_lines - 1 <= len(needs) <= 20


@given(st.binary(max_size=300), st.integers(0, 2000), st.integers(0, 50))
def test_nonsense_in_the_middle_ends_the_record_and_nothing_more(tmp_path_factory, noise, at, removed):
    path = tmp_path_factory.mktemp("record") / "record"
    writer = RecordWriter(path, started_s=1)
    for block in range(60):
        writer.need(FILE, block, Availability.MISSING)
    writer.close()
    whole = path.read_bytes()
    at = max(at % len(whole), whole.index(b"\n") + 1)
    path.write_bytes(whole[:at] + noise + whole[at + removed :])
    for need in read_record(path).needs:
        assert 0 <= need.block < 2**26


def test_the_same_block_counts_once(path):
    writer = RecordWriter(path, started_s=1)
    for _ in range(2):
        writer.need(FILE, 1, Availability.MISSING)
    writer.close()
    assert len(read_record(path).needs) == 1


def test_a_record_is_bounded(path, monkeypatch):
    monkeypatch.setattr(record_module, "MAX_NEEDS", 10)
    writer = RecordWriter(path, started_s=1)
    for block in range(100):
        writer.need(FILE, block, Availability.MISSING)
    writer.close()
    assert len(read_record(path).needs) == 10


@pytest.mark.parametrize(
    "header", [b"", b"{}\n", b'{"schema":"bootseer.record/1"}\n', b'{"schema":"x","started_s":1}\n', b"x" * 1000]
)
def test_what_is_no_record_is_refused(path, header):
    path.write_bytes(header)
    with pytest.raises(CorruptError):
        read_record(path)


def test_a_later_version_is_refused(path):
    path.write_bytes(b'{"schema":"bootseer.record/2","started_s":1}\n')
    with pytest.raises(PermanentError, match="version"):
        read_record(path)


def test_many_threads_may_write(path):
    writer = RecordWriter(path, started_s=1)
    threads = [
        threading.Thread(
            target=lambda base=base: [writer.need(FILE, base + at, Availability.MISSING) for at in range(500)]
        )
        for base in range(0, 4000, 500)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert sorted(need.block for need in read_record(path).needs) == list(range(4000))

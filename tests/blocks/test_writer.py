from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.artifact.objects import read_index
from bootseer.blocks import codec
from bootseer.blocks.writer import BlockWriter
from bootseer.errors import PermanentError, TransientError, UsageError

BLOCK = 4096


@pytest.fixture(scope="module", autouse=True)
def small_batches():
    """Small batches, so that several threads encode files of a few blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bootseer.blocks.writer._BATCH_BYTES", 2 * BLOCK)
        yield


def content(size: int, seed: int = 1) -> bytes:
    """Text, random bytes and zeros, so that each codec is used."""
    rng = random.Random(seed)
    kinds = [lambda: b"torch.nn " * 1000, lambda: rng.randbytes(5000), lambda: bytes(9000)]
    data = b""
    while len(data) < size:
        data += rng.choice(kinds)()
    return data[:size]


def read_back(store, block_file) -> bytes:
    index = read_index(store, block_file)
    data = b""
    for block in range(index.num_blocks):
        place = index.place(block)
        stripe = store.objects.get(index.stripes[place.stripe].name, b"")
        stored = stripe[place.offset : place.offset + place.length]
        data += codec.decode(place.codec, stored, index.length(block), index.digest(block))
    return data


def write(store, data, *, head=b"", cut=1000, **options):
    with BlockWriter(store, block_size=BLOCK, head_bytes=len(head), **options) as writer:
        for start in range(0, len(data), cut):
            writer.write(data[start : start + cut])
        return writer.finish(head)


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(0, 8 * BLOCK),
    head=st.integers(0, BLOCK),
    cut=st.integers(1, 3 * BLOCK),
)
def test_a_file_comes_back_as_it_was(new_store, size, head, cut):
    store, data = new_store(), content(size)
    first = os.urandom(head)
    block_file = write(store, data, head=first, cut=cut)
    assert read_back(store, block_file) == first + data
    assert block_file.size_bytes == head + size
    assert {stored.name: stored.size_bytes for stored in block_file.objects} == {
        name: len(stored) for name, stored in store.objects.items()
    }


@pytest.mark.parametrize("head", [b"", b"superblock" * 100])
def test_threads_and_cuts_do_not_change_a_bit(store, head):
    data = content(50 * BLOCK + 77)
    files = {
        write(store, data, head=head, threads=threads, cut=cut)
        for threads, cut in ((1, 100_000), (1, 333), (4, 1 << 20), (3, BLOCK))
    }
    assert len(files) == 1


def test_the_head_is_stored_last(store):
    noise = random.Random(3).randbytes(5 * BLOCK)
    index = read_index(store, write(store, noise[100:], head=noise[:100]))
    assert [index.place(block).offset for block in range(5)] == [4 * BLOCK, 0, BLOCK, 2 * BLOCK, 3 * BLOCK]


def test_few_blocks_are_in_memory_at_a_time(store):
    """A blocked store blocks the writer."""
    taking = threading.Event()
    store.before_step = lambda: taking.wait(60)
    writer = BlockWriter(store, block_size=BLOCK, threads=2)
    written = []

    def produce():
        for _ in range(200):
            writer.write(b"x" * BLOCK)
            written.append(1)

    thread = threading.Thread(target=produce)
    thread.start()
    deadline = time.monotonic() + 120
    while not written and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(written) <= 8
    taking.set()
    thread.join(60)
    assert len(written) == 200
    writer.finish()


def test_a_writer_that_is_faster_than_its_threads_waits_for_them(store):
    with BlockWriter(store, block_size=1 << 20, threads=1, level=12) as writer:
        in_flight = []
        for _ in range(20):
            writer.write(random.Random(1).randbytes(1 << 14) * 64)
            in_flight.append(len(writer._in_flight))
        assert max(in_flight) < 4


def test_the_store_failing_at_any_step_leaves_no_index(store):
    data = content(12 * BLOCK)
    block_file = write(store, data, threads=2)
    num_steps = store.steps
    assert num_steps > 10
    for step in range(num_steps):
        store.objects.clear()
        store.uploads.clear()
        store.steps, store.fail_at, store.failure = 0, step, TransientError("gone")
        num_before = threading.active_count()
        with pytest.raises(TransientError, match="gone"):
            write(store, data, threads=2)
        assert block_file.index_name not in store.objects
        assert all(upload.ended for upload in store.uploads)
        until = time.monotonic() + 300
        while threading.active_count() > num_before:  # each ends a moment after its work
            assert time.monotonic() < until
            time.sleep(0.001)


def test_calls_of_a_failed_writer_are_errors(store):
    store.fail_at, store.failure = 0, TransientError("gone")
    writer = BlockWriter(store, block_size=BLOCK)
    with pytest.raises(TransientError):
        writer.write(content(20 * BLOCK))
        writer.finish()
    for call in (lambda: writer.write(b"x"), writer.finish):
        with pytest.raises(PermanentError):
            call()
    writer.abort()


def test_leaving_the_block_without_finish_leaves_nothing(store):
    with BlockWriter(store, block_size=BLOCK) as writer:
        writer.write(content(20 * BLOCK))
    assert store.objects == {}
    assert store.uploads
    assert all(upload.ended for upload in store.uploads)


def test_a_store_that_returns_another_name_is_an_error(store):
    real = store.upload

    def upload():
        made = real()
        commit = made.commit
        made.commit = lambda name=None, **_: commit("some/path")
        return made

    store.upload = upload
    with pytest.raises(PermanentError, match="some/path"):
        write(store, b"x" * 100)


@pytest.mark.parametrize(
    "options",
    [{"block_size": 5000}, {"head_bytes": -1}, {"head_bytes": 1 << 30}],
)
def test_impossible_options_are_refused(store, options):
    with pytest.raises(UsageError):
        BlockWriter(store, **options)


def test_a_head_of_another_size_than_announced_is_refused(store):
    with pytest.raises(UsageError), BlockWriter(store, block_size=BLOCK, head_bytes=10) as writer:
        writer.finish(b"short")
    assert store.objects == {}


def test_a_buffer_of_wider_items_counts_its_bytes(store):
    with BlockWriter(store, block_size=BLOCK) as writer:
        writer.write(memoryview(b"abcdefgh" * 1000).cast("Q"))
        assert writer.size_bytes == 8000
        assert read_back(store, writer.finish()) == b"abcdefgh" * 1000


KILLED = """
import os, signal, sys
from pathlib import Path
from bootseer.blocks.writer import BlockWriter
from bootseer.store.store import Stored
import hashlib

root, fatal = Path(sys.argv[1]), int(sys.argv[2])
steps = 0

def step():
    global steps
    steps += 1
    if steps > fatal:
        os.kill(os.getpid(), signal.SIGKILL)

class Upload:
    def __init__(self): step(); self.data = bytearray()
    def write(self, data): step(); self.data += data
    def abort(self): pass
    def commit(self, name=None, **_):
        step()
        name = "sha256:" + hashlib.sha256(self.data).hexdigest()
        temporary = root / "temporary"
        temporary.write_bytes(self.data)
        step()
        temporary.rename(root / name)
        return Stored(name, len(self.data))

class Store:
    uri = "folder"
    upload = Upload

with BlockWriter(Store(), block_size=4096, threads=2) as writer:
    writer.write(b"abc" * 10_000)
    print(writer.finish().index_name, steps)
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_step_leaves_no_readable_index(tmp_path):
    def run(fatal: int, root: Path) -> subprocess.CompletedProcess[str]:
        root.mkdir()
        return subprocess.run(
            [sys.executable, "-c", KILLED, root, str(fatal)], capture_output=True, text=True, timeout=300, check=False
        )

    name, num_steps = run(10**6, tmp_path / "whole").stdout.split()
    stripes = {path.name for path in (tmp_path / "whole").iterdir()} - {name}
    assert len(stripes) == 1
    for fatal in range(int(num_steps)):
        root = tmp_path / str(fatal)
        assert run(fatal, root).returncode == -signal.SIGKILL
        assert not (root / name).exists()

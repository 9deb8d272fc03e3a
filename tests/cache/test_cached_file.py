from __future__ import annotations

import gc
import os
import random
import shutil
import tempfile
import threading
import weakref
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bootseer.artifact.objects import read_index
from bootseer.blocks.writer import BlockWriter
from bootseer.cache.cache import Cache
from bootseer.cache.disk import MissingBlocks
from bootseer.errors import PermanentError
from cached import BLOCK, BOOT, SCRATCH, Child, before, block_of, content, fetch, hold, index_of, limited, put
from store_doubles import MemoryStore

ZEROS = {3, 8}


def flip(path, offset, bit=0):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def test_a_new_file_has_only_its_blocks_of_zeros(cached, data):
    assert {block for block in range(13) if cached.ready(block)} == ZEROS
    assert cached.num_ready == 2
    assert not cached.complete
    assert cached.read(3 * BLOCK, BLOCK) == bytes(BLOCK)


def test_what_was_put_can_be_read(cached, data):
    put(cached, data)
    assert cached.complete
    for offset, length in ((0, len(data)), (1, 2), (BLOCK - 1, 2), (12 * BLOCK + 90, 100), (5 * BLOCK, BLOCK)):
        assert cached.read(offset, length) == data[offset : offset + length]


@pytest.mark.parametrize("verified", [False, True])
def test_what_was_put_can_be_read_into_the_callers_memory(cached, cache, data, verified):
    put(cached, data)
    file = cached if verified else cache.open(cached.index)
    for offset, length in ((0, len(data)), (1, 2), (BLOCK - 1, 2), (12 * BLOCK + 90, 10), (5 * BLOCK, BLOCK), (7, 0)):
        memory = bytearray(length)
        file.readinto(offset, memoryview(memory))
        assert memory == data[offset : offset + length]
    file.close()


def test_reading_into_memory_finds_damage_and_names_what_is_missing(cached, cache, data):
    put(cached, data, [0, 1, 2, 4])
    flip(cached.path, BLOCK + 5)
    flip(cached.path, 2 * BLOCK + 5)
    file = cache.open(cached.index)
    with pytest.raises(MissingBlocks) as caught:
        file.readinto(0, memoryview(bytearray(6 * BLOCK)))
    assert caught.value.blocks == [1, 2, 5]
    assert not file.ready(1)
    with pytest.raises(MissingBlocks):
        file.readinto(2 * BLOCK + 1, memoryview(bytearray(10)))
    file.close()
    with pytest.raises((PermanentError, MissingBlocks)):
        file.readinto(0, memoryview(bytearray(10)))


def test_the_data_file_is_the_file(cached, data):
    put(cached, data)
    assert cached.path.read_bytes() == data


def test_a_read_past_the_end_or_of_nothing_is_empty(cached, data):
    assert cached.read(len(data), 10) == cached.read(0, 0) == cached.read(10**12, 1) == b""


def test_missing_blocks_are_named(cached, data):
    put(cached, data, [1])
    with pytest.raises(MissingBlocks) as caught:
        cached.read(BLOCK - 1, 4 * BLOCK)
    assert caught.value.blocks == [0, 2, 4]
    assert cached.missing(BLOCK - 1, 4 * BLOCK) == [0, 2, 4]
    assert cached.missing(BLOCK, BLOCK) == cached.missing(0, 0) == cached.missing(len(data), 5) == []


@pytest.mark.parametrize("length", [0, BLOCK - 1, BLOCK + 1])
def test_a_block_of_another_length_is_refused(cached, length):
    with pytest.raises(ValueError, match="block 2"):
        cached.put(2, bytes(length))
    assert not cached.ready(2)


@pytest.mark.parametrize("offset", [0, 1, 100, BLOCK - 1])
def test_a_flipped_bit_is_found_at_the_first_use(cache, cached, index, data, offset):
    put(cached, data)
    other = cache.open(index)
    flip(cached.path, 4 * BLOCK + offset)
    with pytest.raises(MissingBlocks) as caught:
        other.read(3 * BLOCK, 3 * BLOCK)
    assert caught.value.blocks == [4]
    assert not other.ready(4)
    assert fetch(other, data, 0, len(data)) == data
    other.close()


def test_a_flipped_bit_in_a_block_of_zeros_is_healed(cache, cached, index, data):
    flip(cached.path, 3 * BLOCK + 7)
    with pytest.raises(MissingBlocks):
        cached.read(3 * BLOCK, 1)
    put(cached, data, [3])
    assert cached.read(3 * BLOCK, BLOCK) == bytes(BLOCK)


def test_data_that_was_cut_is_missing_and_never_zeros(cached, data):
    put(cached, data)
    assert cached.read(0, len(data)) == data
    os.truncate(cached.path, 5 * BLOCK + 10)
    with pytest.raises(MissingBlocks) as caught:
        cached.read(4 * BLOCK, 3 * BLOCK)
    assert caught.value.blocks == [5, 6]
    assert fetch(cached, data, 4 * BLOCK, 3 * BLOCK) == data[4 * BLOCK : 7 * BLOCK]


def test_a_live_map_that_was_cut_claims_nothing(cached, cache, index, data):
    put(cached, data)
    other = cache.open(index)
    os.truncate(cached.entry / "live", 10)
    assert other.num_ready == 0
    assert fetch(other, data, 0, len(data)) == data
    other.close()


def test_two_openings_share_what_is_ready(cache, cached, index, data):
    other = cache.open(index)
    put(cached, data, [0, 1])
    assert other.ready(0)
    assert other.read(0, 2 * BLOCK) == data[: 2 * BLOCK]
    other.close()


def test_one_caller_gets_the_claim(cache, cached, index, data):
    other = cache.open(index)
    assert cached.claim(0)
    assert not cached.claim(0)
    assert not other.claim(0)
    assert other.claim(1)
    cached.release(0)
    assert other.claim(0)
    other.put(0, block_of(data, 0))
    other.release(0)
    assert not cached.claim(0)
    assert not cached.claim(3)  # blocks of zeros are ready
    other.close()
    assert cached.claim(1)


def test_a_block_that_came_while_it_was_being_claimed_is_not_claimed(cache, cached, index, data):
    other = cache.open(index)
    with before("fcntl", lambda: put(other, data, [0])):
        assert not cached.claim(0)
    other.close()


def test_a_claim_and_a_lease_fall_with_their_process(root, cache, cached, index):
    with Child(hold, root, 1, 12, 7) as child:
        assert child.receive()
        assert not cached.claim(7)
        child.kill()
    assert cached.claim(7)


def test_calls_of_a_closed_file_are_errors(cached, data):
    put(cached, data)
    cached.close()
    cached.close()
    for call in (
        lambda: cached.read(0, 10),
        lambda: cached.put(0, data[:BLOCK]),
        lambda: cached.claim(0),
        cached.sync,
        cached.verify_all,
    ):
        with pytest.raises(PermanentError, match="closed"):
            call()


def test_descriptors_of_a_closed_file_are_not_used_again_while_it_can_be_called(cached, tmp_path):
    numbers = set(cached._fds)
    cached.close()
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
    assert other not in numbers
    os.close(other)


def test_a_file_that_was_forgotten_gives_its_lease_back(cache, index):
    cached = cache.open(index)
    gone = weakref.ref(cached)
    del cached
    gc.collect()
    assert gone() is None
    assert not cache.entries()[0].in_use


def test_closing_under_readers_gives_them_errors_and_no_wrong_bytes(cache, index, data):
    cached = cache.open(index)
    put(cached, data)
    wrong, started = [], threading.Barrier(4)

    def read():
        rng = random.Random()
        started.wait(120)
        try:
            while True:
                offset = rng.randrange(len(data))
                if cached.read(offset, 5000) != data[offset : offset + 5000]:
                    wrong.append(offset)
        except PermanentError:
            return

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait(120)
    cached.close()
    others = [cache.open(index) for _ in range(5)]
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert wrong == []
    for other in others:
        other.close()


def test_many_threads_see_the_file(cache, index, data):
    cached = cache.open(index)
    wrong = []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(200):
            offset, length = rng.randrange(len(data)), rng.randrange(1, 3 * BLOCK)
            if fetch(cached, data, offset, length) != data[offset : offset + length]:
                wrong.append(offset)
            if rng.random() < 0.05:
                cached.sync()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    cached.close()


def test_where_files_may_not_grow_only_the_blocks_that_fit_are_there(root):
    with Child(limited, root, 12, 5 * BLOCK + 77) as child:
        done, full, ready = child.receive()
    assert done == ready == [0, 1, 2, 3, 4]
    assert full == list(range(5, 13))
    data = content(12, zeros=False)
    cached = Cache(root, boot=BOOT).open(index_of(data))
    assert cached.read(0, 5 * BLOCK) == data[: 5 * BLOCK]
    assert fetch(cached, data, 0, len(data)) == data
    cached.close()


def test_verifying_everything_drops_and_reports_damage(cached, data):
    put(cached, data)
    flip(cached.path, 2 * BLOCK)
    flip(cached.path, 12 * BLOCK + 99)
    seen = []
    assert cached.verify_all(progress=lambda done, total: seen.append((done, total))) == [2, 12]
    assert seen == [(13, 13)]
    assert not cached.complete
    assert not cached.trusted
    put(cached, data)
    cached.sync()
    assert cached.trusted


def test_a_complete_file_is_trusted_only_after_a_sync_and_until_it_is_written_to(cached, data):
    put(cached, data, range(12))
    cached.sync()
    assert not cached.trusted
    put(cached, data)
    assert not cached.trusted
    cached.sync()
    assert cached.trusted
    flip(cached.path, 0)
    assert not cached.trusted
    assert cached.verify_all() == [0]
    put(cached, data)
    assert cached.verify_all() == []
    assert cached.trusted


def test_verifying_makes_a_file_trusted_that_others_filled_and_did_not_sync(cache, cached, index, data):
    cached.sync()
    other = cache.open(index)
    put(other, data)
    other.close()
    assert cached.verify_all() == []
    assert cached.trusted


def test_an_empty_file_is_complete(cache):
    cached = cache.open(index_of(b""))
    assert cached.complete
    assert cached.read(0, 10) == b""
    cached.sync()
    assert cached.trusted
    cached.close()


def test_a_file_that_was_replaced_does_not_write_into_its_successor(cache, cached, index, data):
    put(cached, data)
    (cached.entry / "index").write_bytes(b"foreign")
    other = cache.open(index)
    with pytest.raises(PermanentError, match="replaced"):
        cached.sync()
    assert cached.read(0, len(data)) == data
    assert other.num_ready == len(ZEROS)
    other.close()


class AsBytes(RuleBasedStateMachine):
    """A cached file behaves like an array of bytes with holes, also for other openers, after boots and with damage."""

    DATA = content(9, 7)
    INDEX = index_of(DATA)
    NUM_BLOCKS = INDEX.num_blocks
    blocks = st.integers(0, NUM_BLOCKS - 1)

    def __init__(self):
        super().__init__()
        self.boot = 0
        self.here = {3, 8}
        self.durable: set[int] = set()
        self.damaged: set[int] = set()
        self.checked: list[set[int]] = [set(), set()]
        self.files = []
        self.folder = None

    @initialize()
    def start(self):
        self.folder = Path(tempfile.mkdtemp(dir=SCRATCH))
        self._open()

    def _open(self):
        cache = Cache(self.folder, boot=str(self.boot))
        self.files = [cache.open(self.INDEX) for _ in range(2)]
        self.checked = [set(), set()]

    @rule(which=st.integers(0, 1), block=blocks)
    def put_block(self, which, block):
        self.files[which].put(block, block_of(self.DATA, block))
        if block not in self.checked[which]:
            self.damaged.discard(block)
            self.here.add(block)
        self.checked[which].add(block)

    @rule(which=st.integers(0, 1), offset=st.integers(0, len(DATA)), length=st.integers(1, 4 * BLOCK))
    def read_range(self, which, offset, length):
        blocks = set(self.INDEX.blocks_of(offset, length))
        unknown = blocks - self.checked[which]
        try:
            got = self.files[which].read(offset, length)
        except MissingBlocks as missing:
            assert set(missing.blocks) == unknown & ((set(range(self.NUM_BLOCKS)) - self.here) | self.damaged)
            self.here -= set(missing.blocks)
            self.damaged -= set(missing.blocks)
            self.checked[which] |= unknown & self.here
        else:
            assert not unknown & self.damaged
            assert got == self.DATA[offset : offset + length] or blocks & self.damaged
            assert blocks <= self.here | self.checked[which]
            self.checked[which] |= blocks

    @rule(block=blocks)
    def damage(self, block):
        """Only blocks not verified yet: later damage is found by `verify_all`."""
        if block in self.here and not any(block in checked for checked in self.checked):
            if block in self.damaged:
                return
            flip(self.files[0].path, block * BLOCK + 5)
            self.damaged.add(block)

    @rule(which=st.integers(0, 1))
    def sync(self, which):
        self.files[which].sync()

    @rule(which=st.integers(0, 1))
    def verify(self, which):
        assert set(self.files[which].verify_all(1)) == self.damaged & self.here
        self.here -= self.damaged
        self.damaged.clear()
        self.checked[which] = set(self.here)
        assert self.files[which].trusted == (len(self.here) == self.NUM_BLOCKS)

    @rule()
    def reopen(self):
        for file in self.files:
            file.close()
        self._open()

    @rule()
    def start_the_machine_again(self):
        for file in self.files:
            file.sync()
            file.close()
        self.boot += 1
        self._open()

    @precondition(lambda self: self.files)
    @invariant()
    def all_agree_on_what_is_here(self):
        for which, file in enumerate(self.files):
            assert {block for block in range(self.NUM_BLOCKS) if file.ready(block)} == self.here | self.checked[which]
            assert file.num_ready == len(self.here)

    def teardown(self):
        for file in self.files:
            file.close()
        if self.folder is not None:
            shutil.rmtree(self.folder)


AsBytes.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_a_cached_file_behaves_as_bytes_with_holes = AsBytes.TestCase


def test_blocks_of_the_usual_size_work_as_well(cache):
    data = random.Random(5).randbytes(700_000)
    store = MemoryStore("usual")
    with BlockWriter(store) as writer:
        writer.write(data)
        block_file = writer.finish()
    cached = cache.open(read_index(store, block_file))
    for block in range(3):
        cached.put(block, data[block << 18 : block + 1 << 18])
    assert cached.read(0, 1 << 20) == data
    cached.close()

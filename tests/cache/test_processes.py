"""Processes that share a cache, and processes that are killed at each of their system calls."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from bootseer.cache.cache import Cache
from bootseer.cache.disk import MissingBlocks
from cached import BOOT, FILE, Child, churn, content, fetch, index_of, kill_everywhere, share

pytestmark = pytest.mark.slow

INDEX = index_of(FILE)
# Operations that precede each scenario.
BEFORE = {
    "create and put": [],
    "complete": [],
    "new boot": ["complete"],
    "prune": ["complete"],
}


def check(root: Path, boot: str, *, lost: bool) -> None:
    """In all cases: no wrong bytes are read, all blocks can be fetched again, and nothing is left over."""
    if lost:  # a crash of the machine that lost all data, even synced data
        for path in root.glob("files/*/data"):
            size = path.stat().st_size
            path.write_bytes(bytes(size))
    cache = Cache(root, boot=boot)
    cache.entries()
    cached = cache.open(INDEX)
    for block in range(INDEX.num_blocks):
        offset = block * INDEX.block_size
        try:
            assert cached.read(offset, INDEX.block_size) == FILE[offset : offset + INDEX.block_size]
        except MissingBlocks as missing:
            assert missing.blocks == [block]
    assert all(cached.claim(block) for block in range(INDEX.num_blocks) if not cached.ready(block))
    assert fetch(cached, FILE, 0, len(FILE)) == FILE
    assert cached.verify_all(1) == []
    assert cached.trusted
    assert cached.path.read_bytes() == FILE
    cached.close()
    for path in root.glob("new/*"):
        os.utime(path, (0, 0))  # of another boot: deleted after ten minutes
    Cache(root, boot=f"after {boot}").prune(0)
    assert [path for path in root.rglob("*") if path.name not in ("files", "new", "trash", "lock")] == []


@pytest.mark.parametrize("name", list(BEFORE))
@pytest.mark.parametrize("boot", [BOOT, "after a crash"])
def test_a_process_killed_at_any_system_call_leaves_a_cache_that_works(name, boot, scratch):
    with Child(kill_everywhere, name, BEFORE[name], scratch) as child:
        status, roots = child.receive()
    assert status == 0
    assert len(roots) > 20
    for number, root in enumerate(roots):
        check(root, boot, lost=boot != BOOT and number % 2 == 0)


def test_processes_that_start_together_fetch_each_block_once(tmp_path):
    for round_number in range(3):
        root = tmp_path / str(round_number)
        children = [Child(share, root, round_number, 300) for _ in range(3)]
        try:
            for child in children:
                assert child.receive() == "ready"
            for child in children:
                child.send()
            own = [child.receive() for child in children]
        finally:
            for child in children:
                child.__exit__()
        index = index_of(content(300, round_number))
        zeros = index.codecs().count(2)
        blocks = [block for blocks in own for block in blocks]
        assert len(blocks) == len(set(blocks)) == index.num_blocks - zeros
        cached = Cache(root, boot=BOOT).open(index)
        assert cached.trusted
        cached.close()


def test_opening_filling_and_pruning_at_once_never_gives_a_wrong_byte(root):
    children = [Child(churn, root, [1, 2, 3], 8, 60) for _ in range(3)]
    try:
        for child in children:
            assert child.receive() == "done"
    finally:
        for child in children:
            child.__exit__()


def test_processes_killed_at_random_times_leave_a_cache_that_works(root):
    rng = random.Random(1)
    for _ in range(25):
        children = [Child(churn, root, [1, 2], 8, 10_000) for _ in range(2)]
        time.sleep(rng.random() * 0.15)  # a random time, not a wait for a condition
        for child in children:
            child.kill()
            child.__exit__()
    cache = Cache(root, boot=BOOT)
    for seed in (1, 2):
        data = content(8, seed)
        cached = cache.open(index_of(data))
        assert fetch(cached, data, 0, len(data)) == data
        assert cached.verify_all(1) == []
        cached.close()
    cache.prune(0)
    assert cache.entries() == []

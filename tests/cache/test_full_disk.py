"""A full disk: a small tmpfs that is filled up."""

from __future__ import annotations

import os

import pytest

from bootseer.cache.cache import Cache
from bootseer.cache.disk import CacheFull
from cached import BLOCK, BOOT, block_of, content, fetch, index_of, put
from small_disks import small_disk

pytestmark = pytest.mark.root


@pytest.fixture
def disk(tmp_path):
    """A tmpfs of 512 KiB."""
    with small_disk(tmp_path / "disk", "size=512k") as folder:
        yield folder


def fill_up(folder, *, leave=0):
    path = folder / "ballast"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(fd, bytes(BLOCK))
    except OSError:
        os.ftruncate(fd, os.fstat(fd).st_size - leave)
    finally:
        os.close(fd)


def test_a_block_that_does_not_fit_is_missing_and_the_others_stay(disk):
    data = content(200, zeros=False)
    cache = Cache(disk / "cache", boot=BOOT)
    cached = cache.open(index_of(data))
    done = []
    with pytest.raises(CacheFull, match="free space"):
        for block in range(200):
            cached.put(block, block_of(data, block))
            done.append(block)
    assert 50 < len(done) < 130
    assert [block for block in range(200) if cached.ready(block)] == done
    assert cached.read(0, len(done) * BLOCK) == data[: len(done) * BLOCK]
    assert cached.claim(len(done))
    cached.close()


def test_states_change_on_a_full_disk(disk):
    """States of blocks change without new disk space, so that damaged blocks can be dropped."""
    data = content(20, zeros=False)
    cached = Cache(disk / "cache", boot=BOOT).open(index_of(data))
    put(cached, data, range(10))
    fill_up(disk)
    with cached.path.open("r+b") as file:
        file.write(b"spoiled")
    with pytest.raises(CacheFull):
        cached.verify_all()  # the snapshot does not fit
    assert not cached.ready(0)
    cached.put(0, block_of(data, 0))  # its space is still allocated
    with pytest.raises(CacheFull):
        cached.sync()
    (disk / "ballast").unlink()
    cached.sync()
    cached.close()
    cached = Cache(disk / "cache", boot="another").open(cached.index)
    assert cached.num_ready == 10
    cached.close()


def test_a_snapshot_that_does_not_fit_leaves_the_old_one(disk):
    data = content(20, zeros=False)
    cached = Cache(disk / "cache", boot=BOOT).open(index_of(data))
    put(cached, data, range(10))
    cached.sync()
    put(cached, data, range(10, 20))
    fill_up(disk)
    with pytest.raises(CacheFull):
        cached.sync()
    cached.close()
    assert [path.name for path in cached.entry.iterdir() if "." in path.name] == []
    cached = Cache(disk / "cache", boot="another").open(cached.index)
    assert cached.num_ready == 10
    cached.close()


@pytest.mark.parametrize("leave", range(0, 8 * BLOCK, BLOCK))
def test_an_entry_that_does_not_fit_leaves_nothing_behind(disk, leave):
    data = content(100, zeros=False)
    index = index_of(data)
    cache = Cache(disk / "cache", boot=BOOT)
    fill_up(disk, leave=leave)
    try:
        cached = cache.open(index)
    except CacheFull:
        assert list((disk / "cache" / "files").iterdir()) == list((disk / "cache" / "new").iterdir()) == []
    else:
        cached.close()
    (disk / "ballast").unlink()
    cached = cache.open(index)
    put(cached, data, range(50))
    assert cached.read(0, 50 * BLOCK) == data[: 50 * BLOCK]
    cached.close()


@pytest.mark.parametrize("boot", [BOOT, "another"])
def test_an_entry_is_opened_on_a_full_disk(disk, boot):
    data = content(20, zeros=False)
    cached = Cache(disk / "cache", boot=BOOT).open(index_of(data))
    put(cached, data)
    cached.sync()
    cached.close()
    fill_up(disk)
    cached = Cache(disk / "cache", boot=boot).open(cached.index)
    assert cached.read(0, len(data)) == data
    cached.close()


def test_evicting_makes_room_on_a_full_disk(disk):
    data = content(60, zeros=False)
    cache = Cache(disk / "cache", boot=BOOT)
    cached = cache.open(index_of(data))
    put(cached, data, range(50))
    cached.sync()
    cached.close()
    fill_up(disk)
    assert cache.prune().freed_bytes > 0
    other = content(2, 5, zeros=False)
    cached = cache.open(index_of(other))
    assert fetch(cached, other, 0, len(other)) == other
    cached.close()


def test_blocks_that_fill_the_disk_leave_space_for_their_states(disk):
    data = content(200, zeros=False)
    cached = Cache(disk / "cache", boot=BOOT).open(index_of(data))
    with pytest.raises(CacheFull, match="cache prune"):
        put(cached, data, range(200))
    cached.sync()
    num_ready = cached.num_ready
    cached.close()
    cached = Cache(disk / "cache", boot="another").open(cached.index)
    assert cached.num_ready == num_ready > 0
    cached.close()

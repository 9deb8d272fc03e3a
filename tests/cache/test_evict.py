from __future__ import annotations

import errno
import fcntl
import signal

import pytest

from bootseer.cache import evict
from bootseer.cache.cache import Cache
from bootseer.cache.eviction_plan import Step
from bootseer.io import files
from cached import BLOCK, BOOT, Child, before, content, fetch, hold, index_of, put


def fill(cache, index, data, *, read=(), hot=()):
    cached = cache.open(index)
    put(cached, data)
    for block in read:
        cached.read(block * BLOCK, 1)
    cached.mark_hot(hot)
    cached.sync()
    cached.close()


def here(cache, index):
    cached = cache.open(index)
    blocks = [block for block in range(index.num_blocks) if cached.ready(block)]
    cached.close()
    return blocks


def test_cold_blocks_are_punched_out_and_the_others_stay(cache, index, data):
    fill(cache, index, data, read=[0, 5], hot=[1, 11])
    before = cache.entries()[0].disk_bytes
    pruned = cache.prune(before - 3 * BLOCK)
    assert [step.whole for step in pruned.steps] == [False]
    assert pruned.freed_bytes >= 3 * BLOCK
    assert cache.entries()[0].disk_bytes <= before - 3 * BLOCK
    left = here(cache, index)
    assert {0, 1, 5, 11} <= set(left)
    assert not {9, 10, 12} & set(left)
    cached = cache.open(index)
    assert not cached.trusted
    assert fetch(cached, data, 0, len(data)) == data
    cached.sync()
    assert cached.trusted
    cached.close()


@pytest.mark.parametrize("shared", [True, False])
def test_where_holes_cannot_be_punched_no_more_entries_go_than_needed(cache, index, data, monkeypatch, shared):
    """On a network file system readers on other nodes, whose locks may not be seen, would read zeros."""

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    if shared:
        monkeypatch.setattr(files, "_SHARED", b"")  # all types
    else:
        monkeypatch.setattr(files, "punch", refuse)
        monkeypatch.setattr(evict, "punch", refuse)
    fill(cache, index, data, read=range(12))  # its cold blocks, the last one, do not suffice
    later = content(9)
    fill(cache, index_of(later), later, read=[0, 5])
    pruned = cache.prune(sum(entry.disk_bytes for entry in cache.entries()) - 5 * BLOCK)
    assert [(step.identity, step.whole) for step in pruned.steps] == [(index.identity, True)]
    assert [entry.identity for entry in cache.entries()] == [index_of(later).identity]


@pytest.mark.parametrize("boot", [BOOT, "another"])
def test_what_was_punched_out_is_forgotten_over_a_boot(cache, index, data, boot):
    fill(cache, index, data, hot=[0])
    Cache(cache.root, boot=boot).prune(cache.entries()[0].disk_bytes - 2 * BLOCK)
    after = Cache(cache.root, boot="a third")
    left = here(after, index)
    assert not {11, 12} & set(left)
    cached = after.open(index)
    for block in left:
        assert cached.read(block * BLOCK, BLOCK) == data[block * BLOCK : (block + 1) * BLOCK]
    cached.close()


def test_blocks_of_a_file_that_something_reads_without_a_lease_stay(cache, index, data):
    fill(cache, index, data)
    entry = cache.entries()[0]
    with (entry.path / "data").open("rb") as file:  # as the kernel does for a mount
        assert cache.prune(entry.disk_bytes - 3 * BLOCK).steps == ()
        assert file.read() == data
    assert cache.prune(entry.disk_bytes - 3 * BLOCK).steps


def test_an_entry_that_another_process_is_about_to_evict_from_is_not_damaged(cache, index, data):
    fill(cache, index, data)
    with (cache.entries()[0].path / "data").open("rb+") as file:
        previous = signal.signal(signal.SIGURG, lambda *_: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK))
        try:
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            assert not cache.entries()[0].damaged
        finally:
            signal.signal(signal.SIGURG, previous)


def test_whole_entries_go_when_cold_blocks_are_not_enough(cache):
    files = {seed: content(6, seed, zeros=False) for seed in (1, 2, 3)}
    indexes = {seed: index_of(data) for seed, data in files.items()}
    for seed, data in files.items():
        fill(cache, indexes[seed], data, read=range(7))
    each = cache.entries()[0].disk_bytes
    pruned = cache.prune(2 * each)
    assert [(step.identity, step.whole) for step in pruned.steps] == [(indexes[1].identity, True)]
    assert [entry.identity for entry in cache.entries()] == [indexes[3].identity, indexes[2].identity]
    assert not any((cache.root / "trash").iterdir())


def test_entries_with_a_lease_or_a_pin_stay(cache, index, data):
    fill(cache, index, data)
    cached = cache.open(index)
    assert cache.prune(0).in_use == (index.identity,)
    cached.pin()
    cached.close()
    assert cache.prune(0).steps == ()
    assert here(cache, index) == list(range(13))
    cache.unpin(index.identity)
    assert cache.prune(0).freed_bytes > 0
    assert cache.entries() == []


def test_a_pin_ends_with_the_boot(cache, index, data):
    cached = cache.open(index)
    cached.pin()
    cached.close()
    later = Cache(cache.root, boot="later")
    later.prune(0)
    assert later.entries() == []


def test_a_lease_of_another_process_keeps_an_entry(root, cache, index, data):
    fill(cache, index, data)
    with Child(hold, root, 1, 12, None) as child:
        assert child.hear()
        assert cache.prune(0).freed_bytes == 0
        child.kill()
    assert cache.prune(0).freed_bytes > 0


def test_a_dry_run_says_what_it_would_do_and_does_nothing(cache, index, data):
    fill(cache, index, data, hot=[0])
    told = cache.prune(0, dry_run=True)
    assert here(cache, index) == list(range(13))
    assert told.steps == cache.prune(0).steps
    assert told.freed_bytes == told.used_bytes


def test_the_watermarks_decide_when_no_size_is_given(root, cache, index, data):
    fill(cache, index, data, read=range(13))
    used = cache.entries()[0].disk_bytes
    assert Cache(root, max_bytes=2 * used, boot=BOOT).prune().steps == ()
    assert cache.prune().steps == ()  # the disk has room
    assert Cache(root, max_bytes=used, boot=BOOT).prune().freed_bytes > 0


def test_bytes_that_a_killed_process_wrote_and_never_claimed_are_freed(cache, index, data):
    fill(cache, index, data, hot=[0], read=[])
    path = cache.entries()[0].path
    with (path / "live").open("r+b") as live:
        live.seek(64 + 5)
        live.write(b"\0")
    before = (path / "data").stat().st_blocks
    cache.prune(cache.entries()[0].disk_bytes - BLOCK)
    assert before - (path / "data").stat().st_blocks >= 2 * BLOCK // 512


@pytest.fixture
def replaced(cache, index, data):
    """Replaces the entry by a new one, which somebody has open. Gives the function that does, and the new files."""
    opened = []

    def replace():
        cache.entries()[0].path.rename(cache.root / "trash" / "old")
        opened.append(cache.open(index))
        put(opened[0], data)

    yield replace, opened
    for cached in opened:
        cached.close()


def test_a_lease_on_an_entry_that_has_moved_is_none(cache, index, data, replaced):
    fill(cache, index, data)
    replace, opened = replaced
    with before("flock", replace):
        cached = cache.open(index)
    opened[0].close()
    assert cached.num_ready == 13
    assert cache.prune(0).in_use == (index.identity,)
    cached.close()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("call", ["open", "fstat", "flock"])
def test_an_entry_that_came_in_the_place_of_the_one_to_evict_stays(cache, index, data, replaced, whole, call):
    fill(cache, index, data)
    entry = cache.entries()[0].path
    replace, opened = replaced
    with before(call, replace):
        evict.evict(entry, Step(index.identity, whole, 5 * BLOCK), cache.root, BOOT)
    if opened:
        assert opened[0].path.samefile(entry / "data")
        assert opened[0].complete
        assert opened[0].read(0, len(data)) == data


def test_an_entry_without_a_lease_file_that_is_replaced_meanwhile_stays(cache, index, data, replaced):
    fill(cache, index, data)
    entry = cache.entries()[0].path
    (entry / "lease").unlink()  # nobody can hold it
    replace, opened = replaced
    with before("flock", replace):
        assert not evict.evict(entry, Step(index.identity, True, 0), cache.root, BOOT)
    assert opened[0].path.samefile(entry / "data")

from __future__ import annotations

import fcntl
import signal

import pytest

from bootseer.cache import disk
from bootseer.cache.cache import Cache
from bootseer.io import files
from cached import BOOT, Child, before, content, hold, index_of, put


def fill(cache, index, data):
    cached = cache.open(index)
    put(cached, data)
    cached.sync()
    cached.close()


def here(cache, index):
    cached = cache.open(index)
    blocks = [block for block in range(index.num_blocks) if cached.ready(block)]
    cached.close()
    return blocks


def test_a_file_that_something_reads_without_a_lease_stays(cache, index, data):
    fill(cache, index, data)
    path = cache.entries()[0].path / "data"
    with path.open("rb"):  # like the kernel for a mount
        assert cache.prune(0).in_use == (index.identity,)
        assert not cache._evict(path.parent)  # like a mount made after the entries were listed
    assert cache.prune(0).freed_bytes > 0
    assert cache.entries() == []


@pytest.mark.parametrize("is_network", [True, False])
def test_a_reader_of_an_evicted_file_reads_all_of_it(cache, index, data, monkeypatch, is_network):
    """Also if the reader is not visible: on another machine, or without a lease file."""
    fill(cache, index, data)
    path = cache.entries()[0].path / "data"
    if is_network:
        monkeypatch.setattr(files, "_SHARED", b"")  # all file system types
    else:
        monkeypatch.setattr(disk, "has_other_users", lambda fd: False)
    with path.open("rb", buffering=0) as reader:
        assert cache.prune(0).freed_bytes > 0
        assert cache.entries() == []
        assert reader.readall() == data


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


def test_what_was_not_used_for_longest_goes_first_and_no_more_than_needed(cache):
    files = {seed: content(6, seed, zeros=False) for seed in (1, 2, 3)}
    indexes = {seed: index_of(data) for seed, data in files.items()}
    for seed, data in files.items():
        fill(cache, indexes[seed], data)
    each = cache.entries()[0].disk_bytes
    pruned = cache.prune(2 * each)
    assert [one.identity for one in pruned.evicted] == [indexes[1].identity]
    assert [entry.identity for entry in cache.entries()] == [indexes[3].identity, indexes[2].identity]
    assert not any((cache.root / "trash").iterdir())


def test_entries_with_a_lease_stay(cache, index, data):
    fill(cache, index, data)
    cached = cache.open(index)
    assert cache.prune(0).in_use == (index.identity,)
    assert cached.read(0, len(data)) == data
    cached.close()
    assert cache.prune(0).freed_bytes > 0
    assert cache.entries() == []


def test_a_lease_of_another_process_keeps_an_entry(root, cache, index, data):
    fill(cache, index, data)
    with Child(hold, root, 1, 12, None) as child:
        assert child.receive()
        assert cache.prune(0).freed_bytes == 0
        child.kill()
    assert cache.prune(0).freed_bytes > 0


def test_a_dry_run_reports_what_it_would_do_and_does_nothing(cache, index, data):
    fill(cache, index, data)
    told = cache.prune(0, dry_run=True)
    assert here(cache, index) == list(range(13))
    assert [one.identity for one in told.evicted] == [one.identity for one in cache.prune(0).evicted]
    assert told.freed_bytes == told.used_bytes


def test_the_watermarks_decide_when_no_size_is_given(root, cache, index, data):
    fill(cache, index, data)
    used = cache.entries()[0].disk_bytes
    assert Cache(root, max_bytes=2 * used, boot=BOOT).prune().evicted == ()
    assert cache.prune().evicted == ()  # the disk has free space
    assert Cache(root, max_bytes=used, boot=BOOT).prune().freed_bytes > 0


@pytest.fixture
def replaced(cache, index, data):
    """A function that replaces the entry by a new one, which is open, and the list of the new files."""
    opened = []

    def replace():
        cache.entries()[0].path.rename(cache.root / "trash" / "old")
        opened.append(cache.open(index))
        put(opened[0], data)

    yield replace, opened
    for cached in opened:
        cached.close()


def test_a_lease_on_an_entry_that_has_moved_is_not_valid(cache, index, data, replaced):
    fill(cache, index, data)
    replace, opened = replaced
    with before("flock", replace):
        cached = cache.open(index)
    opened[0].close()
    assert cached.num_ready == 13
    assert cache.prune(0).in_use == (index.identity,)
    cached.close()


@pytest.mark.parametrize("call", ["open", "fstat", "flock"])
def test_an_entry_that_came_in_the_place_of_the_one_to_evict_stays(cache, index, data, replaced, call):
    fill(cache, index, data)
    entry = cache.entries()[0].path
    replace, opened = replaced
    with before(call, replace):
        cache._evict(entry)
    if opened:
        assert opened[0].path.samefile(entry / "data")
        assert opened[0].complete
        assert opened[0].read(0, len(data)) == data


def test_an_entry_without_a_lease_file_that_is_replaced_meanwhile_stays(cache, index, data, replaced):
    fill(cache, index, data)
    entry = cache.entries()[0].path
    (entry / "lease").unlink()  # no lease can be held
    replace, opened = replaced
    with before("flock", replace):
        assert not cache._evict(entry)
    assert opened[0].path.samefile(entry / "data")

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from pathlib import Path

import pytest

from bootseer.cache import disk
from bootseer.cache.cache import Cache
from bootseer.cache.disk import MissingBlocks
from bootseer.cache.states import LiveMap
from bootseer.errors import AccessError, BootseerError, PermanentError, TransientError
from cached import BLOCK, BOOT, Child, content, fetch, hold, index_of, put

ZEROS = 2  # blocks of zeros, which are ready in a new file


def entry_of(cache, index):
    return cache.root / "files" / index.identity


def leavings(cache):
    return [path for name in ("new", "trash") for path in (cache.root / name).iterdir()]


@pytest.fixture
def full(cache, index, data):
    """A complete, synced and closed entry."""
    cached = cache.open(index)
    put(cached, data)
    cached.sync()
    cached.close()
    return entry_of(cache, index)


def test_a_file_is_found_again(cache, index, data, full):
    cached = Cache(cache.root, boot=BOOT).open(index)
    assert cached.complete
    assert cached.trusted
    assert cached.read(0, len(data)) == data
    cached.close()


def test_what_was_not_synced_survives_the_process(cache, index, data):
    cached = cache.open(index)
    put(cached, data, [0, 1])
    cached.close()
    cached = cache.open(index)
    assert cached.num_ready == 2 + ZEROS
    cached.close()


def test_what_was_not_synced_is_not_claimed_after_a_new_boot(cache, index, data):
    cached = cache.open(index)
    put(cached, data, [0, 1])
    cached.sync()
    put(cached, data, [2])
    cached.close()
    cached = Cache(cache.root, boot="another").open(index)
    assert [block for block in range(13) if cached.ready(block)] == [0, 1, 3, 8]
    assert fetch(cached, data, 0, len(data)) == data
    cached.close()


def test_after_a_crash_that_lost_data_nothing_wrong_is_read(cache, index, data, full):
    """The states list all blocks as ready, but the disk has lost some."""
    os.truncate(full / "data", 4 * BLOCK)
    os.truncate(full / "data", len(data))
    cached = Cache(cache.root, boot="another").open(index)
    assert cached.complete
    assert not cached.trusted
    with pytest.raises(MissingBlocks) as caught:
        cached.read(0, len(data))
    assert caught.value.blocks == [4, 5, 6, 7, 9, 10, 11, 12]
    assert fetch(cached, data, 0, len(data)) == data
    assert cached.verify_all() == []
    assert cached.trusted
    cached.close()


def test_a_complete_file_stays_trusted_over_a_boot(cache, index, full):
    cached = Cache(cache.root, boot="another").open(index)
    assert cached.trusted
    cached.close()


def test_a_complete_file_that_someone_wrote_to_is_verified_after_a_boot(cache, index, data, full):
    os.utime(full / "data")
    cached = Cache(cache.root, boot="another").open(index)
    assert cached.complete
    assert not cached.trusted
    cached.sync()
    assert not cached.trusted
    assert cached.read(0, len(data)) == data
    cached.sync()
    assert cached.trusted  # every block was verified
    cached.close()


def test_a_copy_of_a_cache_is_not_trusted(cache, index, data, full, tmp_path):
    shutil.copytree(cache.root, tmp_path / "copy")
    cached = Cache(tmp_path / "copy", boot="another").open(index)
    assert not cached.trusted
    assert cached.verify_all() == []
    assert cached.trusted
    cached.close()


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def lengthen(path):
    with path.open("ab") as file:
        file.write(b"more")


def overwrite(path):
    path.write_bytes(os.urandom(path.stat().st_size))


def empty(path):
    path.write_bytes(b"")


def to_folder(path):
    path.unlink()
    (path / "x").mkdir(parents=True)


def to_link(path):
    path.unlink()
    path.symlink_to(OUTSIDE)


def to_pipe(path):
    path.unlink()
    os.mkfifo(path)


def remove(path):
    path.unlink()


OUTSIDE = Path("/etc/passwd")
SPOILERS = [cut, lengthen, overwrite, empty, to_folder, to_link, to_pipe, remove]
REPLACED = {"index", "data", "lease"}


@pytest.mark.parametrize("spoil", SPOILERS)
@pytest.mark.parametrize("name", ["index", "data", "live", "durable", "lease", "last-use"])
@pytest.mark.parametrize("boot", [BOOT, "another"])
def test_a_spoiled_file_never_keeps_the_entry_from_being_used(cache, index, data, full, name, spoil, boot):
    path = full / name
    if not path.exists():
        path.write_bytes(bytes(13))
    outside = OUTSIDE.stat().st_mtime_ns
    spoil(path)
    again = Cache(cache.root, boot=boot)
    again.entries()
    cached = again.open(index)
    assert fetch(cached, data, 0, len(data)) == data
    assert cached.verify_all() == []
    assert cached.trusted
    cached.close()
    assert leavings(cache) == []
    [entry] = again.entries()
    assert (entry.damaged, entry.ready_bytes, entry.trusted) == (False, len(data), True)
    again.prune(0)
    assert again.entries() == []
    assert OUTSIDE.stat().st_mtime_ns == outside


@pytest.mark.parametrize("spoil", [shutil.rmtree, lambda path: (shutil.rmtree(path), path.touch())])
def test_a_file_in_place_of_an_entry_is_replaced(cache, index, data, full, spoil):
    spoil(full)
    cached = cache.open(index)
    assert cached.num_ready == ZEROS
    cached.close()


def test_an_entry_that_is_a_link_is_replaced_and_its_target_left_alone(cache, index, full, tmp_path):
    full.rename(tmp_path / "elsewhere")
    full.symlink_to(tmp_path / "elsewhere")
    cached = cache.open(index)
    assert cached.num_ready == ZEROS
    assert (tmp_path / "elsewhere" / "index").exists()
    cached.close()


def test_the_entry_of_another_index_is_replaced(cache, index, full):
    other = index_of(content(12, seed=9))
    full.rename(entry_of(cache, other))
    cached = cache.open(other)
    assert cached.num_ready == ZEROS
    cached.close()


def test_processes_that_have_a_damaged_entry_open_keep_their_files(cache, index, data, full):
    old = cache.open(index)
    overwrite(full / "index")
    new = cache.open(index)
    assert new.num_ready == ZEROS
    assert old.read(0, len(data)) == data
    old.close()
    new.close()


def test_leftovers_of_a_killed_process_are_removed(cache, index):
    (cache.root / "new" / f"{BOOT[:8]}-half").mkdir()
    (cache.root / "trash" / "gone").mkdir()
    cache.open(index).close()
    cache.prune(0)
    assert leavings(cache) == []


def test_what_another_machine_creates_stays_for_a_while(cache):
    """Its lock may not be visible here; the start on the other machine failed."""
    ours, theirs, old = (cache.root / "new" / name for name in (f"{BOOT[:8]}-half", "another-half", "another-old"))
    for path in (ours, theirs, old):
        path.mkdir()
    os.utime(old, (0, 0))
    cache.prune(0)
    assert list((cache.root / "new").iterdir()) == [theirs]


def test_the_last_use_decides_the_order(cache):
    indexes = [index_of(content(2, seed)) for seed in range(4)]
    for index in [*indexes, indexes[1]]:
        cache.open(index).close()
    order = [entry.identity for entry in cache.entries()]
    assert order == [indexes[i].identity for i in (1, 3, 2, 0)]


def test_what_was_used_for_long_was_used_until_it_was_closed(cache, index):
    cached = cache.open(index)
    cache.open(index_of(content(2, 1))).close()
    cached.close()
    assert cache.entries()[0].identity == index.identity


def test_entries_tell_what_is_here(cache, index, data):
    cached = cache.open(index)
    put(cached, data, [0, 1, 12])
    [entry] = cache.entries()
    assert entry.identity == index.identity
    assert entry.size_bytes == len(data)
    assert entry.ready_bytes == (2 + ZEROS) * BLOCK + 100
    assert entry.leases == (os.getpid(),)
    assert entry.in_use
    assert not entry.damaged
    assert not entry.trusted
    assert entry.disk_bytes >= 3 * BLOCK
    cached.close()
    [entry] = cache.entries()
    assert not entry.in_use
    assert entry.leases == ()


def test_entries_know_the_processes_that_hold_leases(root, cache):
    with Child(hold, root, 1, 12, None) as child:
        assert child.receive()
        [entry] = cache.entries()
        assert entry.leases == (child.process.pid,)
        child.kill()
    assert not cache.entries()[0].in_use


def test_an_entry_in_which_a_file_is_replaced_meanwhile_is_found(cache, index, full, monkeypatch):
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: [*listed(path), path / ".durable.renamed"])
    assert [entry.identity for entry in cache.entries()] == [index.identity]


def test_a_damaged_entry_is_shown_and_pruned(cache, index, full):
    overwrite(full / "index")
    [entry] = cache.entries()
    assert entry.damaged
    assert cache.prune().freed_bytes == entry.disk_bytes
    assert cache.entries() == []


@pytest.mark.parametrize("name", ["index", "durable"])
def test_an_entry_with_a_file_that_the_disk_cannot_read_is_shown_and_opened(cache, index, full, monkeypatch, name):
    opened, failures = disk.open_file, ["when it is shown", "when it is opened"]

    def on_a_bad_sector(path, flags=os.O_RDWR):
        if path == full / name and flags == os.O_RDONLY and failures:
            failures.pop()
            return os.open("/proc/self/mem", os.O_RDONLY)  # EIO at its beginning
        return opened(path, flags)

    (full / "live").unlink()  # as after a boot
    monkeypatch.setattr(disk, "open_file", on_a_bad_sector)
    assert len(cache.entries()) == 1
    cached = cache.open(index)
    assert cached.num_ready == ZEROS
    assert not failures
    cached.close()


def test_verifying_the_cache_names_the_blocks_it_dropped(cache, index, data, full):
    other = index_of(content(3, 5))
    cache.open(other).close()
    with (full / "data").open("r+b") as file:
        file.write(b"spoiled")
    seen = []
    dropped = cache.verify(threads=2, progress=lambda *step: seen.append(step))
    assert dropped == {index.identity: [0], other.identity: []}
    assert (index.identity, 13, 13) in seen
    assert cache.verify() == {index.identity: [], other.identity: []}
    assert [entry.identity for entry in cache.entries()] == [other.identity, index.identity]


def test_verifying_leaves_damaged_entries_out(cache, index, full):
    overwrite(full / "index")
    assert cache.verify() == {}


def test_a_root_that_others_may_change_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(AccessError, match="other users"):
        Cache(tmp_path / "open")


@pytest.mark.root
def test_a_root_that_belongs_to_another_user_is_refused(tmp_path):
    if os.geteuid():
        pytest.skip("only root can give a folder to another user")
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(AccessError, match="/theirs belongs to user 12345, not to user 0: set BOOTSEER_CACHE"):
        Cache(tmp_path / "theirs")


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/cache"])
def test_a_root_that_cannot_be_made_is_named(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(BootseerError, match=name if name[0] == "/" else f"{name}.*set BOOTSEER_CACHE"):
        Cache(tmp_path / name)


def test_other_users_cannot_read_the_cache(cache, index, full):
    for folder in (cache.root, cache.root / "files", full):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in full.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_an_entry_that_is_being_evicted_for_too_long_is_a_clear_error(cache, index, full, monkeypatch):
    monkeypatch.setattr(disk, "LOCK_S", 0.05)
    with (full / "lease").open("rb") as lease:
        fcntl.flock(lease, fcntl.LOCK_EX)
        with pytest.raises(TransientError, match="locked"):
            cache.open(index)
    cache.open(index).close()


def test_a_lock_of_the_root_that_is_held_is_a_clear_error(root, cache, index, monkeypatch):
    monkeypatch.setattr(disk, "LOCK_S", 0.05)
    with (root / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TransientError, match=f"process \\[{os.getpid()}\\]"):
            cache.open(index)


def test_an_entry_that_cannot_be_repaired_is_given_up(root, index):
    """Simulates a file system that loses written data."""
    cache = Cache(root, boot=BOOT)
    (root / "files").rmdir()
    (root / "files").symlink_to("/proc/self")
    with pytest.raises((PermanentError, TransientError), match=index.identity):
        cache.open(index)


def test_machines_that_see_only_their_own_locks_create_an_entry_at_once(cache, index, data, monkeypatch):
    """Like on BeeGFS, and on Lustre with `localflock`."""
    other, created = Cache(cache.root, boot="another"), []

    def create(*of):
        monkeypatch.undo()
        created.append(other.open(index))
        LiveMap.create(*of)

    monkeypatch.setattr(LiveMap, "create", create)
    monkeypatch.setattr(Cache, "_lock", lambda self: contextlib.nullcontext(-1))
    with contextlib.closing(cache.open(index)) as cached, contextlib.closing(*created) as same:
        put(same, data)
        assert fetch(cached, data, 0, len(data)) == data
    assert leavings(cache) == []

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from bootseer.errors import TransientError
from bootseer.io import locks


@pytest.fixture
def pair(tmp_path):
    """Two open file descriptions of one file."""
    path = tmp_path / "file"
    fds = [os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2)]
    yield fds
    for fd in fds:
        os.close(fd)


def test_shared_locks_go_together_and_keep_an_exclusive_one_out(pair):
    assert locks.try_flock(pair[0], shared=True)
    assert locks.try_flock(pair[1], shared=True)
    assert not locks.try_flock(pair[1], shared=False)


def test_a_lock_is_held_until_the_block_ends(tmp_path):
    path = tmp_path / "lock"
    with locks.flocked(path, deadline_s=1):
        assert locks.holders(path) == [os.getpid()]
        with pytest.raises(TransientError, match="locked"), locks.flocked(path, deadline_s=0):
            pass
    with locks.flocked(path, deadline_s=0):
        pass
    assert locks.holders(path) == []


def test_a_file_that_does_not_exist_has_no_holders(tmp_path):
    assert locks.holders(tmp_path / "none") == []


def test_a_lock_that_another_process_holds_is_given_up_after_a_while(pair, tmp_path):
    assert locks.try_flock(pair[0])
    with (
        pytest.raises(TransientError, match=rf"locked for 0\.05 s by process \[{os.getpid()}\]"),
        locks.flocked(tmp_path / "file", deadline_s=0.05),
    ):
        pass
    os.close(os.dup(pair[0]))  # a duplicate of the descriptor: the lock stays
    assert not locks.try_flock(pair[1])


def test_a_long_wait_is_explained_once(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_LONG_S", 0.0)
    assert locks.try_flock(pair[0])
    told = []
    with pytest.raises(TransientError), locks.flocked(tmp_path / "file", deadline_s=0.05, on_wait=told.append):
        pass
    assert told == [[os.getpid()]]


def test_short_waits_poll_at_equal_intervals(pair, tmp_path, monkeypatch):
    assert locks.try_flock(pair[0])
    pauses, sleep = [], locks.time.sleep
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: pauses.append(seconds) or sleep(seconds))
    with pytest.raises(TransientError), locks.flocked(tmp_path / "file", deadline_s=0.05):
        pass
    assert len(pauses) > 1
    assert max(pauses) == min(pauses)


def test_a_file_system_without_locks_leaves_no_open_file(tmp_path, monkeypatch):
    def refuse(fd, flags):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="No locks available"):
        locks.claim(tmp_path / "lock", "taken")
    assert len(list(Path("/proc/self/fd").iterdir())) == before

from __future__ import annotations

import os

import pytest

from bootseer.cache import locks
from bootseer.errors import TransientError


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


def test_each_byte_is_locked_for_itself(pair):
    assert locks.try_range(pair[0], 5)
    assert not locks.try_range(pair[1], 5)
    assert locks.try_range(pair[1], 6)
    assert locks.try_range(pair[1], 1 << 40)
    locks.release_range(pair[0], 5)
    assert locks.try_range(pair[1], 5)


def test_byte_locks_and_whole_file_locks_do_not_see_each_other(pair):
    assert locks.try_flock(pair[0], shared=False)
    assert locks.try_range(pair[1], 0)


def test_byte_locks_stay_when_another_descriptor_of_the_file_is_closed(pair, tmp_path):
    assert locks.try_range(pair[0], 5)
    os.close(os.open(tmp_path / "file", os.O_RDONLY))
    assert not locks.try_range(pair[1], 5)


def test_a_lock_is_held_until_the_block_ends(tmp_path):
    path = tmp_path / "lock"
    with locks.flocked(path, deadline_s=1):
        assert locks.holders(path) == [os.getpid()]
        with pytest.raises(TransientError, match="locked"), locks.flocked(path, deadline_s=0):
            pass
    with locks.flocked(path, deadline_s=0):
        pass
    assert locks.holders(path) == []


def test_a_file_that_is_not_there_has_no_holders(tmp_path):
    assert locks.holders(tmp_path / "none") == []

"""Locks that are waited for with an end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.errors import TransientError
from bootseer.mounts import flock


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def test_a_lock_that_somebody_holds_is_given_up_after_a_while(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = opened(path), opened(path)
    flock.lock(first, path, 0.0)
    with pytest.raises(TransientError, match=r"another process has held it for 0\.05 s"):
        flock.lock(second, path, 0.05)
    os.close(first)
    flock.lock(second, path, 0.0)
    os.close(second)

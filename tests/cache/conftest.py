from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from bootseer.cache.cache import Cache
from cached import BOOT, SCRATCH, content, index_of


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def scratch():
    """A folder for tests that sync very often."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        yield Path(folder)


@pytest.fixture
def cache(root):
    return Cache(root, boot=BOOT)


@pytest.fixture(scope="session")
def data():
    """Twelve blocks, of which blocks 3 and 8 are zeros, and a thirteenth of 100 bytes."""
    return content(12)


@pytest.fixture(scope="session")
def index(data):
    return index_of(data)


@pytest.fixture
def cached(cache, index):
    cached = cache.open(index)
    yield cached
    cached.close()

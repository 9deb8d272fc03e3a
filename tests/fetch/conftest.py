from __future__ import annotations

import threading
import time

import pytest

from bootseer.blocks.index import Index
from bootseer.cache.cache import Cache
from bootseer.fetch.fetch_settings import FetchSettings
from bootseer.fetch.fetcher import Fetcher
from fetch.files import content, stored
from store_doubles import FaultyStore, MemoryStore


def _threads() -> set[threading.Thread]:
    """Threads of fetchers; other threads may remain from other tests for a while."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("bootseer-fetch")}


@pytest.fixture
def origin(request):
    """A store for one test."""
    return MemoryStore(request.node.nodeid)


@pytest.fixture(scope="session")
def data():
    """Ninety-nine blocks of all codecs and a short one."""
    return content(99)


@pytest.fixture
def index(origin, data) -> Index:
    return stored(origin, data)


@pytest.fixture
def cache(tmp_path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def fetching(cache, origin, index):
    """Creates a fetcher for the file `index` with some faults. Returns fetcher, store and cached file."""
    undo = []

    def make(plan=(), settings=None, **options):
        store = FaultyStore(origin, plan)
        cached = cache.open(index)
        fetcher = Fetcher(settings or FetchSettings(), **options)
        undo.extend((fetcher.close, cached.close))
        assert fetcher.add(index, store, cached) == 0
        return fetcher, store, cached

    threads = _threads()
    yield make
    for step in undo:
        step()
    until = time.monotonic() + 300
    while not _threads() <= threads:  # each ends a moment after its work
        assert time.monotonic() < until, _threads() - threads
        time.sleep(0.001)

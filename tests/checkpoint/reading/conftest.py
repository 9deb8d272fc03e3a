from __future__ import annotations

import pytest

from bootseer.cache.cache import Cache
from bootseer.checkpoint.reading.reading import Reading
from bootseer.places.folder import FolderPlace
from checkpoint.faulty_place import FaultyPlace


@pytest.fixture
def empty(tmp_path):
    """A place of one's own, whose reads go wrong on order."""
    (tmp_path / "own").mkdir()
    return FaultyPlace(FolderPlace(tmp_path / "own"))


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


@pytest.fixture
def reading_of(empty, cache):
    """Makes what one process has: several of them share the place and the cache."""
    made = []

    def make(**more):
        made.append(Reading(empty, cache=cache, **more))
        return made[-1]

    yield make
    for reading in made:
        reading.close()

from __future__ import annotations

import pytest

from bootseer.cache.cache import Cache
from bootseer.checkpoint.reading.reading import Reading
from bootseer.places.folder import FolderPlace
from checkpoint.faulty_place import FaultyPlace


@pytest.fixture
def empty(tmp_path):
    """An empty place of the test, with configurable read faults."""
    (tmp_path / "own").mkdir()
    return FaultyPlace(FolderPlace(tmp_path / "own"))


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


@pytest.fixture
def reading_of(empty, cache):
    """Creates `Reading`s, one for each simulated process; all share the place and the cache."""
    made = []

    def make(**more):
        made.append(Reading(empty, cache=cache, **more))
        return made[-1]

    yield make
    for reading in made:
        reading.close()

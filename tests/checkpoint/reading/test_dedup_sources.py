from __future__ import annotations

import pytest

from bootseer.cache.cache import Cache
from bootseer.checkpoint.reading.reading import Reading
from checkpoint.striped_files import content_of, put_striped

MIB = 1 << 20


@pytest.fixture
def checkpoints(empty):
    """Two that differ in chunk 3, and in their stripes and segments."""
    old = content_of(8 * MIB + 500)
    new = old[: 3 * MIB] + content_of(MIB, seed=9) + old[4 * MIB :]
    put_striped(empty, "step-1", old, stripes=4, segment_rows=1)
    put_striped(empty, "step-2", new, stripes=2, segment_rows=64)
    return old, new


def test_chunks_that_an_earlier_checkpoint_had_are_not_read_again(reading_of, checkpoints):
    old, new = checkpoints
    reading = reading_of()
    assert reading.open("step-1").read(0, len(old)) == old
    reading.close()
    other = reading_of()
    assert other.open("step-2").read(0, len(new)) == new
    other.close()
    facts = other.facts()
    assert facts["place_bytes"] == MIB
    assert facts["donor_bytes"] == len(new) - MIB
    # All of it is in the cache under its own name now, and outlives the donor.
    third = reading_of()
    memory = bytearray(len(new))
    third.open("step-2").readinto(0, memory)
    assert memory == new
    assert (third.facts()["place_bytes"], third.facts()["donor_bytes"]) == (0, 0)


def test_small_reads_are_served_by_donors(reading_of, checkpoints):
    old, new = checkpoints
    reading = reading_of()
    reading.open("step-1").read(0, len(old))
    reading.close()
    other = reading_of()
    file = other.open("step-2")
    assert file.read(2 * MIB - 3, 6) == new[2 * MIB - 3 : 2 * MIB + 3]
    assert other.facts()["donor_bytes"] == 6


def test_a_damaged_donor_gives_nothing(reading_of, checkpoints, cache):
    old, new = checkpoints
    reading = reading_of()
    reading.open("step-1").read(0, len(old))
    reading.close()
    for data in cache.root.glob("files/*/data"):
        data.write_bytes(bytes(data.stat().st_size))
    other = reading_of()
    assert other.open("step-2").read(0, len(new)) == new
    assert other.facts()["donor_bytes"] == 0


def test_a_donor_that_is_evicted_meanwhile_gives_nothing(reading_of, checkpoints, cache):
    old, new = checkpoints
    reading = reading_of()
    reading.open("step-1").read(0, len(old))
    reading.close()
    other = reading_of()
    file = other.open("step-2")
    cache.prune(to_bytes=0)
    assert file.read(0, len(new)) == new


def test_the_cache_is_searched_once_for_all_files_of_a_checkpoint(empty, checkpoints, tmp_path):
    class Counting(Cache):
        num_searches = 0

        def recent(self, max_files):
            self.num_searches += 1
            return super().recent(max_files)

    cache = Counting(tmp_path / "cache")
    reading = Reading(empty, cache=cache)
    for name in ("step-1", "step-2", "step-1"):
        with reading.open(name) as file:
            file.read(0, 10)
    reading.close()
    assert cache.num_searches == 1

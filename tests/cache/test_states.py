from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.cache.states import MISSING, READY, SYNC_CLAIM, UNVERIFIED, Durable, LiveMap, StatIdentity
from bootseer.io import locks

WHOLE = StatIdentity(1, 2, -3, 4)


def states_of(index, *ready):
    return bytes(UNVERIFIED if block in ready else MISSING for block in range(index.num_blocks))


@pytest.mark.parametrize("whole", [None, WHOLE])
def test_a_snapshot_comes_back_as_it_was(index, whole):
    durable = Durable(states_of(index, 0, 12), whole)
    encoded = durable.encode(index.identity)
    assert Durable.parse(encoded, index) == durable


def test_a_snapshot_of_live_states_claims_all_that_is_here(index):
    states = states_of(index)[4:]
    encoded = Durable(bytes([MISSING, UNVERIFIED, READY, 77]) + states).encode(index.identity)
    assert Durable.parse(encoded, index) == Durable(bytes([0, 1, 1, 1]) + states)


def test_each_flipped_bit_and_cut_makes_a_snapshot_unknown(index):
    encoded = Durable(states_of(index, 0), WHOLE).encode(index.identity)
    for position in range(len(encoded) * 8):
        broken = bytearray(encoded)
        broken[position // 8] ^= 1 << position % 8
        assert Durable.parse(bytes(broken), index) is None
    for end in range(len(encoded)):
        assert Durable.parse(encoded[:end], index) is None


def test_the_snapshot_of_another_file_is_unknown(index):
    assert Durable.parse(Durable(states_of(index)).encode("0" * 64), index) is None


@given(data=st.binary(max_size=300))
def test_random_bytes_are_not_a_snapshot(index, data):
    assert Durable.parse(data, index) is None


def test_a_live_map_is_of_one_boot_and_one_file(index, tmp_path):
    LiveMap.create(tmp_path, index, "boot", states_of(index, 4))
    live = LiveMap.open(tmp_path, index, "boot")
    assert live.get(4) == UNVERIFIED
    assert live.get_all() == states_of(index, 4)
    assert live.get_all(3, 6) == bytes([MISSING, UNVERIFIED, MISSING])
    os.close(live.fd)
    assert LiveMap.open(tmp_path, index, "another boot") is None


def test_two_that_have_a_live_map_open_see_each_others_changes(index, tmp_path):
    LiveMap.create(tmp_path, index, "boot", states_of(index))
    one, two = LiveMap.open(tmp_path, index, "boot"), LiveMap.open(tmp_path, index, "boot")
    one.set(12, READY)
    assert two.get(12) == READY
    two.set(1, UNVERIFIED)
    assert (one.get(1), one.get_all(12)) == (UNVERIFIED, bytes([READY]))
    os.close(one.fd)
    os.close(two.fd)


@pytest.fixture
def two_maps(index, tmp_path):
    LiveMap.create(tmp_path, index, "boot", states_of(index))
    maps = [LiveMap.open(tmp_path, index, "boot") for _ in range(2)]
    yield maps
    for live in maps:
        os.close(live.fd)


def test_each_block_is_claimed_for_itself(two_maps):
    one, two = two_maps
    assert one.try_claim(5)
    assert not two.try_claim(5)
    assert two.try_claim(6)
    assert two.try_claim(1 << 40)
    assert two.try_claim(SYNC_CLAIM)
    one.release_claim(5)
    assert two.try_claim(5)


def test_claims_and_whole_file_locks_do_not_see_each_other(two_maps):
    assert locks.try_flock(two_maps[0].fd)
    assert two_maps[1].try_claim(0)


def test_claims_stay_when_another_descriptor_of_the_file_is_closed(two_maps, tmp_path):
    assert two_maps[0].try_claim(5)
    os.close(os.open(tmp_path / "live", os.O_RDONLY))
    assert not two_maps[1].try_claim(5)


def test_there_is_no_live_map_where_there_is_no_file(index, tmp_path):
    assert LiveMap.open(tmp_path, index, "boot") is None
    assert Durable.load(tmp_path, index) is None

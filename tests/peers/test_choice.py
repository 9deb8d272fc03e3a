"""Owners of runs: all nodes agree on them, racks are crossed once, and only some nodes may ask the origin."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.peers.choice import Level, Members, Peer, Step

FILE = "ab" * 32


def job(num: int, racks: int = 0) -> list[Peer]:
    return [Peer(f"n{at}", (f"10.0.0.{at}:7400",), f"r{at % racks}" if racks else "") for at in range(num)]


def walk(peers: list[Peer], start: str, run: int, absent: frozenset[str] = frozenset()) -> list[str]:
    """The path of a request: the nodes up to the one that asks the origin, if all answer."""
    passed = [start]
    while steps := Members(peers, passed[-1]).route(FILE, run, absent).steps:
        passed.append(steps[0].peer.name)
        assert len(passed) <= len(peers)
    return passed


@pytest.mark.slow
@pytest.mark.parametrize("racks", [0, 4])
def test_all_nodes_agree_on_one_that_asks_the_origin(racks: int) -> None:
    peers = job(64, racks)
    for run in range(20):
        ends = {tuple(walk(peers, peer.name, run)[-1:]) for peer in peers}
        assert len(ends) == 1
        assert max(len(walk(peers, peer.name, run)) for peer in peers) == (3 if racks else 2)


def test_two_at_most_may_ask_the_origin_for_a_run() -> None:
    for racks in (0, 4):
        peers = job(64, racks)
        for run in range(20):
            assert sum(Members(peers, peer.name).route(FILE, run).may_ask_store for peer in peers) == 2


def test_a_run_comes_into_a_rack_once() -> None:
    peers = job(64, 4)
    racks = {peer.name: peer.rack for peer in peers}
    for run in range(20):
        walks = [walk(peers, peer.name, run) for peer in peers]
        hops = {hop for passed in walks for hop in pairwise(passed)}
        assert len({hop for hop in hops if racks[hop[0]] != racks[hop[1]]}) == 3


@pytest.mark.slow
def test_an_owner_asked_by_its_rack_may_ask_further_and_one_asked_by_an_owner_may_not() -> None:
    peers = job(64, 4)
    for run in range(20):
        for peer in peers:
            path = walk(peers, peer.name, run)
            levels = [Members(peers, name).route(FILE, run).steps[0].level for name in path[:-1]]
            assert levels in ([], [Level.RACK], [Level.GLOBAL], [Level.RACK, Level.GLOBAL])


def test_a_node_asked_as_an_owner_asks_no_owner_of_that_level_and_then_the_origin() -> None:
    peers, ahead = job(64, 4), frozenset({"n1", "n2"})
    allowed = {Level.RACK: {Level.GLOBAL, Level.HELD}, Level.GLOBAL: {Level.HELD}}
    seen = set()
    for asked, levels in allowed.items():
        for peer in peers:
            route = Members(peers, peer.name).route(FILE, 1, ahead=ahead, asked=asked)
            found = {step.level for step in route.steps}
            assert found <= levels
            assert len(found) == 1
            assert route.may_ask_store or found == {Level.GLOBAL}
            seen |= {(asked, level) for level in found}
    assert seen == {(asked, level) for asked, levels in allowed.items() for level in levels}


def test_racks_that_are_small_or_unknown_make_no_level() -> None:
    for peers in (job(12, 4), job(32, 1)):
        assert all(
            step.level is Level.GLOBAL for peer in peers for step in Members(peers, peer.name).route(FILE, 1).steps
        )


def test_one_small_rack_switches_off_the_level_for_itself_alone() -> None:
    peers = [*job(32, 2), Peer("lonely", ("h:1",)), Peer("few", ("h:2",), "r7")]
    racks = {peer.name: peer.rack for peer in peers}
    for run in range(20):
        walks = [walk(peers, peer.name, run) for peer in peers]
        assert len({passed[-1] for passed in walks}) == 1
        for name in ("lonely", "few"):
            assert all(step.level is Level.GLOBAL for step in Members(peers, name).route(FILE, run).steps)
        crossing = {hop for passed in walks for hop in pairwise(passed) if racks[hop[0]] != racks[hop[1]]}
        assert len(crossing) <= 4  # one per rack, and one for each of the two nodes
    owned = Counter(walk(peers, "n0", run)[-1] for run in range(1000))
    assert owned["lonely"] < 100  # 29 on average: its weight is that of a node, not of a rack


def test_a_node_is_asked_once_for_a_run() -> None:
    for peers in (job(64, 4), job(20, 2)):
        for run in range(40):
            for peer in peers:
                steps = Members(peers, peer.name).route(FILE, run).steps
                assert len({step.peer for step in steps}) == len(steps)


@given(st.integers(2, 40), st.sets(st.integers(0, 39)), st.integers(0, 1000), st.sampled_from([0, 2]))
def test_absent_nodes_are_never_asked_and_the_way_still_ends_at_one(
    num: int, gone: set[int], run: int, racks: int
) -> None:
    absent = frozenset(f"n{at}" for at in gone)
    peers = job(num, racks)
    living = [peer.name for peer in peers if peer.name not in absent]
    ends = {walk(peers, name, run, absent)[-1] for name in living}
    assert not ends & absent
    assert len(ends) <= 1


def test_a_node_that_leaves_moves_only_its_own_runs() -> None:
    peers = job(16)
    before = [walk(peers, "n0", run)[-1] for run in range(400)]
    after = [walk(peers[:-1], "n0", run)[-1] for run in range(400)]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != "n15")


def test_owners_share_the_work() -> None:
    counts = Counter(walk(job(16), "n0", run)[-1] for run in range(1600))
    assert len(counts) == 16
    assert max(counts.values()) < 150  # 100 on average


def test_a_client_that_serves_nothing_asks_the_same_owners() -> None:
    peers = job(8)
    for run in range(20):
        route = Members(peers, "client").route(FILE, run)
        assert route.steps[0] == Step(Members(peers, "x").route(FILE, run).steps[0].peer, Level.GLOBAL)
        assert len(route.steps) == 2
        assert not route.may_ask_store


def test_alone_there_is_the_origin() -> None:
    for peers in ([], job(1)):
        assert Members(peers, "n0").route(FILE, 3).steps == ()

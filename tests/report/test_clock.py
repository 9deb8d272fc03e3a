"""Clock offsets between nodes, compared with given ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.report.analysis.spans import offsets, startups
from startups import EPOCH_S, began, moment, report, span


def found(*parts):
    (startup,) = startups([event for part in parts for event in part])
    return offsets(startup.nodes)


def barrier(node: str, arrive_s: float, left_s: float, clock_s: float, name: str = "b", **more):
    return span(arrive_s, left_s, "a.barrier", node=node, clock_s=clock_s, attrs={"barrier": name}, **more)


@given(st.lists(st.integers(-3_000_000, 3_000_000), min_size=3, max_size=9), st.integers(0, 8))
def test_differences_between_nodes_are_exact(off_ms, last):
    """The last node waits for 2 ms at the barrier: offsets are known to that precision and no better."""
    last %= len(off_ms)
    parts = [
        barrier(f"n{i}", 9.998 if i == last else 1.0, 10.0, off / 1000, booted_s=-1e6 - i)
        for i, off in enumerate(off_ms)
    ]
    clocks = found(*parts)
    middle = sorted(off_ms)[len(off_ms) // 2] if len(off_ms) % 2 else None
    for i, off in enumerate(off_ms):
        for j, other in enumerate(off_ms):
            told = (clocks[f"n{i}"].offset_ns - clocks[f"n{j}"].offset_ns) / 1e6
            assert told == pytest.approx(off - other, abs=2 * 2.1)
        assert clocks[f"n{i}"].error_ns >= 1_000_000
        if middle is not None:
            assert clocks[f"n{i}"].offset_ns / 1e6 == pytest.approx(off - middle, abs=2.1)


def test_a_node_without_barrier_is_untied():
    clocks = found(barrier("a", 1, 2, 0), barrier("b", 1.9, 2, 50), span(0, 1, "x", node="c", clock_s=9))
    assert clocks["c"].error_ns is None
    assert clocks["c"].offset_ns == 0
    assert clocks["b"].offset_ns - clocks["a"].offset_ns == pytest.approx(50e9, rel=0.01)


def test_a_barrier_that_failed_ties_nothing():
    """Each node's timeout ends at its own time: a difference of 30 s is not one of the clocks."""
    clocks = found(
        barrier("a", 1, 30, 0, outcome="failed"), barrier("b", 1, 60, 0, outcome="failed"), barrier("c", 1, 90, 0)
    )
    assert {clock.offset_ns for clock in clocks.values()} == {0}


def test_a_barrier_at_which_all_nodes_wait_long_has_a_large_error():
    clocks = found(barrier("a", 1, 11, 0), barrier("b", 1, 12, 0))
    assert all(clock.error_ns >= 10 * 10**9 and clock.offset_ns == 0 for clock in clocks.values())


def test_times_of_controllers_are_not_corrected_by_the_clock_of_a_node():
    """Kubernetes' scheduler writes when a pod was assigned. With the correction, a pod whose clock is late was late."""
    parts = []
    for number in range(5):
        at = {"node": f"n{number}", "clock_s": -30.0 * (number == 4)}
        parts += [moment(0, "bound", node=f"n{number}", booted_s=-EPOCH_S, attrs={"parsed_from": "kubelet"})]
        parts += span(2, 21, "environment_setup", **at)
        parts += barrier(at["node"], 20 + number / 10, 20.5, at["clock_s"])
        parts += began(30, **at)
    result = report(parts)
    assert result.clock.max_offset_s == pytest.approx(30, abs=0.1)
    assert [node.start_s for node in result.nodes] == [0] * 5
    assert not result.stragglers

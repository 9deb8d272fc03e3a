"""The two cases that decide whether hot sets are worth it, in virtual time: the right set and a wrong one.

The reader is a Python interpreter that imports modules: one thread, which waits for one block after the other and
computes a little in between.
"""

from __future__ import annotations

import functools
from random import Random

import pytest

from bootseer.fetch.fetch_settings import Purpose
from fetch.virtual import BLOCK, Layout, World, void

pytestmark = pytest.mark.slow

NUM_BLOCKS = 16_000
LINES = [(0.001, 1e9), (0.02, 100e6), (0.02, 25e6), (0.1, 400e6), (0.005, 12e6)]


def imports(seed: int, start: int = 0, num_runs: int = 300, think_s: float = 0.004) -> list[tuple[float, int, range]]:
    """Short runs of adjacent blocks, at scattered places in a part of the image."""
    rng = Random(seed)
    places = rng.sample(range(start, start + NUM_BLOCKS // 2, 8), num_runs)
    return [(rng.expovariate(1 / think_s), 0, range(at, at + rng.randint(1, 4))) for at in places]


def startup(line: tuple[float, float], steps: list[tuple[float, int, range]], hot: list[int]) -> World:
    """The world at the moment when the reader has finished."""
    latency_s, bytes_per_s = line
    world = World([Layout([BLOCK] * NUM_BLOCKS)], latency_s=latency_s, bytes_per_s=bytes_per_s)
    world.prefetch((0, block) for block in hot)
    ends: list[float] = []
    # The mount takes a moment, while the prefetch already runs.
    world.at(0.05, lambda: void(world.reader(iter(steps), lambda: ends.append(world.now))))
    world.run(until=1e4)
    world.now = ends[0]
    return world


@functools.cache
def without_hot_set(line: tuple[float, float], seed: int) -> float:
    """When `imports(seed)` end."""
    return startup(line, imports(seed), []).now


def blocks_of(steps: list[tuple[float, int, range]]) -> list[int]:
    return list(dict.fromkeys(block for _, _, blocks in steps for block in blocks))


@pytest.mark.parametrize("line", LINES)
def test_the_right_hot_set_leaves_the_reader_its_own_work_or_the_line_full(line: tuple[float, float]) -> None:
    steps = imports(1)
    work_s = sum(think_s for think_s, _, _ in steps)
    line_s = len(blocks_of(steps)) * BLOCK / line[1]
    world = startup(line, steps, blocks_of(steps))
    assert world.now < without_hot_set(line, 1)
    assert world.now < 1.15 * max(work_s, line_s) + 0.05 + 10 * line[0]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_hot_set_costs_less_than_a_tenth(line: tuple[float, float], seed: int) -> None:
    steps = imports(seed)
    wrong = blocks_of(imports(seed + 100, start=NUM_BLOCKS // 2))
    world = startup(line, steps, wrong)
    assert world.now < 1.1 * without_hot_set(line, seed)
    assert world.scheduler.trust.suspended


@pytest.mark.parametrize("line", LINES)
def test_a_hot_set_of_which_a_tenth_is_wrong_is_better_than_none(line: tuple[float, float]) -> None:
    steps = imports(1)
    right = blocks_of(steps)
    wrong = blocks_of(imports(101, start=NUM_BLOCKS // 2))
    rng = Random(2)
    mixed = [other if rng.random() < 0.1 else one for one, other in zip(right, wrong, strict=False)]
    assert startup(line, steps, mixed).now < without_hot_set(line, 1)


def test_a_workload_that_parts_from_its_hot_set_stops_paying_for_it() -> None:
    line = LINES[2]
    shared = imports(1, num_runs=100)
    steps = [*shared, *imports(2, start=NUM_BLOCKS // 2)]
    hot = [*blocks_of(shared), *blocks_of(imports(3, num_runs=900))]
    world = startup(line, steps, hot)
    without = startup(line, steps, [])
    assert world.scheduler.trust.suspensions == 1
    assert world.now < without.now
    assert sum(fetch.purpose is Purpose.HOT for _, fetch in world.launched) > 3


def test_a_library_that_both_share_does_not_bring_the_rest_of_a_wrong_set() -> None:
    line = LINES[2]
    library = imports(5, num_runs=60, think_s=0.03)  # so slow that meanwhile the link could transfer everything
    own = imports(2, start=NUM_BLOCKS // 2)
    hot = [*blocks_of(library), *blocks_of(imports(3, num_runs=200))]
    world = startup(line, [*own[:100], *library, *own[100:]], hot)
    assert world.scheduler.trust.suspensions == 2
    brought = sum(len(fetch.blocks) * BLOCK for _, fetch in world.launched if fetch.purpose is Purpose.HOT)
    half_a_second = line[1] / 2
    assert brought < len(blocks_of(library)) * BLOCK + 1.5 * half_a_second < len(hot) * BLOCK

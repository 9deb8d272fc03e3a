"""Cache and store contents over a month, and how often starts hit them."""

from __future__ import annotations

import msgspec
import pytest

from bootseer.sim.month import Policy, Times, policies, simulate_month
from bootseer.sim.scenario import Scenario, read_scenario

TIMES: Times = {(nodes, draw): (60.0, 25.0, 300.0) for nodes in (1, 2, 4) for draw in (0, 1)}
"""Durations of starts, given instead of simulated."""


@pytest.fixture
def scenario() -> Scenario:
    return read_scenario("month", ["month.days=10", "month.nodes=8", "month.job-nodes=[1, 2, 4]", "month.jobs=4"])


def test_more_cache_and_older_snapshots_are_hit_more_often(scenario: Scenario) -> None:
    assert scenario.month is not None
    found = {
        (policy.cache_gb, policy.max_age_days): simulate_month(scenario, scenario.month, policy, TIMES)
        for policy in [*policies(scenario.month), Policy(10, 1)]
    }
    assert len({one["starts"] for one in found.values()}) == 1, "policies are compared on the same starts"
    hits = [found[gb, 1]["hit_rate"] for gb in (10, 25, 50, 100)]
    assert hits == sorted(hits)
    assert hits[0] < hits[-1] - 0.02
    restored = [found[25, days]["snapshot_rate"] for days in (1, 7, 0)]
    assert restored == sorted(restored)
    assert restored[0] < restored[-1]
    assert found[25, 1]["days"][-1]["store_gb"] < found[25, 0]["days"][-1]["store_gb"]
    for (limit_gb, _), one in found.items():
        # What a start uses is never evicted, however low the cache's limit.
        in_use_gb = scenario.image.gb + scenario.environment.gb
        assert max(day["cache_gb_per_node"] for day in one["days"]) <= max(limit_gb, in_use_gb)
        assert one["gpu_hours"]["bootseer"] < one["gpu_hours"]["today"]


def test_a_job_that_never_changes_loads_once(scenario: Scenario) -> None:
    assert scenario.month is not None
    month = msgspec.structs.replace(
        scenario.month, nodes=2, jobs=1, job_nodes=(2,), days=0.875, starts_per_day=26 / 0.875, even=True,
        image_days=1e6, environment_days=1e6,
    )  # fmt: skip
    found = simulate_month(scenario, month, Policy(100, 0), TIMES)
    assert found["starts"] == 26
    assert found["hit_rate"] == pytest.approx(25 / 26, abs=1e-3)
    assert found["snapshot_rate"] == pytest.approx(25 / 26, abs=1e-3)
    assert found["gpu_share"]["today"] == pytest.approx(26 * 300 / (0.875 * 86400), abs=1e-4)
    install_s = scenario.environment.install_s
    assert found["gpu_hours"]["bootseer"] == pytest.approx((60 + 25 * 25 + install_s) * 16 / 3600, abs=0.1)


def test_the_allocation_costs_no_gpu_time() -> None:
    """As in reports."""
    hours = []
    for allocate_s in (0, 500):
        changes = ["month.days=1", "month.draws=1", "month.nodes=1", "month.job-nodes=[1]", "image.gb=1"]
        one = read_scenario("month", [*changes, "checkpoint.gb=1", f"rest.allocate-s={allocate_s}"])
        assert one.month is not None
        hours.append(simulate_month(one, one.month, Policy(25, 7), {})["gpu_hours"])
    assert hours[0] == pytest.approx(hours[1], abs=0.2)


def test_the_same_seed_gives_the_same_month(scenario: Scenario) -> None:
    assert scenario.month is not None
    months = [simulate_month(scenario, scenario.month, Policy(25, 7), TIMES, seed) for seed in (1, 1, 2)]
    assert months[0] == months[1] != months[2]

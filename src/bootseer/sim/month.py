"""A month of a cluster: cost of starts, contents of caches and store, and hit rates.

The real code decides: `cache.eviction_plan` about evictions, `env.life.decide` about restoring or building snapshots.
Only some starts on each number of nodes are simulated by `job_start.simulate`, with empty and with full caches; the
duration of every other start is interpolated between these by the share of missing blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from bootseer.cache.eviction_plan import Candidate, goal_bytes, plan
from bootseer.env.document import EnvironmentDocument
from bootseer.env.life.decide import Action, Lookup, decide
from bootseer.sim.job_start import environment_document, simulate
from bootseer.sim.scenario import Month, Scenario

_DAY_S: Final = 86400.0
Times = dict[tuple[int, int], tuple[float, float, float]]
"""By number of nodes and seed: seconds after the allocation of a start with empty caches, with full caches, and
without BootSeer."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy to compare."""

    cache_gb: float
    """Size limit of each node's cache."""
    max_age_days: float
    """Maximum age of snapshots in the store; 0: as long as the environment is used."""


@dataclass
class _Entry:
    """A file in a node's cache."""

    last_use: int
    gb: float


@dataclass
class _Node:
    entries: dict[str, _Entry] = field(default_factory=dict)

    def use(self, identity: str, hot: float, cold: float, at: int) -> float:
        """A start needs a file of so many GB; returns the missing part of its hot set, in GB."""
        missing = 0.0 if identity in self.entries else hot
        self.entries[identity] = _Entry(at, hot + cold)
        return missing

    def shrink(self, limit_gb: float, in_use: set[str]) -> None:
        used = int(sum(entry.gb for entry in self.entries.values()) * 1e9)
        goal = goal_bytes(used, int(limit_gb * 1e9))
        if goal is None:
            return
        candidates = [
            Candidate(name, entry.last_use, name in in_use, int(entry.gb * 1e9)) for name, entry in self.entries.items()
        ]
        for one in plan(candidates, used, goal):
            del self.entries[one.identity]


@dataclass
class _Job:
    """A job that is started repeatedly, with an image and an environment that change."""

    number: int
    nodes: int
    image: int = 0
    environment: int = 0


def policies(month: Month) -> list[Policy]:
    """The policies that the scenario compares."""
    return [Policy(gb, days) for gb in month.cache_gb for days in month.snapshot_days]


def simulate_month(scenario: Scenario, month: Month, policy: Policy, times: Times, seed: int = 0) -> dict[str, Any]:
    """Hit rates, sizes and GPU-hours of one policy. The starts are the same for all policies of a seed. `times` caches
    the durations of starts between calls."""
    random = Random(f"{seed}/month")  # noqa: S311
    jobs = [_Job(number, random.choice(month.job_nodes)) for number in range(month.jobs)]
    nodes = [_Node() for _ in range(month.nodes)]
    documents: dict[str, EnvironmentDocument] = {}
    image_gb = scenario.image.gb * (1 - month.base_share)
    sizes = {"base": scenario.image.gb * month.base_share, "image": image_gb, "environment": scenario.environment.gb}
    shares = {part: scenario.environment.hot_share if part == "environment" else scenario.image.hot_share
              for part in sizes}  # fmt: skip
    hot_gb = sum(gb * shares[part] for part, gb in sizes.items())
    starts = restored = 0
    needed = missed = 0.0
    hours = {"today": 0.0, "bootseer": 0.0}
    days: dict[int, dict[str, float]] = {}
    for number, (time_s, job) in enumerate(_starts(random, month, jobs)):
        chosen = random.sample(nodes, min(job.nodes, len(nodes)))
        names = {"base": f"base {int(time_s / _DAY_S / 30)}", "image": f"image {job.number}.{job.image}",
                 "environment": f"environment {job.number}.{job.environment}"}  # fmt: skip
        found = documents.get(names["environment"])
        decision = decide("auto", Lookup("none" if found is None else "found", found), now_s=time_s)
        starts += 1
        restored += decision.action is Action.RESTORE
        if decision.action is Action.BUILD:
            max_age_s = policy.max_age_days * _DAY_S or None
            documents[names["environment"]] = environment_document(names["environment"], scenario, time_s, max_age_s)
        lost = 0.0
        for node in chosen:
            for part, gb in sizes.items():
                hot = gb * shares[part]
                lost += node.use(names[part], hot, (gb - hot) * month.cold_loaded, number)
            node.shrink(policy.cache_gb, set(names.values()))
        needed, missed = needed + hot_gb * len(chosen), missed + lost
        kind = job.nodes, number % month.draws
        if kind not in times:
            arms = ("bootseer", "warm", "today")
            allocate_s = scenario.rest.allocate_s  # without GPUs
            cold_s, warm_s, today_s = (simulate(scenario, job.nodes, arm, kind[1]).began_s - allocate_s for arm in arms)
            times[kind] = cold_s, warm_s, today_s
        cold_s, warm_s, today_s = times[kind]
        share = lost / (hot_gb * len(chosen)) if hot_gb else 0.0
        built_s = scenario.environment.install_s if decision.action is Action.BUILD else 0.0
        gpus = job.nodes * scenario.gpus_per_node / 3600
        hours["bootseer"] += gpus * (warm_s + share * (cold_s - warm_s) + built_s)
        hours["today"] += gpus * today_s
        for name in [name for name, one in documents.items() if one.expired(time_s)]:
            del documents[name]
        kept = sum(entry.gb for node in nodes for entry in node.entries.values())
        days[int(time_s / _DAY_S)] = {
            "day": int(time_s / _DAY_S) + 1, "cache_gb_per_node": round(kept / len(nodes), 2),
            "store_gb": round(len(documents) * scenario.environment.gb, 2), "hit_rate": _rate(missed, needed),
        }  # fmt: skip
    gpu_hours = month.nodes * scenario.gpus_per_node * month.days * 24
    return {
        "cache_gb": policy.cache_gb, "snapshot_days": policy.max_age_days, "seed": seed, "starts": starts,
        "hit_rate": _rate(missed, needed), "snapshot_rate": _rate(starts - restored, starts),
        "gpu_hours": {arm: round(value, 1) for arm, value in hours.items()},
        "gpu_share": {arm: round(value / gpu_hours, 5) for arm, value in hours.items()}, "days": list(days.values()),
    }  # fmt: skip


def _rate(missed: float, needed: float) -> float:
    return round(1 - missed / needed, 4) if needed else 0.0


def _starts(random: Random, month: Month, jobs: list[_Job]) -> Iterator[tuple[float, _Job]]:
    """Times and jobs of starts. Jobs are often restarted until they work, so the same job often follows itself."""
    time_s, job = 0.0, jobs[0]
    per_s = month.starts_per_day / _DAY_S
    while (time_s := time_s + (1 / per_s if month.even else random.expovariate(per_s))) <= month.days * _DAY_S:
        if random.random() >= month.again_share:
            job = random.choice(jobs)
        mean = month.starts_per_day / len(jobs)
        job.image += random.random() < 1 / (month.image_days * mean)
        job.environment += random.random() < 1 / (month.environment_days * mean)
        yield time_s, job

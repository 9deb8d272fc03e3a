"""Generates weeks of a fleet as rows of the service's database, and the expected results.

Jobs of the paper's seven scales start on a ring of nodes. A few nodes are slow and always the last ones of their
starts; starts with cache misses take longer. The expected results are counted in plain Python while starts are
generated, for comparison with the service's sums and queries.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from sqlalchemy import text

from bootseer.report.analysis.verdict import BUCKETS
from bootseer.service import schema
from bootseer.service.database import Database
from bootseer.service.rows import BEGAN, DAY_NS
from bootseer.service.upkeep import roll_up
from bootseer.units import NS_PER_S

FIRST_DAY = 20_600
TEAMS = ("llm", "vision", "speech", "search", "research")
STAGES = (
    *("container.pull", "container.mount", "environment_setup.install", "environment_setup.restore"),
    *("model_initialization.import", "model_initialization.process_group", "checkpoint_load.read"),
    *("checkpoint_load.place", "data_loader.begin", "compile", "warm_up", "first_step"),
)
INSTALL = 2
NODES_OF = ((1, 1), (2, 12), (13, 60), (63, 120), (126, 240), (251, 370), (376, 1440))
WEIGHTS = (0.35, 0.30, 0.20, 0.06, 0.05, 0.025, 0.015)
GPUS = 8


@dataclass
class Truth:
    """Expected results."""

    starts: int = 0
    teams: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    overheads: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Overheads without the queue, of the starts in which training began, by scale."""
    stage_work_s: Counter[tuple[int, int]] = field(default_factory=Counter)
    stage_medians: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    last: Counter[int] = field(default_factory=Counter)
    seen: Counter[int] = field(default_factory=Counter)
    delay_s: Counter[int] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    days: Counter[tuple[int, str]] = field(default_factory=Counter)
    jobs: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    straggler_s: Counter[int] = field(default_factory=Counter)
    """Bytes by hour."""
    queue_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    failures: Counter[int] = field(default_factory=Counter)
    """By stage."""
    open: int = 0
    heard: int = 0
    expected: int = 0
    lost: int = 0


@dataclass
class Month:
    """The generator of the data, which `fill` writes. It depends only on the seed."""

    num_nodes: int = 10_000
    num_days: int = 30
    node_starts: int = 1_250_000
    """Approximate number of nodes of all starts together."""
    num_jobs: int = 2_000
    num_lemons: int = 20
    seed: int = 7
    first_day: int = FIRST_DAY
    truth: Truth = field(default_factory=Truth)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.lemons = sorted(self._random.sample(range(1, self.num_nodes + 1), self.num_lemons))
        self._made = 0

    @property
    def last_day(self) -> int:
        return self.first_day + self.num_days - 1

    @property
    def now_ns(self) -> int:
        return (self.last_day + 1) * DAY_NS

    def name(self, node: int) -> str:
        return f"node-{node:05d}"

    def fill(self, database: Database) -> Truth:
        """Write the data, day by day, and compute the daily sums."""
        with database.write() as connection:
            stages = [{"id": number + 1, "name": name} for number, name in enumerate(STAGES)]
            database.insert_all(connection, schema.stage, stages)
            nodes = [
                {"id": node, "name": self.name(node), "rack": f"r{node // 32}"} for node in range(1, self.num_nodes + 1)
            ]
            database.insert_all(connection, schema.node, nodes)
        for day in range(self.first_day, self.last_day + 1):
            self._day(database, day)
            roll_up(database, day)
        with database.write() as connection:
            if database.is_postgres:
                connection.execute(text("SELECT setval(pg_get_serial_sequence('start', 'id'), max(id)) FROM start"))
                connection.execute(text("ANALYZE"))  # like its autovacuum; SQLite has no statistics in the service
        return self.truth

    def _day(self, database: Database, day: int) -> None:
        budget, tables = self.node_starts // self.num_days, defaultdict(list)
        while budget > 0:
            budget -= self._start(day, tables)
        with database.write() as connection:
            for table in (schema.start, schema.stage_start, schema.node_start, schema.technique_start, schema.batch):
                database.insert_all(connection, table, tables[table.name])

    def _start(self, day: int, tables: dict[str, list[Any]]) -> int:
        """Add the rows of one start to the tables; returns its number of nodes."""
        chance, truth = self._random, self.truth
        self._made += 1
        identity = self._made
        bucket = chance.choices(range(7), WEIGHTS)[0]
        fewest, most = NODES_OF[bucket]
        num = min(chance.randint(fewest, most), self.num_nodes // 2)
        gpus = num * GPUS
        bucket = next(number for number, (limit, *_) in enumerate(BUCKETS) if gpus <= limit)
        first = chance.randrange(self.num_nodes)
        nodes = [(first + number) % self.num_nodes + 1 for number in range(num)]
        number = chance.randrange(self.num_jobs)
        job, team = f"job-{number:04d}", TEAMS[number % len(TEAMS)]
        kind = chance.choices(("full", "hot", "replaced"), (6, 3, 1))[0]
        missed = chance.random() < 0.2
        failed = chance.random() < 0.04
        is_open = day == self.last_day and chance.random() < 0.05
        slow = [node for node in nodes if node in self.lemons] if num > 1 else []
        delay_s = chance.uniform(20, 60) if slow else chance.uniform(0, 2)
        last = slow[0] if slow else chance.choice(nodes)
        queue_s = chance.expovariate(1 / 90)
        # Rounded, so that both engines and Python compute the same sums.
        work_s = round(BUCKETS[bucket][2] * chance.lognormvariate(0, 0.25) * (1.6 if missed else 1.0), 3)
        took_s = round(queue_s + work_s + delay_s, 3)
        run_s = None if is_open else took_s + chance.expovariate(1 / 40_000)
        began_ns = day * DAY_NS + chance.randrange(DAY_NS // NS_PER_S) * NS_PER_S
        origin = num * (chance.randrange(4 << 30, 28 << 30) if missed else chance.randrange(0, 1 << 30))
        heard, lost = num - (chance.random() < 0.01), int(chance.random() < 0.01) * chance.randrange(1, 50)
        gpu_s = took_s * gpus
        stopped = chance.randrange(len(STAGES)) if failed else INSTALL
        outcome = "" if is_open else "failed" if failed else BEGAN
        tables["start"].append(
            {
                "id": identity, "job": job, "attempt": identity, "restart": 0, "kind": kind, "team": team,
                "queue": f"q{number % 3}", "user": f"user{number % 97}", "cluster": "c1",
                "state": schema.OPEN if is_open else schema.CLOSED, "outcome": outcome,
                "began_ns": began_ns, "ended_ns": began_ns + round(took_s * NS_PER_S),
                "day": day, "bucket": bucket, "nodes_expected": num, "nodes_heard": heard, "ranks": gpus,
                "gpus": gpus, "cache_state": "miss" if missed else "hit", "image": f"train:{number % 50}",
                "fingerprint": f'{{"nodes": {num}}}', "overhead_s": took_s, "queue_s": queue_s,
                "work_s": work_s * num * 0.7, "wait_s": work_s * num * 0.3, "gpu_s": gpu_s, "wait_gpu_s": gpu_s * 0.3,
                "straggler_s": delay_s, "run_s": run_s,
                "origin_bytes": origin, "peer_bytes": origin // 4, "lines_lost": lost, "clock_error_s": 0.01,
                "last_node_id": last, "last_stage_id": stopped + 1, "computed_ns": began_ns, "computed_n": 1,
            }
        )  # fmt: skip
        same = {"day": day, "bucket": bucket, "kind": kind, "cache_state": "miss" if missed else "hit"}
        for stage in range(len(STAGES)):
            median_s = round(work_s / (3 if stage == INSTALL else 18) * chance.uniform(0.9, 1.1), 3)
            worst_s = median_s + (delay_s if stage == INSTALL else 0)
            tables["stage_start"].append(
                {
                    "start_id": identity, "stage_id": stage + 1, **same, "num_nodes": num,
                    "median_s": median_s, "p99_s": median_s * 1.1, "max_s": worst_s,
                    "max_node_id": last, "work_s": median_s * num, "wait_s": 0.0,
                    "gpu_s": median_s * gpus,
                }
            )  # fmt: skip
            if not is_open:
                truth.stage_work_s[bucket, stage] += median_s * num
                truth.stage_medians[bucket, stage].append(median_s)
        for node in nodes:
            tables["node_start"].append(
                {
                    "start_id": identity, "node_id": node, "day": day,
                    "is_last": node == last and num > 1, "stage_id": INSTALL + 1 if node == last else None,
                    "delay_s": delay_s if node == last else None,
                }
            )  # fmt: skip
        for name, chance_missed in (("image", missed), ("environment", missed)):
            hits, misses = (0, num) if chance_missed else (num, 0)
            tables["technique_start"].append(
                {
                    "start_id": identity, "technique": name, "day": day, "digest": f"{name}{number % 50}",
                    "stored_bytes": 9 << 30, "hits": hits, "misses": misses, "cache_bytes": 1 << 30, "peer_bytes": 0,
                    "origin_bytes": origin // 2, "saved_s": 12.5 * hits,
                }
            )  # fmt: skip
            truth.hits[name] += 0 if is_open else hits
            truth.misses[name] += 0 if is_open else misses
        if day > self.last_day - 14:  # older raw lines are deleted
            for node in nodes:
                tables["batch"].append(
                    {
                        "raw_key": f"raw/{day}/{job}/attempt-{identity}/{node}-1-0123456789abcdef.events.zst",
                        "day": day, "job": job, "attempt": identity, "received_ns": began_ns, "done": True,
                    }
                )  # fmt: skip
        self._count(tables["start"][-1], nodes, last, delay_s)
        return num

    def _count(self, row: dict[str, Any], nodes: Iterable[int], last: int, delay_s: float) -> None:
        truth, bucket = self.truth, row["bucket"]
        truth.starts += 1
        truth.teams[row["team"]].update(starts=1, gpu_s=row["gpu_s"])
        if row["run_s"] is not None:
            truth.teams[row["team"]].update(ended_gpu_s=row["gpu_s"], run_gpu_s=row["run_s"] * row["gpus"])
            truth.jobs[row["job"]].update(ended_s=row["overhead_s"] - row["queue_s"], run_s=row["run_s"])
        truth.jobs[row["job"]].update(starts=1, wait_s=row["wait_s"], work_s=row["work_s"], gpu_s=row["gpu_s"])
        if row["outcome"] == BEGAN:
            truth.overheads[bucket].append(row["overhead_s"] - row["queue_s"])
            truth.queue_s[bucket].append(row["queue_s"])
            truth.straggler_s[bucket] += delay_s
        elif row["state"] == schema.CLOSED:
            truth.failures[row["last_stage_id"] - 1] += 1
        if row["state"] == schema.CLOSED:
            truth.seen.update(nodes)
            truth.last[last] += len(nodes) > 1
            truth.delay_s[last] += delay_s
        truth.days[row["day"], row["kind"]] += 1
        truth.open += row["state"] == schema.OPEN
        truth.heard += row["nodes_heard"]
        truth.expected += row["nodes_expected"]
        truth.lost += row["lines_lost"]


def worst(counts: Counter[int], most: int) -> Iterator[tuple[int, float]]:
    """The items with the largest counts; among equals, those with smaller keys first."""
    return islice(sorted(counts.items(), key=lambda item: (-item[1], item[0])), most)

"""A month of a large fleet in the service's database: all queries, timed and compared with the known answers.

10,000 nodes, the paper's seven scales. Both engines have the same month; each query is made five times. Then each page
is loaded for that month, alone, and by 200 concurrent readers while senders add new starts.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
from harness import Benchmark, Must, Outcome
from service_ingest import _Costs, _service
from service_load import lines_of, loaded
from sqlalchemy import Connection

from bootseer.report.analysis.verdict import BUCKETS
from bootseer.service import questions
from bootseer.service.database import Database, default_url
from bootseer.service.questions import Filter
from bootseer.service.rows import day_of
from fleet_month import STAGES, Month, Truth, worst
from postgres import running_postgres

_ANSWER_S = 1.0
_PAGE_S = 0.3
_READ_S = 1.0
_TIMES = 5
_READ_FOR_S = 10.0
_DAYS = 30
_PAGES = ("/", "/now", "/jobs", "/nodes", "/caches", "/compare", "/?since=7d", "/?team=llm", "/api/v1/fleet")


def asked(connection: Connection, month: Month) -> dict[str, Callable[[], Any]]:
    """The queries of a month, by name."""
    where, now = Filter(month.first_day, month.last_day), Filter(month.last_day - 6, month.last_day)
    return {
        "1 cost by team": lambda: questions.cost(connection, where),
        "2 stages by scale": lambda: [
            {"bucket": name, **row}
            for number, (_, name, _) in enumerate(BUCKETS)
            for row in questions.stages(connection, replace(where, bucket=number))
        ],
        "3 open starts": lambda: questions.open_starts(connection),
        "4 slow nodes": lambda: questions.nodes(connection, where, questions.node_sums(connection, where), limit=1000),
        "5 starts of a job": lambda: questions.starts(connection, Filter(job="job-0007")),
        "6 scales against before": lambda: questions.buckets(connection, now),
        "7 caches": lambda: (questions.caches(connection, where), questions.caches_by_day(connection, where)),
        "8 starts by day": lambda: questions.by_day(connection, where),
        "9 jobs that lose most": lambda: questions.jobs(connection, where),
        "10 wait against work": lambda: questions.jobs(connection, now),
        "11 without stragglers": lambda: questions.straggling(connection, where),
        "13 queue against start": lambda: questions.queues(connection, where),
        "14 failed starts": lambda: questions.failures(connection, where),
        "15 coverage": lambda: questions.coverage(connection, where, month.now_ns),
    }


def wrong(connection: Connection, month: Month) -> list[str]:
    """The names of the queries with wrong answers."""
    truth, where, found = month.truth, Filter(month.first_day, month.last_day), []
    answers = {name: ask() for name, ask in asked(connection, month).items()}

    def check(name: str, what: str, is_so: bool) -> None:
        if not is_so:
            found.append(f"{name}: {what}")

    teams = {row["team"]: row for row in answers["1 cost by team"]}
    for team, sums in truth.teams.items():
        same = all(math.isclose(teams[team][key], sums[key], rel_tol=1e-9) for key in ("starts", "gpu_s"))
        share = math.isclose(teams[team]["share"], sums["ended_gpu_s"] / sums["run_gpu_s"], rel_tol=1e-9)
        check("1", f"team {team}", same and share)
    names = [name for _, name, _ in BUCKETS]
    stages = {(names.index(row["bucket"]), STAGES.index(row["stage"])): row for row in answers["2 stages by scale"]}
    check("2", "which stages and scales", stages.keys() == truth.stage_medians.keys())
    for key, medians in truth.stage_medians.items():
        row = stages[key]
        p50 = _at(medians, 0.5)
        near = p50 / 1.2 <= row["p50_s"] <= p50 * 1.2  # of classes that grow by 19 %
        same = row["n"] == len(medians) and math.isclose(row["work_s"], truth.stage_work_s[key], rel_tol=1e-9)
        check("2", str(key), same and near)
    check("3", "open starts", len(answers["3 open starts"]) == truth.open)
    slow = [(row["node"], row["last"], row["starts"]) for row in answers["4 slow nodes"][:10]]
    expected = [(month.name(n), truth.last[n], truth.seen[n]) for n, _ in worst(truth.delay_s, 10)]
    check("4", "slow nodes", slow == expected)
    check("4", "their stage", {row["stage"] for row in answers["4 slow nodes"][:10]} == {STAGES[2]})
    check("5", "starts of a job", len(answers["5 starts of a job"]) == truth.jobs["job-0007"]["starts"])
    for row in questions.buckets(connection, where):
        values = truth.overheads[names.index(row["bucket"])]
        same = row["starts"] == len(values) and row["p50_s"] == _at(values, 0.5) and row["p95_s"] == _at(values, 0.95)
        check("6", row["bucket"], same)
    for row in answers["7 caches"][0]:
        check("7", row["technique"], row["hits"] == truth.hits[row["technique"]])
        check("7", row["technique"], row["misses"] == truth.misses[row["technique"]] and row["miss_costs_s"] > 0)
    days = {(row["day"], row["kind"]): row["starts"] for row in answers["8 starts by day"]}
    check("8", "starts by day", days == dict(truth.days))
    for row in answers["9 jobs that lose most"]:
        sums = truth.jobs[row["job"]]
        share = not sums["run_s"] or math.isclose(row["share"], sums["ended_s"] / sums["run_s"], rel_tol=1e-9)
        wait = math.isclose(row["wait_share"], sums["wait_s"] / (sums["wait_s"] + sums["work_s"]), rel_tol=1e-9)
        check("9, 10", row["job"], row["starts"] == sums["starts"] and share and wait)
    most = sorted(truth.jobs, key=lambda name: -truth.jobs[name]["gpu_s"])[:10]
    check("9", "order", [row["job"] for row in answers["9 jobs that lose most"][:10]] == most)
    for row in answers["11 without stragglers"]:
        saved = truth.straggler_s[names.index(row["bucket"])]
        check("11", row["bucket"], math.isclose(row["straggler_s"], saved, rel_tol=1e-9))
    for row in answers["13 queue against start"]:
        values = truth.queue_s[names.index(row["bucket"])]
        check("13", row["bucket"], math.isclose(row["queue_p50_s"], median(values), rel_tol=1e-9))
    stopped = {STAGES.index(row["stage"]): row["starts"] for row in answers["14 failed starts"]}
    check("14", "where starts stopped", stopped == dict(truth.failures))
    seen = answers["15 coverage"]
    same = (seen["nodes_heard"], seen["nodes_expected"], seen["lines_lost"]) == (
        truth.heard,
        truth.expected,
        truth.lost,
    )
    check("15", "coverage", same and seen["starts"] == truth.starts)
    return found


def _at(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


def _settled(process: psutil.Process) -> None:
    """Wait while the service computes the sums of the last days again, as at each start."""
    while True:
        before = process.cpu_times()
        time.sleep(3)
        after = process.cpu_times()
        if after.user + after.system - before.user - before.system < 0.3:
            return


def pages(data: Path, database: str, job: str) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds of each page alone, and the waiting times of 200 readers while senders add starts."""
    shown = (*_PAGES, f"/job/{job}")
    alone: dict[str, list[float]] = {page: [] for page in shown}
    with _service(data, database) as (address, process), httpx.Client(base_url=address, timeout=300) as client:
        _settled(process)
        for turn in range(_TIMES):
            for page in shown:
                began_s = time.perf_counter()
                # Another address, so that it is not cached.
                client.get(httpx.URL(page).copy_merge_params({"turn": turn})).raise_for_status()
                alone[page].append(time.perf_counter() - began_s)
        return alone, loaded(address, lines_of(16), 0, _READ_FOR_S, _Costs(process), shown)


def measure(quick: bool) -> Outcome:
    samples: dict[str, list[float]] = {}
    details: dict[str, Any] = {}
    musts, truth = [], Truth()
    first_day = day_of(time.time_ns()) - _DAYS + 1  # pages show the days before today
    for engine in ("sqlite", "postgres"):
        month = Month(node_starts=50_000 if quick else 1_250_000, num_days=_DAYS, first_day=first_day)
        server: Any = running_postgres() if engine == "postgres" else nullcontext()
        with tempfile.TemporaryDirectory() as folder, server as postgres:
            url = postgres.new_database() if postgres else default_url(Path(folder))
            database = Database.open(url)
            began_s = time.monotonic()
            truth = month.fill(database)
            filled_s = time.monotonic() - began_s
            times: dict[str, list[float]] = {}
            with database.read() as connection:
                for _ in range(_TIMES):
                    for name, ask in asked(connection, month).items():
                        begin_s = time.perf_counter()
                        ask()
                        times.setdefault(name, []).append(time.perf_counter() - begin_s)
                differ = wrong(connection, month)
            database.close()
            most = max(truth.jobs, key=lambda job: truth.jobs[job]["starts"])
            alone, readers = pages(Path(folder), url, most)
            among = readers.pop("took")
        samples |= {f"{engine}: {page}": values for page, values in alone.items()}
        samples |= {f"{engine}: {page}, 200 readers": values for page, values in among.items()}
        worst_page = max(alone, key=lambda page: median(alone[page]))
        slowest_read = max(median(values) for values in among.values())
        musts += [
            Must(f"slowest page, {engine} ({worst_page})", median(alone[worst_page]), _PAGE_S, "s"),
            Must(f"slowest page for 200 readers, {engine}", slowest_read, _READ_S, "s"),
            Must(f"errors, {engine}", len(readers["errors"]), 0, ""),
        ]
        samples |= {f"{engine}: {name}": values for name, values in times.items()}
        slowest = max(times, key=lambda name: median(times[name]))
        musts += [
            Must(f"slowest query, {engine} ({slowest})", median(times[slowest]), _ANSWER_S, "s"),
            Must(f"wrong answers, {engine}", len(differ), 0, ""),
        ]
        details[engine] = {
            "filled_s": filled_s,
            "differ": differ,
            "readers": readers,
            "first_s": {k: v[0] for k, v in times.items()},
        }
    return Outcome(
        parameters={
            "nodes": month.num_nodes,
            "days": month.num_days,
            "starts": truth.starts,
            "jobs": month.num_jobs,
        },
        samples=samples,
        unit="seconds",
        must_reach=musts,
        details=details,
        method="the same month in both engines, one after the other; each query is made five times",
    )


BENCHMARK = Benchmark("service_month", "How long does each query about a month of a large fleet take?", measure)

"""The queries on both engines, with starts whose results are known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, update

from bootseer.service import over_time, questions, schema
from bootseer.service.derive import Attempt, derive_attempt
from bootseer.service.questions import Filter
from bootseer.service.rows import DAY_NS
from bootseer.service.upkeep import roll_up
from bootseer.units import NS_PER_S
from fleet import EPOCH_NS, INSTALL, Fleet
from service.test_derive import Place

DAY = EPOCH_NS // DAY_NS
ALL = Filter()


@pytest.fixture
def place(tmp_path: Path, database_url: str) -> Iterator[Place]:
    place = Place(tmp_path, database_url)
    for number, fleet in enumerate(FLEETS):
        place.put(fleet.lines(), job=fleet.job, attempt=fleet.attempt)
        derive_attempt(
            place.raw,
            place.database,
            Attempt(fleet.job, fleet.attempt),
            [place.batches[number]],
            time.time_ns() + DAY_NS,
        )
    with place.database.write() as connection:
        connection.execute(update(schema.start).where(schema.start.c.job == "big").values(team="red", run_s=1000.0))
        connection.execute(update(schema.start).where(schema.start.c.job == "small").values(team="blue"))
    roll_up(place.database, DAY)
    yield place
    place.close()


SLOW = {(1, INSTALL): 100.0}
FLEETS = [
    *(Fleet(4, job="big", attempt=number, work_of=SLOW, seed=number, begin_s=number * 4000.0) for number in range(3)),
    Fleet(1, job="small", begin_s=100.0),
    Fleet(2, job="dead", killed_in={1: INSTALL}, begin_s=200.0),
]


def ask(place: Place, question: Any, *arguments: Any, **named: Any) -> Any:
    with place.database.read() as connection:
        return question(connection, *arguments, **named)


def test_cost_by_team(place: Place) -> None:
    rows = {row["team"]: row for row in ask(place, questions.cost, ALL)}
    assert {name: row["starts"] for name, row in rows.items()} == {"red": 3, "blue": 1, "": 1}
    took = sum(row.overhead_s for row in place.rows(schema.start) if row.job == "big")
    assert rows["red"]["overhead_s"] == pytest.approx(took)
    assert rows["red"]["share"] == pytest.approx(rows["red"]["gpu_s"] / (3 * 1000.0 * 32))
    assert rows["blue"]["share"] is None, "it has not ended"


def test_stages(place: Place) -> None:
    rows = ask(place, questions.stages, ALL)
    install = next(row for row in rows if row["stage"] == INSTALL)
    assert install["n"] == 5  # three with 32 GPUs, the dead one with 16, and one with more
    assert install["p50_s"] == pytest.approx(60, rel=0.092)


def test_nodes_that_hold_others_back_come_first(place: Place) -> None:
    rows = ask(place, questions.nodes, ALL, ask(place, questions.node_sums, ALL), limit=100)
    assert (rows[0]["node"], rows[0]["stage"], rows[0]["starts"], rows[0]["last"]) == ("node-0001", INSTALL, 4, 3)
    assert rows[0]["delay_s"] == pytest.approx(120.0, abs=4.0)
    assert all(row["delay_s"] < 2 for row in rows[1:])
    assert rows[0]["last_share"] == 0.75


def test_a_node_is_suspicious_only_in_comparison_with_nodes_of_the_same_starts(place: Place) -> None:
    """Alone it is always the last one, and of two nodes every second time. Starts without other nodes show nothing."""
    large = [f"large-{number:02}" for number in range(40)]
    with place.database.write() as connection:
        ids = place.database.ids(connection, schema.node, ["alone", "one", "two", *large])
        for day in (DAY + 5, DAY + 6):
            for number in range(30):
                slow = large[7] if day == DAY + 6 and number < 8 else large[number]
                several = (["one", "two"], ["one", "two"][number % 2]), (large, slow)
                for restart, (nodes, last) in enumerate([(["alone"], "alone"), *several, *[([large[7]], "")] * 9]):
                    values = {
                        "job": nodes[0], "attempt": day * 100 + number, "restart": restart, "kind": "full",
                        "state": "closed", "began_ns": 0, "ended_ns": 0, "day": day, "bucket": 0, "ranks": 1,
                        "nodes_heard": len(nodes), "cache_state": "off", "last_node_id": ids.get(last),
                    }  # fmt: skip
                    made = insert(schema.start).values(values).returning(schema.start.c.id)
                    identity = connection.execute(made).scalar_one()
                    rows = [
                        {"start_id": identity, "node_id": ids[node], "day": day, "is_last": node == last}
                        for node in nodes
                    ]
                    connection.execute(insert(schema.node_start), rows)
    for day in (DAY + 5, DAY + 6):
        roll_up(place.database, day)
    assert ask(place, over_time.lemons, Filter(DAY + 5, DAY + 5)) == []
    (row,) = ask(place, over_time.lemons, Filter(DAY + 6, DAY + 6))
    assert (row["node"], row["last"], row["starts"]) == (large[7], 8, 30)
    assert row["expected_share"] == pytest.approx(1 / 40)


def test_starts_are_listed_with_what_they_had(place: Place) -> None:
    rows = ask(place, questions.starts, ALL)
    assert [(row["job"], row["attempt"]) for row in rows[:2]] == [("big", 2), ("big", 1)]
    assert rows[0]["last_node"] == "node-0001"
    assert rows[0]["fingerprint"]["nodes"] == 4
    assert ask(place, questions.starts, Filter(job="big"), limit=1, offset=2)[0]["attempt"] == 0
    assert ask(place, questions.stages_of, rows[0]["id"])[0]["max_s"] > 60


def test_scales_next_to_the_days_before_and_the_paper(place: Place) -> None:
    (row, other) = ask(place, questions.buckets, Filter(DAY, DAY))
    assert (row["bucket"], row["starts"], row["paper_s"], row["p50_before_s"]) == ("1-10", 1, 44, None)
    took = sorted(start.overhead_s - 12.0 for start in place.rows(schema.start) if start.job == "big")
    assert (other["starts"], other["p50_s"]) == (3, pytest.approx(took[1]))
    (later, _) = ask(place, questions.buckets, Filter(DAY + 1, DAY + 1))
    assert (later["starts"], later["p50_before_s"]) == (0, pytest.approx(row["p50_s"]))
    with place.database.write() as connection:
        failed = (schema.start.c.job == "big") & (schema.start.c.overhead_s < 12.0 + took[1] - 1e-3)
        connection.execute(update(schema.start).where(failed).values(outcome="failed"))
    (_, two) = ask(place, questions.buckets, Filter(DAY, DAY))
    assert (two["starts"], two["p50_s"], two["p95_s"]) == (2, *map(pytest.approx, took[1:])), "half do not exceed it"


def test_the_period_before_is_as_long_as_the_one_until_now(place: Place) -> None:
    """`fleet` must not compare with all earlier starts."""
    for later, known in ((1, 2), (3, 0)):
        now_ns = (DAY + later) * DAY_NS
        found = ask(place, over_time.fleet, Filter(DAY + later), now_ns)["buckets"]
        assert [(row["starts"], row["p50_before_s"] is None) for row in found] == [(0, False)] * known


def test_caches_and_what_a_miss_costs(place: Place) -> None:
    rows = place.rows(schema.start)
    with place.database.write() as connection:
        for number, row in enumerate(one for one in rows if one.job == "big"):
            values = {"start_id": row.id, "technique": "image", "day": DAY, "digest": "d", "stored_bytes": 5 << 30}
            more = {"hits": 4 if number else 0, "misses": 0 if number else 4, "origin_bytes": 0 if number else 1 << 30}
            connection.execute(insert(schema.technique_start).values(**values, **more))
            queue_s, took_s = (0.0, 50.0) if number else (3600.0, 90.0)
            changed = {"overhead_s": queue_s + took_s, "queue_s": queue_s}
            connection.execute(update(schema.start).where(schema.start.c.id == row.id).values(changed))
    roll_up(place.database, DAY)
    (row,) = ask(place, questions.caches, ALL)
    assert (row["hits"], row["misses"], row["stored_bytes"]) == (8, 4, 5 << 30)
    assert row["hit_share"] == pytest.approx(2 / 3)
    assert row["miss_costs_s"] == pytest.approx(40.0)
    days = ask(place, questions.caches_by_day, ALL)
    assert (len(days), days[0]["stored_bytes"]) == (1, 5 << 30)
    assert ask(place, questions.caches_by_day, Filter(job="big")) == days
    assert ask(place, questions.caches_by_day, Filter(team="another")) == []


def test_jobs_and_days(place: Place) -> None:
    jobs = {row["job"]: row for row in ask(place, questions.jobs, ALL)}
    assert (jobs["big"]["starts"], jobs["dead"]["failed"]) == (3, 1)
    big = [row for row in place.rows(schema.start) if row.job == "big"]
    assert jobs["big"]["share"] == pytest.approx(sum(row.overhead_s - row.queue_s for row in big) / 3000.0)
    assert jobs["big"]["wait_share"] == pytest.approx(
        sum(r.wait_s for r in big) / sum(r.wait_s + r.work_s for r in big)
    )
    (day,) = ask(place, questions.by_day, ALL)
    assert (day["day"], day["starts"], day["failed"]) == (DAY, 5, 1)


def test_stragglers_queues_failures_and_coverage(place: Place) -> None:
    rows = {row["bucket"]: row for row in ask(place, questions.straggling, ALL)}
    assert rows["10-100"]["straggler_s"] == pytest.approx(3 * 40.0, abs=4.0)
    queues = {row["bucket"]: row for row in ask(place, questions.queues, ALL)}
    assert queues["10-100"]["queue_p50_s"] == pytest.approx(12.0)
    assert queues["10-100"]["starts"] == 3, "the dead one did not start"
    (failure,) = ask(place, questions.failures, ALL)
    assert (failure["stage"], failure["starts"]) == (INSTALL, 1)
    seen = ask(place, questions.coverage, ALL, time.time_ns())
    assert (seen["starts"], seen["heard_share"], seen["batches_waiting"]) == (5, 1.0, 0)
    assert seen["silent_s"] < 600
    values = {"state": schema.OPEN, "nodes_expected": 15, "overhead_s": 20.0, "queue_s": 12.0}
    with place.database.write() as connection:
        connection.execute(update(schema.start).where(schema.start.c.job == "dead").values(values))
    # A start that has just begun waits for more nodes, also if nothing more is received from the first ones.
    for later_s, share in ((300.0, 1.0), (320.0, 15 / 28)):
        now_ns = EPOCH_NS + round((200.0 + later_s) * NS_PER_S)
        assert ask(place, questions.coverage, ALL, now_ns)["heard_share"] == pytest.approx(share)


def test_an_empty_database_has_empty_answers(tmp_path: Path, database_url: str) -> None:
    place = Place(tmp_path, database_url)
    for name in ("cost", "stages", "node_sums", "starts", "buckets", "caches", "caches_by_day", "by_day", "jobs"):
        assert ask(place, getattr(questions, name), ALL) == []
    for name in ("straggling", "queues", "failures"):
        assert ask(place, getattr(questions, name), ALL) == []
    assert ask(place, questions.open_starts) == []
    assert ask(place, questions.coverage, ALL, 0)["starts"] == 0
    place.close()

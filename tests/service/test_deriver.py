"""Which attempts are analysed when, and by which service; analyses that fail or are killed."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import Engine, delete, event, func, insert, select, text, update

from bootseer.service import schema
from bootseer.service.derive import Attempt, Derived, derive_attempt
from bootseer.service.deriver import Deriver
from bootseer.service.rows import DAY_NS
from bootseer.units import NS_PER_S
from fleet import Fleet
from service.test_derive import Place
from waiting import until


@pytest.fixture
def place(tmp_path: Path, database_url: str) -> Any:
    place = Place(tmp_path, database_url)
    yield place
    place.close()


@pytest.fixture
def deriver(place: Place) -> Any:
    deriver = Deriver(place.database, place.url, str(place.folder))
    deriver.start()
    yield deriver
    deriver.close()


def test_lines_that_arrive_show_where_the_nodes_are_and_end_in_a_closed_start(place: Place, deriver: Deriver) -> None:
    lines = Fleet(3).lines()
    place.put(lines[: len(lines) // 2])
    deriver.wake()
    until(lambda: any(row.moment for row in place.rows(schema.live)), "no moment was told")
    moment = json.loads(place.rows(schema.live)[0].moment)
    assert (moment["job"], moment["nodes_heard"]) == ("fleet", 2)
    until(lambda: place.rows(schema.start), "nothing was derived")
    place.put(lines[len(lines) // 2 :])
    deriver.wake()
    until(lambda: place.rows(schema.start)[0].outcome == "training_began", "the rest was not derived")
    until(lambda: all(row.done for row in place.rows(schema.batch)), "batches are left")


def test_many_batches_that_another_service_analyses_hold_up_no_other_attempt(place: Place) -> None:
    claim = {"job": "big", "attempt": 0, "owner": "another", "owned_until_ns": time.time_ns() + 29 * NS_PER_S}
    rows = [
        {"raw_key": str(number), "day": 1, "job": "big", "attempt": 0, "received_ns": number, "done": False}
        for number in range(1_200)
    ]
    with place.database.write() as connection:
        connection.execute(insert(schema.live).values(claim))
        connection.execute(insert(schema.batch), rows)
    place.put(Fleet(2).lines())
    deriver = Deriver(place.database, place.url, str(place.folder))
    deriver.start()
    try:
        until(lambda: place.rows(schema.start), "nothing was derived")
        assert "another" in {row.owner for row in place.rows(schema.live)}, "it waited until the claim had expired"
    finally:
        deriver.close()


def test_attempts_that_another_service_has_claimed_are_not_tried(place: Place, monkeypatch: Any) -> None:
    """That would be a transaction for each of them, four times a second."""
    place.put(Fleet(2).lines())
    first, second = (Deriver(place.database, place.url, str(place.folder), name=name) for name in ("a", "b"))
    first._take()
    monkeypatch.setattr(second, "_claim", lambda attempt: pytest.fail(f"{attempt} is taken"))
    second._take()
    first._take()
    assert list(first._states) == [Attempt("fleet", 0)]


def test_a_poll_of_an_analysed_database_reads_only_batches_that_wait(place: Place) -> None:
    """Otherwise SQLite would read all 600,000 batches of a month four times a second."""
    if place.database.is_postgres:
        pytest.skip("the statement was slow in SQLite only")
    rows = [
        {"raw_key": str(number), "day": 1, "job": f"job {number % 200}", "attempt": 0, "received_ns": 1, "done": True}
        for number in range(2_000)
    ]
    with place.database.write() as connection:
        connection.execute(insert(schema.batch), rows)
        connection.execute(text("ANALYZE"))
    asked: list[tuple[str, Any]] = []
    event.listen(Engine, "before_cursor_execute", take := lambda *found: asked.append(found[2:4]))
    try:
        Deriver(place.database, place.url, str(place.folder))._take()
    finally:
        event.remove(Engine, "before_cursor_execute", take)
    statement, parameters = next(found for found in asked if "FROM batch" in found[0])
    with place.database.read() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
    assert any("batch_to_do" in str(step) for step in plan), plan


def test_late_lines_of_a_start_whose_lines_were_removed_leave_no_live_state(place: Place, monkeypatch: Any) -> None:
    monkeypatch.setattr("bootseer.service.deriver._CLAIMED_S", 2)
    lines = Fleet(2).lines()
    place.put(lines)
    derive_attempt(place.raw, place.database, Attempt("fleet", 0), place.batches, time.time_ns() + DAY_NS)
    place.raw.delete([name for name, _ in place.batches])
    place.put(lines[-1:])
    deriver = Deriver(place.database, place.url, str(place.folder))
    deriver.start()
    try:
        until(lambda: place.rows(schema.live), "the attempt was not claimed")
        until(lambda: not place.rows(schema.live), "its live state stays")
    finally:
        deriver.close()


def test_attempts_whose_lines_keep_arriving_leave_the_others_their_turn(place: Place) -> None:
    last, ended = 11, threading.Event()
    lines = [Fleet(2, attempt=attempt).lines() for attempt in range(last + 1)]
    for attempt in range(last + 1):
        place.put(lines[attempt], attempt=attempt)

    def keep_arriving() -> None:
        while not ended.wait(0.1):
            for attempt in range(last):
                place.put(lines[attempt], attempt=attempt)

    def computed() -> dict[int, int]:
        return {row.attempt: row.computed_n for row in place.rows(schema.start)}

    sender = threading.Thread(target=keep_arriving)
    deriver = Deriver(place.database, place.url, str(place.folder))
    sender.start()
    deriver.start()
    try:
        until(lambda: max(computed().values(), default=0) > 1, "nothing was derived again")
        assert last in computed()
    finally:
        ended.set()
        sender.join()
        deriver.close()


def test_an_open_start_without_raw_lines_is_closed(place: Place) -> None:
    lines = Fleet(2).lines()
    place.put(lines[: len(lines) // 2])
    derive_attempt(place.raw, place.database, Attempt("fleet", 0), place.batches, time.time_ns())
    assert [row.state for row in place.rows(schema.start)] == [schema.OPEN]
    with place.database.write() as connection:
        connection.execute(delete(schema.batch))
    derived: list[Derived] = []
    deriver = Deriver(place.database, place.url, str(place.folder), on_derived=derived.append)
    deriver.start()
    try:
        until(lambda: [row.state for row in place.rows(schema.start)] == [schema.CLOSED], "it stays open")
    finally:
        deriver.close()
    assert derived[-1].days == {row.day for row in place.rows(schema.start)}, "now it counts in the sums of its day"


def test_an_analysis_that_fails_is_repeated(place: Place) -> None:
    place.put(Fleet(2).lines())
    path = place.folder / place.batches[0][0]
    whole = path.read_bytes()
    path.write_bytes(b"damaged")
    deriver = Deriver(place.database, place.url, str(place.folder))
    deriver.start()
    try:
        until(lambda: any(state.failures for state in list(deriver._states.values())), "nothing failed")
        path.write_bytes(whole)
        until(lambda: place.rows(schema.start), "it was not repeated")
    finally:
        deriver.close()


@pytest.mark.slow
def test_a_killed_worker_costs_nothing_but_time(place: Place, deriver: Deriver) -> None:
    for attempt in range(6):
        place.put(Fleet(2, attempt=attempt).lines(), attempt=attempt)
    deriver.wake()
    killed: set[psutil.Process] = set()
    while len(killed) < 2:  # a third one of the same attempt would be the last
        # The workers are children of the fork server, which is a child of this process.
        for server in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                for worker in server.children():
                    if worker not in killed and len(killed) < 2:
                        worker.kill()
                        killed.add(worker)
        time.sleep(0.02)
    until(lambda: len(place.rows(schema.start)) == 6, "not all attempts were derived")
    until(lambda: all(row.done for row in place.rows(schema.batch)), "batches are left")
    with place.database.read() as connection:
        nodes = connection.execute(
            select(func.count()).select_from(schema.node_start).group_by(schema.node_start.c.start_id)
        ).all()
    assert len({count for (count,) in nodes}) == 1


class Ends:
    """Ends the process that reads it."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


def test_an_attempt_whose_workers_are_killed_again_and_again_is_given_up(place: Place) -> None:
    """Otherwise an attempt that needs more memory than the machine has would be tried forever."""
    place.put(Fleet(2).lines())
    deriver = Deriver(place.database, place.url, str(place.folder), patterns=[Ends()])  # type: ignore[list-item]
    deriver.start()
    until(lambda: all(row.done for row in place.rows(schema.batch)), "it is tried again")
    deriver.close()
    assert not place.rows(schema.start)


def test_a_start_that_an_earlier_service_left_open_is_closed_when_its_analysis_is_given_up(place: Place) -> None:
    """Otherwise it would be in progress for ever."""
    lines = Fleet(2).lines()
    place.put(lines[: len(lines) // 2])
    derive_attempt(place.raw, place.database, Attempt("fleet", 0), place.batches, time.time_ns())
    assert [row.state for row in place.rows(schema.start)] == [schema.OPEN]
    deriver = Deriver(place.database, place.url, str(place.folder), patterns=[Ends()])  # type: ignore[list-item]
    deriver.start()
    try:
        until(lambda: [row.state for row in place.rows(schema.start)] == [schema.CLOSED], "it stays open")
    finally:
        deriver.close()


def test_a_claim_of_before_the_clock_was_set_back_holds_nothing_up(place: Place) -> None:
    place.put(Fleet(2).lines())
    values = {"job": "fleet", "attempt": 0, "owner": "gone", "owned_until_ns": time.time_ns() + 1200 * NS_PER_S}
    with place.database.write() as connection:
        connection.execute(insert(schema.live).values(values))
    deriver = Deriver(place.database, place.url, str(place.folder))
    deriver.start()
    until(lambda: place.rows(schema.start), "nothing was derived")
    deriver.close()


def test_a_claim_of_a_service_whose_clock_is_ahead_is_respected(place: Place) -> None:
    """Otherwise the other service would take over each attempt, and both would analyse it."""
    first, second = (Deriver(place.database, place.url, str(place.folder), name=name) for name in ("a", "b"))
    attempt = Attempt("fleet", 0)
    assert [first._claim(attempt), second._claim(attempt)] == [True, False]
    with place.database.write() as connection:
        ahead = schema.live.c.owned_until_ns + 5 * NS_PER_S
        connection.execute(update(schema.live).values(owned_until_ns=ahead))
    assert not second._claim(attempt)
    with place.database.write() as connection:
        connection.execute(update(schema.live).values(owned_until_ns=time.time_ns() - 1))
    assert second._claim(attempt)
    first._states.clear()
    assert not first._claim(attempt)


def test_an_open_start_that_another_service_has_left_is_closed(place: Place) -> None:
    """Otherwise it would be in progress, and in no sum, until that service starts again."""
    here = Deriver(place.database, place.url, str(place.folder), name="here")
    here._look()
    lines = Fleet(2).lines()
    place.put(lines[: len(lines) // 2])
    derive_attempt(place.raw, place.database, Attempt("fleet", 0), place.batches, time.time_ns())
    values = {"job": "fleet", "attempt": 0, "owner": "gone", "owned_until_ns": time.time_ns()}
    with place.database.write() as connection:
        connection.execute(delete(schema.batch))
        connection.execute(insert(schema.live).values(values))
    here._reopens_s = 1.0
    here._look()
    assert not here._states, "the other one may still wait for its end"
    with place.database.write() as connection:
        connection.execute(update(schema.live).values(owned_until_ns=time.time_ns() - DAY_NS))
    here._reopens_s = 1.0
    until(lambda: here._look() or [row.state for row in place.rows(schema.start)] == [schema.CLOSED], "it stays open")
    here.close()


def test_two_services_share_the_work_of_one_postgres(place: Place) -> None:
    if not place.database.is_postgres:
        pytest.skip("SQLite belongs to one service")
    others = [Deriver(place.database, place.url, str(place.folder)) for _ in range(2)]
    for number, one in enumerate(others):
        one._name = f"service-{number}"
        one.start()
    for attempt in range(4):
        place.put(Fleet(2, attempt=attempt).lines(), attempt=attempt)
    until(lambda: all(row.done for row in place.rows(schema.batch)), "batches are left")
    assert [row.computed_n for row in place.rows(schema.start)] == [1] * 4
    for one in others:
        one.close()

"""Sums by day, raw lines without a row, and deleting old data, on both engines."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, select, text

from bootseer.errors import TransientError
from bootseer.report.analysis.compose import Analysis
from bootseer.report.analysis.prepare import Options
from bootseer.report.analysis.spans import unique
from bootseer.report.inputs import Source
from bootseer.report.log_scan import scan
from bootseer.service import schema
from bootseer.service.database import Database
from bootseer.service.derive import Attempt, derive_attempt
from bootseer.service.histogram import CLASSES, bound_s, class_of, middle_s, quantile_s
from bootseer.service.raw import LOG, parse_name
from bootseer.service.rows import DAY_NS
from bootseer.service.upkeep import Upkeep, forget, reconcile, reindex, roll_up
from bootseer.units import NS_PER_S
from fleet import EPOCH_NS, INSTALL, Fleet
from service.test_derive import Place, contents
from waiting import until

DAY = EPOCH_NS // DAY_NS


@pytest.fixture
def place(tmp_path: Path, database_url: str) -> Iterator[Place]:
    place = Place(tmp_path, database_url)
    yield place
    place.close()


def derive_all(place: Place) -> None:
    for attempt in sorted({row.attempt for row in place.rows(schema.batch)}):
        batches = [(row.raw_key, row.received_ns) for row in place.rows(schema.batch) if row.attempt == attempt]
        derive_attempt(place.raw, place.database, Attempt("fleet", attempt), batches, time.time_ns() + DAY_NS)


def test_sums_of_a_day_are_those_of_its_starts_however_often_they_are_computed(place: Place) -> None:
    for attempt in range(3):
        place.put(Fleet(4, attempt=attempt, work_of={(1, INSTALL): 100.0}).lines(), attempt=attempt)
    derive_all(place)
    for _ in range(2):
        roll_up(place.database, DAY)
    stages, of_starts = place.rows(schema.stage_day), place.rows(schema.stage_start)
    assert sum(row.n for row in stages) == len(of_starts)
    assert sum(row.work_s for row in stages) == pytest.approx(sum(row.work_s for row in of_starts))
    assert sum(sum(json.loads(row.hist)) for row in stages) == sum(row.median_s is not None for row in of_starts)
    with place.database.read() as connection:
        joined = schema.node_day.join(schema.node, schema.node.c.id == schema.node_day.c.node_id)
        rows = connection.execute(select(schema.node.c.name, schema.node_day).select_from(joined)).all()
    slow = next(row for row in rows if row.name == "node-0001")
    assert (slow.n, slow.n_last) == (3, 3)
    assert slow.delay_s == pytest.approx(3 * 40.0, abs=3.0)
    assert all(row.delay_s == 0 for row in rows if row.name != "node-0001")


def test_a_start_counts_in_the_sums_once_it_is_closed(place: Place) -> None:
    """Until then its numbers may decrease, which Prometheus would take for a counter reset, and the last node so far
    would count as the last one."""
    lines = Fleet(4, work_of={(1, INSTALL): 100.0}).lines()
    place.put(lines[: len(lines) // 2])
    derive_attempt(place.raw, place.database, Attempt("fleet", 0), place.batches, time.time_ns())
    roll_up(place.database, DAY)
    assert place.rows(schema.stage_start)
    assert place.rows(schema.stage_day) == place.rows(schema.node_day) == place.rows(schema.storage_day) == []
    place.put(lines[len(lines) // 2 :])
    derive_all(place)
    roll_up(place.database, DAY)
    assert [row.n for row in place.rows(schema.node_day)] == [1] * 4


def test_two_services_may_compute_the_same_day_at_once(place: Place) -> None:
    """Neither must fail because the other one has just written the same rows."""
    place.put(Fleet(4).lines(), attempt=0)
    derive_all(place)

    def computed(number: int) -> None:
        with contextlib.closing(Database(place.url)) as database:
            for _ in range(20):
                roll_up(database, DAY)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(computed, range(4)))
    assert sum(row.n for row in place.rows(schema.stage_day)) == len(place.rows(schema.stage_start))


def test_a_day_whose_sums_fail_is_tried_again_after_a_pause(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is missing, which is an unexpected error on PostgreSQL."""
    monkeypatch.setattr("bootseer.service.upkeep._SUM_EVERY_S", 0.01)
    monkeypatch.setattr("bootseer.service.upkeep._RETRY_S", 0.01)
    place.put(Fleet(2).lines())
    derive_all(place)
    upkeep = Upkeep(place.database, place.raw, 14, lambda: None)
    with place.database.write() as connection:
        connection.execute(text("ALTER TABLE stage_day RENAME TO away"))
    upkeep.start()
    try:
        until(lambda: caplog.records, "the error was not told")
        time.sleep(0.2)
        assert len(caplog.records) == 1
        with place.database.write() as connection:
            connection.execute(text("ALTER TABLE away RENAME TO stage_day"))
        until(lambda: place.rows(schema.stage_day), "the day was not tried again")
    finally:
        upkeep.close()


def test_sums_that_a_service_left_are_computed_by_the_next_one_also_days_later(place: Place) -> None:
    place.put(Fleet(2).lines())
    derive_all(place)
    computed_ns = schema.start.c.computed_ns
    with place.database.write() as connection:
        connection.execute(schema.start.update().values(computed_ns=computed_ns - 5 * DAY_NS))
    Upkeep(place.database, place.raw, 14, lambda: None)._sum()
    assert place.rows(schema.stage_day)


def test_the_end_does_not_wait_for_a_bucket(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.service.upkeep._END_S", 0.1)
    listing, answered = threading.Event(), threading.Event()

    def names(day: int | None = None) -> Iterator[str]:
        listing.set()
        answered.wait(60)
        return iter(())

    monkeypatch.setattr(place.raw, "names", names)
    upkeep = Upkeep(place.database, place.raw, 14, lambda: None)
    upkeep.start()
    assert listing.wait(60)
    upkeep.close()
    listed = upkeep._threads[1].thread
    assert listed.is_alive()
    answered.set()
    listed.join()


def test_lines_that_arrived_without_the_database_are_found(place: Place) -> None:
    lines = Fleet(3, attempt=7).lines()
    place.put(lines[:50], attempt=7)
    place.put(lines[50:], attempt=7)
    derive_all(place)
    whole = place.rows(schema.stage_start)
    with place.database.write() as connection:
        for table in (schema.batch, schema.stage_start, schema.node_start, schema.start_report):
            connection.execute(delete(table))
        connection.execute(delete(schema.start))
    assert reconcile(place.database, place.raw, [DAY]) == 2
    assert reconcile(place.database, place.raw) == 0
    assert {(row.job, row.attempt, row.done) for row in place.rows(schema.batch)} == {("fleet", 7, False)}
    seen: list[tuple[int, int]] = []
    assert reindex(place.database, place.raw, lambda *done: seen.append(done)) == {
        "starts": 1,
        "attempts": 1,
        "batches": 2,
    }
    assert seen == [(1, 1)]
    assert sorted(row[1:] for row in place.rows(schema.stage_start)) == sorted(row[1:] for row in whole)
    assert place.rows(schema.stage_day)


def test_a_damaged_object_is_reported_once(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.put(Fleet(2).lines())
    (place.folder / place.batches[0][0]).write_bytes(b"damaged")
    with place.database.write() as connection:
        connection.execute(delete(schema.batch))
    for _ in range(2):
        assert reconcile(place.database, place.raw, [DAY]) == 0
    assert ["is damaged" in record.message for record in caplog.records] == [True]


def test_an_abandoned_start_is_over_also_after_its_database_was_lost(place: Place) -> None:
    """Otherwise all those of the last two weeks would be in progress again for a day."""
    place.raw.put(b"".join(Fleet(2, killed_in={1: INSTALL}).lines()), day=DAY, job="fleet", attempt=0, sender="n",
                  sequence=0)  # fmt: skip
    reindex(place.database, place.raw, lambda done, of: None)
    assert [row.state for row in place.rows(schema.start)] == [schema.CLOSED]


@pytest.mark.parametrize("job", ["moe", "team a/llama 7", "größe"])
def test_a_log_that_arrived_without_the_database_belongs_to_the_job_it_was_sent_for(place: Place, job: str) -> None:
    line = b"2026-11-24T12:00:00Z step 1\n"
    kept = place.raw.put(line, day=20_000, job=job, attempt=0, sender="s", sequence=0, suffix=LOG)
    assert place.raw.read(kept.name) == line
    assert reconcile(place.database, place.raw) == 1
    assert [row.job for row in place.rows(schema.batch)] == [job]
    found = scan([Source(kept.name, place.folder / kept.name, True)])
    assert (found.lines, dict(found.skipped)) == (1, {})


def test_of_a_log_that_had_grown_the_longer_batch_counts_after_its_rows_were_lost(place: Place) -> None:
    """And not the later one in the order of names, which are digests."""
    whole = [b"2026-11-24T12:00:%02dZ line\n" % number for number in range(8)]
    for number in range(len(whole)):
        for lines in (whole[: number + 1], [*whole[: number + 1], b"more\n"]):
            place.raw.put(b"".join(lines), day=20_000, job="j", attempt=0, sender=f"s{number}", sequence=0, suffix=LOG)
    assert reconcile(place.database, place.raw) == 16
    latest: dict[str, int] = {}
    for row in sorted(place.rows(schema.batch), key=lambda row: row.received_ns):
        key = parse_name(row.raw_key)
        assert key is not None
        latest[key.sender] = place.raw.read(row.raw_key).count(b"\n")
    assert latest == {f"s{number}": number + 2 for number in range(8)}


NUM_PIECES = 6
STEP = st.tuples(st.sampled_from(["arrives", "arrives without a row", "is derived", "is found", "ends late"]),
                 st.integers(0, NUM_PIECES - 1))  # fmt: skip
attempts = itertools.count()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP, min_size=4, max_size=20))
def test_each_line_counts_once_whatever_happens(place: Place, steps: list[tuple[str, int]]) -> None:
    """Batches in any order, repeated, from several senders, without the database, and with late workers: in the end the
    rows are those of the set of lines."""
    attempt = Attempt("fleet", next(attempts))
    fleet = Fleet(2, attempt=attempt.attempt)
    lines, events = fleet.lines(), fleet.events()
    came: set[int] = set()
    before: list[list[tuple[str, int]]] = [[]]

    def derive() -> None:
        rows = [row for row in place.rows(schema.batch) if row.attempt == attempt.attempt]
        if all(row.done for row in rows):  # like the deriver, which ignores finished batches
            return
        before.append([(row.raw_key, row.received_ns) for row in rows])
        derive_attempt(place.raw, place.database, attempt, before[-1], time.time_ns())

    for number, (step, piece) in enumerate(steps):
        data = lines[piece::NUM_PIECES]
        if step == "arrives":
            place.put(data, attempt=attempt.attempt, sender=f"node-{number}")
            came.add(piece)
        elif step == "arrives without a row":
            place.raw.put(b"".join(data), day=DAY, job="fleet", attempt=attempt.attempt, sender="rack", sequence=piece)
            came.add(piece)
        elif step == "is derived":
            derive()
        elif step == "is found":
            reconcile(place.database, place.raw, [DAY])
        else:
            with contextlib.suppress(TransientError):
                derive_attempt(place.raw, place.database, attempt, before[piece % len(before)], time.time_ns())
    reconcile(place.database, place.raw, [DAY])
    derive()
    whole, _ = unique([event for piece in came for event in list(events)[piece::NUM_PIECES]])
    model = {}
    if whole:
        analysis = Analysis(whole, Options(job="fleet"))
        texts = {startup.key.restart: analysis.report(startup).to_text() for startup in analysis.startups}
        model = {restart: json.loads(text)["nodes"] for restart, text in texts.items()}
    with place.database.read() as connection:
        start, stored = schema.start, schema.start_report
        rows = connection.execute(
            select(start.c.restart, stored.c.json)
            .join_from(start, stored, stored.c.start_id == start.c.id)
            .where(start.c.attempt == attempt.attempt)
        )
        found = {restart: json.loads(zstandard.decompress(packed))["nodes"] for restart, packed in rows}
    assert found == model
    assert all(row.done for row in place.rows(schema.batch))


def test_starts_outlive_their_raw_lines(place: Place) -> None:
    place.put(Fleet(2).lines())
    derive_all(place)
    forget(place.database, place.raw, 1, (DAY + 2) * DAY_NS)
    assert reindex(place.database, place.raw, lambda *done: None)["attempts"] == 0
    whole = contents(place)
    # A job of several weeks ends: its last line is not a separate start.
    late_ns = time.time_ns() + 20 * DAY_NS
    place.put(Fleet(2).lines()[-1:])
    late = [(place.batches[-1][0], late_ns)]
    assert derive_attempt(place.raw, place.database, Attempt("fleet", 0), late, late_ns).starts == 0
    assert contents(place) == whole
    assert [row.done for row in place.rows(schema.batch)] == [True]


def test_a_later_run_with_the_same_attempt_number_replaces_a_start_whose_lines_are_gone(place: Place) -> None:
    """A monthly job without attempt numbers: not only its first run is shown."""
    place.put(Fleet(2).lines())
    derive_all(place)
    forget(place.database, place.raw, 14, (DAY + 30) * DAY_NS)
    (before,) = place.rows(schema.start)
    place.put(Fleet(3, begin_s=(before.computed_ns - EPOCH_NS) / NS_PER_S + 30 * 86_400).lines())
    at_ns = before.computed_ns + 31 * DAY_NS
    later = [(place.batches[-1][0], at_ns)]
    assert derive_attempt(place.raw, place.database, Attempt("fleet", 0), later, at_ns).starts == 1
    (row,) = place.rows(schema.start)
    assert (row.nodes_heard, row.began_ns > before.computed_ns) == (3, True)


def test_what_is_old_is_forgotten(place: Place) -> None:
    place.put(Fleet(60).lines())
    derive_all(place)
    assert forget(place.database, place.raw, 14, 20_000 * DAY_NS) == 0
    assert forget(place.database, place.raw, 0, (DAY + 2) * DAY_NS) == 1
    assert list(place.raw.names()) == []
    assert list(place.folder.iterdir()) == [], "folders without lines stayed for ever"
    assert len(place.rows(schema.start)) == len(place.rows(schema.start_report)) == 1


@given(st.floats(0, 1e6))
def test_a_class_holds_its_value(value: float) -> None:
    number = class_of(value)
    assert value <= bound_s(number) * (1 + 1e-9) or number == CLASSES - 1
    assert number == 0 or value > bound_s(number - 1) * (1 - 1e-9)


def test_a_quantile_is_as_exact_as_its_class() -> None:
    hist = [0] * CLASSES
    for value in range(1, 101):
        hist[class_of(float(value))] += 1
    assert quantile_s(hist, 0.5) == pytest.approx(50, rel=0.2)
    assert quantile_s(hist, 0.99) == pytest.approx(99, rel=0.2)
    assert quantile_s([0] * CLASSES, 0.5) is None
    for took_s in (0.06, 20.0, 39.3, 5000.0):  # not biased upwards
        hist = [int(number == class_of(took_s)) for number in range(CLASSES)]
        assert middle_s(hist, 0.5) == pytest.approx(took_s, rel=0.092)

"""From raw lines to rows: the tables have the report's numbers, once, for any order of lines."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard
from sqlalchemy import insert, select

from bootseer.errors import TransientError
from bootseer.report.scanned import Scanned
from bootseer.service import questions, schema
from bootseer.service.database import Database
from bootseer.service.derive import Attempt, derive_attempt, derive_found, skip_alive
from bootseer.service.questions import Filter
from bootseer.service.raw import LOG, RawStore
from bootseer.service.rows import DAY_NS, day_of
from bootseer.service.upkeep import roll_up
from bootseer.store.open import open_store
from bootseer.trace.event import encode
from bootseer.units import NS_PER_S
from fleet import INSTALL, Fleet
from startups import EPOCH_S, moment, span

DAY = EPOCH_S // 86_400


class Place:
    """The raw lines and database of a service, without the service."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder / "raw"
        self.folder.mkdir()
        self.url = url
        self.raw = RawStore(open_store(str(self.folder)))
        self.database = Database.open(url)
        self.batches: list[tuple[str, int]] = []

    def put(self, lines: Sequence[bytes], job: str = "fleet", attempt: int = 0, sender: str = "node") -> None:
        """A batch arrives."""
        data, received_ns = b"".join(lines), time.time_ns()
        kept = self.raw.put(data, day=DAY, job=job, attempt=attempt, sender=sender, sequence=len(self.batches))
        self.batches.append((kept.name, received_ns))
        row = {"raw_key": kept.name, "day": DAY, "job": job, "attempt": attempt, "received_ns": received_ns}
        with self.database.write() as connection:
            connection.execute(insert(schema.batch).values(**row, done=False))

    def rows(self, table: Any) -> list[Any]:
        with self.database.read() as connection:
            return list(connection.execute(select(table)))

    def close(self) -> None:
        self.database.close()
        self.raw.store.close()


@pytest.fixture
def place(tmp_path: Path, database_url: str) -> Any:
    place = Place(tmp_path, database_url)
    yield place
    place.close()


def contents(place: Place) -> dict[str, list[Any]]:
    """All derived rows, without the times of derivation."""
    found = {}
    for table in (schema.stage_start, schema.node_start, schema.start_report):
        found[table.name] = sorted(map(repr, place.rows(table)))
    dropped = {"computed_ns", "computed_n", "state"}
    with place.database.read() as connection:
        rows = connection.execute(select(schema.start)).mappings()
        found["start"] = [{k: v for k, v in row.items() if k not in dropped} for row in rows]
    return found


def test_the_time_of_a_run_is_divided_among_its_starts(place: Place) -> None:
    """An hour in the queue, and a restart in place; the clock of one node is wrong by ten minutes."""
    parts = [span(0, 3600, "queue")]
    for node, clock_s in (("n0", 0.0), ("n1", 600.0)):
        at: dict[str, Any] = {"node": node, "clock_s": clock_s}
        parts.append(span(3600, 13_600, "run", attrs={"gpus": 8}, **at))
        for restart, begin_s in ((0, 3600), (1, 5600)):
            waits = {"attrs": {"barrier": "process_group"}, "restart": restart, **at}
            parts.append(span(begin_s, begin_s + 90, "model_initialization.process_group", **waits))
            parts.append(span(begin_s + 90, begin_s + 100, "first_step", restart=restart, **at))
    place.put([encode(event) for part in parts for event in part], job="j")
    derive_attempt(place.raw, place.database, Attempt("j", 0), place.batches, time.time_ns() + DAY_NS)
    rows = sorted(place.rows(schema.start), key=lambda row: row.restart)
    assert [row.run_s for row in rows] == [pytest.approx(2000), pytest.approx(8000)]
    with place.database.read() as connection:
        (job,) = questions.jobs(connection, Filter())
        (team,) = questions.cost(connection, Filter())
    assert job["share"] == pytest.approx(200 / 10_000)
    assert team["share"] == pytest.approx(200 / 10_000)


def test_starts_that_overlap_take_at_most_all_of_a_jobs_time(place: Place) -> None:
    """A node restarts its command while another one has not noticed the failure yet."""
    parts = []
    for node, times in (("n0", [(0, 40), (50, 200)]), ("n1", [(0, 90), (100, 200)])):
        parts.append(span(0, 200, "run", attrs={"gpus": 8}, node=node))
        parts += [span(*one, "environment_setup", node=node, restart=restart) for restart, one in enumerate(times)]
    place.put([encode(event) for part in parts for event in part], job="j")
    derive_attempt(place.raw, place.database, Attempt("j", 0), place.batches, time.time_ns() + DAY_NS)
    starts = place.rows(schema.start)
    assert sum(row.overhead_s for row in starts) > sum(row.run_s for row in starts) > 0
    with place.database.read() as connection:
        (job,) = questions.jobs(connection, Filter())
    assert job["share"] == 1


def test_a_run_is_over_when_it_has_ended_on_most_nodes(place: Place) -> None:
    """Otherwise, after the death of a node, the job's GPU time would be missing in the shares."""
    parts = [span(0, None, "run", node=f"n{number}", attrs={"gpus": 8}) for number in range(3)]
    for number, run_s in enumerate((None, 1000.0, 1010.0, 1020.0)):
        if run_s is not None:
            begin = parts[number - 1][0]
            end_ns = {name: getattr(begin, name) + round(run_s * NS_PER_S) for name in ("wall_ns", "mono_ns")}
            parts.append([begin._replace(phase="end", outcome="ok", attrs={}, **end_ns)])
        place.put([encode(event) for part in parts for event in part], job="j", sender=f"s{number}")
        derive_attempt(place.raw, place.database, Attempt("j", 0), place.batches, time.time_ns() + DAY_NS)
        assert [row.run_s for row in place.rows(schema.start)] == [run_s if number > 1 else None]


def test_a_start_of_clocks_that_are_years_ahead_is_counted_when_its_lines_arrived(place: Place) -> None:
    """Otherwise it would be in each `--since` until then, and in no month."""
    at: dict[str, Any] = {"clock_s": 10 * 365 * 86_400.0}
    parts = [
        span(0, 3600, "run", attrs={"gpus": 8}, **at),
        span(0, 90, "environment_setup", **at),
        span(90, 100, "first_step", **at),
    ]
    place.put([encode(event) for part in parts for event in part], job="j")
    derive_attempt(place.raw, place.database, Attempt("j", 0), place.batches, time.time_ns() + DAY_NS)
    (row,) = place.rows(schema.start)
    today = day_of(place.batches[0][1])
    assert row.began_ns == place.batches[0][1]
    assert (row.ended_ns - row.began_ns, row.run_s) == (100 * NS_PER_S, 3600)
    assert {
        one.day for table in (schema.start, schema.stage_start, schema.node_start) for one in place.rows(table)
    } == {today}
    with place.database.read() as connection:
        assert questions.cost(connection, Filter(today + 2)) == []


def test_a_time_that_no_database_can_store_is_the_last_one_that_it_can(place: Place) -> None:
    """`bootseer fleet` must not fail with a traceback."""
    begin, end = span(0, 100, "environment_setup")
    far = [begin._replace(wall_ns=92 * 10**17, mono_ns=0), end._replace(wall_ns=92 * 10**17, mono_ns=5 * 10**17)]
    derive_found(place.database, Scanned(far), time.time_ns())
    assert [row.ended_ns for row in place.rows(schema.start)] == [2**63 - 1]


def test_numbers_that_no_job_has_leave_the_sums_of_the_day_there(place: Place) -> None:
    for attempt in range(3):
        counts = {"local_bytes": 2**62, "demand_bytes": 2**62, "stored_bytes": 2**62}
        image = span(50, 51, "image_start", attrs={"image": "x", "mode": "local", **counts})[0]
        parts = [*span(0, 100, "run", attrs={"gpus": 8}), image._replace(phase="instant"), *span(90, 100, "first_step")]
        place.batches = []
        lines = [encode(event._replace(attempt=attempt)) for event in parts]
        place.put(lines, job="j", attempt=attempt, sender=f"node{attempt}")
        derive_attempt(place.raw, place.database, Attempt("j", attempt), place.batches, time.time_ns() + DAY_NS)
    (day,) = {row.day for row in place.rows(schema.start)}
    roll_up(place.database, day)
    assert place.rows(schema.technique_start)[0].origin_bytes == 2**53


@pytest.mark.parametrize(
    ("read", "fetched", "cached", "hits", "before"),
    [(100, 110, 0, 0, 0), (100, 100, 100, 0, 0), (100, 0, 100, 1, 100), (100, 30, 70, 1, 70), (0, 0, 0, 1, 0)],
)
def test_what_a_start_has_prefetched_was_not_in_its_cache(
    place: Place, read: int, fetched: int, cached: int, hits: int, before: int
) -> None:
    """It is read from the cache: cold starts with a hot list were hits."""
    counts = {"mode": "mounted", "read_bytes": read, "place_bytes": fetched, "cache_bytes": cached}
    parts = [*span(0, 100, "run"), moment(99, "checkpoint_start", attrs=counts), *span(90, 100, "first_step")]
    place.put([encode(event) for event in parts], job="j")
    derive_attempt(place.raw, place.database, Attempt("j", 0), place.batches, time.time_ns() + DAY_NS)
    (row,) = place.rows(schema.technique_start)
    assert (row.hits, row.misses, row.cache_bytes, row.origin_bytes) == (hits, 1 - hits, before, fetched)


def test_the_report_is_byte_for_byte_that_of_the_same_lines(place: Place) -> None:
    fleet = Fleet(12, work_of={(3, INSTALL): 90.0})
    lines = fleet.lines()
    for first in range(0, len(lines), 100):
        place.put(lines[first : first + 100])
    derived = derive_attempt(place.raw, place.database, Attempt("fleet", 0), place.batches, time.time_ns())
    assert derived.starts == 1
    told = subprocess.run(
        [sys.executable, "-m", "bootseer", "report", "--json", str(place.folder)], capture_output=True, check=True
    ).stdout
    kept = place.rows(schema.start_report)[0].json
    assert zstandard.decompress(kept) == told
    report = json.loads(told)
    start = place.rows(schema.start)[0]
    assert (start.nodes_heard, start.gpus, start.bucket) == (12, 96, 1)
    assert start.overhead_s == pytest.approx(report["overhead"]["startup_s"], abs=1e-5)
    with place.database.read() as connection:
        node, stage, of_node = schema.node, schema.stage, schema.node_start
        joined = of_node.join(node, of_node.c.node_id == node.c.id).join(stage, of_node.c.stage_id == stage.c.id)
        slow = connection.execute(select(node.c.name, stage.c.name, of_node.c.delay_s).select_from(joined)).all()
    assert [(name, where) for name, where, _ in slow] == [(fleet.name(3), INSTALL)]
    assert slow[0][2] == pytest.approx(30.0, abs=1.0)


def test_a_log_is_of_the_job_it_was_sent_for_whatever_torchrun_calls_it(place: Place) -> None:
    """torchrun has a rendezvous id in all jobs of several nodes: it must not hide the job's log."""
    data = (Path(__file__).parents[1] / "golden" / "torchelastic" / "restart.log").read_bytes()
    batches = []
    for number, lines in enumerate((data, data.replace(b"moe-42", b"moe-43"))):
        kept = place.raw.put(lines, day=DAY, job="llama", attempt=0, sender=f"node-{number}", sequence=0, suffix=LOG)
        batches.append((kept.name, time.time_ns()))
        derived = derive_attempt(place.raw, place.database, Attempt("llama", 0), batches, time.time_ns())
        assert derived.starts == 2
        assert {(row.job, row.nodes_heard) for row in place.rows(schema.start)} == {("llama", number + 1)}


def test_a_log_beside_that_of_a_scheduler_names_no_machine(place: Place) -> None:
    """As in `bootseer report --job 42`: the lines of a file that names no node are of the job's first one."""
    lines = "".join(
        f"[2026-11-20T18:10:00.000] _slurm_rpc_submit_batch_job: JobId={job} InitPrio=42 usec=3\n"
        f"[2026-11-20T18:17:00.000] sched: Allocate JobId={job} NodeList={node} #CPUs=2 Partition=gpu\n"
        for job, node in ((42, "gpu-1"), (43, "gpu-2"))
    )
    data = (
        (Path(__file__).parents[1] / "golden" / "torchelastic" / "restart.log").read_bytes().replace(b"moe-42", b"none")
    )
    batches = []
    for sender, sent in (("slurmctld", lines.encode()), ("slurm-42", data)):
        kept = place.raw.put(sent, day=DAY, job="42", attempt=0, sender=sender, sequence=0, suffix=LOG)
        batches.append((kept.name, time.time_ns()))
    derive_attempt(place.raw, place.database, Attempt("42", 0), batches, time.time_ns())
    assert {row.name for row in place.rows(schema.node)} == {"gpu-1"}


def test_times_of_logs_without_a_zone_are_those_of_the_services_zone(place: Place, monkeypatch: Any) -> None:
    data = (Path(__file__).parents[1] / "golden" / "torchelastic" / "restart.log").read_bytes()
    kept = place.raw.put(data, day=DAY, job="j", attempt=0, sender="n", sequence=0, suffix=LOG)
    began_ns = []
    for zone in ("UTC", "Asia/Tokyo"):
        with monkeypatch.context() as patched:
            patched.setenv("TZ", zone)
            time.tzset()
            derive_attempt(place.raw, place.database, Attempt("j", 0), [(kept.name, time.time_ns())], time.time_ns())
        began_ns.append(place.rows(schema.start)[0].began_ns)
    time.tzset()
    assert began_ns[0] - began_ns[1] == 9 * 3600 * NS_PER_S


def test_signs_of_life_of_a_job_that_trains_are_not_analysed(place: Place) -> None:
    """Those of 1,440 nodes would take 20 % of a core all day."""
    attempt, alive = Attempt("fleet", 0), moment(9_000, "alive")._replace(job="fleet", node="node-0000")
    place.put(Fleet(2).lines())
    derive_attempt(place.raw, place.database, attempt, place.batches, time.time_ns())
    place.put([encode(alive)])
    assert not skip_alive(place.raw, place.database, attempt), "it is open"
    derive_attempt(place.raw, place.database, attempt, place.batches, time.time_ns() + DAY_NS)
    assert not skip_alive(place.raw, place.database, attempt), "nothing is new: it is analysed for another reason"
    for number, (stage, gap, is_skipped) in enumerate(
        [("alive", b"\n", True), ("training_began", b"", False), ("training_began", b"\n", False)]
    ):
        one, other = (encode(alive._replace(mono_ns=number, stage=name)).rstrip() for name in ("alive", stage))
        place.put([one + gap + other + b"\n"])
        assert skip_alive(place.raw, place.database, attempt) == is_skipped
        assert all(row.done for row in place.rows(schema.batch)) == is_skipped


def test_batches_in_any_order_and_twice_end_in_the_same_rows(place: Place) -> None:
    lines = Fleet(4, ranks_per_node=2).lines()
    rng = random.Random(5)
    attempt = Attempt("fleet", 0)
    for first in range(0, len(lines), 40):
        place.put(lines[first : first + 40])
    derive_attempt(place.raw, place.database, attempt, place.batches, time.time_ns())
    once = contents(place)
    for _ in range(3):
        place.put(rng.sample(lines, 60), sender="another")
        rng.shuffle(place.batches)
        derive_attempt(place.raw, place.database, attempt, place.batches, time.time_ns())
    again = contents(place)
    # The report counts the lines read, including repetitions.
    assert once.pop("start_report") != again.pop("start_report")
    assert again == once
    assert place.rows(schema.start)[0].computed_n == 4


def test_an_analysis_that_ends_late_does_not_replace_one_of_more_lines(place: Place) -> None:
    """The worker of a killed service continues, while the next service has another one."""
    lines, attempt = Fleet(3).lines(), Attempt("fleet", 0)
    place.put(lines[: len(lines) // 2])
    before = list(place.batches)
    place.put(lines[len(lines) // 2 :])
    derive_attempt(place.raw, place.database, attempt, place.batches, time.time_ns())
    whole = contents(place)
    with pytest.raises(TransientError, match="more of its lines"):
        derive_attempt(place.raw, place.database, attempt, before, time.time_ns())
    assert contents(place) == whole


def test_a_start_whose_lines_were_removed_stays_as_it_was_and_is_over(place: Place) -> None:
    lines, attempt = Fleet(3).lines(), Attempt("fleet", 0)
    half = len(lines) // 2
    place.put(lines[:half])
    derive_attempt(place.raw, place.database, attempt, place.batches, time.time_ns())
    (before,) = place.rows(schema.start)
    assert before.state == schema.OPEN
    place.raw.delete([name for name, _ in place.batches])
    derive_attempt(place.raw, place.database, attempt, place.batches, time.time_ns())
    (after,) = place.rows(schema.start)
    assert (after.state, after.nodes_heard) == (schema.CLOSED, before.nodes_heard)
    place.put(lines[half:])
    derive_attempt(place.raw, place.database, attempt, place.batches, time.time_ns())
    assert place.rows(schema.start) == [after]

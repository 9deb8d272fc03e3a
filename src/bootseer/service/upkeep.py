"""Background maintenance: sums by day, rows for raw objects that have none, and deletion of old raw lines.

The sums of a day are recomputed from the day's starts when one of them has changed, so that no start counts twice.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import Connection, Integer, Table, bindparam, cast, delete, func, select, text
from sqlalchemy.sql.elements import ColumnElement

from bootseer.errors import BootseerError, CorruptError, TransientError
from bootseer.logs import logger
from bootseer.service import schema
from bootseer.service.database import Database
from bootseer.service.derive import Attempt, Patterns, derive_attempt
from bootseer.service.histogram import CLASSES, class_of
from bootseer.service.questions import Filter, technique_days
from bootseer.service.raw import EVENTS, RawStore, parse_name
from bootseer.service.repeated import Repeated
from bootseer.service.rows import DAY_NS, day_of
from bootseer.trace.event import Malformed, decode

_LOG = logger(__name__)
_SUM_EVERY_S: Final = 2.0
_RECONCILE_EVERY_S: Final = 60.0
_FORGET_EVERY_S: Final = 3600.0
_END_S: Final = 10.0
_PACE: Final = 10
"""Multiple of a task's duration after which it begins again: listing a large bucket takes minutes, and is billed."""
_RETRY_S: Final = 60.0
RAW_DAYS: Final = 14
"""How long raw lines are kept; starts, reports and sums are kept for ever."""


def roll_up(database: Database, day: int) -> None:
    """Compute the sums of a day, over its closed starts."""
    with database.write() as connection:
        # Several services may compute the same day at once. Without the lock, the second one's DELETE would not see the
        # rows that the first one has just inserted, and its own rows would be duplicates.
        if database.is_postgres:
            connection.execute(text("SELECT pg_advisory_xact_lock(7012621, :day)"), {"day": day})
        for table in (schema.stage_day, schema.node_day, schema.storage_day):
            connection.execute(delete(table).where(table.c.day == day))
        database.insert_all(connection, schema.stage_day, _stage_days(connection, day))
        database.insert_all(connection, schema.node_day, _node_days(connection, day))
        database.insert_all(connection, schema.storage_day, technique_days(connection, Filter(day, day)))


def _closed(of: Table, day: int) -> ColumnElement[bool]:
    """The condition for the rows of a day's closed starts. The numbers of others may fall: Prometheus would take that
    for a restart of the counter, and a node that is last so far for one that is last."""
    ids = select(schema.start.c.id).where(schema.start.c.day == day, schema.start.c.state == schema.CLOSED)
    return (of.c.day == day) & of.c.start_id.in_(ids)


def _stage_days(connection: Connection, day: int) -> list[dict[str, Any]]:
    of = schema.stage_start
    keys = (of.c.bucket, of.c.kind, of.c.cache_state, of.c.stage_id)
    hists: dict[tuple[Any, ...], tuple[list[int], ...]] = defaultdict(lambda: ([0] * CLASSES, [0] * CLASSES))
    where = _closed(of, day)
    for *key, median_s, p99_s in connection.execute(select(*keys, of.c.median_s, of.c.p99_s).where(where)):
        for hist, value in zip(hists[tuple(key)], (median_s, p99_s), strict=True):
            if value is not None:
                hist[class_of(value)] += 1
    sums = [func.sum(func.coalesce(of.c[name], 0.0)).label(name) for name in ("work_s", "wait_s", "gpu_s")]
    grouped = select(*keys, func.count().label("n"), *sums).where(where).group_by(*keys)
    found = []
    for row in connection.execute(grouped).mappings():
        of_key = hists[tuple(row[key.name] for key in keys)]
        texts = (json.dumps(hist, separators=(",", ":")) for hist in of_key)
        found.append({"day": day, **row, **dict(zip(("hist", "hist99"), texts, strict=True))})
    return found


def _node_days(connection: Connection, day: int) -> list[dict[str, Any]]:
    of = schema.node_start
    last: ColumnElement[int] = func.sum(cast(of.c.is_last, Integer))
    where = _closed(of, day)
    worst: dict[int, tuple[float, int]] = {}
    lost = select(of.c.node_id, of.c.stage_id, func.sum(of.c.delay_s).label("lost"))
    for row in connection.execute(lost.where(where, of.c.stage_id.is_not(None)).group_by(of.c.node_id, of.c.stage_id)):
        worst[row.node_id] = max(worst.get(row.node_id, (0.0, 0)), (row.lost, row.stage_id))
    sums = select(of.c.node_id, func.count().label("n"), last.label("n_last"), func.sum(of.c.delay_s).label("lost"))
    return [
        {
            "day": day,
            "node_id": row.node_id,
            "n": row.n,
            "n_last": row.n_last or 0,
            "delay_s": row.lost or 0.0,
            "worst_stage_id": worst[row.node_id][1] if row.node_id in worst else None,
        }
        for row in connection.execute(sums.where(where).group_by(of.c.node_id))
    ]


def reconcile(database: Database, raw: RawStore, days: Iterable[int] | None = None) -> int:
    """Create rows for raw objects that have none, of these days or all, so that they are derived. Returns their number.

    Such objects arrived while the database was unreachable, or just before a crash.
    """
    found, now_ns = 0, time.time_ns()
    for day in [None] if days is None else days:
        names = set(raw.names(day))
        with database.read() as connection:
            where = [] if day is None else [schema.batch.c.day == day]
            names -= set(connection.execute(select(schema.batch.c.raw_key).where(*where)).scalars())
        for name in sorted(names):
            try:
                row = _batch(raw, name, now_ns)
            except BootseerError as error:
                _tell(str(error))
                continue
            made = database.insert(schema.batch).values(row).on_conflict_do_nothing().returning(schema.batch.c.raw_key)
            with database.write() as connection:
                found += connection.execute(made).first() is not None
    return found


@lru_cache
def _tell(problem: str) -> None:
    """Log a problem once: a damaged object is found again every minute."""
    _LOG.warning("%s", problem)


def _batch(raw: RawStore, name: str, now_ns: int) -> dict[str, Any]:
    """The row of a raw object, from its name and its first line.

    Of its arrival only the day is known: of batches of a log with the same number, of which only the latest counts, the
    longest is taken for the latest, because logs grow.
    """
    key, lines = parse_name(name), raw.read(name)
    if key is None:
        raise CorruptError(f"{name} is not a name of raw lines")
    job, attempt = key.folder, key.attempt
    if name.endswith(EVENTS):
        for line in lines.split(b"\n"):
            try:
                event = decode(line)
            except Malformed:
                continue
            job, attempt = event.job, event.attempt
            break
    else:
        job = raw.job_of_log(name, key.folder)
    return {
        "raw_key": name,
        "day": key.day,
        "job": job,
        "attempt": attempt,
        "received_ns": min(now_ns, (key.day + 1) * DAY_NS) + len(lines),
        "done": False,
    }


def reindex(
    database: Database, raw: RawStore, progress: Callable[[int, int], object], patterns: Patterns = ()
) -> dict[str, int]:
    """Derive everything with raw lines again. Returns the number of starts, attempts and batches. `progress` is called
    with the attempts done and their total. Starts whose raw lines were deleted are kept.

    An attempt that cannot be analysed is skipped with a warning.
    """
    reconcile(database, raw)
    batch = schema.batch
    with database.read() as connection:
        rows = connection.execute(select(batch.c.job, batch.c.attempt, batch.c.raw_key, batch.c.received_ns)).all()
    attempts: dict[Attempt, list[tuple[str, int]]] = defaultdict(list)
    for job, number, name, received_ns in rows:
        attempts[Attempt(job, number)].append((name, received_ns))
    found = 0
    days: set[int] = set()
    for done, (attempt, batches) in enumerate(attempts.items(), 1):
        try:
            derived = derive_attempt(raw, database, attempt, batches, time.time_ns(), patterns)
        except TransientError:
            raise
        except Exception as error:  # one attempt that cannot be analysed must not stop the others
            _LOG.warning("%r, attempt %d was not analysed: %s", *attempt, error, exc_info=True)
        else:
            found += derived.starts
            days |= derived.days
        progress(done, len(attempts))
    for day in days:
        roll_up(database, day)
    return {"starts": found, "attempts": len(attempts), "batches": len(rows)}


def forget(database: Database, raw: RawStore, raw_days: int, now_ns: int) -> int:
    """Delete raw lines older than this number of days; returns the number of objects."""
    batch = schema.batch
    # All lines of an attempt or none: a part of them would be derived as an incomplete start.
    latest = select(batch.c.job, batch.c.attempt, func.max(batch.c.day).label("day")).group_by(
        batch.c.job, batch.c.attempt
    )
    old = latest.having(func.max(batch.c.day) < day_of(now_ns) - raw_days).subquery()
    same = (batch.c.job == old.c.job) & (batch.c.attempt == old.c.attempt)
    with database.read() as connection:
        names = list(connection.execute(select(batch.c.raw_key).join_from(batch, old, same)).scalars())
    raw.delete(names)
    if names:
        with database.write() as connection:
            gone = delete(batch).where(batch.c.raw_key == bindparam("name"))
            connection.execute(gone, [{"name": name} for name in names])
    return len(names)


class Upkeep:
    """Does this while a service runs, each task in a thread."""

    def __init__(self, database: Database, raw: RawStore, raw_days: int, found: Callable[[], None]) -> None:
        """`found` is called after rows for raw objects were created."""
        self._database = database
        self._raw = raw
        self._raw_days = raw_days
        self._found = found
        self._days: set[int] = set()
        """Days whose sums are to be computed."""
        self._knows_days = False
        """Whether `_days` has those that an earlier service left."""
        self._since: int | None = None
        """The first day that may have objects without rows; None before the first look."""
        self._lock = threading.Lock()
        self._sums = Repeated("sums", self._sum, _SUM_EVERY_S, retry_s=_RETRY_S)
        self._threads = (
            self._sums,
            Repeated("reconcile", self._reconcile, _RECONCILE_EVERY_S, pace=_PACE),
            Repeated("forget", self._forget, _FORGET_EVERY_S, first_s=_FORGET_EVERY_S / 10, pace=_PACE),
        )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def changed(self, days: Iterable[int]) -> None:
        """Starts of these days were derived: recompute their sums within seconds."""
        with self._lock:
            self._days.update(days)

    def close(self) -> None:
        """Stop the threads. The next service computes the pending sums.

        A bucket may take minutes to be listed, and hours to be emptied of what is old: that is left to the next
        service, too, as after a crash.
        """
        until = time.monotonic() + _END_S
        for thread in self._threads:
            thread.ended.set()
        for thread in self._threads:
            thread.close(until - time.monotonic())

    def _find_days(self) -> None:
        """A killed service may have left sums that were not recomputed."""
        start = schema.start
        # Counted from the newest, because that service may have ended long ago.
        newest_ns = select(func.max(start.c.computed_ns)).scalar_subquery()
        lately = start.c.computed_ns >= newest_ns - 2 * DAY_NS  # it may have been closed a day later
        with self._database.read() as connection:
            self.changed(connection.execute(select(start.c.day).distinct().where(lately)).scalars())

    def _sum(self) -> None:
        if not self._knows_days:
            self._find_days()
            self._knows_days = True
        with self._lock:
            days, self._days = sorted(self._days), set()
        failed: Exception | None = None
        for day in days:
            if self._sums.ended.is_set():  # each may wait for a database that hangs
                return
            try:
                roll_up(self._database, day)
            except Exception as error:  # the other days do not wait for it
                failed = error
                self.changed([day])
        if failed is not None:
            raise failed

    def _reconcile(self) -> None:
        today = day_of(time.time_ns())
        if self._since is None:
            self._since = self._latest_day(today)
        if reconcile(self._database, self._raw, range(min(self._since, today - 1), today + 1)):
            self._found()
        self._since = today - 1

    def _forget(self) -> None:
        forget(self._database, self._raw, self._raw_days, time.time_ns())

    def _latest_day(self, today: int) -> int:
        """The day of the last batch with a row: the service may have been killed just after it, days ago."""
        with self._database.read() as connection:
            latest = connection.execute(
                select(func.max(schema.batch.c.day)).where(schema.batch.c.day <= today)
            ).scalar()
        return max(latest if latest is not None else today, today - self._raw_days)

"""From raw lines to rows: the analysis of `bootseer report`, for each attempt while its lines arrive.

`Deriver` is a thread of the service. It takes batches that are not derived yet, says at once where the nodes are
(`live`), and has worker processes analyse the attempt. A worker reads all raw lines of the attempt and replaces all of
its rows in one transaction, so that batches that come late, twice or in another order end in the same rows, and so does
a worker that was killed half-way. How often that happens follows what it costs.

Several services share one PostgreSQL: an attempt belongs to the one that claimed it, for half a minute at a time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from datetime import UTC
from pathlib import Path
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, bindparam, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from bootseer.errors import BootseerError, CorruptError, NotFoundError, TransientError
from bootseer.logs import logger
from bootseer.report.analysis.live import Live, Moment
from bootseer.report.analysis.prepare import Options
from bootseer.report.analysis.report import Analysis
from bootseer.report.analysis.spans import RUN, TRUNCATED, StartupSpans, unique
from bootseer.report.foreign.parser import UNKNOWN_JOB
from bootseer.report.inputs import Source
from bootseer.report.model import Report
from bootseer.report.scan import scan
from bootseer.service import schema
from bootseer.service.closing import Seen, closes_ns
from bootseer.service.database import Database
from bootseer.service.raw import EVENTS, RawStore
from bootseer.service.rows import Rows, rows_of
from bootseer.store.open import open_store
from bootseer.trace.event import OK, Event, Malformed, decode
from bootseer.units import NS_PER_S

_LOG = logger(__name__)
_LOOK_EVERY_S: Final = 0.25
_QUIET_S: Final = 0.5
"""A worker begins when no batch has come for so long ..."""
_PACE: Final = 4
"""... or when so many times what the last analysis took have passed, however many come."""
_LEAST_S: Final = 1.0
_BATCHES: Final = 1_000
_CLAIMED_S: Final = 30
_TRIES: Final = 3
"""Lines whose analysis fails so often are left alone; `bootseer serve reindex` tries again."""
_TASKS_PER_WORKER: Final = 200
"""A worker is replaced then: what a large start made it take is given back."""


class Attempt(NamedTuple):
    """A job's attempt: what is derived at once."""

    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Derived:
    """What one analysis has put into the database."""

    starts: int
    days: frozenset[int]
    """Whose sums over all starts have changed."""
    closes_ns: int | None
    """When the last open start of the attempt is over if nothing more comes; None without an open one."""


def derive_attempt(
    raw: RawStore, database: Database, attempt: Attempt, batches: Sequence[tuple[str, int]], now_ns: int
) -> Derived:
    """Analyse all lines of an attempt and replace its rows. `batches`: each object's name and when it arrived, ns.

    Raises `BootseerError` when the lines cannot be read or the rows not be written: nothing has changed then.
    """
    rows, closes = _rows(raw, attempt, sorted(batches), now_ns)
    with database.write() as connection:
        days = _replace(database, connection, attempt, rows, now_ns)
        for name, _ in batches:
            connection.execute(update(schema.batch).where(schema.batch.c.raw_key == name).values(done=True))
    return Derived(len(rows), frozenset(days), closes)


def _rows(
    raw: RawStore, attempt: Attempt, batches: Sequence[tuple[str, int]], now_ns: int
) -> tuple[list[Rows], int | None]:
    arrived = dict(batches)
    objects = raw.of_attempt(arrived)
    found = scan((Source(name, Path(name), False, lines, arrived[name]) for name, lines in objects), zone=UTC)
    own = [event for event in found.events if event.job in (attempt.job, UNKNOWN_JOB)]
    own = [event._replace(job=attempt.job, attempt=attempt.attempt) for event in own]
    events, duplicates = unique(own)
    if not events:
        return [], None
    analysis = Analysis(events, Options(job=attempt.job), facts=found.facts, read=found.input(), duplicates=duplicates)
    rows, open_until = [], []
    for startup in analysis.startups:
        report = analysis.report(startup)
        over_ns = closes_ns(_seen(report, startup, list(arrived.values())))
        is_closed = now_ns >= over_ns
        rows.append(rows_of(report, startup, is_closed=is_closed, told=report.to_text()))
        open_until += [] if is_closed else [over_ns]
    return rows, max(open_until, default=None)


def _seen(report: Report, startup: StartupSpans, arrived_ns: Sequence[int]) -> Seen:
    ended = 0
    for node in startup.nodes.values():
        runs = [span for span in node.structure if span.stage == RUN]
        ended += node.restarted or bool(runs and all(span.outcome != TRUNCATED for span in runs))
    return Seen(
        first_ns=min(arrived_ns),
        latest_ns=max(arrived_ns),
        nodes_expected=report.coverage.nodes_expected,
        nodes_heard=report.coverage.nodes_heard,
        nodes_began=sum(node.outcome == OK for node in report.nodes),
        nodes_ended=ended,
    )


def _replace(
    database: Database, connection: Connection, attempt: Attempt, rows: Sequence[Rows], now_ns: int
) -> set[int]:
    """Put these rows in the place of all that the attempt has; the days that are concerned."""
    start = schema.start
    old = connection.execute(
        select(start.c.id, start.c.restart, start.c.day, start.c.computed_n).where(
            start.c.job == attempt.job, start.c.attempt == attempt.attempt
        )
    ).all()
    known = {row.restart: row for row in old}
    days = {row.day for row in old}
    for row in old:
        for table in (schema.start_report, schema.stage_start, schema.node_start, schema.span):
            connection.execute(delete(table).where(table.c.start_id == row.id))
    gone = known.keys() - {one.start["restart"] for one in rows}
    if gone:
        connection.execute(delete(start).where(start.c.id.in_([known[restart].id for restart in gone])))
    for one in rows:
        nodes = database.ids(connection, schema.node, _node_names(one))
        stages = database.ids(connection, schema.stage, _stage_names(one))
        values = dict(one.start)
        values["last_node_id"] = nodes.get(values.pop("last_node"))
        values["last_stage_id"] = stages.get(values.pop("last_stage"))
        before = known.get(values["restart"])
        values |= {"computed_ns": now_ns, "computed_n": (before.computed_n if before else 0) + 1}
        if before is None:
            identity = connection.execute(insert(start).values(values).returning(start.c.id)).scalar_one()
        else:
            identity = before.id
            connection.execute(update(start).where(start.c.id == identity).values(values))
        days.add(values["day"])
        connection.execute(insert(schema.start_report).values(start_id=identity, json=one.report))
        _insert_parts(database, connection, one, identity, nodes, stages)
        seen = [{"id_": nodes[row["node"]], "ns": values["ended_ns"]} for row in one.nodes]
        if seen:
            table = schema.node
            later = (table.c.id == bindparam("id_")) & (table.c.last_seen_ns < bindparam("ns"))
            connection.execute(update(table).where(later).values(last_seen_ns=bindparam("ns")), seen)
        for name, rack in one.racks.items():
            connection.execute(update(schema.node).where(schema.node.c.id == nodes[name]).values(rack=rack))
    return days


def _insert_parts(
    database: Database, connection: Connection, one: Rows, identity: int, nodes: dict[str, int], stages: dict[str, int]
) -> None:
    def put(rows: Iterable[dict[str, Any]], table: Any, numbers: dict[str, tuple[str, dict[str, int]]]) -> None:
        made = []
        for row in rows:
            values = {"start_id": identity, **row}
            for name, (column, ids) in numbers.items():
                values[column] = ids.get(values.pop(name))
            made.append(values)
        database.insert_all(connection, table, made)

    put(one.stages, schema.stage_start, {"stage": ("stage_id", stages), "max_node": ("max_node_id", nodes)})
    put(
        one.nodes,
        schema.node_start,
        {"node": ("node_id", nodes), "stage": ("stage_id", stages), "last_stage": ("last_stage_id", stages)},
    )
    put(one.spans, schema.span, {"node": ("node_id", nodes), "stage": ("stage_id", stages)})


def _node_names(one: Rows) -> set[str]:
    names = {row["node"] for row in (*one.nodes, *one.spans)} | {row["max_node"] for row in one.stages}
    return {name for name in (*names, one.start["last_node"]) if name}


def _stage_names(one: Rows) -> set[str]:
    names = {row["stage"] for row in (*one.stages, *one.nodes, *one.spans)} | {row["last_stage"] for row in one.nodes}
    return {name for name in (*names, one.start["last_stage"]) if name}


@dataclass(slots=True)
class _State:
    """What the service knows of an attempt whose lines arrive."""

    live: Live
    names: set[str] = field(default_factory=set)
    """Objects that `live` has seen."""
    is_changed: bool = True
    """Batches came that no analysis has."""
    came_s: float = 0.0
    ended_s: float = 0.0
    took_s: float = 0.0
    running: Future[Derived] | None = None
    began_s: float = 0.0
    failures: int = 0
    closes_ns: int | None = None
    claimed_s: float = float("-inf")


class Deriver:
    """Derives what arrives. `start` it; `wake` it when a batch came."""

    def __init__(
        self,
        database: Database,
        database_url: str,
        raw_uri: str,
        *,
        workers: int = 1,
        on_moment: Callable[[Moment], None] = lambda moment: None,
        on_derived: Callable[[Attempt, Derived], None] = lambda attempt, derived: None,
    ) -> None:
        """`on_moment` and `on_derived` are called from the deriver's thread, when a start has moved on, and when its
        rows were replaced."""
        self._database = database
        self._places = (raw_uri, database_url)
        self._raw = RawStore(open_store(raw_uri))
        self._workers = workers
        self._on_moment = on_moment
        self._on_derived = on_derived
        self._name = f"{socket.gethostname()}.{os.getpid()}"
        self._states: dict[Attempt, _State] = {}
        self._pool: ProcessPoolExecutor | None = None
        self._woken = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bootseer-derive", daemon=True)
        self.problem = ""
        """Why nothing is derived at the moment; "" while all is well."""

    def start(self) -> None:
        """Begin; starts that were open when the service ended are taken up again."""
        self._thread.start()

    def wake(self) -> None:
        """There is a new batch."""
        self._woken.set()

    def close(self) -> None:
        """End. What was not derived is derived by the next service."""
        self._ended.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._raw.store.close()

    def is_idle(self) -> bool:
        """Whether all that had arrived at the last look is derived."""
        return not any(state.is_changed or state.running for state in list(self._states.values()))

    def _run(self) -> None:
        reopened = False
        while not self._ended.is_set():
            try:
                if not reopened:
                    self._reopen()
                    reopened = True
                self._take()
                self._collect()
                self._submit()
                self._close_starts()
                self.problem = ""
            except BootseerError as error:
                if self.problem != str(error):
                    _LOG.warning("nothing is derived: %s", error)
                self.problem = str(error)
                self._ended.wait(_LEAST_S)
            self._woken.wait(_LOOK_EVERY_S)
            self._woken.clear()

    def _reopen(self) -> None:
        """Take up the attempts with open starts, so that they are closed some day."""
        with self._database.read() as connection:
            start = schema.start
            rows = connection.execute(
                select(start.c.job, start.c.attempt).where(start.c.state == schema.OPEN).distinct()
            ).all()
        for job, number in rows:
            self._state(Attempt(job, number)).is_changed = True

    def _state(self, attempt: Attempt) -> _State:
        state = self._states.get(attempt)
        if state is None:
            state = self._states[attempt] = _State(Live(attempt.job, attempt.attempt, None))
        return state

    def _take(self) -> None:
        """Look for batches that are not derived, and tell where the nodes are by them."""
        batch = schema.batch
        with self._database.read() as connection:
            rows = connection.execute(
                select(batch.c.raw_key, batch.c.job, batch.c.attempt)
                .where(batch.c.done.is_(False))
                .order_by(batch.c.received_ns)
                .limit(_BATCHES)
            ).all()
        came: dict[Attempt, list[str]] = defaultdict(list)
        for name, job, number in rows:
            came[Attempt(job, number)].append(name)
        for attempt, names in came.items():
            if not self._claim(attempt):
                continue
            state = self._state(attempt)
            new = [name for name in names if name not in state.names]
            if not new:
                continue
            state.names.update(new)
            state.is_changed, state.came_s = True, time.monotonic()
            state.live.feed(self._events(attempt, new))
            moment = state.live.moment(time.time_ns())
            with self._database.write() as connection:
                where = (schema.live.c.job == attempt.job) & (schema.live.c.attempt == attempt.attempt)
                values = {"moment": json.dumps(moment.to_json()), "updated_ns": time.time_ns()}
                connection.execute(update(schema.live).where(where).values(values))
            self._on_moment(moment)

    def _events(self, attempt: Attempt, names: Sequence[str]) -> list[Event]:
        events = []
        for name in names:
            if not name.endswith(EVENTS):
                continue
            try:
                lines = self._raw.read(name)
            except (NotFoundError, CorruptError) as error:
                _LOG.warning("%s", error)
                continue
            for line in lines.split(b"\n"):
                if line:
                    try:
                        event = decode(line)[0]
                    except Malformed:
                        continue
                    if event.job == attempt.job and event.attempt == attempt.attempt:
                        events.append(event)
        return events

    def _claim(self, attempt: Attempt) -> bool:
        """Whether this process derives the attempt."""
        state = self._states.get(attempt)
        if state is not None and time.monotonic() - state.claimed_s < _CLAIMED_S / 3:
            return True
        live, now_ns = schema.live, time.time_ns()
        until_ns = now_ns + _CLAIMED_S * NS_PER_S
        here = (live.c.job == attempt.job) & (live.c.attempt == attempt.attempt)
        free = (live.c.owner == self._name) | (live.c.owned_until_ns < now_ns)
        with self._database.write() as connection:
            taken = connection.execute(
                update(live).where(here & free).values(owner=self._name, owned_until_ns=until_ns)
            ).rowcount
            is_ours = bool(taken)
            if not taken and connection.execute(select(live.c.owner).where(here)).first() is None:
                try:
                    with connection.begin_nested():
                        connection.execute(
                            insert(live).values(
                                job=attempt.job, attempt=attempt.attempt, owner=self._name, owned_until_ns=until_ns
                            )
                        )
                    is_ours = True
                except IntegrityError:  # another one was faster
                    is_ours = False
        if is_ours:
            self._state(attempt).claimed_s = time.monotonic()
        return is_ours

    def _submit(self) -> None:
        now_s = time.monotonic()
        for attempt, state in self._states.items():
            if state.running or not state.is_changed:
                continue
            paced_s = state.ended_s + max(_LEAST_S, _PACE * state.took_s)
            if now_s < min(max(state.came_s + _QUIET_S, state.ended_s + _LEAST_S), paced_s):
                continue
            if not self._claim(attempt):
                continue
            with self._database.read() as connection:
                batch = schema.batch
                batches = connection.execute(
                    select(batch.c.raw_key, batch.c.received_ns).where(
                        batch.c.job == attempt.job, batch.c.attempt == attempt.attempt
                    )
                ).all()
            state.is_changed = False
            if not batches:
                continue
            work = [(name, received_ns) for name, received_ns in batches]
            state.began_s, state.running = now_s, self._executor().submit(_work, *self._places, attempt, work)
            state.running.add_done_callback(lambda _: self._woken.set())

    def _executor(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._workers,
                mp_context=multiprocessing.get_context("forkserver"),
                max_tasks_per_child=_TASKS_PER_WORKER,
            )
        return self._pool

    def _collect(self) -> None:
        for attempt, state in self._states.items():
            if state.running is None or not state.running.done():
                continue
            future, state.running = state.running, None
            state.ended_s = time.monotonic()
            state.took_s = state.ended_s - state.began_s
            try:
                derived = future.result()
            except BrokenProcessPool:
                _LOG.warning("a worker process was killed; another one takes its place")
                self._pool = None
                state.is_changed = True
            except TransientError as error:
                self.problem = str(error)
                state.is_changed = True
            except Exception as error:  # lines that the analysis fails for must not stop all others
                state.failures += 1
                what = (attempt.job, attempt.attempt, error)
                _LOG.warning("%r, attempt %d cannot be analysed: %s", *what, exc_info=True)
                state.is_changed = state.failures < _TRIES
                if not state.is_changed:
                    self._give_up(attempt)
            else:
                state.failures, state.closes_ns = 0, derived.closes_ns
                self._on_derived(attempt, derived)

    def _give_up(self, attempt: Attempt) -> None:
        batch = schema.batch
        with self._database.write() as connection:
            connection.execute(
                update(batch).where(batch.c.job == attempt.job, batch.c.attempt == attempt.attempt).values(done=True)
            )

    def _close_starts(self) -> None:
        """Starts whose time has come are over; what is known of them is forgotten here."""
        for attempt, state in list(self._states.items()):
            if state.is_changed or state.running:
                continue
            if state.closes_ns is not None and time.time_ns() < state.closes_ns:
                continue
            if state.closes_ns is not None:
                start = schema.start
                where = (start.c.job == attempt.job) & (start.c.attempt == attempt.attempt)
                with self._database.write() as connection:
                    connection.execute(update(start).where(where).values(state=schema.CLOSED))
                    live = schema.live
                    connection.execute(delete(live).where(live.c.job == attempt.job, live.c.attempt == attempt.attempt))
                state.closes_ns = None
                self._on_derived(attempt, Derived(0, frozenset(), None))
            if time.monotonic() - state.came_s > _CLAIMED_S:
                del self._states[attempt]


_opened: dict[tuple[str, str], tuple[RawStore, Database]] = {}
"""Of a worker process: stays open from one attempt to the next."""


def _work(raw_uri: str, database_url: str, attempt: Attempt, batches: list[tuple[str, int]]) -> Derived:
    """What a worker process does."""
    place = (raw_uri, database_url)
    if place not in _opened:
        _opened[place] = (RawStore(open_store(raw_uri)), Database(database_url))
    raw, database = _opened[place]
    return derive_attempt(raw, database, attempt, batches, time.time_ns())

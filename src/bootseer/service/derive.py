"""From raw lines to rows: the analysis of `bootseer report`, for one attempt.

Why everything is derived again instead of updating rows with each batch: the analysis is not incremental. A late line
can move the clock offsets, the order of barriers and thereby the numbers of every node. So all raw lines of the attempt
are read and all its rows replaced in one transaction. The result depends only on the set of lines: batches that arrive
late, twice or in another order give the same rows, and so does an analysis that was killed half-way and repeated. The
cost grows with the number of analyses, which `deriver` limits.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, Table, bindparam, delete, func, insert, select, text, update

from bootseer.errors import TransientError
from bootseer.logs import logger
from bootseer.report.analysis.compose import Analysis
from bootseer.report.analysis.live import Live
from bootseer.report.analysis.prepare import Options
from bootseer.report.analysis.spans import COMMAND, RUN, TRUNCATED, StartupSpans, unique
from bootseer.report.foreign.parser import FOREIGN, UNKNOWN_JOB
from bootseer.report.inputs import Source
from bootseer.report.log_scan import scan
from bootseer.report.model import Report
from bootseer.report.scanned import Scanned
from bootseer.service import schema
from bootseer.service.database import Database
from bootseer.service.raw import LOG, RawStore, parse_name
from bootseer.service.rows import BEGAN, Rows, move_to_arrival, rows_of, set_run_s
from bootseer.trace.event import BEGIN, OK, TAG_STEM, Event
from bootseer.units import NS_PER_S

_LOG = logger(__name__)
_PARTS: Final = (schema.start_report, schema.stage_start, schema.node_start, schema.technique_start)
_NODES: Final = ("node", "max_node", "last_node")
_STAGES: Final = ("stage", "last_stage")
Patterns = Sequence[tuple[str, re.Pattern[bytes]]]
_MARK: Final = re.compile(r"-[0-9a-f]{8,12}$")
"""The suffix that `bootseer ship` adds to the name of a file."""
_ALIVE: Final = b'"stage":"alive"'
_CLOCKS_DIFFER_NS: Final = 3600 * NS_PER_S
"""Maximum difference between the clocks of several services' machines; much less than any retention."""


class Attempt(NamedTuple):
    """A job's attempt, the unit of derivation."""

    job: str
    attempt: int

    def of(self, table: Table) -> ColumnElement[bool]:
        """The condition for its rows in a table."""
        return (table.c.job == self.job) & (table.c.attempt == self.attempt)


@dataclass(frozen=True, slots=True)
class Derived:
    """The result of one analysis."""

    starts: int
    days: frozenset[int]
    """Days whose sums over all starts have changed."""
    closes_ns: int | None
    """When the last open start of the attempt closes if no more lines arrive; None if none is open."""


def derive_attempt(
    raw: RawStore,
    database: Database,
    attempt: Attempt,
    batches: Sequence[tuple[str, int]],
    now_ns: int,
    patterns: Patterns = (),
) -> Derived:
    """Analyse all lines of an attempt, and replace its rows and the live state of its nodes.

    batches: the name of each object and when it arrived, ns.
    patterns: patterns of stages in a site's own logs.

    If earlier lines of the attempt were removed, by retention or by hand, late lines change nothing: otherwise the rows
    of a complete start would be replaced by those of a part. Such a start is closed. A later run of the same number
    replaces it.

    Raises `BootseerError` if lines cannot be read or rows cannot be written, `TransientError` if another process has
    analysed more lines meanwhile; then nothing is changed.
    """
    gone: set[str] = set()
    arrived = dict(sorted(batches))
    found = scan(_sources(raw, arrived, gone), patterns=patterns, job=attempt.job)
    events, duplicates = unique(_own(found, attempt))
    rows, closes = _analysed(events, duplicates, attempt, found, list(arrived.values()), now_ns)
    live = Live(attempt.job, attempt.attempt, None)
    live.feed(events)
    moment = json.dumps(live.moment(now_ns).to_json())
    with database.write() as connection:
        _only_one(database, connection, attempt, {name for name, _ in batches})
        if _has_all(connection, attempt, min(arrived.values(), default=0), gone, events):
            days = _replace(database, connection, attempt, rows, now_ns)
            live_row = update(schema.live).where(attempt.of(schema.live))
            connection.execute(live_row.values(moment=moment, updated_ns=now_ns))
        else:
            rows, closes, days = [], None, close_starts(connection, attempt)
            _LOG.warning("%r, attempt %d: late lines were ignored, because earlier ones were removed", *attempt)
        _mark_done(connection, [name for name, _ in batches])
    return Derived(len(rows), frozenset(days), closes)


def skip_alive(raw: RawStore, database: Database, attempt: Attempt) -> bool:
    """If training has begun, and the new batches have only `alive` events, mark them as done; returns whether it did.

    They change no figure of the starts, and 1,440 nodes send several each second.
    """
    start, batch = schema.start, schema.batch
    trains = select((start.c.outcome == BEGAN) & (start.c.state == schema.CLOSED)).where(attempt.of(start))
    with database.read() as connection:
        if not connection.execute(trains.order_by(start.c.restart.desc()).limit(1)).scalar():
            return False
        new = select(batch.c.raw_key).where(attempt.of(batch), batch.c.done.is_(False))
        names = connection.execute(new).scalars().all()
    lines = (line for _, data in raw.of_attempt(names, set()) for line in data.split(b"\n") if line)
    # Of several processes that write to one log, a line may have the events of two.
    if not names or not all(_ALIVE in line and line.count(TAG_STEM) == 1 for line in lines):
        return False
    with database.write() as connection:
        _mark_done(connection, names)
    return True


def _mark_done(connection: Connection, names: Sequence[str]) -> None:
    if names:
        done = update(schema.batch).where(schema.batch.c.raw_key == bindparam("name")).values(done=True)
        connection.execute(done, [{"name": name} for name in names])


def close_starts(connection: Connection, attempt: Attempt) -> set[int]:
    """Close all starts of the attempt; returns their days."""
    start = schema.start
    over = update(start).where(attempt.of(start)).values(state=schema.CLOSED).returning(start.c.day)
    return set(connection.execute(over).scalars())


def _only_one(database: Database, connection: Connection, attempt: Attempt, names: set[str]) -> None:
    """Lock the attempt's rows, and refuse to replace rows derived from more lines: a worker may outlive its service,
    and finish after a worker of the next one."""
    if database.is_postgres:
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:job, :attempt))"), attempt._asdict())
    batch = schema.batch
    done = select(batch.c.raw_key).where(attempt.of(batch), batch.c.done.is_(True))
    if not names.issuperset(connection.execute(done).scalars()):
        raise TransientError("another process has analysed more of its lines")


def _has_all(connection: Connection, attempt: Attempt, first_ns: int, gone: set[str], events: list[Event]) -> bool:
    """Whether the lines that the attempt was derived from still exist, as they arrived before that and can be read; or
    all are of a run that began later."""
    computed = select(func.min(schema.start.c.computed_ns)).where(attempt.of(schema.start))
    computed_ns = connection.execute(computed).scalar_one()
    has_run = any(event.stage == RUN and event.phase == BEGIN for event in events)
    is_later_run = has_run and min(event.wall_ns for event in events) > (computed_ns or 0)
    return computed_ns is None or (not gone and (is_later_run or first_ns < computed_ns + _CLOCKS_DIFFER_NS))


def _own(found: Scanned, attempt: Attempt) -> list[Event]:
    """The attempt's events, and those of its logs, whose programs may give the job another name, as torchrun's
    `--rdzv-id` does. Only logs of schedulers, and lines of a site's own patterns, may be about several jobs."""
    is_one = len({event.job for event in found.events}) == 1
    own = []
    for event in found.events:
        program = event.attrs.get(FOREIGN)
        if (event.job, event.attempt) == attempt:
            own.append(event)
        elif event.job == UNKNOWN_JOB or (program and (is_one or program not in ("slurm", "pattern"))):
            own.append(event._replace(job=attempt.job, attempt=attempt.attempt))
    return own


def _sources(raw: RawStore, arrived: Mapping[str, int], gone: set[str]) -> Iterator[Source]:
    """The event lines of each batch; and each log as a whole, because its stages may span several batches.

    Of batches with the same sequence number only the latest counts: the log had grown when it was sent again.
    """
    logs: dict[str, dict[int, str]] = defaultdict(dict)
    for name in sorted(arrived, key=lambda name: arrived[name]):
        key = parse_name(name) if name.endswith(LOG) else None
        if key is not None:
            logs[key.sender][key.sequence] = name
    events = (name for name in arrived if not name.endswith(LOG))
    for name, lines in raw.of_attempt(events, gone):
        yield Source(name, Path(name), False, [lines], arrived[name])
    for sender, names in sorted(logs.items()):
        pieces = (lines for _, lines in raw.of_attempt((names[number] for number in sorted(names)), gone))
        # Named like its file, which identifies the node if no line does.
        yield Source(sender, Path(_MARK.sub("", sender)), False, pieces, max(arrived[name] for name in names.values()))


def derive_found(database: Database, found: Scanned, now_ns: int) -> frozenset[int]:
    """Store all starts of scanned logs in a database; returns their days."""
    attempts: dict[Attempt, list[Event]] = defaultdict(list)
    for event in found.events:
        attempts[Attempt(event.job, event.attempt)].append(event)
    days: set[int] = set()
    for attempt, events in attempts.items():
        times = [event.wall_ns for event in events]
        later_ns = now_ns + AFTER_BEGAN_NS  # no lines are on their way
        rows, _ = _analysed(*unique(events), attempt, found, [min(times), max(times)], later_ns)
        with database.write() as connection:
            days |= _replace(database, connection, attempt, rows, now_ns)
    return frozenset(days)


def _analysed(
    events: list[Event],
    duplicates: int,
    attempt: Attempt,
    found: Scanned,
    arrived_ns: Sequence[int],
    now_ns: int,
) -> tuple[list[Rows], int | None]:
    if not events:
        return [], None
    analysis = Analysis(events, Options(job=attempt.job), facts=found.facts, read=found.input(), duplicates=duplicates)
    first_ns, latest_ns = min(arrived_ns), max(arrived_ns)
    last_ns = max(node.last_ns for startup in analysis.startups for node in startup.nodes.values())

    def arrival_ns(at_ns: int) -> int:
        """When a line of this moment arrived, if it was under way as long as the latest line."""
        return min(max(latest_ns - (last_ns - at_ns), first_ns), latest_ns)

    rows, open_until, next_ns = [], [], math.inf
    for startup in reversed(analysis.startups):
        report = analysis.report(startup)
        seen = _seen(report, startup, arrival_ns)
        over_ns = min(closes_ns(seen), next_ns)
        next_ns = seen.first_ns + AFTER_BEGAN_NS  # a later restart ends those before it
        is_closed = now_ns >= over_ns
        rows.append(rows_of(report, startup, is_closed=is_closed))
        open_until += [] if is_closed else [int(over_ns)]
    set_run_s(rows, analysis.startups)
    move_to_arrival(rows, first_ns)
    return rows, max(open_until, default=None)


def _seen(report: Report, startup: StartupSpans, arrival_ns: Callable[[int], int]) -> Seen:
    zero_ns, ended, commands, has_runs = report.startup.zero_ns, 0, 0, False
    for node in startup.nodes.values():
        runs = [span for span in node.spans if span.stage == RUN]  # the last restart has that of the attempt
        ended += node.restarted or bool(runs and all(span.outcome != TRUNCATED for span in runs))
        commands += any(span.stage == COMMAND for span in node.spans)
        has_runs |= bool(runs)
    begin_ns = zero_ns + round(min((node.start_s for node in report.nodes), default=0.0) * NS_PER_S)
    return Seen(
        # Logs of jobs without `bootseer run` may be sent long afterwards.
        first_ns=arrival_ns(begin_ns) if has_runs else min(arrival_ns(begin_ns), begin_ns),
        latest_ns=arrival_ns(zero_ns + round((report.overhead.startup_s or 0.0) * NS_PER_S)),
        nodes_expected=report.coverage.nodes_expected,
        nodes_heard=report.coverage.nodes_heard,
        nodes_began=sum(node.outcome == OK for node in report.nodes),
        nodes_ended=ended,
        nodes_commanded=commands,
    )


def _replace(
    database: Database, connection: Connection, attempt: Attempt, rows: Sequence[Rows], now_ns: int
) -> set[int]:
    """Replace all rows of the attempt; returns the days concerned."""
    start = schema.start
    old = connection.execute(select(start.c.id, start.c.restart, start.c.day).where(attempt.of(start))).all()
    days = {row.day for row in old}
    for table in _PARTS:
        connection.execute(delete(table).where(table.c.start_id.in_([row.id for row in old])))
    kept = {one.start["restart"] for one in rows}
    connection.execute(delete(start).where(start.c.id.in_([row.id for row in old if row.restart not in kept])))
    for one in rows:
        named = (one.start, *one.stages, *one.nodes)
        nodes = database.ids(connection, schema.node, _names(named, _NODES))
        stages = database.ids(connection, schema.stage, _names(named, _STAGES))
        ids = {**dict.fromkeys(_NODES, nodes), **dict.fromkeys(_STAGES, stages)}
        values = {**_with_ids(one.start, ids), "computed_ns": now_ns, "computed_n": start.c.computed_n + 1}
        put = database.insert(start).values(values | {"computed_n": 1})
        put = put.on_conflict_do_update(index_elements=[start.c.job, start.c.attempt, start.c.restart], set_=values)
        identity = connection.execute(put.returning(start.c.id)).scalar_one()
        days.add(values["day"])
        connection.execute(insert(schema.start_report).values(start_id=identity, json=one.report))
        for table, parts in (
            (schema.stage_start, one.stages),
            (schema.node_start, one.nodes),
            (schema.technique_start, one.techniques),
        ):
            made = [{"start_id": identity, **_with_ids(row, ids)} for row in parts]
            database.insert_all(connection, table, made)
        racks = [{"id_": nodes[name], "place": rack} for name, rack in one.racks.items()]
        if racks:
            of = schema.node.c
            moved = update(schema.node).where(of.id == bindparam("id_"), of.rack != bindparam("place"))
            connection.execute(moved.values(rack=bindparam("place")), racks)
    return days


def _names(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> set[str]:
    return {row[name] for row in rows for name in columns if row.get(name)}


def _with_ids(row: Mapping[str, Any], ids: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """The row with ids instead of names of nodes and stages."""
    return {name + "_id" * (name in ids): ids[name].get(value) if name in ids else value for name, value in row.items()}


AFTER_BEGAN_NS: Final = 30 * NS_PER_S
"""Nodes write a few more lines after the first step."""
QUIET_NS: Final = 10 * NS_PER_S
LOST_NS: Final = 600 * NS_PER_S
CAP_NS: Final = 24 * 3600 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of a start; times are estimated by the service's clock, because those of nodes may be wrong."""

    first_ns: int
    """When its first line arrived."""
    latest_ns: int
    """When its latest line arrived, without those of the training that followed."""
    nodes_expected: int | None
    nodes_heard: int
    nodes_began: int
    """Nodes on which training began."""
    nodes_ended: int
    """Nodes whose commands have ended, or were replaced by a later restart."""
    nodes_commanded: int
    """Nodes whose commands have begun: while they run, `alive` comes at most a tenth of their age apart."""


def closes_ns(seen: Seen) -> int:
    """When a start is over if no more lines arrive, so that its numbers count as final. Late lines open it again.

    Why not simply after some quiet time: on 1,440 nodes one slow node may be silent for minutes while all others wait.
    A start that is closed too early would be counted with a wrong duration until the next line. So it closes soon after
    training began on every expected node; or soon after its last line before training if every command that was started
    has ended; later if only some have, or none of those that all nodes began, because a node that died sends no end; or
    `CAP_NS` after its first line, even if nodes are missing. A later restart closes it, too (`_analysed`).
    """
    capped_ns = seen.first_ns + CAP_NS
    all_nodes = max(seen.nodes_expected or 0, seen.nodes_heard)
    if seen.nodes_began >= all_nodes > 0:
        return min(seen.latest_ns + AFTER_BEGAN_NS, capped_ns)
    if not seen.nodes_ended and not seen.nodes_commanded >= seen.nodes_heard > 0:
        return capped_ns
    lost_ns = max(LOST_NS, (seen.latest_ns - seen.first_ns) // 4)
    return min(seen.latest_ns + (QUIET_NS if seen.nodes_ended >= seen.nodes_heard else lost_ns), capped_ns)

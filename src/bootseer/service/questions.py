"""Queries over all starts: over weeks, by team, scale, stage, node and cache.

Each function answers one question with a list of plain dicts, which pages, `/api/v1`, `/metrics` and the verbs show.
They read the rows of starts and the sums of days, never spans, so a month of a large fleet takes less than a second.

Shares and medians are over starts; GPU time is in seconds of one GPU.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Connection, Integer, Select, Table, case, cast, func, select

from bootseer.report.analysis.spans import TRUNCATED
from bootseer.report.analysis.stages import quantile
from bootseer.report.analysis.verdict import BUCKETS
from bootseer.service.histogram import CLASSES, class_of, middle_s, sum_of
from bootseer.service.rows import BEGAN
from bootseer.service.schema import (
    CLOSED,
    OPEN,
    batch,
    live,
    node,
    node_day,
    stage,
    stage_day,
    stage_start,
    start,
    storage_day,
    technique_start,
)
from bootseer.trace.event import FAILED, written_name
from bootseer.units import NS_PER_S

Rows = list[dict[str, Any]]
_USES: Final = ("hits", "misses", "cache_bytes", "peer_bytes", "origin_bytes", "saved_s")
_COMING_S: Final = 300
_LEAST_STARTS: Final = 3
"""Of a node that is compared with others."""
# Not open starts, which have not ended yet, nor starts without an observed first step, which may have trained.
_FAILED: Final = start.c.outcome.in_((FAILED, TRUNCATED)) & (start.c.state == CLOSED)
own_s: Final = start.c.overhead_s - func.coalesce(start.c.queue_s, 0.0)
"""Duration without the queue, in which a job has no GPUs."""
_UNKNOWN: Final = func.count() - func.count(start.c.gpus)
"""Starts whose number of GPUs is unknown. They are in no sum of GPU time; sums of only such starts are null."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects starts: by days (both inclusive), team, queue, job, scale, kind and state."""

    since_day: int = 0
    until_day: int = 1 << 20
    team: str | None = None
    queue: str | None = None
    job: str | None = None
    bucket: int | None = None
    kind: str | None = None
    state: str | None = None
    words: str = ""
    """Part of a job's name, ignoring case."""

    def of(self, table: Table) -> list[ColumnElement[bool]]:
        """The conditions on columns of this table."""
        known = [table.c[name] == value for name, value in self._wanted() if name in table.c]
        if self.words and "job" in table.c:
            known.append(table.c.job.icontains(self.words, autoescape=True))
        return [table.c.day >= self.since_day, table.c.day <= self.until_day, *known]

    def needs_starts(self, table: Table) -> bool:
        """Whether a condition needs a join with the table of starts."""
        return any(name not in table.c for name, _ in self._wanted()) or bool(self.words)

    def _wanted(self) -> list[tuple[str, str | int]]:
        job = None if self.job is None else written_name(self.job)
        each = {"team": self.team, "queue": self.queue, "job": job, "bucket": self.bucket, "kind": self.kind}
        return [(name, value) for name, value in {**each, "state": self.state}.items() if value is not None]

    def before(self) -> Filter:
        """The same for the period of equal length before it."""
        days = self.until_day - self.since_day + 1
        return replace(self, since_day=self.since_day - days, until_day=self.since_day - 1)


def bucket_name(number: int) -> str:
    """The paper's name of a scale, in GPUs; empty if unknown."""
    return BUCKETS[number][1] if 0 <= number < len(BUCKETS) else ""


def _known(column: ColumnElement[Any]) -> ColumnElement[Any]:
    """The sum of a column over starts whose number of GPUs is known; null if there are none, as 0 is a false bill."""
    return func.sum(case((start.c.gpus.is_not(None), column)))


def cost(connection: Connection, where: Filter) -> Rows:
    """Cost of starts by team, and their share of GPU time."""
    rows = connection.execute(
        _grouped(
            where,
            start.c.team,
            "overhead_s",
            gpu_s=_known(start.c.gpu_s),
            wait_gpu_s=_known(start.c.wait_gpu_s),
            ended_gpu_s=_known(case((start.c.run_s.is_not(None), start.c.gpu_s))),
            run_gpu_s=func.sum(start.c.run_s * start.c.gpus),
        )
    ).mappings()
    found = [{**row, "share": _share(row["ended_gpu_s"], row["run_gpu_s"])} for row in rows]
    return sorted(found, key=lambda row: -(row["gpu_s"] or 0))


def stages(connection: Connection, where: Filter) -> Rows:
    """Cost of each stage in closed starts: 50th and 95th percentiles of their medians over nodes, and sums."""
    # The sums of days are not split by team, queue and job: with such a filter the rows of starts are summed.
    of = stage_start if where.needs_starts(stage_day) else stage_day
    where = replace(where, state=CLOSED)  # as in these sums
    known, summed = names(connection, stage), ("work_s", "wait_s")
    gpu_s = func.sum(case((of.c.bucket >= 0, of.c.gpu_s))).label("gpu_s")  # the other starts have no scale
    columns = (of.c.stage_id, gpu_s, *(func.sum(of.c[name]).label(name) for name in summed))
    hists: dict[int, list[int]] = defaultdict(lambda: [0] * CLASSES)
    if of is stage_day:  # all histograms of a stage as one text: thousands of small ones take longer to parse
        totals = select(*columns, func.sum(of.c.n).label("n"), func.aggregate_strings(of.c.hist, ",").label("hists"))
        totals = totals.where(*where.of(of))
    else:
        totals = select(*columns, func.count().label("n")).join_from(of, start).where(*where.of(start))
        medians = select(of.c.stage_id, of.c.median_s).join_from(of, start)
        for stage_id, took_s in connection.execute(medians.where(*where.of(start), of.c.median_s.is_not(None))):
            hists[stage_id][class_of(took_s)] += 1
    found = []
    for row in connection.execute(totals.group_by(of.c.stage_id)):
        if of is stage_day:
            hist = sum_of(*msgspec.json.decode(f"[{row.hists}]", type=list[list[int]]))
        else:
            hist = hists[row.stage_id]
        quantiles = {"p50_s": middle_s(hist, 0.5), "p95_s": middle_s(hist, 0.95)}
        added = {name: row._mapping[name] or 0.0 for name in summed}
        found.append({"stage": known[row.stage_id], "n": int(row.n), "gpu_s": row.gpu_s, **added, **quantiles})
    return sorted(found, key=lambda row: -(row["gpu_s"] or row["work_s"] + row["wait_s"]))


def open_starts(connection: Connection, job: str | None = None) -> Rows:
    """Open starts of one job or all, with the state of their nodes; newest first."""
    rows = connection.execute(
        select(start.c.id, start.c.job, start.c.attempt, start.c.restart, start.c.kind, start.c.team, start.c.began_ns,
               start.c.bucket, start.c.cache_state, start.c.nodes_expected, start.c.nodes_heard, start.c.gpus,
               start.c.outcome, start.c.overhead_s, live.c.moment, live.c.updated_ns)
        .outerjoin_from(start, live, (live.c.job == start.c.job) & (live.c.attempt == start.c.attempt))
        .where(start.c.state == OPEN, *([start.c.job == written_name(job)] if job is not None else []))
        .order_by(start.c.began_ns.desc())
    ).mappings()  # fmt: skip
    found = []
    for row in rows:
        moment = json.loads(row["moment"]) if row["moment"] else None
        name = bucket_name(row["bucket"])
        found.append({**row, "bucket": name, "bucket_number": row["bucket"], "moment": moment})
    return found


class NodeSums(NamedTuple):
    """Sums of a node over some days."""

    node_id: int
    n: int
    n_last: int
    delay_s: float
    days_late: int


def node_sums(connection: Connection, where: Filter) -> list[NodeSums]:
    """The sums of each node over these days; those with most delay first."""
    of = node_day.c
    sums = (func.sum(of.n), func.sum(of.n_last), func.sum(of.delay_s), func.count(of.worst_stage_id))
    rows = connection.execute(select(of.node_id, *sums).where(*where.of(node_day)).group_by(of.node_id))
    found = [NodeSums(number, int(n), int(last), float(delay_s), late) for number, n, last, delay_s, late in rows]
    return sorted(found, key=lambda row: (-row.delay_s, -row.n_last, row.node_id))


def nodes(connection: Connection, where: Filter, sums: Sequence[NodeSums], *, limit: int) -> Rows:
    """Nodes that delay others, of these: how often each was last, in which stage, and its total delay."""
    often = [row for row in sums if row.n >= _LEAST_STARTS]
    return named_nodes(connection, where, often[:limit])


def teams(connection: Connection) -> list[str]:
    return sorted(filter(None, connection.execute(select(start.c.team).distinct()).scalars()))


def named_nodes(connection: Connection, where: Filter, rows: Sequence[NodeSums]) -> Rows:
    """These nodes with their names, and the stage of each with the most delay."""
    ids = [row.node_id for row in rows]
    known = {row.id: row for row in connection.execute(select(node).where(node.c.id.in_(ids)))}
    worst = _worst_stages(connection, where, ids)
    return [
        {
            "node": known[row.node_id].name,
            "rack": known[row.node_id].rack,
            "starts": row.n,
            "last": row.n_last,
            "last_share": row.n_last / row.n,
            "delay_s": row.delay_s,
            "days_late": row.days_late,
            "stage": worst.get(row.node_id, ""),
        }
        for row in rows
    ]


def _worst_stages(connection: Connection, where: Filter, ids: Sequence[int]) -> dict[int, str]:
    known = names(connection, stage)
    lost: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    columns = (node_day.c.node_id, node_day.c.worst_stage_id, node_day.c.delay_s)
    days = range(where.since_day, where.until_day + 1)  # listed, because for a range SQLite would read all nodes
    found = [node_day.c.day.in_(days)] if len(days) < 400 else [*where.of(node_day)]
    for row in connection.execute(select(*columns).where(*found, node_day.c.node_id.in_(ids))):
        if row.worst_stage_id is not None:
            lost[row.node_id][row.worst_stage_id] += row.delay_s
    return {number: known[max(by, key=lambda key: by[key])] for number, by in lost.items()}


def starts(
    connection: Connection, where: Filter, *, one: tuple[int, int] | None = None, limit: int = 200, offset: int = 0
) -> Rows:
    """The starts, newest first, each with its fingerprint. `one`: only that of this attempt and restart."""
    columns = [column for column in start.c if column.name not in ("last_node_id", "last_stage_id", "bucket")]
    query = (
        select(
            *columns, start.c.bucket.label("bucket_"), node.c.name.label("last_node"), stage.c.name.label("last_stage")
        )
        .outerjoin_from(start, node, node.c.id == start.c.last_node_id)
        .outerjoin(stage, stage.c.id == start.c.last_stage_id)
        .where(*where.of(start), *([start.c.attempt == one[0], start.c.restart == one[1]] if one is not None else []))
        .order_by(start.c.began_ns.desc(), start.c.id.desc())
    )
    rows = connection.execute(query.limit(limit).offset(offset)).mappings()
    found = [dict(row) for row in rows]
    for values in found:
        values["bucket"] = bucket_name(values.pop("bucket_"))
        values.update({"gpu_s": None, "wait_gpu_s": None} if values["gpus"] is None else {})
        values["fingerprint"] = json.loads(values["fingerprint"] or "{}")
    return found


def stages_of(connection: Connection, start_id: int) -> Rows:
    """The stages of one start."""
    columns = (stage_start.c.num_nodes, stage_start.c.median_s, stage_start.c.max_s, stage_start.c.work_s)
    rows = connection.execute(
        select(stage.c.name.label("stage"), *columns, stage_start.c.wait_s, node.c.name.label("max_node"))
        .join_from(stage_start, stage, stage.c.id == stage_start.c.stage_id)
        .outerjoin(node, node.c.id == stage_start.c.max_node_id)
        .where(stage_start.c.start_id == start_id)
        .order_by(stage_start.c.max_s.desc(), stage.c.name)
    ).mappings()
    return [dict(row) for row in rows]


def buckets(connection: Connection, where: Filter) -> Rows:
    """50th and 95th percentile of starts by scale, without the queue; the previous period's, and the paper's median."""
    now, before = (_overheads(connection, each) for each in (where, where.before()))
    found = []
    for number, (_, name, paper_s) in enumerate(BUCKETS):
        values, earlier = now.get(number, []), before.get(number, [])
        if values or earlier:
            quantiles = {"p50_s": quantile(values, 0.5), "p95_s": quantile(values, 0.95)}
            then = {"p50_before_s": quantile(earlier, 0.5), "p95_before_s": quantile(earlier, 0.95)}
            found.append({"bucket": name, "starts": len(values), **quantiles, **then, "paper_s": paper_s})
    return found


def _overheads(connection: Connection, where: Filter) -> dict[int, list[float]]:
    values: dict[int, list[float]] = defaultdict(list)
    each = select(start.c.bucket, own_s).where(*where.of(start), start.c.outcome == BEGAN)
    for number, took_s in connection.execute(each.order_by(own_s)):
        values[number].append(took_s)
    return values


def caches(connection: Connection, where: Filter) -> Rows:
    """Hit rate of each technique, sources of bytes, and the cost of a miss: the difference of the medians of starts
    of the same scale with and without misses, without the queue."""
    costs = _miss_costs(connection, where)
    return [{**row, "miss_costs_s": costs.get(row["technique"])} for row in uses(connection, where)]


def uses(connection: Connection, where: Filter) -> Rows:
    """Hits, misses and sources of bytes of each technique."""
    by_technique: dict[str, Rows] = defaultdict(list)
    for row in caches_by_day(connection, where):
        by_technique[row["technique"]].append(row)
    found = []
    for technique, rows in sorted(by_technique.items()):
        sums = {name: sum(row[name] for row in rows) for name in _USES}
        share = _share(sums["hits"], sums["hits"] + sums["misses"])
        stored = max(row["stored_bytes"] for row in rows)
        found.append({"technique": technique, **sums, "hit_share": share, "stored_bytes": stored})
    return found


def _miss_costs(connection: Connection, where: Filter) -> dict[str, float]:
    """How much longer starts with misses take, by technique; omitted if no scale has both kinds."""
    took: dict[tuple[str, int, bool], list[float]] = defaultdict(list)
    of = technique_start
    each = select(of.c.technique, start.c.bucket, of.c.misses > 0, own_s).join_from(of, start)
    for technique, number, missed, took_s in connection.execute(each.where(*where.of(start), start.c.outcome == BEGAN)):
        took[technique, number, bool(missed)].append(took_s)
    costs: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for (technique, number, missed), values in took.items():
        if missed and (hits := took.get((technique, number, False))):
            costs[technique].append((median(values) - median(hits), len(values)))
    return {
        technique: sum(more_s * num for more_s, num in of_scales) / sum(num for _, num in of_scales)
        for technique, of_scales in costs.items()
    }


def caches_by_day(connection: Connection, where: Filter) -> Rows:
    """Hits, sources of bytes and stored bytes of each technique by day."""
    if where.needs_starts(storage_day):
        return technique_days(connection, where)
    query = select(storage_day).where(*where.of(storage_day)).order_by(storage_day.c.day, storage_day.c.technique)
    return [dict(row) for row in connection.execute(query).mappings()]


def technique_days(connection: Connection, where: Filter) -> Rows:
    """The same from the rows of closed starts. Stored bytes are those of the different images, environments and
    checkpoints that were used on the day."""
    of = technique_start.c
    sums = (func.max(of.stored_bytes).label("stored_bytes"), *(func.sum(of[name]).label(name) for name in _USES))
    query = select(of.day, of.technique, *sums).join_from(technique_start, start)
    query = query.where(*where.of(start), start.c.state == CLOSED)
    query = query.group_by(of.day, of.technique, of.digest).order_by(of.day, of.technique)
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for row in connection.execute(query).mappings():
        day = found.setdefault((row["day"], row["technique"]), {"day": row["day"], "technique": row["technique"]})
        for name in ("stored_bytes", *_USES):
            day[name] = day.get(name, 0) + _plain(row[name])
    return list(found.values())


def by_day(connection: Connection, where: Filter) -> Rows:
    """Starts by day and kind, with their overhead and GPU time."""
    query = (
        select(start.c.day, start.c.kind, func.count().label("starts"),
               func.sum(start.c.overhead_s).label("overhead_s"), _known(start.c.gpu_s).label("gpu_s"),
               func.sum(cast(_FAILED, Integer)).label("failed"))
        .where(*where.of(start)).group_by(start.c.day, start.c.kind).order_by(start.c.day, start.c.kind)
    )  # fmt: skip
    return [dict(row) for row in connection.execute(query).mappings()]


def jobs(connection: Connection, where: Filter, *, limit: int = 200) -> Rows:
    """Jobs, those that lose most first: number of starts, their share of the job's time after the queue, and the share
    of that in which nodes wait for each other."""
    ran = start.c.run_s.is_not(None)
    rows = connection.execute(
        _grouped(
            where,
            start.c.job,
            *("overhead_s", "run_s", "work_s", "wait_s"),
            gpu_s=_known(start.c.gpu_s),
            ended_s=func.sum(case((ran, own_s), else_=0.0)),
            failed=func.sum(cast(_FAILED, Integer)),
            restarts=func.sum(cast(start.c.kind != "full", Integer)),
            latest_ns=func.max(start.c.began_ns),
        )
        .order_by(func.sum(start.c.gpu_s).desc(), start.c.job)
        .limit(limit)
    ).mappings()
    found = [{name: _plain(value) for name, value in row.items()} for row in rows]
    for values in found:
        values["share"] = _share(values["ended_s"], values["run_s"])
        values["wait_share"] = _share(values["wait_s"], values["wait_s"] + values["work_s"])
    return found


def straggling(connection: Connection, where: Filter) -> Rows:
    """Savings without stragglers, by scale."""
    query = _grouped(
        where,
        start.c.bucket,
        *("overhead_s", "straggler_s"),
        straggler_gpu_s=func.sum(start.c.straggler_s * start.c.gpus),
    ).where(start.c.outcome == BEGAN)
    return [
        {**row, "bucket": bucket_name(row["bucket"]), "share": _share(row["straggler_s"], row["overhead_s"])}
        for row in connection.execute(query.order_by(start.c.bucket)).mappings()
    ]


def queues(connection: Connection, where: Filter) -> Rows:
    """Wait for the scheduler and duration of the start, by scale: medians of starts that reached training and for
    which both are known."""
    values: dict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    each = select(start.c.bucket, start.c.queue_s, start.c.overhead_s).where(*where.of(start), start.c.outcome == BEGAN)
    for number, queue_s, took_s in connection.execute(each.where(start.c.queue_s.is_not(None))):
        queued, started = values[number]
        queued.append(queue_s)
        started.append(took_s - queue_s)
    return [
        {
            "bucket": bucket_name(number),
            "starts": len(queued),
            "queue_p50_s": median(queued),
            "start_p50_s": median(started),
        }
        for number, (queued, started) in sorted(values.items())
    ]


def failures(connection: Connection, where: Filter) -> Rows:
    """Starts without training: the stage in which they stopped, and what they cost."""
    query = (
        select(start.c.outcome, stage.c.name.label("stage"), func.count().label("starts"),
               func.sum(start.c.overhead_s).label("overhead_s"), _known(start.c.gpu_s).label("gpu_s"),
               _UNKNOWN.label("gpus_unknown"))
        .outerjoin_from(start, stage, stage.c.id == start.c.last_stage_id)
        .where(*where.of(start), start.c.outcome != BEGAN, start.c.state == CLOSED)
        .group_by(start.c.outcome, stage.c.name).order_by(func.count().desc(), start.c.outcome, stage.c.name)
    )  # fmt: skip
    return [{**row, "stage": row["stage"] or ""} for row in connection.execute(query).mappings()]


def coverage(connection: Connection, where: Filter, now_ns: int) -> dict[str, Any]:
    """Completeness of the data: nodes with events of those expected, lost lines, clock errors, batches that wait."""
    stated = func.coalesce(start.c.nodes_expected, start.c.nodes_heard)
    left_queue_ns = start.c.began_ns + func.coalesce(start.c.queue_s, 0.0) * NS_PER_S
    # Otherwise nodes are still to come. By our clock: the lines of a start may all stop before.
    is_under_way = (start.c.state == CLOSED) | (left_queue_ns < now_ns - _COMING_S * NS_PER_S)
    row = connection.execute(
        select(
            func.count().label("starts"),
            func.sum(start.c.nodes_heard).label("nodes_heard"),
            func.sum(case((is_under_way, stated), else_=start.c.nodes_heard)).label("nodes_expected"),
            func.sum(start.c.lines_lost).label("lines_lost"),
            func.max(start.c.clock_error_s).label("clock_error_s"),
        ).where(*where.of(start))
    ).mappings().one()  # fmt: skip
    received = batch.c.received_ns  # two queries, because the index begins with `done`
    waiting = connection.execute(
        select(func.count(), func.min(received), func.max(received)).where(batch.c.done.is_(False))
    ).one()
    newest_ns = connection.execute(select(func.max(received)).where(batch.c.done.is_(True))).scalar()
    latest_ns = max(waiting[2] or 0, newest_ns or 0)
    found = {name: _plain(value) for name, value in row.items()}
    return {
        **{name: value or 0 for name, value in found.items() if name != "clock_error_s"},
        "clock_error_s": found["clock_error_s"],
        "heard_share": _share(found["nodes_heard"], found["nodes_expected"]),
        "batches_waiting": waiting[0],
        "lag_s": (now_ns - waiting[1]) / NS_PER_S if waiting[1] is not None else 0.0,
        "silent_s": (now_ns - latest_ns) / NS_PER_S if latest_ns else None,
    }


def _grouped(where: Filter, by: ColumnElement[Any], *summed: str, **sums: ColumnElement[Any]) -> Select[Any]:
    """The number of starts by a column, the sums of their columns `summed`, and other `sums`."""
    columns = [_UNKNOWN.label("gpus_unknown"), *(func.sum(start.c[name]).label(name) for name in summed)]
    columns += [value.label(name) for name, value in sums.items()]
    return select(by, func.count().label("starts"), *columns).where(*where.of(start)).group_by(by)


def names(connection: Connection, table: Table) -> Mapping[int, str]:
    """The names of stages or nodes by id, in the order in which they were first seen."""
    return {row.id: row.name for row in connection.execute(select(table.c.id, table.c.name).order_by(table.c.id))}


def _share(part: float | None, whole: float | None) -> float | None:
    """At most 1, as in reports: where the nodes of a job restart one after the other, starts overlap."""
    return min(part / whole, 1.0) if part is not None and whole else None


def _plain(value: Any) -> Any:
    """An int for a `Decimal`: PostgreSQL returns sums of integers as decimals."""
    return int(value) if value is not None and not isinstance(value, (str, float, int)) else value

"""`/metrics` in Prometheus' text format: duration and cost of starts, and the health of the service.

The number of labels is bounded: scales, kinds and cache states are fixed. Names of stages and teams come from outside:
the outermost stages and the first teams of a period have labels of their own, the rest are `other`. Nodes and jobs are
no labels. Counters are sums over a period of four weeks, computed from the database: they restart at 0 with each
period, as after a restart.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Final

from sqlalchemy import Connection, case, func, select

from bootseer.service import questions
from bootseer.service.histogram import bound_s, sum_of
from bootseer.service.over_time import OverTime, now
from bootseer.service.questions import Filter, bucket_name, own_s
from bootseer.service.rows import BEGAN, day_of
from bootseer.service.schema import CLOSED, alert, stage, stage_day, start
from bootseer.units import Figures

_PERIOD_DAYS: Final = 28
_BOUNDS_S: Final = (10, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200, 3600)
_EVERY: Final = 4
"""Classes of `stage_day.hist` per bucket: the bounds double."""
_BELOW: Final = 63
"""Number of classes below the last bucket, up to half an hour."""
_STAGES: Final = 40
_TEAMS: Final = 32
_OTHER: Final = "other"


def text_of(connection: Connection, over_time: OverTime, now_ns: int) -> str:
    today = day_of(now_ns)
    where = Filter(today - today % _PERIOD_DAYS)
    made = Figures()
    # The numbers of open starts may fall, which looks like a restart of the counter.
    _starts(made, connection, replace(where, state=CLOSED))
    _stages(made, connection, where)
    _teams(made, connection, where)
    _caches(made, connection, where)
    _now(made, connection, over_time, now_ns)
    return made.text()


def _starts(made: Figures, connection: Connection, where: Filter) -> None:
    edges = [-1e18, *_BOUNDS_S]
    within = [func.sum(case(((own_s > low) & (own_s <= high), 1), else_=0)) for low, high in pairwise(edges)]
    began = select(start.c.bucket, start.c.kind, func.count(), func.sum(own_s), *within)
    made.family("bootseer_start_seconds", "histogram", "From the beginning of a start to training, without the queue.")
    for scale, kind, num, total_s, *counts in connection.execute(
        began.where(*where.of(start), start.c.outcome == BEGAN).group_by(start.c.bucket, start.c.kind)
    ):
        numbers = [int(count) for count in counts]
        above = int(num) - sum(numbers)
        labels = {"scale": bucket_name(scale), "kind": kind}
        made.histogram("bootseer_start_seconds", _BOUNDS_S, [*numbers, above], float(total_s), **labels)
    made.family("bootseer_starts_total", "counter", "Starts by outcome, once they are over.")
    ended = select(start.c.outcome, start.c.kind, func.count()).where(*where.of(start))
    for outcome, kind, num in connection.execute(ended.group_by(start.c.outcome, start.c.kind)):
        made.value("bootseer_starts_total", num, outcome=outcome, kind=kind)


def _stages(made: Figures, connection: Connection, where: Filter) -> None:
    table, known = stage_day, questions.names(connection, stage)
    # Not by cost: a stage that changes between a label of its own and `other` makes counters fall.
    names = _named(sorted(known.values(), key=lambda name: name.count(".")), _STAGES)
    hists: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    gpu_s: dict[tuple[str, str, str], float] = defaultdict(float)
    columns = (table.c.stage_id, table.c.bucket, table.c.cache_state, table.c.gpu_s, table.c.hist)
    for number, scale, cache, seconds, hist in connection.execute(select(*columns).where(*where.of(table))):
        key = names[known[number]], bucket_name(scale), cache
        gpu_s[key] += seconds
        hists[key] = sum_of(hists[key], json.loads(hist))
    bounds = [bound_s(number) for number in range(0, _BELOW, _EVERY)]
    made.family("bootseer_stage_seconds", "histogram", "Medians over a start's nodes.")
    for (name, scale, cache), hist in hists.items():
        counts = [hist[0], *(sum(hist[at - _EVERY + 1 : at + 1]) for at in range(_EVERY, _BELOW, _EVERY))]
        above = sum(hist) - sum(counts)
        made.histogram("bootseer_stage_seconds", bounds, [*counts, above], None, stage=name, scale=scale, cache=cache)
    made.family("bootseer_stage_gpu_seconds_total", "counter", "GPU time in stages of starts.")
    for (name, scale, cache), seconds in gpu_s.items():
        if scale:  # else the number of GPUs is unknown, or 0
            made.value("bootseer_stage_gpu_seconds_total", seconds, stage=name, scale=scale, cache=cache)


def _teams(made: Figures, connection: Connection, where: Filter) -> None:
    rows = questions.cost(connection, replace(where, state=CLOSED))
    # Not by cost, for the same reason as stages: later teams come last, with all others' labels unchanged.
    first = select(start.c.team).where(*where.of(start)).group_by(start.c.team).order_by(func.min(start.c.id))
    names = _named(connection.execute(first).scalars(), _TEAMS)
    for family, column, about in (
        ("bootseer_start_gpu_seconds_total", "gpu_s", "GPU time in starts."),
        ("bootseer_wait_gpu_seconds_total", "wait_gpu_s", "GPU time in starts while nodes waited for others."),
        (
            "bootseer_run_gpu_seconds_total",
            "run_gpu_s",
            "GPU time of commands that have ended, including their starts.",
        ),
        ("bootseer_ended_start_gpu_seconds_total", "ended_gpu_s", "GPU time in starts of commands that have ended."),
    ):
        sums: dict[str, float] = defaultdict(float)
        for row in rows:
            if row[column] is not None:
                sums[names[row["team"]]] += row[column]
        made.family(family, "counter", about)
        for name, value in sums.items():
            made.value(family, value, team=name)


def _caches(made: Figures, connection: Connection, where: Filter) -> None:
    rows = questions.uses(connection, where)
    made.family("bootseer_technique_uses_total", "counter", "Nodes by hit or miss of image, environment, checkpoint.")
    for row in rows:
        for result in ("hits", "misses"):
            made.value("bootseer_technique_uses_total", row[result], technique=row["technique"], result=result)
    made.family("bootseer_technique_bytes_total", "counter", "Bytes fetched by starts, by source.")
    for row in rows:
        for source in ("cache", "peer", "origin"):
            value = row[f"{source}_bytes"]
            made.value("bootseer_technique_bytes_total", value, technique=row["technique"], source=source)


def _now(made: Figures, connection: Connection, over_time: OverTime, now_ns: int) -> None:
    open_starts = now(connection, over_time.deadlines())
    seen = questions.coverage(connection, Filter(day_of(now_ns)), now_ns)
    alerts = connection.execute(select(func.count()).where(alert.c.ended_ns.is_(None))).scalar_one()
    for name, kind, about, value in (
        ("bootseer_starts_open", "gauge", "Open starts.", len(open_starts)),
        ("bootseer_nodes_late", "gauge", "Nodes of open starts whose stage takes longer than on 99 % of nodes.",
         sum(len(row["late"]) for row in open_starts)),
        ("bootseer_ingest_lag_seconds", "gauge", "Age of the oldest batch that is not analysed.", seen["lag_s"]),
        ("bootseer_silent_seconds", "gauge", "Time since the last line arrived.", seen["silent_s"]),
        ("bootseer_nodes_heard_ratio", "gauge", "Share of today's expected nodes with events.", seen["heard_share"]),
        ("bootseer_lines_lost", "gauge", "Lines of today's starts that their senders lost.", seen["lines_lost"]),
        ("bootseer_alerts", "gauge", "Open alerts.", alerts),
    ):  # fmt: skip
        if value is not None:
            made.family(name, kind, about)
            made.value(name, value)


def _named(ranked: Iterable[str], most: int) -> dict[str, str]:
    """The label of each name: its own for the first, `other` for the rest."""
    return {name: (name if number < most else _OTHER) for number, name in enumerate(ranked)}

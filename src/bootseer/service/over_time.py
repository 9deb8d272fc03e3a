"""Documents composed of the answers of `questions`: the weeks of a fleet, the history of a job with slower starts, the
open starts with late nodes, and nodes that are last too often to be chance.

The verbs `fleet`, `history` and `watch` show these documents, from a service or from a folder; so do `/api/v1` and the
pages.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from statistics import median
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Double, Integer, cast, func, select

from bootseer.errors import UsageError
from bootseer.service import questions
from bootseer.service.database import Database
from bootseer.service.deadlines import LEARNED_DAYS, Deadlines, words
from bootseer.service.questions import Filter
from bootseer.service.rows import BEGAN, day_of
from bootseer.service.schema import OPEN, node_start, stage, stage_day, start
from bootseer.units import NS_PER_S

ADDRESS: Final = "/api/v1/over-time"
QUESTIONS: Final = ("fleet", "history", "now")
"""The documents below `ADDRESS`."""
_BASELINE: Final = 20
"""Number of earlier starts that a start is compared with."""
_LEAST: Final = 5
_SIGMAS: Final = 3.0
_FEW: Final = 10
"""With so many starts the limit is twice as far as with very many, because their deviation is uncertain."""
_MAD: Final = 1.4826
_BAND: Final = 0.1
"""A start within this share of its baseline's median is normal, even if the baseline varies less."""
_CHANCE: Final = 1e-3
"""Probability that any node is on the list of lemons by chance."""
_LEAST_LAST: Final = 3
# Of an open start, another node may still be the last one. With ==, SQLite without statistics would read all starts.
_IS_CLOSED: Final = start.c.state != OPEN
_COMPARED: Final = _IS_CLOSED & (start.c.nodes_heard > 1) & start.c.last_node_id.is_not(None)
_MAX_AGE_S: Final = 7 * 86_400
"""If a stage seems to have lasted longer, a clock is wrong."""
_LEARN_EVERY_S: Final = 300.0
_HISTORY: Final = 500
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", re.ASCII)
_SINCE = re.compile(r"([0-9]{1,4})([hdw])")


def since_day(text: str, now_ns: int) -> int:
    """The first day of `7d`, `4w` or `2026-11-01`. Raises `UsageError` for other text."""
    if found := _SINCE.fullmatch(text):
        number = int(found[1])
        if found[2] == "h":  # at least so long, also shortly after midnight
            return day_of(now_ns - number * 3600 * NS_PER_S)
        return max(day_of(now_ns) - number * {"d": 1, "w": 7}[found[2]] + 1, 0)
    try:
        return day_of(round(datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()) * NS_PER_S)
    except ValueError:
        raise UsageError(f"{text!r} is not a time such as 7d, 4w, 12h or 2026-11-01") from None


def fleet(connection: Connection, where: Filter, now_ns: int) -> dict[str, Any]:
    """What starts cost in these days, by team, scale and stage; caches, slow nodes and coverage."""
    # Until tomorrow: the period before it is as long as the one until now.
    until_now = replace(where, until_day=min(where.until_day, day_of(now_ns) + 1))
    return {
        "teams": questions.cost(connection, where),
        "buckets": questions.buckets(connection, until_now),
        "stages": questions.stages(connection, where)[:20],
        "jobs": questions.jobs(connection, where, limit=20),
        "caches": questions.caches(connection, where),
        "failures": questions.failures(connection, where)[:20],
        "lemons": lemons(connection, where),
        "coverage": questions.coverage(connection, where, now_ns),
    }


def lemons(
    connection: Connection, where: Filter, sums: Sequence[questions.NodeSums] | None = None
) -> list[dict[str, Any]]:
    """Nodes that were last too often to be chance, with the evidence, worst first.

    `sums`: those of all nodes, if already known.

    Null hypothesis: a node is last with the same probability as the other nodes of the start. A node is listed if the
    probability of being last as often as it was is then below one in a thousand, after Bonferroni's correction for all
    nodes. Starts of different sizes have different probabilities; the binomial distribution with their mean is never
    more extreme (Hoeffding 1956).
    """
    sums = questions.node_sums(connection, where) if sums is None else sums
    days, of = start.c.day.between(where.since_day, where.until_day) & _IS_CLOSED, node_start.c.node_id
    least = 1 / (connection.execute(select(func.max(start.c.nodes_heard)).where(days)).scalar() or 1)
    other = select(of, func.count()).join_from(node_start, start).where(days, ~_COMPARED).group_by(of)
    others = {row[0]: row[1] for row in connection.execute(other)}
    often = {}
    for row in sums:  # with the least of the probabilities: few nodes are left to look at
        num = row.n - others.get(row.node_id, 0)
        if row.n_last >= _LEAST_LAST and _at_least(row.n_last, num, least) * len(sums) < _CHANCE:
            often[row.node_id] = row
    found = []
    for node_id, num, last, expected in _times_last(connection, where, list(often)):
        if (chance := _at_least(last, num, expected / num)) * len(sums) < _CHANCE:
            evidence = {"starts": num, "last": last, "last_share": last / num}
            found.append((often[node_id], evidence | {"expected_share": expected / num, "chance": chance}))
    found.sort(key=lambda one: (-one[0].delay_s, -one[0].n_last, one[0].node_id))
    named = questions.named_nodes(connection, where, [row for row, _ in found])
    return [{**row, **evidence} for row, (_, evidence) in zip(named, found, strict=True)]


def _times_last(connection: Connection, where: Filter, ids: Sequence[int]) -> list[tuple[int, int, int, float]]:
    """For each of these nodes: its id, its starts with other nodes of which one was last, in how many of them it was,
    and in how many it would be if all nodes of a start were equally likely to be."""
    of = node_start.c
    fair = func.sum(1.0 / cast(start.c.nodes_heard, Double))
    each = select(of.node_id, func.count(), func.sum(cast(of.is_last, Integer)), fair).join_from(node_start, start)
    rows = connection.execute(each.where(*where.of(node_start), of.node_id.in_(ids), _COMPARED).group_by(of.node_id))
    return [(node_id, num, last, expected) for node_id, num, last, expected in rows]


def _at_least(hits: int, tries: int, share: float) -> float:
    """The probability of at least this many hits; some value above `_CHANCE` if it is larger, or if they are not more
    than expected."""
    if share >= 1.0 or hits <= share * tries:
        return 1.0
    logs = math.log(share), math.log1p(-share)
    all_ = math.lgamma(tries + 1)
    chance = 0.0
    for k in range(hits, tries + 1):
        ways = all_ - math.lgamma(k + 1) - math.lgamma(tries - k + 1)
        chance += (more := math.exp(ways + k * logs[0] + (tries - k) * logs[1]))
        if chance > _CHANCE or more < 1e-9 * chance:  # each is smaller than the one before
            break
    return chance


def exported(rows: Sequence[Mapping[str, Any]], form: str) -> str:
    """A list of nodes as `slurm` (an option of sbatch), `drain` (commands that drain them in Slurm) or `kubernetes`
    (commands that label them).

    Names that are not valid host names are left out: they come from outside and would end up in a shell.
    """
    names = [row["node"] for row in rows if _HOST.fullmatch(row["node"])]
    if form == "slurm":
        return f"--exclude={','.join(names)}" if names else ""
    if form == "drain":
        why = {row["node"]: f"last in {row['last']:d} of {row['starts']:d} starts" for row in rows}
        return "\n".join(
            f"scontrol update NodeName={name} State=DRAIN Reason='bootseer: {why[name]}'" for name in names
        )
    return "\n".join(f"kubectl label node {name} bootseer.io/slow-start=true --overwrite" for name in names)


def history(connection: Connection, job: str, where: Filter) -> dict[str, Any]:
    """A job's starts, newest first, each compared with those before it: `baseline_s`, `limit_s`, `slower`; and for the
    newest slower one which stages and inputs changed."""
    wanted = replace(where, job=job)
    rows = questions.starts(connection, wanted, limit=_HISTORY)
    compared = _compared(rows)
    changed = None
    for number, row in enumerate(compared):
        if row["slower"]:
            changed = _changed(connection, row, compared[number + 1 :])
            break
    summed = questions.jobs(connection, wanted, limit=1)
    return {"job": job, "sums": summed[0] if summed else None, "starts": compared, "changed": changed}


def _compared(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    compared: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        own_s = _own_s(row)
        entry = {**row, "own_s": own_s, "baseline_s": None, "limit_s": None, "slower": False}
        before = list(islice((_own_s(other) for other in rows[number + 1 :] if _is_like(other, row)), _BASELINE))
        if len(before) >= _LEAST:
            middle, limit_s = band(before)
            entry |= {"baseline_s": middle, "limit_s": limit_s, "slower": row["outcome"] == BEGAN and own_s > limit_s}
        compared.append(entry)
    return compared


def band(values: Sequence[float]) -> tuple[float, float]:
    """The median duration of starts, and the limit up to which one is normal: three robust standard deviations above
    it, more if they are few, and at least a tenth."""
    middle = median(values)
    spread = _MAD * median(abs(value - middle) for value in values)
    return middle, middle + max(_SIGMAS * (1 + _FEW / len(values)) * spread, _BAND * middle)


def _own_s(row: Mapping[str, Any]) -> float:
    """The duration without the wait for the scheduler, for which the job is not responsible."""
    return float(row["overhead_s"]) - float(row["queue_s"] or 0.0)


def _is_like(other: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return (other["outcome"], other["kind"], other["bucket"]) == (BEGAN, row["kind"], row["bucket"])


def _changed(connection: Connection, row: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The differences between a start and the last normal one before it."""
    other = next(each for each in before if _is_like(each, row) and not each["slower"])
    now, then = (
        {each["stage"]: each["max_s"] or 0.0 for each in questions.stages_of(connection, one["id"])}
        for one in (row, other)
    )
    grown = [{"stage": name, "max_s": now[name], "before_s": then.get(name, 0.0)} for name in now]
    grown.sort(key=lambda one: one["before_s"] - one["max_s"])
    names = row["fingerprint"].keys() | other["fingerprint"].keys()
    pairs = {name: (other["fingerprint"].get(name), row["fingerprint"].get(name)) for name in sorted(names)}
    return {
        "start": row["id"],
        "before": other["id"],
        "stages": [one for one in grown[:5] if one["max_s"] > one["before_s"]],
        "inputs": {name: {"before": old, "now": new} for name, (old, new) in pairs.items() if old != new},
        "cache_state": {"before": other["cache_state"], "now": row["cache_state"]},
    }


def learned(connection: Connection, today: int) -> Deadlines:
    """The limits of stages, from the last four weeks."""
    names = questions.names(connection, stage)
    table = stage_day.c
    columns = (table.bucket, table.kind, table.cache_state, table.stage_id, table.hist99)
    rows = connection.execute(select(*columns).where(table.day >= today - LEARNED_DAYS))
    return Deadlines(
        (bucket, kind, cache_state, names[stage_id], msgspec.json.decode(hist, type=list[int]))
        for bucket, kind, cache_state, stage_id, hist in rows
        if hist
    )


def now(connection: Connection, deadlines: Deadlines, job: str | None = None) -> list[dict[str, Any]]:
    """The open starts, each with the state of its nodes (`moment`), its `late` nodes, and a summary line."""
    found = []
    for row in questions.open_starts(connection, job):
        moment, late = row["moment"], list[dict[str, Any]]()
        if moment:
            # The moment is from the last line: since then the stages have gone on.
            more_s = max(time.time_ns() - row["updated_ns"], 0) / NS_PER_S
            for one in moment["missing"] if more_s < _MAX_AGE_S else ():
                if one["seconds"] is not None:
                    one["seconds"] += more_s
            # Nodes report what they had in their caches when training begins.
            cache_state = row["cache_state"] if row["outcome"] == BEGAN else ""
            late = deadlines.late(moment, row["bucket_number"], row["kind"], cache_state)
        found.append({**row, "late": late, "line": words(moment, late) if moment else ""})
    return found


class OverTime:
    """These documents by name, for the verbs and other programs, and the deadlines of stages."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._learned = (float("-inf"), Deadlines(()))

    def deadlines(self) -> Deadlines:
        """The current deadlines, learned again every few minutes."""
        if time.monotonic() - self._learned[0] > _LEARN_EVERY_S:
            with self._database.read() as connection:
                self._learned = time.monotonic(), learned(connection, day_of(time.time_ns()))
        return self._learned[1]

    def answer(self, connection: Connection, question: str, asked: Mapping[str, str]) -> dict[str, Any]:
        """The document of one of `QUESTIONS`. Raises `UsageError` if `asked`, the parameters of a URL, is invalid."""
        now_ns = time.time_ns()
        if question == "fleet":
            found = fleet(connection, _filter(asked, now_ns), now_ns)
        elif question == "history":
            if not asked.get("job"):
                raise UsageError("job= is missing")
            found = history(connection, asked["job"], _filter(asked, now_ns, "90d"))
        else:
            rows = now(connection, self.deadlines(), asked.get("job") or None)
            found = {"starts": [row for row in rows if asked.get("team") in (None, "", row["team"])]}
        return {"schema": f"bootseer.{question}/1", "now_ns": now_ns, **found}


def _filter(asked: Mapping[str, str], now_ns: int, since: str = "28d") -> Filter:
    values = {name: asked.get(name) or None for name in ("team", "queue", "kind")}
    return Filter(since_day(asked.get("since") or since, now_ns), **values)  # type: ignore[arg-type]

"""Alerts: rules that are evaluated every 15 s, stored in the table `alert`, and sent to webhooks.

An alert has a rule and a key (a job, a node, a cache; empty for the service as a whole). It begins when its rule finds
it, and ends when the rule no longer does. Slack gets one message for all changes, Alertmanager gets open alerts
repeatedly. If a webhook cannot be reached, it alone is tried again at the next evaluation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from sqlalchemy import Connection, func, insert, select, text, update

from bootseer.errors import UsageError
from bootseer.logs import logger
from bootseer.report.render.fold import clean
from bootseer.service import over_time, questions
from bootseer.service.database import Database
from bootseer.service.questions import Filter
from bootseer.service.repeated import Repeated
from bootseer.service.rows import BEGAN, DAY_NS, day_of
from bootseer.service.schema import OPEN, alert, start
from bootseer.units import NS_PER_S, format_seconds

_LOG = logger(__name__)
SLACK: Final = "slack"
ALERTMANAGER: Final = "alertmanager"
FORMS: Final = (SLACK, ALERTMANAGER)
_EVERY_S: Final = 15.0
_SLOW_RULES_S: Final = 300.0
"""How often rules about weeks of data are evaluated."""
_SEND_S: Final = 5.0
_RECENT_NS: Final = 6 * 3600 * NS_PER_S
_WEEK: Final = 7
_MOST: Final = 200
"""Maximum number of alerts of a rule."""
_SHOWN: Final = 20
_TEXT: Final = 500
_SHARE: Final = 0.05
"""Of GPU time in starts, over the commands that ended in the last six hours."""
_HIT_SHARE: Final = 0.8
_HEARD_SHARE: Final = 0.95
_LAG_S: Final = 60.0
_SILENT_S: Final = 3600.0
_LEAST_USES: Final = 20
"""Uses of a cache within a day for its hit rate to be meaningful."""


class Webhook(NamedTuple):
    """A destination of alerts. Never shown as a whole: the path of a Slack webhook is a secret."""

    form: str
    url: str


def webhook(given: str) -> Webhook:
    """`slack=URL` or `alertmanager=URL`. Raises `UsageError` for anything else, without showing the URL."""
    form, _, url = given.strip().partition("=")
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        host.encode("idna")  # this and other characters in the path would be errors of `http.client`
        can_send = all("!" <= char <= "~" for char in parts.path + parts.query)
        good = form in FORMS and parts.scheme in ("http", "https") and bool(host) and parts.port != 0 and can_send
    except ValueError:
        good = False
    if not good:
        raise UsageError("--alert-to: not a webhook", hint="slack=https://HOOK or alertmanager=http://HOST:9093")
    return Webhook(form, url)


class Finding(NamedTuple):
    """What a rule found."""

    rule: str
    key: str
    text: str


def urgent(connection: Connection, open_starts: Sequence[Mapping[str, Any]], now_ns: int) -> list[Finding]:
    """The rules about the present: late nodes, and whether the service receives and analyses events.

    `open_starts`: from `over_time.now`.
    """
    found = [
        Finding("nodes_late", f"{row['job']}/{row['attempt']}", f"{row['job']}: {row['line']}")
        for row in open_starts
        if row["late"]
    ]
    seen = questions.coverage(connection, Filter(day_of(now_ns - _RECENT_NS)), now_ns)
    if seen["lag_s"] > _LAG_S:
        waits = f"{seen['batches_waiting']:,} batches wait to be analysed, the oldest for"
        found.append(Finding("ingest_lag", "", f"{waits} {format_seconds(seen['lag_s'])}"))
    if open_starts and (seen["silent_s"] or 0.0) > _SILENT_S:
        silent = format_seconds(seen["silent_s"])
        found.append(Finding("silent", "", f"no event for {silent}, while {len(open_starts)} starts are open"))
    heard = seen["heard_share"]
    if heard is not None and heard < _HEARD_SHARE:
        text = f"only {seen['nodes_heard']:,} of {seen['nodes_expected']:,} expected nodes sent events today"
        found.append(Finding("nodes_not_heard", "", text))
    return found


def of_weeks(connection: Connection, now_ns: int) -> list[Finding]:
    """The rules that compare with earlier days: slower jobs, nodes too often last, cache misses, lost GPU time."""
    today, found = day_of(now_ns), []
    closed = [start.c.outcome == BEGAN, start.c.state != OPEN]
    recent = [start.c.began_ns >= now_ns - _RECENT_NS, *closed]
    # Those that began within six hours would all be short ones. Longer than a week: too many starts to look at.
    ended_ns = start.c.began_ns + (func.coalesce(start.c.queue_s, 0.0) + start.c.run_s) * NS_PER_S
    ended = [start.c.day >= today - _WEEK, ended_ns >= now_ns - _RECENT_NS, *closed]
    whole = select(func.sum(start.c.gpu_s), func.sum(start.c.run_s * start.c.gpus)).where(*ended)
    lost, used = connection.execute(whole).one()
    if lost and used and lost / used > _SHARE:
        text = f"startup took {lost / used:.1%} of the GPU time of commands that ended in the last six hours"
        found.append(Finding("share", "", text))
    for row in connection.execute(select(start.c.job).where(*recent).distinct().limit(_MOST)):
        newest = over_time.history(connection, row.job, Filter(today - 90))["starts"][:1]
        for one in newest:
            if one["slower"]:
                usual = f"{format_seconds(one['own_s'])} instead of {format_seconds(one['baseline_s'])}"
                found.append(Finding("slower", row.job, f"{row.job}, attempt {one['attempt']}: {usual}"))
    for node in over_time.lemons(connection, Filter(today - _WEEK))[:_MOST]:
        text = f"{node['node']} was last in {node['last']} of {node['starts']} starts with others in the last week"
        text += f", mostly in {node['stage']}" if node["stage"] else ""
        found.append(Finding("node_often_last", node["node"], text))
    for cache in questions.uses(connection, Filter(today)):
        num = cache["hits"] + cache["misses"]
        if num >= _LEAST_USES and cache["hit_share"] < _HIT_SHARE:
            text = f"{cache['technique']}: ready on {cache['hit_share']:.0%} of {num:,} nodes that started today"
            found.append(Finding("cache_misses", cache["technique"], text))
    return found


def settle(connection: Connection, rules: Sequence[str], found: Sequence[Finding], now_ns: int) -> None:
    """Update the table `alert` with the findings: begin, refresh, end. `rules`: those evaluated."""
    known = select(alert).where(alert.c.ended_ns.is_(None), alert.c.rule.in_(rules))
    open_alerts = {(row.rule, row.key): row for row in connection.execute(known)}
    seen = {(one.rule, one.key): one for one in found}
    for key, one in seen.items():
        row = open_alerts.get(key)
        if row is None:
            values = {"rule": one.rule, "key": one.key, "text": one.text[:_TEXT], "since_ns": now_ns}
            connection.execute(insert(alert).values(values))
        elif row.text != one.text[:_TEXT]:
            connection.execute(update(alert).where(alert.c.id == row.id).values(text=one.text[:_TEXT]))
    for key, row in open_alerts.items():
        if key not in seen:
            connection.execute(update(alert).where(alert.c.id == row.id).values(ended_ns=now_ns))


URGENT: Final = ("nodes_late", "ingest_lag", "silent", "nodes_not_heard")
OF_WEEKS: Final = ("share", "slower", "node_often_last", "cache_misses")


def body(form: str, rows: Sequence[Any], now_ns: int) -> bytes:
    """The request body for a webhook of this form."""
    if form == SLACK:
        words = ["over" if row.ended_ns is not None else "alert" for row in rows]
        lines = [f"{word} ({row.rule}): {clean(row.text)}" for word, row in zip(words, rows[:_SHOWN], strict=False)]
        lines += [f"{len(rows) - _SHOWN:,} more"] if len(rows) > _SHOWN else []
        # Names come from outside: neither links nor mentions, nor lines of their own.
        text = "\n".join(lines).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return json.dumps({"text": text}).encode()
    alerts = [
        {
            "labels": {"alertname": f"bootseer_{row.rule}", "key": row.key, "source": "bootseer"},
            "annotations": {"summary": row.text},
            "startsAt": _time(row.since_ns),
            "endsAt": _time(row.ended_ns if row.ended_ns is not None else now_ns + 300 * NS_PER_S),
        }
        for row in rows
    ]
    return json.dumps(alerts).encode()


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns / NS_PER_S, UTC).isoformat()


def send(to: Webhook, data: bytes) -> None:
    """Send one request. Raises `OSError` or `HTTPException` if it fails; redirects are not followed."""
    parts = urlsplit(to.url)
    made = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = made(str(parts.hostname), parts.port, timeout=_SEND_S)
    path = parts.path or "/"
    if to.form == ALERTMANAGER and not path.endswith("/alerts"):
        path = f"{path.rstrip('/')}/api/v2/alerts"
    try:
        connection.request("POST", path + (f"?{parts.query}" if parts.query else ""), data,
                           {"Content-Type": "application/json"})  # fmt: skip
        answer = connection.getresponse()
        answer.read(4096)
        if not 200 <= answer.status < 300:
            raise OSError(f"status {answer.status}")
    finally:
        connection.close()


class Alerts:
    """Evaluates the rules, in `thread`, and sends changes. Of several services on one database, only one does."""

    def __init__(
        self,
        database: Database,
        known: over_time.OverTime,
        to: Sequence[Webhook],
        seen: Callable[[Sequence[Mapping[str, Any]]], None] = lambda open_starts: None,
    ) -> None:
        """`seen` is called with the open starts at each evaluation."""
        self._database = database
        self._seen = seen
        self._known = known
        self._to = tuple(to)
        self._weeks_s = float("-inf")
        self._delivered: dict[Webhook, set[tuple[int, int | None]]] = {}
        """Changes that a webhook has received, while another one has not: number and end of the alert."""
        self.problem = ""
        """Why the last message to a webhook was not delivered."""
        self.thread = Repeated("alerts", lambda: self.evaluate(time.time_ns()), _EVERY_S, first_s=_EVERY_S)

    def evaluate(self, now_ns: int) -> None:
        """Evaluate the rules once, and send changes."""
        deadlines = self._known.deadlines()
        with self._database.read() as connection:
            open_starts = over_time.now(connection, deadlines)
            self._seen(open_starts)
            rules, found = list(URGENT), urgent(connection, open_starts, now_ns)
            if time.monotonic() - self._weeks_s >= _SLOW_RULES_S:
                rules, found = [*rules, *OF_WEEKS], [*found, *of_weeks(connection, now_ns)]
                self._weeks_s = time.monotonic()
        with ExitStack() as until_sent:
            if self._database.is_postgres:
                lock = until_sent.enter_context(self._database.read())
                if not lock.execute(text("SELECT pg_try_advisory_xact_lock(7012620)")).scalar():
                    return
            with self._database.write() as connection:
                settle(connection, rules, found, now_ns)
            self._send_changes(now_ns)

    def _send_changes(self, now_ns: int) -> None:
        if not self._to:  # another service on this database may have webhooks
            return
        new = alert.c.sent_ns.is_(None) | (alert.c.ended_ns.is_not(None) & (alert.c.sent_ns < alert.c.ended_ns))
        # Not those from before the first webhook was configured.
        new &= func.coalesce(alert.c.ended_ns, alert.c.since_ns) > now_ns - _WEEK * DAY_NS
        open_ = alert.c.ended_ns.is_(None)
        with self._database.read() as connection:
            # New ones first: otherwise many open alerts would keep them from being sent.
            found = select(alert).where(new | open_).order_by(new.desc(), alert.c.id)
            rows = connection.execute(found.limit(_MOST)).all()
        changed = {(row.id, row.ended_ns): row for row in rows if row.sent_ns is None or row.ended_ns is not None}
        self.problem = ""
        for to in self._to:
            has = self._delivered.get(to, set())
            sent = rows if to.form == ALERTMANAGER else [row for key, row in changed.items() if key not in has]
            try:
                if sent:
                    send(to, body(to.form, sent, now_ns))
                self._delivered[to] = set(changed)
            except (OSError, HTTPException) as error:
                self.problem = f"cannot reach the webhook of {to.form}: {error}"
                _LOG.warning("alerts: %s", self.problem)
        if changed and not self.problem:
            with self._database.write() as connection:
                numbers = [number for number, _ in changed]
                connection.execute(update(alert).where(alert.c.id.in_(numbers)).values(sent_ns=now_ns))

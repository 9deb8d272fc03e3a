"""The web pages: each is a dict of answers, rendered by a template and returned by `/api/v1` as JSON.

Pages are rendered by the server and complete without JavaScript; the script updates open pages. Charts are SVG. Names
of jobs, nodes and teams come from outside: templates escape all of them, and the content security policy of `access`
allows only our own script file.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

import anyio
import msgspec
import zstandard
from markupsafe import Markup
from sqlalchemy import Connection, select
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from bootseer import __version__
from bootseer.errors import BootseerError, NotFoundError, TransientError, UsageError
from bootseer.report.analysis.diff import compare
from bootseer.report.analysis.stages import STAGES
from bootseer.report.analysis.verdict import BUCKETS
from bootseer.report.model import Report
from bootseer.report.render import html, perfetto
from bootseer.report.render.html_svg import NUM_COLOURS
from bootseer.report.render.html_text import dotted, raw
from bootseer.service import metrics, questions, schema
from bootseer.service.access import Grant, refusal
from bootseer.service.charts import bars
from bootseer.service.over_time import ADDRESS, QUESTIONS, exported, lemons, now
from bootseer.service.questions import Filter
from bootseer.service.rows import DAY_NS, day_of
from bootseer.trace.event import written_name
from bootseer.units import PROMETHEUS, S_PER_H, format_bytes, format_hours, format_money, format_seconds

if TYPE_CHECKING:
    from bootseer.service.app import Service

_SINCE: Final = {"1d": 1, "7d": 7, "30d": 30, "90d": 90, "365d": 365}
_KINDS: Final = ("full", "hot_update", "restart")
_SCALES: Final = [name for _, name, _ in BUCKETS]
_LINKS: Final = [("/" + name * (name != "fleet"), name.capitalize())
                 for name in ("fleet", "now", "jobs", "nodes", "caches", "compare")]  # fmt: skip
# Made at the import, because msgspec crashes the process if threads do so at the same time (`artifact.document`).
_REPORT: Final = msgspec.json.Decoder(Report)
_ROWS: Final = 100
_DEADLINE_S = 30.0
_EVENTS_S: Final = 1.0
_QUIET_S: Final = 15.0
"""Interval of events without a change, which keep the connection alive."""
Answer = dict[str, Any]
_Find = Callable[[Connection, Request], Answer]
_Endpoint = Callable[[Request], Awaitable[Response]]


class _JobConvertor(PathConvertor):
    """Any text: Starlette's own parameters end at a line break."""

    regex = "(?s:.*)"


register_url_convertor("job", _JobConvertor())


class Pages:
    """All pages of a service, and their JSON."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._changes = 0
        self._templates = html.templates_of("bootseer.service")
        settings = service.settings
        self._templates.globals["has_price"] = settings.price > 0
        self._templates.filters |= {
            "seconds": lambda value: "–" if value is None else format_seconds(value),
            "bytes": lambda value: "–" if value is None else format_bytes(value),
            "percent": lambda value: "–" if value is None else f"{100 * value:.1f} %",
            "hours": lambda value: "–" if value is None else format_hours(value / S_PER_H),
            "money": lambda gpu_s: (
                "–" if gpu_s is None else format_money(gpu_s / S_PER_H * settings.price, settings.currency)
            ),
            "moment": lambda ns: datetime.fromtimestamp(ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S"),
            "count": lambda value: "–" if value is None else f"{value:,.0f}",
            "dotted": lambda text: Markup(dotted(text)),  # noqa: S704 - escaped by `dotted`
            "words": lambda text: str(text).replace("_", " "),
            "raw": raw,
            "colour": _colour,
            "start_link": start_link,
            "job_link": lambda job: f"/job/{quote(job, safe='')}",
        }
        self._pages: dict[str, tuple[str, _Find]] = {
            "fleet": ("/", self._fleet),
            "now": ("/now", self._now),
            "jobs": ("/jobs", self._jobs),
            "job": ("/job/{job:job}", self._job),
            "nodes": ("/nodes", self._nodes),
            "caches": ("/caches", self._caches),
            "compare": ("/compare", self._compare),
        }

    def changed(self) -> None:
        """A start has changed: notify open pages."""
        self._changes += 1

    def routes(self) -> list[Any]:
        """Routes of the pages, of their JSON, and of the parts of a start."""
        found: list[Any] = []
        for name, (path, answer) in self._pages.items():
            json_path = f"/api/v1/{name}{path.removeprefix(f'/{name}').rstrip('/')}"
            found.append(Route(path, self._shown(name, answer), methods=["GET"]))
            found.append(Route(json_path, self._json_of(answer, of_weeks=name != "now"), methods=["GET"]))
        one = "{attempt:int}/{restart:int}/{job:job}"
        return [
            *found,
            Route(f"/start/{one}", self._guarded(self._start, of_weeks=True)),
            Route(f"/api/v1/start/{one}", self._guarded(self._start_json)),
            Route(f"/perfetto/{one}", self._guarded(self._perfetto)),
            Route("/api/v1/starts", self._json_of(self._starts)),
            *(
                Route(f"{ADDRESS}/{name}", self._json_of(partial(self._over_time, name), of_weeks=name != "now"))
                for name in QUESTIONS
            ),
            Route("/metrics", self._guarded(self._metrics, of_weeks=True)),
            Route("/api/v1/openapi.json", lambda request: JSONResponse(openapi())),
            Route("/events", self._events),
            Mount(
                "/static", StaticFiles(packages=[("bootseer.service", "static"), ("bootseer.report.render", "assets")])
            ),
        ]

    # The content of pages.

    def _fleet(self, connection: Connection, request: Request) -> Answer:
        where, chosen = filter_of(request)
        days = questions.by_day(connection, where)
        return {
            **chosen,
            "teams": [team] if (team := _grant(request).team) else questions.teams(connection),
            "by_team": questions.cost(connection, where),
            "buckets": questions.buckets(connection, where),
            "stages": questions.stages(connection, where)[:15],
            "jobs": questions.jobs(connection, where, limit=20),
            "straggling": questions.straggling(connection, where),
            "queues": questions.queues(connection, where),
            "failures": questions.failures(connection, where),
            "days": days,
            "coverage": questions.coverage(connection, where, time.time_ns()),
        }

    def _now(self, connection: Connection, request: Request) -> Answer:
        team, open_starts = _grant(request).team, now(connection, self._service.over_time.deadlines())
        return {"starts": [row for row in open_starts if team in ("", row["team"])], "at_ns": time.time_ns()}

    def _job(self, connection: Connection, request: Request) -> Answer:
        job = request.path_params["job"]
        where, chosen = filter_of(request, default="365d", job=job)
        starts = questions.starts(connection, where, limit=_ROWS)
        if not starts:
            raise NotFoundError(f"no start of job {job!r} in this period")
        return {
            **chosen,
            "job": job,
            "summary": questions.jobs(connection, where)[0],
            "starts": starts,
        }

    def _jobs(self, connection: Connection, request: Request) -> Answer:
        words = written_name(request.query_params.get("q", ""))
        where, chosen = filter_of(request, words=words)
        return {**chosen, "q": words, "jobs": questions.jobs(connection, where, limit=_ROWS)}

    def _nodes(self, connection: Connection, request: Request) -> Answer:
        where, chosen = filter_of(request)
        sums = questions.node_sums(connection, where)
        found = questions.nodes(connection, where, sums, limit=_ROWS)
        worst = lemons(connection, where, sums)
        exclude = exported(worst, "slurm").removeprefix("--exclude=")
        return {**chosen, "nodes": found, "lemons": [row["node"] for row in worst], "exclude": exclude}

    def _caches(self, connection: Connection, request: Request) -> Answer:
        where, chosen = filter_of(request)
        days = questions.caches_by_day(connection, where)
        return {**chosen, "caches": questions.caches(connection, where), "days": days}

    def _compare(self, connection: Connection, request: Request) -> Answer:
        sides = [request.query_params.get(name, "") for name in ("a", "b")]
        if not all(sides):
            return {"a": None, "b": None, "verdict": "", "slower": False, "headlines": [], "stages": [], "changed": []}
        first, second = (self._found(connection, request, *_identity(side)) for side in sides)
        marks = [one["fingerprint"] for one in (first, second)]
        changed = [
            {"what": name, "a": marks[0].get(name), "b": marks[1].get(name)}
            for name in sorted({*marks[0], *marks[1]})
            if marks[0].get(name) != marks[1].get(name)
        ]
        reports = [_REPORT.decode(self._stored(connection, one["id"])) for one in (first, second)]
        difference = compare(reports[:1], reports[1:])
        rows = [
            {"stage": one.stage, "a_s": one.a_s, "b_s": one.b_s, "more_s": (one.b_s or 0.0) - (one.a_s or 0.0)}
            for one in difference.stages
        ]
        return {
            "a": first,
            "b": second,
            "verdict": difference.verdict,
            "slower": difference.slower,
            "headlines": difference.headlines,
            "stages": sorted(rows, key=lambda row: -abs(row["more_s"])),
            "changed": changed,
        }

    def _starts(self, connection: Connection, request: Request) -> Answer:
        where, chosen = filter_of(request, job=request.query_params.get("job"))
        offset = _number(request, "offset", 0, 1 << 31)
        limit = _number(request, "limit", _ROWS, 1000)
        return {**chosen, "starts": questions.starts(connection, where, limit=limit, offset=offset)}

    def _over_time(self, question: str, connection: Connection, request: Request) -> Answer:
        team = _grant(request).team  # a token of a team reads that team's starts
        asked = {**request.query_params, **({"team": team} if team else {})}
        return self._service.over_time.answer(connection, question, asked)

    # Requests for them.

    def _metrics(self, request: Request) -> Response:
        if _grant(request).team:  # most of these sums are not split by team
            return refusal(403, "/metrics is about all teams: this needs a token without a team")
        with self._service.database.read() as connection:
            text = metrics.text_of(connection, self._service.over_time, time.time_ns())
        return PlainTextResponse(text, media_type=PROMETHEUS)

    def _shown(self, name: str, answer: _Find) -> _Endpoint:
        def shown(request: Request) -> Response:
            with self._service.database.read() as connection:
                found = answer(connection, request)
            return self._page(name, request, **found)

        return self._guarded(shown, of_weeks=name != "now")

    def _json_of(self, answer: _Find, *, of_weeks: bool = True) -> _Endpoint:
        def content(request: Request) -> Response:
            with self._service.database.read() as connection:
                return JSONResponse({"schema": "bootseer.service/1", **answer(connection, request)})

        return self._guarded(content, of_weeks=of_weeks)

    def _guarded(self, answer: Callable[[Request], Response], *, of_weeks: bool = False) -> _Endpoint:
        """The answer, or a page or JSON document with the error."""

        def guarded(request: Request) -> Response:
            try:
                asked = (*request.query_params.values(), *request.path_params.values())
                if any("\0" in str(text) for text in asked):
                    raise UsageError("the address has a NUL character, which no name has")  # PostgreSQL refuses it
                return answer(request)
            except BootseerError as error:
                return failed(request, error)

        def failed(request: Request, error: BootseerError) -> Response:
            status = {NotFoundError: 404, UsageError: 400, TransientError: 503}.get(type(error), 500)
            if request.url.path.startswith(("/api/", "/metrics")):
                return JSONResponse({"error": str(error)}, status, {"retry-after": "5"} if status == 503 else None)
            return self._page("error", request, status=status, error=str(error))

        async def shared(request: Request) -> Response:
            try:
                with anyio.fail_after(_DEADLINE_S):  # a database that hangs does not even cancel a query
                    return await self._service.answers.of(request, guarded, of_weeks=of_weeks)
            except TimeoutError:
                return failed(request, TransientError(f"{self._service.database}: no answer in {_DEADLINE_S:g} s"))

        return shared

    def _page(self, name: str, request: Request, *, status: int = 200, **values: Any) -> Response:
        text = self._templates.get_template(f"{name}.html").render(
            **values, bars=_bars, links=_LINKS, path=request.url.path, version=__version__, since_words=list(_SINCE),
            kinds=_KINDS, scales=_SCALES,
        )  # fmt: skip
        return HTMLResponse(text, status)

    async def not_found(self, request: Request, error: Exception) -> Response:
        """A page for browsers that ask for an address that does not exist."""
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse("Not Found", 404)
        return self._page("error", request, status=404, error=f"There is no page {request.url.path}")

    def login(self, request: Request, text: str, status: int = 200) -> Response:
        return self._page("login", request, status=status, text=text)

    def _found(self, connection: Connection, request: Request, job: str, attempt: int, restart: int) -> Answer:
        """A start. Raises `NotFoundError` if there is none, or if it belongs to another team."""
        where, one = Filter(job=job, team=_grant(request).team or None), (attempt, restart)
        found = questions.starts(connection, where, one=one) if max(one) < 1 << 31 else []
        if not found:
            raise NotFoundError(f"no start of job {job!r}, attempt {attempt}, restart {restart} is known")
        return found[0]

    def _report(self, request: Request) -> bytes:
        with self._service.database.read() as connection:
            return self._stored(connection, self._found(connection, request, **request.path_params)["id"])

    @staticmethod
    def _stored(connection: Connection, number: int) -> bytes:
        table = schema.start_report.c
        packed = connection.execute(select(table.json).where(table.start_id == number)).scalar_one()
        return zstandard.decompress(packed)

    def _start(self, request: Request) -> Response:
        with self._service.database.read() as connection:
            start = self._found(connection, request, **request.path_params)
            report = _REPORT.decode(self._stored(connection, start["id"]))
        above = self._templates.get_template("above.html").render(start=start)
        page = html.render(report, above=above, refresh_s=5 if start["state"] == schema.OPEN else None)
        return HTMLResponse(page, headers={"content-security-policy": html.policy()})

    def _start_json(self, request: Request) -> Response:
        return Response(self._report(request), media_type="application/json")

    def _perfetto(self, request: Request) -> Response:
        report = _REPORT.decode(self._report(request))
        headers = {"content-disposition": 'attachment; filename="start.perfetto.json"'}
        return Response(perfetto.render(report), media_type="application/json", headers=headers)

    async def _events(self, request: Request) -> Response:
        """Server-sent events: `changed` when a start has changed."""

        async def moments() -> AsyncIterator[str]:
            seen, quiet_s = self._changes, 0.0
            yield "retry: 3000\n\n"
            while not getattr(request.app.state, "ending", False) and not await request.is_disconnected():
                await asyncio.sleep(_EVENTS_S)
                quiet_s += _EVENTS_S
                # Also after some time without a change: another service of the same database may have changes.
                if self._changes != seen or quiet_s >= _QUIET_S:
                    seen, quiet_s = self._changes, 0.0
                    yield "event: changed\ndata: 1\n\n"

        return StreamingResponse(moments(), media_type="text/event-stream", headers={"cache-control": "no-store"})


def filter_of(
    request: Request, *, default: str = "30d", job: str | None = None, words: str = ""
) -> tuple[Filter, Answer]:
    """The filter of a request, and the values of the page's form. Raises `UsageError`."""
    asked = request.query_params
    since, kind, bucket = asked.get("since", default), asked.get("kind") or None, asked.get("bucket") or None
    for name, value, known in (("since", since, _SINCE), ("kind", kind, _KINDS), ("bucket", bucket, _SCALES)):
        if value is not None and value not in known:
            raise UsageError(f"{name}={value}: choose from {', '.join(known)}")
    today = day_of(time.time_ns())
    team = _grant(request).team or asked.get("team") or None
    scale = _SCALES.index(bucket) if bucket is not None else None
    # Until tomorrow: a node's clock that is ahead of ours must not hide its start.
    where = Filter(today - _SINCE[since] + 1, today + 1, team=team, job=job, kind=kind, bucket=scale, words=words)
    return where, {"since": since, "team": team or "", "kind": kind or "", "bucket": bucket or ""}


def start_link(start: Mapping[str, Any]) -> str:
    """The page of a start; the link remains valid after `reindex`."""
    return f"/start/{start['attempt']}/{start['restart']}/{quote(start['job'], safe='')}"


def _identity(text: str) -> tuple[str, int, int]:
    """JOB, attempt and restart of `ATTEMPT/RESTART/JOB`, or of the link of a page."""
    _, link, path = text.rpartition("/start/")
    attempt, _, rest = (unquote(path) if link else text).partition("/")
    restart, _, job = rest.partition("/")
    if not (job and attempt.isdecimal() and restart.isdecimal() and len(attempt) < 10 and len(restart) < 10):
        raise UsageError(f"{text!r} is not a start: give ATTEMPT/RESTART/JOB, or the link of its page")
    return job, int(attempt), int(restart)


def _grant(request: Request) -> Grant:
    grant: Grant = request.state.grant
    return grant


def _number(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 12 and int(text) <= most):
        raise UsageError(f"{name}={text}: not a number up to {most}")
    return int(text)


def _bars(rows: list[Answer], value: str, label: str, unit: float, by: str) -> Markup:
    """A chart of a value by day, in this unit; the values of a day are stacked by the column `by`."""
    sums: dict[int, dict[str, float]] = {}
    for row in rows:
        parts = sums.setdefault(row["day"], {})
        part = str(row[by]).replace("_", " ")
        parts[part] = parts.get(part, 0.0) + float(row[value] or 0) / unit
    days = range(min(sums), max(sums) + 1) if sums else range(0)
    named = [(datetime.fromtimestamp(day * DAY_NS / 1e9, UTC).strftime("%Y-%m-%d"), sums.get(day, {})) for day in days]
    return Markup(bars(named, label))  # noqa: S704 - escaped by `bars`


def _colour(stage: str) -> str:
    """The class of a stage's colour, the same as in reports."""
    top = stage.partition(".")[0]
    return f"c{STAGES.index(top) if top in STAGES else NUM_COLOURS - 2}"


def _parameter(name: str, kind: str = "string", *, place: str = "query", **schema: Any) -> Answer:
    required = {"required": True} if place == "path" else {}
    return {"name": name, "in": place, **required, "schema": {"type": kind, **schema}}


def openapi() -> Answer:
    since, team = _parameter("since", enum=list(_SINCE)), _parameter("team")
    kind, bucket = _parameter("kind", enum=list(_KINDS)), _parameter("bucket", enum=_SCALES)
    filters = [since, team, kind, bucket]
    counts = [
        _parameter(name, "integer", minimum=0, maximum=most) for name, most in (("offset", 1 << 31), ("limit", 1000))
    ]
    pattern = "^[0-9]{1,9}/[0-9]{1,9}/[^\\s]+$"
    sides = [_parameter(name, pattern=pattern, description="ATTEMPT/RESTART/JOB") for name in ("a", "b")]
    job, named = (_parameter("job", place=place, minLength=1) for place in ("path", "query"))
    numbers = [
        _parameter(name, "integer", place="path", minimum=0, maximum=2**31 - 1) for name in ("attempt", "restart")
    ]
    words = {**_parameter("q"), "description": "Part of a job's name"}
    ago = _parameter("since", pattern="^[0-9]{1,4}[hdw]$")
    weeks = [ago, team, kind, _parameter("queue")]
    paths: dict[str, tuple[str, list[Answer]]] = {
        "/api/v1/fleet": ("Cost of starts by team, scale, stage and day", filters),
        "/api/v1/now": ("Open starts, the state of their nodes, and late nodes", []),
        "/api/v1/jobs": ("Jobs, those that lose most first", [*filters, words]),
        "/api/v1/job/{job}": ("One job's starts", [job, *filters]),
        "/api/v1/nodes": ("Nodes that delay others, worst first", [since]),
        "/api/v1/caches": ("Hits, misses and bytes of images, environments and checkpoints", filters),
        "/api/v1/compare": ("Comparison of two starts", sides),
        "/api/v1/starts": ("Starts, newest first", [*filters, *counts]),
        "/api/v1/start/{attempt}/{restart}/{job}": ("The report of one start", [*numbers, job]),
        f"{ADDRESS}/fleet": ("The data of `bootseer fleet`", weeks),
        f"{ADDRESS}/history": ("The data of `bootseer history`", [{**named, "required": True}, *weeks]),
        f"{ADDRESS}/now": ("The data of `bootseer watch`", [named, team]),
    }
    content = {"application/json": {"schema": {"type": "object"}}}
    answers = {
        "200": {"description": "The answer", "content": content},
        **{status: {"description": why, "content": content} for status, why in _ERRORS.items()},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "BootSeer Stage Analysis Service", "version": __version__},
        "paths": {
            path: {"get": {"summary": summary, "parameters": parameters, "responses": answers}}
            for path, (summary, parameters) in paths.items()
        },
    }


_ERRORS: Final = {
    "400": "Invalid request",
    "401": "A token is required",
    "403": "The token does not allow it",
    "404": "No such start or job",
    "503": "The database cannot be reached",
}

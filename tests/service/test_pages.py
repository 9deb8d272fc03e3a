"""The pages: they show the results of the queries, equally in HTML and JSON, with any names."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from sqlalchemy import func, select
from starlette.requests import Request
from starlette.responses import Response

from bootseer.report.render import html
from bootseer.service import schema
from bootseer.service.access import Grant
from bootseer.service.charts import bars
from bootseer.service.database import Database, default_url
from bootseer.service.rows import BEGAN, day_of
from bootseer.service.shared_answers import Answers
from bootseer.service.upkeep import roll_up
from bootseer.units import format_hours, format_money
from browser import needs_chromium, open_tab
from fleet import EPOCH_NS, INSTALL, NS, Fleet
from fleet_month import Month
from running_service import RunningService, ask, running_service

pytestmark = pytest.mark.slow

HOSTILE = "a/../b\n?c=1&<script>alert(1)</script>\"'\u202e" + "x" * 200
PAGES = ("/", "/now", "/jobs", "/nodes", "/caches", "/compare")


def send(service: RunningService, fleet: Fleet, lines: list[bytes] | None = None) -> None:
    """Send the lines of a fleet that starts now."""
    shift_ns = time.time_ns() - EPOCH_NS - 600 * NS
    data = b"".join(lines or fleet.lines())
    data = re.sub(rb'"wall_ns":(\d+)', lambda match: b'"wall_ns":%d' % (int(match[1]) + shift_ns), data)
    answer = service.post("/v1/lines", data, x_bootseer_sender="rack", x_bootseer_kind="lines")
    assert answer.status_code == 202, answer.text


def derived(service: RunningService, num: int) -> None:
    rows = service.rows(schema.start, num)
    assert len(rows) >= num


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running_service(tmp_path_factory.mktemp("service")) as running:
        for attempt in range(4):
            send(running, Fleet(4, job="moe", attempt=attempt, seed=attempt, work_of={(1, INSTALL): 90.0}))
        send(running, Fleet(2, job=HOSTILE, names=("<b>node</b>", "n'); DROP TABLE start;--")))
        send(running, Fleet(3, job="dead", killed_in={1: INSTALL}))
        derived(running, 6)
        until = time.monotonic() + 300
        while not all(row.done for row in running.rows(schema.batch, 6)):
            assert time.monotonic() < until
        began = schema.start.c.outcome == BEGAN
        with running.service.database.write() as connection:  # as if half a minute later
            connection.execute(schema.start.update().where(began).values(state=schema.CLOSED))
        for day in {row.day for row in running.rows(schema.start)}:
            roll_up(running.service.database, day)
        yield running


def get(service: RunningService, path: str, code: int = 200) -> httpx.Response:
    answer = ask("GET", service.url + path)
    assert answer.status_code == code, (path, answer.status_code, answer.text[:300])
    return answer


def test_an_empty_service_says_how_to_fill_it(tmp_path: Path) -> None:
    with running_service(tmp_path) as running:
        assert "--trace-to service=" in get(running, "/").text
        for path in PAGES:
            get(running, path)
            get(running, f"/api/v1{path if path != '/' else '/fleet'}")


def test_pages_and_their_json_say_the_same(service: RunningService) -> None:
    fleet = get(service, "/api/v1/fleet").json()
    assert sum(row["starts"] for row in fleet["by_team"]) == fleet["coverage"]["starts"] == 6
    page = get(service, "/").text
    assert '<p class="big">6</p>' in page
    jobs, page = get(service, "/api/v1/jobs").json()["jobs"], get(service, "/jobs").text
    assert min(job["gpu_s"] for job in jobs) < 3600
    assert all(f">{format_hours(job['gpu_s'] / 3600)}</td>" in page for job in jobs), "a small cost is not 0.0"
    nodes = get(service, "/api/v1/nodes").json()
    assert nodes["nodes"][0]["node"] == "node-0001"
    assert nodes["lemons"] == [], "four of five starts of so few nodes may be bad luck"
    assert "sbatch --exclude" not in get(service, "/nodes").text
    now = get(service, "/api/v1/now").json()
    dead = next(one for one in now["starts"] if one["job"] == "dead")
    assert dead["line"].startswith("2 of 3 at process_group")
    assert dead["line"].partition("; ")[0] in get(service, "/now").text


@pytest.mark.parametrize(
    ("most", "ticks"), [(1, "0 1 2"), (5, "0 3 6"), (64.1, "0 40 80"), (100, "0 50 100"), (0, "0 1 2")]
)
def test_axes_have_round_numbers(most: float, ticks: str) -> None:
    drawn = bars([("2026-11-26", {"": most})], "starts")
    assert re.findall('text-anchor="end">([^<]*)<', drawn) == ticks.split()


def test_jobs_are_found_by_a_part_of_their_name_and_filters_narrow_all_of_a_page(service: RunningService) -> None:
    def found(query: str) -> list[str]:
        return [row["job"] for row in get(service, f"/api/v1/jobs?{query}").json()["jobs"]]

    assert set(found("")) == {"moe", "dead", HOSTILE}
    assert found("q=MO") == ["moe"]
    assert found("q=<script>") == [HOSTILE]
    assert found("q=%25") == found("q=_") == [], "no wildcards"
    assert 'value="&#34;&gt;x"' in get(service, '/jobs?q=">x').text
    small, large = (get(service, f"/api/v1/fleet?bucket={name}").json() for name in ("10-100", ">3000"))
    assert sum(row["starts"] for row in small["by_team"]) == 6
    assert (large["by_team"], large["stages"], large["days"]) == ([], [], [])
    every, none = (get(service, f"/api/v1/fleet{query}").json() for query in ("", "?team=other"))
    assert none["stages"] == [], "the sums of days know no teams"
    assert get(service, "/api/v1/caches?team=other").json()["caches"] == []
    mine = get(service, "/api/v1/over-time/fleet?team=other").json()
    assert (mine["stages"], mine["caches"]) == ([], [])
    assert len(every["stages"]) > 3


def asking(query: str = "") -> Request:
    scope = {"type": "http", "path": "/", "query_string": query.encode(), "headers": [], "server": ("h", 80)}
    return Request({**scope, "state": {"grant": Grant("read")}})


def test_readers_that_ask_for_the_same_share_an_answer_that_was_begun_after_they_asked(monkeypatch: Any) -> None:
    monkeypatch.setattr("bootseer.service.shared_answers._LASTS", 1e9)
    begun: list[float] = []

    def make(request: Request) -> Response:
        begun.append(time.monotonic())
        return Response(str(begun[-1]))

    async def ask(answers: Answers, query: str) -> None:
        asked_s = time.monotonic()
        answer = await answers.of(asking(query), make)
        assert float(bytes(answer.body)) >= asked_s, query

    async def all_of_them() -> None:
        answers = Answers()
        await asyncio.gather(*(ask(answers, query) for query in ["a"] * 50 + ["b"]))
        assert not answers._asked
        for number in range(100):
            await answers.of(asking(f"c{number % 50}"), make, of_weeks=True)
        assert len(answers._asked) == 32, "those of 50 that were not forgotten"
        first = await answers.of(asking("c49"), make, of_weeks=True)
        assert await answers.of(asking("c49"), make, of_weeks=True) is first

    asyncio.run(all_of_them())
    assert len(begun) == 3 + 100, "one for the first, one for the 49 that came meanwhile, one for b; then each of c"


def test_an_error_is_not_shown_again(monkeypatch: Any) -> None:
    monkeypatch.setattr("bootseer.service.shared_answers._LASTS", 1e9)
    statuses = iter([503, 200])

    async def asked() -> list[int]:
        answers = Answers()
        return [
            (await answers.of(asking(), lambda _: Response(status_code=next(statuses)), of_weeks=True)).status_code
            for _ in range(2)
        ]

    assert asyncio.run(asked()) == [503, 200]


def test_no_reader_gets_an_answer_from_before_its_request_after_an_exception() -> None:
    made = iter([Response("first"), RuntimeError("an exception"), Response("third")])

    def make(request: Request) -> Response:
        answer = next(made)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def asked() -> list[Any]:
        answers = Answers()
        return await asyncio.gather(*(answers.of(asking(), make) for _ in range(3)), return_exceptions=True)

    first, second, third = asyncio.run(asked())
    assert (first.body, str(second), third.body) == (b"first", "an exception", b"third")


def test_a_start_is_its_report(service: RunningService, tmp_path: Path, monkeypatch: Any) -> None:
    render = html.render
    answer = get(service, "/api/v1/start/2/0/moe")
    for name, lines in service.raw().items():
        if "/moe/attempt-2/" in name:
            (tmp_path / "one.events").write_bytes(lines)
    command = [sys.executable, "-m", "bootseer", "report", "--json", str(tmp_path / "one.events")]
    assert answer.content == subprocess.run(command, capture_output=True, check=True).stdout
    drawn = []
    monkeypatch.setattr(html, "render", lambda *of, **more: drawn.append(of) or render(*of, **more))
    page = get(service, "/start/2/0/moe")
    assert get(service, "/start/2/0/moe").text == page.text
    assert len(drawn) == 1, "the same analysis is drawn once"
    assert answer.json()["verdict"][:40] in page.text
    assert "sha256-" in page.headers["content-security-policy"]
    assert json.loads(get(service, "/perfetto/2/0/moe").content)["traceEvents"]
    get(service, "/start/9/0/moe", 404)
    get(service, f"/start/{1 << 70}/0/moe", 404)
    get(service, "/job/none", 404)
    get(service, "/api/v1/job/none", 404)


def test_nodes_that_came_last_too_often_are_listed_and_sums_have_their_price(tmp_path: Path) -> None:
    database, today = Database.open(default_url(tmp_path)), day_of(time.time_ns())
    month = Month(num_nodes=400, num_days=2, node_starts=2000, num_jobs=10, num_lemons=3, first_day=today - 1)
    month.fill(database)
    with database.write() as connection:  # open ones would be derived again, from lines that do not exist
        connection.execute(schema.start.update().values(state=schema.CLOSED))
        failed = schema.start.c.outcome == "failed"
        odd = schema.start.update().where(failed, schema.start.c.id % 2 == 1)
        connection.execute(odd.values(outcome="unobserved"))  # may have trained
        num_failed = connection.execute(select(func.count()).where(failed)).scalar_one()
    for day in (today - 1, today):
        roll_up(database, day)
    database.close()
    with running_service(tmp_path, price=2.0, currency="EUR") as running:
        nodes = get(running, "/api/v1/nodes").json()
        assert nodes["lemons"]
        assert set(nodes["lemons"]) <= {month.name(node) for node in month.lemons}
        page = get(running, "/nodes").text
        assert f"sbatch --exclude={','.join(nodes['lemons'])}" in page
        assert "too often to be chance" in page
        teams = {row["team"]: row["gpu_s"] for row in get(running, "/api/v1/fleet").json()["by_team"]}
        assert teams == pytest.approx({team: sums["gpu_s"] for team, sums in month.truth.teams.items()})
        page = get(running, "/").text
        assert f'<p class="sub">{num_failed} failed or abandoned</p>' in page
        assert all(f">{format_money(gpu_s / 3600 * 2, 'EUR')}<" in page for gpu_s in teams.values())
        of_team = get(running, "/api/v1/fleet?team=llm").json()
        stages = sum(row["gpu_s"] for row in of_team["stages"])
        every = sum(row["gpu_s"] for row in get(running, "/api/v1/fleet").json()["stages"])
        assert 0 < stages < every
        parts = [get(running, f"/api/v1/fleet?team={team}").json()["stages"] for team in teams]
        assert sum(row["gpu_s"] for rows in parts for row in rows) == pytest.approx(every)
        with running.service.database.write() as connection:  # no node reports its number of GPUs
            unknown = {"gpus": None, "gpu_s": 0.0, "wait_gpu_s": 0.0}
            connection.execute(schema.start.update().where(schema.start.c.team != "llm").values(unknown))
        rows = {row["team"]: row for row in get(running, "/api/v1/fleet?since=7d").json()["by_team"]}
        assert {row["team"]: row["gpu_s"] for row in rows.values() if row["gpu_s"] is not None} == {
            "llm": pytest.approx(teams["llm"])
        }
        assert {team: row["gpus_unknown"] for team, row in rows.items()} == {
            team: 0 if team == "llm" else row["starts"] for team, row in rows.items()
        }
        num, every = (sum(row[name] for row in rows.values()) for name in ("gpus_unknown", "starts"))
        page = get(running, "/?since=7d").text
        assert f"; {num} of {every} starts without a GPU count</p>" in page
        figures = get(running, "/metrics").text
        assert re.findall(r'bootseer_start_gpu_seconds_total{team="(\w+)"}', figures) == ["llm"]
        with running.service.database.write() as connection:
            connection.execute(schema.start.update().values(unknown))
            day = schema.stage_day
            connection.execute(day.update().values(bucket=-1 - day.c.bucket, gpu_s=0.0))
        start = get(running, "/api/v1/starts?limit=1").json()["starts"][0]
        assert start["gpu_s"] is None
        page = get(running, f"/job/{start['job']}").text
        assert [f'{name}</h3><p class="big">–<' in page for name in ("GPU-hours", "Cost")] == [True, True]
        found = get(running, "/api/v1/fleet?since=90d").json()
        parts = [row for name in ("by_team", "stages", "days", "jobs", "failures") for row in found[name]]
        assert {row["gpu_s"] for row in parts} == {row["straggler_gpu_s"] for row in found["straggling"]} == {None}
        page = get(running, "/?since=90d").text
        assert f'GPU-hours in starts</h3><p class="big">–</p><p class="sub">unknown; {every} of {every} starts' in page


def test_two_starts_are_compared(service: RunningService) -> None:
    both = get(service, "/api/v1/compare?a=0/0/moe&b=/start/1/0/moe").json()
    assert (both["a"]["attempt"], both["b"]["attempt"]) == (0, 1)
    assert INSTALL in [row["stage"] for row in both["stages"]]
    assert INSTALL in get(service, "/compare?a=0/0/moe&b=1/0/moe").text
    get(service, "/compare?a=x&b=y", 400)
    link = f"{service.url}/start/0/0/{quote(HOSTILE, safe='')}"  # as copied from a browser
    both = get(service, f"/api/v1/compare?a={quote(link, safe='')}&b=0/0/moe").json()
    assert both["a"]["job"] == HOSTILE


def test_names_are_shown_as_they_are_and_nothing_more(service: RunningService) -> None:
    job = quote(HOSTILE, safe="")
    for path in ("/", f"/job/{job}", f"/start/0/0/{job}", "/nodes", "/now", f"/compare?a=0/0/{job}&b=0/0/moe"):
        page = get(service, path)
        assert "<script>alert" not in page.text
        assert "<b>node" not in page.text
        assert "\u202e" not in page.text, "a mark that turns what follows around"
        assert "script-src" in page.headers["content-security-policy"] or "default-src 'self'" in str(page.headers)
    assert get(service, f"/api/v1/job/{job}").json()["job"] == HOSTILE
    assert len(service.rows(schema.start)) == 6


@pytest.mark.parametrize("path", ["/?since=1", "/?kind=odd", "/api/v1/starts?limit=-1", "/api/v1/starts?offset=1e9"])
def test_requests_that_make_no_sense_are_errors(service: RunningService, path: str) -> None:
    answer = get(service, path, 400)
    assert path.partition("?")[2].partition("=")[0] in answer.text


def test_the_api_is_what_its_document_says(service: RunningService) -> None:
    import schemathesis  # takes a second, also for runs that only collect this file

    api = schemathesis.openapi.from_url(f"{service.url}/api/v1/openapi.json")
    routes = {getattr(route, "path_format", "") for route in service.service.routes()}
    documented = set(get(service, "/api/v1/openapi.json").json()["paths"]) | {"/api/v1/openapi.json"}
    assert documented == {path for path in routes if path.startswith("/api/")}
    asked = 0
    for result in api.get_all_operations():
        operation = result.ok()

        @settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            nonlocal asked
            asked += 1
            case.call_and_validate(base_url=service.url)

        check()
    assert asked >= 50


@pytest.mark.browser
@needs_chromium
def test_pages_in_a_browser(service: RunningService) -> None:
    with open_tab(390, 800) as page:
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        for path in (*PAGES, "/job/moe", "/start/0/0/moe", f"/job/{quote(HOSTILE, safe='')}"):
            page.goto(service.url + path)
            for width in (390, 1400):
                page.set_viewport_size({"width": width, "height": 800})
                element = "document.documentElement"
                assert page.evaluate(f"{element}.scrollWidth - {element}.clientWidth") == 0, (path, width)
        page.goto(service.url + "/jobs")
        hidden = page.evaluate(
            "[...document.querySelectorAll('.scroll')].map((one) => one.scrollWidth - one.clientWidth)"
        )
        assert hidden == [0], "a long name does not push the figures of all jobs aside"
        page.goto(service.url + "/now")
        page.keyboard.press("o")
        page.wait_for_url("**/nodes")
        page.goto(service.url + "/now")
        lines = Fleet(5, job="live-one").lines()
        send(service, Fleet(5, job="live-one"), lines[: len(lines) // 2])
        page.wait_for_selector("text=live-one")
        assert [text for text in problems if "favicon" not in text and "404" not in text] == []

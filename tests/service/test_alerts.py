"""Alerts begin, end and are sent once; metrics for Prometheus match the database, with bounded labels."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
import yaml
from sqlalchemy import func, select

from bootseer.errors import UsageError
from bootseer.service import alerts
from bootseer.service.alerts import Alerts, Finding, of_weeks, settle, urgent, webhook
from bootseer.service.database import Database
from bootseer.service.metrics import text_of
from bootseer.service.over_time import OverTime, learned, now
from bootseer.service.schema import alert, batch, live, stage, stage_day, start, technique_start
from bootseer.service.upkeep import roll_up
from fleet import Fleet
from fleet_month import INSTALL, STAGES, Month
from running_service import running_service

pytestmark = pytest.mark.slow

CONTRIB = Path(__file__).parents[2] / "contrib"
SAMPLE = re.compile(r'([a-z_]+)(\{(?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*\})? (-?[0-9.e+-]+|\+Inf|NaN)')


@pytest.fixture
def month(database_url: str) -> Any:
    database = Database.open(database_url)
    made = Month(num_nodes=400, num_days=2, node_starts=2000, num_jobs=10, num_lemons=3)
    made.fill(database)
    yield made, database
    database.close()


def samples(text: str) -> dict[str, float]:
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            assert SAMPLE.fullmatch(line), line
            name, _, value = line.rpartition(" ")
            assert name not in found, f"{name} twice"
            found[name] = float(value)
    return found


def test_figures_and_rules_of_a_month(month: Any) -> None:
    made, database = month
    with database.write() as connection:
        connection.execute(start.update().where(start.c.id <= 3).values(team='bad"\n{x="\\'))
        of_open = connection.execute(select(func.sum(start.c.gpu_s)).where(start.c.state == "open")).scalar_one()
    with database.read() as connection:
        text = text_of(connection, OverTime(database), made.now_ns - 1)
        found = of_weeks(connection, made.now_ns - 1)
    figures = samples(text)
    counts = sum(value for name, value in figures.items() if name.startswith("bootseer_start_seconds_count"))
    assert counts == sum(map(len, made.truth.overheads.values()))
    infinite = [value for name, value in figures.items() if 'le="+Inf"' in name and "start_seconds" in name]
    assert sum(infinite) == counts
    gpu_s = sum(value for name, value in figures.items() if name.startswith("bootseer_start_gpu_seconds_total"))
    assert of_open > 0
    assert gpu_s == pytest.approx(sum(sums["gpu_s"] for sums in made.truth.teams.values()) - of_open, rel=1e-6)
    over = sum(value for name, value in figures.items() if name.startswith("bootseer_starts_total"))
    assert over == made.truth.starts - made.truth.open
    assert figures['bootseer_technique_uses_total{technique="image",result="hits"}'] == made.truth.hits["image"]
    assert "node-0" not in text
    assert "job-0" not in text
    listed = {one.key for one in found if one.rule == "node_often_last"}
    assert made.name(max(made.truth.last, key=made.truth.last.__getitem__)) in listed
    assert listed <= {made.name(node) for node in made.lemons}, "none by bad luck"


def test_labels_of_stages_stay_whatever_they_cost(month: Any) -> None:
    """If a stage that became cheaper than another one moved to `other`, Prometheus would take that for an increase."""
    made, database = month
    with database.write() as connection:
        rare = [{"id": 1000 + number, "name": f"model_initialization.import.m{number}"} for number in range(60)]
        connection.execute(stage.insert(), rare)

    def labels() -> set[str]:
        with database.read() as connection:
            text = text_of(connection, OverTime(database), made.now_ns - 1)
        return set(re.findall(r'bootseer_stage_gpu_seconds_total{stage="([^"]+)"', text))

    before = labels()
    assert set(STAGES) <= before
    with database.write() as connection:
        row = dict(connection.execute(select(stage_day)).first()._mapping)
        for one in rare:
            values = {**row, "stage_id": one["id"], "gpu_s": 1e12, "work_s": 1e12}
            connection.execute(stage_day.insert().values(values))
    assert before <= labels()
    assert "other" in labels()


def test_labels_of_teams_stay_whatever_they_cost(month: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, database = month
    monkeypatch.setattr("bootseer.service.metrics._TEAMS", 1)

    def labels() -> set[str]:
        with database.read() as connection:
            text = text_of(connection, OverTime(database), made.now_ns - 1)
        return set(re.findall(r'bootseer_start_gpu_seconds_total{team="([^"]*)"', text))

    before = labels()
    assert len(before) == 2
    for team in made.truth.teams:
        with database.write() as connection:
            connection.execute(start.update().values(gpu_s=1.0))
            connection.execute(start.update().where(start.c.team == team).values(gpu_s=1e12))
        assert labels() == before


def test_each_rule_finds_what_it_is_for_and_nothing_else(month: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fact is changed for each rule; its finding disappears with the change."""
    made, database = month
    now_ns, hour_ns = made.now_ns - 1, 3600 * 10**9

    def found(**of: Any) -> dict[str, str]:
        with database.read() as connection, monkeypatch.context() as patched:
            for name, limit in of.items():
                patched.setattr(alerts, name, limit)
            deadlines = learned(connection, made.last_day)
            both = [
                *urgent(connection, now(connection, deadlines), now_ns),
                *of_weeks(connection, now_ns),
            ]
            return {one.rule: one.text for one in both if one.rule != "node_often_last"}

    def change(table: Any, where: Any, **values: Any) -> None:
        with database.write() as connection:
            connection.execute(table.update().where(where).values(**values))

    change(start, start.c.state == "open", state="closed")
    roll_up(database, made.last_day)
    change(batch, batch.c.day > 0, received_ns=now_ns)
    change(start, start.c.nodes_heard < start.c.nodes_expected, nodes_heard=start.c.nodes_expected)
    quiet = found(_SHARE=1.0, _HIT_SHARE=0.0)
    assert set(quiet) <= {"slower"}
    said = found(_SHARE=1e-6, _HIT_SHARE=1.0)
    assert {"share", "cache_misses"} <= set(said)
    with database.read() as connection, monkeypatch.context() as patched:
        newest = connection.execute(
            select(start).where(start.c.outcome == "training_began").order_by(start.c.began_ns.desc())
        ).first()
        today = (technique_start.c.day == made.last_day) & (technique_start.c.technique == "image")
        columns = (func.sum(technique_start.c.hits), func.sum(technique_start.c.misses))
        hits, misses = map(int, connection.execute(select(*columns).where(today)).one())
        patched.setattr(alerts, "_HIT_SHARE", 1.0)
        all_ = {one.text for one in of_weeks(connection, now_ns)}
    assert newest is not None
    num = hits + misses
    assert f"image: ready on {hits / num:.0%} of {num:,} nodes that started today" in all_
    change(start, start.c.id == newest.id, overhead_s=100_000.0, queue_s=0.0)
    for number in range(5):  # earlier ones, of the same kind and scale
        values = {
            **newest._mapping,
            "id": 10**6 + number,
            "attempt": 10**6 + number,
            "overhead_s": 100.0,
            "queue_s": 0.0,
        }
        values["began_ns"] = newest.began_ns - (number + 1) * hour_ns
        with database.write() as connection:
            connection.execute(start.insert().values(values))
    assert f"{newest.job}, attempt {newest.attempt}: " in found()["slower"]
    change(batch, batch.c.attempt == newest.attempt, done=False, received_ns=now_ns - hour_ns // 30)
    assert "wait to be analysed, the oldest for 2 min" in found()["ingest_lag"]
    change(batch, batch.c.day > 0, done=True, received_ns=now_ns - 2 * hour_ns)
    assert "silent" not in found(), "nothing is open"
    under_way = {"state": "open", "outcome": "", "began_ns": now_ns - hour_ns}
    change(start, start.c.id == newest.id, **under_way, nodes_heard=0, nodes_expected=10**6)
    missing = {"node": "n7", "rank": -1, "stage": STAGES[INSTALL], "seconds": 1e6, "stack": ""}
    moment = {"barrier": "process_group", "arrived": 0, "expected": 1, "unit": "nodes", "missing": [missing]}
    with database.write() as connection:
        values = {
            "job": newest.job,
            "attempt": newest.attempt,
            "moment": json.dumps(moment),
            "owner": "",
            "updated_ns": 0,
            "owned_until_ns": 0,
        }
        connection.execute(live.insert().values(values))
    said = found()
    assert "no event for 2 h" in said["silent"]
    assert "expected nodes sent events today" in said["nodes_not_heard"]
    assert "n7" in said["nodes_late"]


def test_the_share_of_starts_is_that_of_commands_that_ended_lately_also_of_long_ones(
    month: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "_SHARE", 0.001)
    made, database = month
    now_ns = made.now_ns - 1
    with database.write() as connection:
        newest = connection.execute(select(start).where(start.c.outcome == "training_began")).first()
        assert newest is not None
        connection.execute(start.update().values(state="open"))
        for number, (began_h, run_h) in enumerate([(1.0, 0.5), (20.0, 18.0), (20.0, 2.0)]):
            values = {**newest._mapping, "id": 10**6 + number, "attempt": 10**6 + number, "state": "closed"}
            values |= {"began_ns": now_ns - round(began_h * 3600e9), "day": made.last_day, "queue_s": None}
            values |= {"run_s": run_h * 3600, "gpus": 8, "gpu_s": 8 * 300.0}
            connection.execute(start.insert().values(values))
        found = of_weeks(connection, now_ns)
    # 10 minutes of 18.5 hours: a command that ended 18 hours ago does not count.
    assert [one.text[:18] for one in found if one.rule == "share"] == ["startup took 0.9% "]


def test_rules_and_dashboard_ask_for_figures_that_there_are(month: Any) -> None:
    made, database = month
    with database.read() as connection:
        names = set(re.findall(r"^bootseer_\w+", text_of(connection, OverTime(database), made.now_ns - 1), re.M))
    rules = yaml.safe_load((CONTRIB / "prometheus" / "rules.yaml").read_text())["groups"][0]["rules"]
    board = json.loads((CONTRIB / "grafana" / "bootseer.json").read_text())
    asked = [rule["expr"] for rule in rules] + [t["expr"] for panel in board["panels"] for t in panel["targets"]]
    wanted = {name for expr in asked for name in re.findall(r"bootseer_\w+", expr)}
    assert wanted <= names


_has_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)"
)


@_has_promtool
def test_prometheus_own_tool_finds_metrics_well_formed(month: Any) -> None:
    made, database = month
    with database.read() as connection:
        text = text_of(connection, OverTime(database), made.now_ns - 1)
    _promtool("check", "metrics", given=text)


@_has_promtool
def test_prometheus_own_tool_finds_that_rules_fire_as_they_should() -> None:
    _promtool("test", "rules", str(CONTRIB / "prometheus" / "rules_test.yaml"))


def _promtool(*words: str, given: str = "") -> None:
    ran = subprocess.run(["promtool", *words], input=given, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


class Hook(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append((self.path, json.loads(data)))  # type: ignore[attr-defined]
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_an_alert_is_reported_at_its_begin_and_its_end_also_after_a_webhook_was_away(tmp_path: Path) -> None:
    server: Any = HTTPServer(("127.0.0.1", 0), Hook)
    server.got, server.status = [], 500
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    database = Database.open(f"sqlite:///{tmp_path / 'd.sqlite'}")
    try:
        hooks = [webhook(f"slack={address}/secret"), webhook(f"alertmanager={address}")]
        alerts = Alerts(database, OverTime(database), hooks)
        now_ns = time.time_ns()
        with database.write() as connection:
            settle(connection, ["slower"], [Finding("slower", "moe", "<!channel>\nmoe")], now_ns)
        alerts._send_changes(now_ns)
        assert "500" in alerts.problem
        server.status, server.got[:] = 200, []
        alerts._send_changes(now_ns)
        alerts._send_changes(now_ns)
        slack = [said for path, said in server.got if path == "/secret"]
        assert slack == [{"text": "alert (slower): &lt;!channel&gt;\ufffdmoe"}]
        manager = [said for path, said in server.got if path == "/api/v2/alerts"]
        assert len(manager) == 2, "Alertmanager forgets what it is not told again"
        assert manager[0][0]["labels"]["alertname"] == "bootseer_slower"
        server.got[:] = []
        alerts.evaluate(now_ns + 1)  # its rule finds nothing now
        alerts._send_changes(now_ns + 2)
        assert [said["text"] for path, said in server.got if path == "/secret"] == [
            "over (slower): &lt;!channel&gt;\ufffdmoe"
        ]
        with database.read() as connection:
            (row,) = connection.execute(select(alert)).all()
        assert row.ended_ns == now_ns + 1
    finally:
        database.close()
        server.shutdown()
        server.server_close()


def test_a_webhook_that_is_away_repeats_nothing_at_the_others(tmp_path: Path) -> None:
    """Slack must not get the same message every 15 s while Alertmanager is unavailable."""
    server: Any = HTTPServer(("127.0.0.1", 0), Hook)
    server.got, server.status = [], 200
    Thread(target=server.serve_forever, daemon=True).start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        away = f"alertmanager=http://127.0.0.1:{free.getsockname()[1]}"
    database = Database.open(f"sqlite:///{tmp_path / 'd.sqlite'}")
    hooks = [webhook(f"slack=http://127.0.0.1:{server.server_port}/"), webhook(away)]
    alerts = Alerts(database, OverTime(database), hooks)
    for number, found in enumerate([[Finding("slower", "a", "a")], [Finding("slower", "b", "b")], []]):
        with database.write() as connection:
            settle(connection, ["slower"], found, number + 1)
        for _ in range(3):
            alerts._send_changes(number + 1)
            assert alerts.problem
    assert [said["text"] for _, said in server.got] == [
        "alert (slower): a", "over (slower): a\nalert (slower): b", "over (slower): b"
    ]  # fmt: skip
    database.close()
    server.shutdown()
    server.server_close()


def test_alerts_are_left_for_the_service_that_has_webhooks(tmp_path: Path) -> None:
    """With two services on one database, the one without webhooks must not mark them as sent."""
    server: Any = HTTPServer(("127.0.0.1", 0), Hook)
    server.got, server.status = [], 200
    Thread(target=server.serve_forever, daemon=True).start()
    database = Database.open(f"sqlite:///{tmp_path / 'd.sqlite'}")
    now_ns, day_ns = time.time_ns(), 86_400 * 10**9
    for key, at_ns in (("old", now_ns - 8 * day_ns), ("new", now_ns)):
        with database.write() as connection:
            settle(connection, ["slower"], [Finding("slower", key, key)], at_ns)
    hook = webhook(f"slack=http://127.0.0.1:{server.server_port}/")
    for hooks in ([], [hook]):
        Alerts(database, OverTime(database), hooks)._send_changes(now_ns)
    assert [said["text"] for _, said in server.got] == ["over (slower): old\nalert (slower): new"]
    database.close()
    server.shutdown()
    server.server_close()


def test_of_two_services_one_sends_an_alert(database_url: str, monkeypatch: Any) -> None:
    database = Database.open(database_url)
    if not database.is_postgres:
        pytest.skip("SQLite belongs to one service")
    monkeypatch.setattr(alerts, "urgent", lambda *_: [Finding("silent", "", "silent")])
    first, second = (Alerts(database, OverTime(database), [webhook("slack=http://x")]) for _ in range(2))
    sent: list[bytes] = []

    def send(to: alerts.Webhook, data: bytes) -> None:
        sent.append(data)
        if len(sent) == 1:  # while the first one sends it
            second.evaluate(time.time_ns())

    monkeypatch.setattr(alerts, "send", send)
    for service in (first, second):
        service.evaluate(time.time_ns())
    assert len(sent) == 1
    database.close()


def test_a_new_alert_is_sent_however_many_are_open(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("bootseer.service.alerts._MOST", 2)
    server: Any = HTTPServer(("127.0.0.1", 0), Hook)
    server.got, server.status = [], 200
    Thread(target=server.serve_forever, daemon=True).start()
    database = Database.open(f"sqlite:///{tmp_path / 'd.sqlite'}")
    alerts = Alerts(database, OverTime(database), [webhook(f"slack=http://127.0.0.1:{server.server_port}/")])
    found: list[Finding] = []
    for number in range(4):
        found.append(Finding("slower", f"job-{number}", f"job-{number}"))
        with database.write() as connection:
            settle(connection, ["slower"], found, number)
        alerts._send_changes(number + 1)
    assert [said["text"] for _, said in server.got] == [f"alert (slower): {one.key}" for one in found]
    database.close()
    server.shutdown()
    server.server_close()


def test_webhooks_are_checked_and_never_shown() -> None:
    refused = ["slack", "slack=ftp://x", "mail=http://x", "slack=http://", "alertmanager=http://x:99999/secret"]
    refused += ["slack=http://x..y/secret", "slack=http://x/secret\xe9", "slack=http://x/?secret secret"]
    for wrong in refused:
        with pytest.raises(UsageError) as error:
            webhook(wrong)
        assert "secret" not in str(error.value)


def test_the_thread_of_alerts_goes_on_after_any_error(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("bootseer.service.alerts._EVERY_S", 0.01)
    database = Database.open(f"sqlite:///{tmp_path / 'd.sqlite'}")
    came: list[Any] = []
    again = Event()

    def seen(open_starts: Any) -> None:
        came.append(open_starts)
        if len(came) == 1:
            raise ValueError("not an error of BootSeer")
        again.set()

    alerts = Alerts(database, OverTime(database), [], seen)
    alerts.thread.start()
    went_on = again.wait(60)
    alerts.thread.close()
    database.close()
    assert went_on


def test_a_service_serves_its_figures(tmp_path: Path) -> None:
    with running_service(tmp_path / "data") as service:
        assert samples(httpx.get(service.url + "/metrics", timeout=30).text)["bootseer_starts_open"] == 0
        data = b"".join(Fleet(2, job="moe").lines())
        service.post("/v1/lines", data, x_bootseer_sender="n", x_bootseer_sequence="0")
        service.rows(start, 1)
        with service.service.database.read() as connection:  # not a cached response
            text = text_of(connection, service.service.over_time, time.time_ns())
        assert "moe" not in text
        assert 0 <= samples(text)["bootseer_silent_seconds"] < 60

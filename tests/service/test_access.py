"""Access control: tokens, the proxy's headers, loopback; and the program `bootseer serve` itself."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.requests import HTTPConnection

from bootseer.errors import TransientError, UsageError
from bootseer.report.inputs import Source
from bootseer.report.log_scan import scan
from bootseer.service import app, schema
from bootseer.service.access import COOKIE, READ, Gate, Tokens, needed, networks
from bootseer.service.app import Settings, _bound, _check_access
from bootseer.service.database import Database
from conftest_launch import BOOTSEER
from fleet import Fleet
from running_service import RunningService, ask, running_service

pytestmark = pytest.mark.slow


def status(running: RunningService, path: str, token: str = "", method: str = "GET", **headers: str) -> int:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if token:
        sent["authorization"] = f"Bearer {token}"
    return ask(method, running.url + path, headers=sent).status_code


def test_each_scope_allows_its_own_and_a_revoked_token_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("bootseer.service.access._FRESH_S", 0.0)
    with running_service(tmp_path / "data") as running:
        assert status(running, "/v1/lines", method="POST") == 400  # on loopback without any token
        made = {scope: running.service.tokens.add(scope) for scope in ("ingest", "read", "admin")}
        assert status(running, "/v1/lines", method="POST") == 401
        assert status(running, "/healthz") == 200
        for scope, lines, pages in (("ingest", 400, 403), ("read", 403, 404), ("admin", 400, 404)):
            token = made[scope][1]
            assert status(running, "/v1/lines", token, "POST") == lines
            assert status(running, "/nothing", token) == pages
        assert status(running, "/nothing", "bst_wrong") == 401
        wrong = ask("GET", f"{running.url}/api/v1/jobs", headers={"authorization": "Bearer bst_wrong"})
        assert "unknown or revoked" in wrong.text
        running.service.tokens.revoke(made["read"][0])
        assert status(running, "/nothing", made["read"][1]) == 401
        assert made["read"][1].encode() not in (running.settings.data / "derived.sqlite").read_bytes()
    assert needed("DELETE", "/") == "admin"


def test_a_tokens_team_is_that_of_the_runs_it_sends(tmp_path):
    with running_service(tmp_path / "data") as running:
        _, token = running.service.tokens.add("ingest", team="llm")
        data = b"".join(Fleet(2).lines())
        answer = running.post("/v1/lines", data, authorization=f"Bearer {token}", x_bootseer_sender="n")
        assert answer.status_code == 202
        (start,) = running.rows(schema.start, 1)
        assert start.team == "llm"


def test_a_teams_token_reads_nothing_of_other_teams(tmp_path, monkeypatch):
    monkeypatch.setattr("bootseer.service.access._FRESH_S", 0.0)
    with running_service(tmp_path / "data") as running:
        sent = [running.service.tokens.add("ingest", team=team)[1] for team in ("llm", "zebra")]
        for number, token in enumerate(sent):
            data = b"".join(Fleet(2, job=f"job-{number}").lines())
            running.post("/v1/lines", data, authorization=f"Bearer {token}", x_bootseer_sender=f"n{number}")
        assert len(running.rows(schema.start, 2)) == 2
        reader = running.service.tokens.add("read", team="llm")[1]
        assert status(running, "/metrics", reader) == 403
        sees_all = running.service.tokens.add("read")[1]
        for token, shown in ((reader, False), (sees_all, True)):
            for path in ("/?since=365d", "/api/v1/fleet?since=365d", "/api/v1/over-time/fleet?since=365d"):
                text = ask("GET", running.url + path, headers={"authorization": f"Bearer {token}"}).text
                assert ("zebra" in text) == shown, path
        assert status(running, "/metrics", sees_all) == 200


def test_no_way_to_write_a_line_names_another_team_than_the_tokens(tmp_path):
    begin = {"wall_ns": 1_790_000_000_000_000_000, "mono_ns": 1, "job": "moe", "node": "n", "stage": "run",
             "phase": "begin", "span": "0a", "attrs": {"team": "other"}}  # fmt: skip
    mark = {**begin, "stage": "x", "phase": "instant", "attrs": {}}

    def line(fields, tag="@bootseer1"):
        return f"{tag} {json.dumps(fields)}"

    forged = [
        line(begin),
        line(begin).replace('"run"', '"\\u0072un"').replace('"begin"', '"\\u0062egin"'),
        line(begin).replace('"attrs"', '"\\u0061ttrs"').replace('"team"', '"\\u0074eam"'),
        line(begin).replace('"stage": "run"', '"stage": "x", "stage": "run"'),
        f"{line(mark)} {line(begin)}",
        f"{line(begin, '@bootseer0')} {line(mark)}",
        line(begin, "@boot\33[0mseer1") + line(mark),
        line({**begin, "phase": "end"}),
        line({**begin, "stage": "x", "phase": "end"}),
        line({**begin, "attrs": {}}),
        f"2026-11-26T00:00:00Z stdout P {line(mark)} {line(begin)[:80]}",
        f"2026-11-26T00:00:00Z stdout F {line(begin)[80:]} {line(mark)}",
    ]
    with running_service(tmp_path / "data") as running:
        _, token = running.service.tokens.add("ingest", team="llm")
        data = "\n".join(forged).encode()
        answer = running.post("/v1/lines", data, authorization=f"Bearer {token}", x_bootseer_sender="n")
        assert (answer.status_code, answer.json()["accepted"]) == (202, len(forged))
        found = scan([Source(name, Path(name), data=[lines]) for name, lines in running.raw().items()])
    teams = [event.attrs.get("team", "llm") for event in found.events]
    assert set(teams) == {"llm"}
    assert all("team" in event.attrs for event in found.events if (event.stage, event.phase) == ("run", "begin"))
    assert sum(event.stage == "run" for event in found.events) == 7


def test_no_name_has_a_nul_character(tmp_path):
    """PostgreSQL refuses it in text columns, which would be an error of the server."""
    with running_service(tmp_path / "data") as running:
        for path in ("/api/v1/starts?job=%00", "/?team=%00", "/jobs?q=%00", "/start/0/0/a%00b"):
            assert (path, status(running, path)) == (path, 400)


def test_a_browser_logs_in_and_other_sites_cannot_use_its_cookie(tmp_path):
    with running_service(tmp_path / "data") as running:
        _, token = running.service.tokens.add("admin")
        with httpx.Client(base_url=running.url) as browser:
            asked = browser.get("/page?x=1", headers={"accept": "text/html"})
            assert asked.headers["location"] == "/login?next=/page%3Fx%3D1"
            sender = running.service.tokens.add("ingest")[1]
            for useless in ("wrong", sender):  # a cookie with one that only sends would lead to a page of JSON
                assert browser.post("/login", data={"token": useless}).status_code == 403
            assert browser.post("/login?next=//evil.example", data={"token": token}).headers["location"] == "/"
            assert browser.cookies[COOKIE] == token
            for scheme in ("https", "http"):  # https: by a proxy in front of the service
                origin = {"origin": running.url.replace("http", scheme)}
                cookie = browser.post("/login", data={"token": token}, headers=origin).headers["set-cookie"]
                assert ("secure" in cookie.lower()) == (scheme == "https")
            assert browser.get("/page").status_code == 404
            page = browser.get("/<page>", headers={"accept": "text/html"})
            assert (page.status_code, "There is no page /&lt;page&gt;" in page.text) == (404, True)
            own, other = {"origin": running.url}, {"origin": "http://evil.example"}
            assert browser.post("/v1/lines", headers=other).status_code == 403
            assert browser.post("/v1/lines", headers=own).status_code == 400
            assert browser.post("/v1/lines", headers={"origin": "http://["}).status_code == 403
            assert browser.post("/login", data={"token": token}, headers=other).status_code == 403
            answer = browser.get("/page")
            assert "default-src 'self'" in answer.headers["content-security-policy"]


def test_without_tokens_only_this_machine_is_served(tmp_path):
    with running_service(tmp_path / "data") as running:
        port = running.settings.listen[1]
        assert status(running, "/nothing") == 404
        assert status(running, "/nothing", host=f"evil.example:{port}") == 403  # a name that resolves to 127.0.0.1
        assert status(running, "/nothing", x_forwarded_for="10.0.0.1") == 403  # a proxy on this machine
        assert status(running, "/v1/lines", method="POST", origin="http://evil.example") == 403
        _check_access(running.settings, running.service)
        with pytest.raises(UsageError, match="without tokens"):
            _check_access(replace(running.settings, listen=("0.0.0.0", 1)), running.service)  # noqa: S104


@pytest.mark.parametrize(("address", "code"), [("127.0.0.0/8", 404), ("10.0.0.1", 403)])
def test_a_proxy_vouches_for_users_from_its_own_address_alone(tmp_path, address, code):
    with running_service(tmp_path / "data", proxies=networks([address])) as running:
        assert status(running, "/nothing", x_forwarded_user="ada") == code
        assert status(running, "/nothing") == 401
        assert status(running, "/v1/lines", method="POST", x_forwarded_user="ada") == 403


def test_a_proxy_over_ipv4_is_known_on_a_socket_for_both_protocols(tmp_path):
    with running_service(tmp_path / "data", proxies=networks(["10.0.0.7"])) as running:
        gate = Gate(running.service.app(), running.service.tokens, loopback_only=False,
                    proxies=running.settings.proxies, proxy_header="x-forwarded-user")  # fmt: skip
        for address, known in (("::ffff:10.0.0.7", True), ("::ffff:10.0.0.8", False), ("10.0.0.7", True)):
            scope = {"type": "http", "client": (address, 1), "headers": []}
            assert gate._from_proxy(HTTPConnection(scope)) == known


def test_the_state_of_health_names_the_store_only_to_readers(tmp_path):
    with running_service(tmp_path / "data") as running:
        running.service.ingest.problem = "s3://secret-bucket: full"
        assert "secret-bucket" in ask("GET", f"{running.url}/healthz").text  # on loopback without any token
        tokens = {scope: running.service.tokens.add(scope)[1] for scope in ("ingest", "read")}
        running.service.tokens._read_at = float("-inf")
        for scope, token in {"none": "", **tokens}.items():
            headers = {"authorization": f"Bearer {token}"} if token else {}
            answer = ask("GET", f"{running.url}/healthz", headers=headers)
            assert (answer.status_code, "secret-bucket" in answer.text) == (503, scope == "read")


def test_tokens_are_known_while_the_database_is_away(tmp_path, monkeypatch):
    with running_service(tmp_path / "data") as running:
        tokens = Tokens(running.service.database)
        _, secret = tokens.add(READ)
        assert tokens.grant(secret) is not None

        def away() -> None:
            raise TransientError("away")

        monkeypatch.setattr("bootseer.service.access._FRESH_S", 0.0)
        monkeypatch.setattr(running.service.database, "read", away)
        assert tokens.grant(secret) is not None


def test_a_revoked_token_is_refused_while_the_database_can_only_be_read(tmp_path, monkeypatch):
    """When its disk is full, for example: the use of tokens cannot be stored then."""
    with running_service(tmp_path / "data") as running:
        tokens = Tokens(running.service.database)
        number, secret = tokens.add(READ)
        assert tokens.grant(secret) is not None
        tokens.revoke(number)

        def full() -> None:
            raise TransientError("full")

        monkeypatch.setattr("bootseer.service.access._FRESH_S", 0.0)
        monkeypatch.setattr(running.service.database, "write", full)
        assert tokens.grant(secret) is None


def test_tokens_that_could_not_be_read_yet_count_as_there(tmp_path, monkeypatch):
    """Otherwise requests before the first successful read, while the database is unavailable, would need no token."""
    with running_service(tmp_path / "data") as running:
        running.service.tokens.add(READ)

        def away() -> None:
            raise TransientError("away")

        monkeypatch.setattr(running.service.database, "read", away)
        assert Tokens(running.service.database).any()


def test_a_database_that_does_not_answer_holds_up_one_request_only(tmp_path, monkeypatch):
    monkeypatch.setattr("bootseer.service.access._FRESH_S", 0.0)
    with running_service(tmp_path / "data") as running, socket.create_server(("127.0.0.1", 0)) as hung:
        tokens = Tokens(running.service.database)
        _, secret = tokens.add("read")
        assert tokens.grant(secret) is not None
        database = Database(f"postgresql://me@127.0.0.1:{hung.getsockname()[1]}/none")
        tokens._database = database
        first = threading.Thread(target=tokens.grant, args=(secret,), daemon=True)
        first.start()
        connection, _ = hung.accept()
        assert tokens.grant(secret) is not None
        assert tokens.grant("unknown") is None
        assert tokens.any()
        assert first.is_alive()
        hung.close()  # so that it does not try again
        connection.close()
        first.join()
        database.close()


def test_a_token_that_is_given_is_taken_once(run, tmp_path):
    """The init container of a Kubernetes deployment passes it at each start."""
    add = ("serve", "token", "add", "--scope", "admin", "--data", "data", "--from")
    for text, code in (("x" * 31, 2), ("x" * 16 + "\n" + "x" * 16, 2), ("a" * 64 + "\n", 0), ("a" * 64, 0)):
        (tmp_path / "token").write_text(text)
        done = run(*add, "token")
        assert (done.returncode, "a" * 64 in done.stdout + done.stderr) == (code, False)
    assert run("serve", "token", "list", "--data", "data").stdout.count("admin") == 1


@pytest.mark.parametrize("option", ["--data", "--database", "--raw"])
def test_a_place_that_the_verb_would_not_use_is_refused(run, option):
    done = run("serve", option, "elsewhere", "token", "add", "--scope", "read")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{option} must come after the verb" in done.stderr


def test_tokens_have_no_option_for_the_raw_lines(run):
    """It would have no effect: tokens are in the database."""
    assert "No such option '--raw'" in run("serve", "token", "list", "--raw", "elsewhere").stderr


def test_the_program_serves_and_ends_with_a_signal(run, env, tmp_path):
    added = run("serve", "token", "add", "--scope", "ingest", "--data", "data", "--note", "rack 7")
    assert added.returncode == 0
    assert "rack 7" in run("serve", "token", "list", "--data", "data").stdout
    command = [*BOOTSEER, "serve", "--data", "data", "--listen", "127.0.0.1:0"]
    server = subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = re.search(r"http://\S+/", server.stderr.readline())
        assert url is not None
        headers = {"authorization": f"Bearer {added.stdout.strip()}", "x-bootseer-sender": "n"}
        assert httpx.post(f"{url[0]}v1/lines", content=b"", headers=headers).status_code == 202
        second = run("serve", "--data", "data", "--listen", "127.0.0.1:0")
        assert (second.returncode, "another service uses" in second.stderr) == (2, True)
        for _ in range(2):  # a user presses Ctrl-C twice
            server.send_signal(signal.SIGINT)
        assert server.wait(300) == 0
        assert server.stderr.read() == ""
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


def test_clients_that_send_no_request_do_not_keep_their_connections(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "_IDLE_S", 0.1)
    with running_service(tmp_path) as service, contextlib.ExitStack() as held:
        address = service.settings.listen
        silent, slow, reader = (held.enter_context(socket.create_connection(address, timeout=10)) for _ in range(3))
        slow.sendall(b"GET /healthz HTTP/1.1\r\n")
        reader.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert silent.recv(1) == slow.recv(1) == b""
        assert reader.recv(1 << 16).startswith(b"HTTP/1.1 200")
        reader.settimeout(0.3)
        with pytest.raises(TimeoutError):  # its response continues
            while reader.recv(1 << 16):
                pass


def test_there_may_be_more_senders_than_the_usual_limit_of_descriptors(env, tmp_path):
    """Otherwise the rest waits until a connected sender has been idle for 75 s."""
    limited = ["sh", "-c", 'ulimit -Sn 128 && exec "$0" "$@"', *BOOTSEER]
    command = [*limited, "serve", "--data", "data", "--listen", "127.0.0.1:0"]
    server = subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        port = int(re.search(r":(\d+)/", server.stderr.readline())[1])
        with contextlib.ExitStack() as held:
            for _ in range(200):
                sender = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                held.callback(sender.close)
                sender.request("GET", "/healthz")
                assert sender.getresponse().read()
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--listen", "here"], "not an address"),
        (["--listen", "0.0.0.0:0"], "without tokens, listening on"),
        (["--tls-cert", "none.pem"], "none.pem"),
        (["--database", "mysql://x"], "is not a database URL"),
        (["--proxy-from", "x"], "--proxy-from"),
    ],
)
def test_what_cannot_be_served_is_reported_in_one_line(run, words, said, tmp_path):
    done = run("serve", "--data", "data", "--listen", "127.0.0.1:0", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_may_have_an_address_of_ipv6_only(monkeypatch, tmp_path):
    found = socket.getaddrinfo("::1", 0, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    settings = Settings(tmp_path, listen=("node.example", 0))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(contextlib.closing(socket.create_server(("::1", 0), family=socket.AF_INET6)))
        except OSError:
            pytest.skip("no IPv6")
        assert _bound(settings, stack).family == socket.AF_INET6


def test_an_address_that_is_in_use_is_reported_once(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other, contextlib.ExitStack() as stack:
        address = other.getsockname()
        with pytest.raises(UsageError, match=rf"cannot listen on 127.0.0.1 port {address[1]}: [A-Za-z ]+\Z"):
            _bound(Settings(tmp_path, listen=address), stack)

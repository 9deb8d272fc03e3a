"""Export to real HTTP servers: one that accepts everything, and several that do not."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bootseer.errors import UsageError
from bootseer.trace import otlp
from bootseer.trace.event import Event, decode, encode
from bootseer.trace.otlp import OtlpExporter, endpoint_url
from bootseer.trace.spool_tail import SpoolTail
from bootseer.trace.tracer import from_environment
from otlp_collector import attributes, collector, trace_service

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
ROOT, CHILD = "00f067aa0ba902b7", "b7ad6b7169203331"
BEGIN = Event(10**18, 500, "moe", "n0", "env", "begin", ROOT, attempt=2, rank=3, pid=77, trace=TRACE)
END = BEGIN._replace(phase="end", wall_ns=10**18 + 999, mono_ns=1500, outcome="ok")
LONG_S = 60.0
"""A deadline that tests do not reach: it only ends a hanging test."""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "HEADERS", "TIMEOUT", "TRACES_ENDPOINT", "TRACES_HEADERS", "TRACES_TIMEOUT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_ids_parents_times_and_attributes() -> None:
    child = BEGIN._replace(stage="env.install", span=CHILD, parent=ROOT, wall_ns=10**18 + 100, mono_ns=600)
    attrs = {"bytes": 2**40, "hits": 0.5, "b": True, "no": None, "error": "OSError"}
    failed = child._replace(phase="end", mono_ns=900, outcome="failed", attrs=attrs)
    mark = BEGIN._replace(stage="mark", phase="instant", span="0000000000000001", node="n1", rank=-1)
    with collector() as server:
        exporter = OtlpExporter(server.url)
        exporter.feed([BEGIN, child, failed, END, mark])
        assert exporter.close(LONG_S)
        assert (exporter.exported, exporter.lost) == (3, 0)
    assert {path for path, _, _ in server.requests} == {"/v1/traces"}
    assert {headers["content-type"] for _, headers, _ in server.requests} == {"application/x-protobuf"}
    assert [resource for resource, _ in server.resources()] == [
        {
            "service.name": "bootseer",
            "host.name": node,
            "bootseer.job": "moe",
            "bootseer.attempt": 2,
            "bootseer.restart": 0,
            "bootseer.kind": "full",
        }
        for node in ("n0", "n1")
    ]
    spans = server.spans()
    env, install, instant = spans["env"], spans["env.install"], spans["mark"]
    assert {span.trace_id.hex() for span in (env, install, instant)} == {TRACE}
    assert (env.span_id.hex(), env.parent_span_id) == (ROOT, b"")
    assert (install.span_id.hex(), install.parent_span_id.hex()) == (CHILD, ROOT)
    assert (env.start_time_unix_nano, env.end_time_unix_nano) == (10**18, 10**18 + 1000)
    assert (install.start_time_unix_nano, install.end_time_unix_nano) == (10**18 + 100, 10**18 + 400)
    assert instant.start_time_unix_nano == instant.end_time_unix_nano == 10**18
    common = {"bootseer.rank": 3, "process.pid": 77}
    assert attributes(env) == {**common, "bootseer.mono_ns": 500}
    assert attributes(install) == {
        **common, "bootseer.mono_ns": 600, "bytes": 2**40, "hits": 0.5, "b": True, "error": "OSError",
    }  # fmt: skip
    assert attributes(instant) == {
        "bootseer.rank": -1,
        "process.pid": 77,
        "bootseer.mono_ns": 500,
        "bootseer.instant": True,
    }
    assert (env.status.code, install.status.code, instant.status.code) == (1, 2, 0)
    assert install.status.message == "OSError"


def test_open_spans_are_exported_as_truncated() -> None:
    with collector() as server:
        exporter = OtlpExporter(server.url)
        exporter.feed([BEGIN, BEGIN._replace(stage="mark", phase="instant", span=CHILD, mono_ns=700)])
        assert exporter.close(LONG_S)
    env = server.spans()["env"]
    assert attributes(env)["bootseer.truncated"] is True
    assert env.end_time_unix_nano - env.start_time_unix_nano == 200


def test_odd_events_do_not_cost_the_batch() -> None:
    odd = Event(
        -5, -7, "j\ud800", "n\udfff", "odd", "instant", "no hex", trace="none", parent="x", attempt=2**63 - 1,
        attrs={"huge": 10**5000, "text": "\ud800", "list": [1], "n\udc80": 1, "nan": float("nan")},
    )  # fmt: skip
    with collector() as server:
        exporter = OtlpExporter(server.url)
        exporter.feed([decode(encode(odd)), BEGIN, END])
        assert exporter.close(LONG_S)
        assert exporter.exported == 2
    span = server.spans()["odd"]
    assert (len(span.trace_id), len(span.span_id), len(span.parent_span_id)) == (16, 8, 8)
    assert span.start_time_unix_nano == 0
    assert server.spans()["env"]


def test_spans_are_exported_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_GATHER_S", 0.01)
    arrived = threading.Event()

    def answer(_: int) -> tuple[int, dict[str, str], bytes]:
        arrived.set()
        return 200, {}, b""

    with collector(answer) as server:
        exporter = OtlpExporter(server.url)
        exporter.feed([BEGIN, END])
        assert arrived.wait(LONG_S)
        assert exporter.close(LONG_S)


def test_many_spans_go_in_batches() -> None:
    with collector() as server:
        exporter = OtlpExporter(server.url)
        exporter.feed(BEGIN._replace(phase="instant", span=f"{number:016x}") for number in range(1, 2001))
        assert exporter.close(LONG_S)
        assert exporter.exported == 2000
    assert 4 <= len(server.requests) < 20
    assert len({span.span_id for _, spans in server.resources() for span in spans}) == 2000


def test_variables_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc,x-team=ml")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "7")
        exporter = OtlpExporter()
        exporter.feed([BEGIN, END])
        assert exporter.close(LONG_S)
    headers = server.requests[0][1]
    assert (headers["authorization"], headers["x-team"]) == ("Bearer abc", "ml")


@pytest.mark.slow
def test_503_is_tried_again_and_retry_after_is_obeyed() -> None:
    answers = [(503, {"Retry-After": "1"}, b""), (429, {"Retry-After": "1"}, b""), (200, {}, b"")]
    with collector(lambda number: answers[number]) as server:
        exporter = OtlpExporter(server.url)
        exporter.feed([BEGIN, END])
        assert exporter.close(LONG_S)
        assert (exporter.exported, exporter.lost) == (1, 0)
    first, second, third = server.times
    assert second - first >= 1.0  # the server's Retry-After
    assert third - second >= 1.0


@pytest.mark.parametrize("status", [302, 400, 401, 404, 413, 500])
def test_refusals_are_not_repeated(status: int) -> None:
    with collector(lambda _: (status, {"Location": "/elsewhere"}, b"")) as server:
        exporter = OtlpExporter(server.url)
        exporter.feed([BEGIN, END])
        assert not exporter.close(LONG_S)
        assert (exporter.exported, exporter.lost) == (0, 1)
        assert exporter.last_error == f"HTTP {status}"
    assert len(server.requests) == 1


def test_spans_that_the_endpoint_throws_away_are_failed() -> None:
    reply = trace_service.ExportTraceServiceResponse()
    reply.partial_success.rejected_spans = 1
    headers = {"Content-Type": "application/x-protobuf"}
    with collector(lambda _: (200, headers, reply.SerializeToString())) as server:
        exporter = OtlpExporter(server.url)
        exporter.feed([BEGIN, END, BEGIN._replace(phase="instant", span=CHILD)])
        assert not exporter.close(LONG_S)
        assert (exporter.exported, exporter.lost) == (1, 1)
    assert len(server.requests) == 1


@pytest.mark.parametrize("answer", [(503, {}, b""), (429, {"Retry-After": "3600"}, b"")])
def test_an_endpoint_that_is_never_ready_costs_the_deadline_only(answer: tuple[int, dict[str, str], bytes]) -> None:
    with collector(lambda _: answer) as server:
        exporter = OtlpExporter(server.url)
        exporter.feed([BEGIN, END])
        assert not exporter.close(0.5)
        assert (exporter.exported, exporter.lost, exporter.last_error) == (0, 1, f"HTTP {answer[0]}")
        assert len(server.requests) <= 3
        assert not exporter.close(0.5)
        assert exporter.lost == 1


@contextmanager
def silent_server() -> Iterator[str]:
    """Accepts connections and requests, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def no_server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


def test_the_reason_for_no_answer_is_reported_without_the_address() -> None:
    with no_server() as url:
        exporter = OtlpExporter(f"{url}/v1/traces?token=s3cret")
        exporter.feed([BEGIN, END])
        assert not exporter.close(0.5)
    assert "Connection refused" in exporter.last_error
    assert "s3cret" not in exporter.last_error


EXIT = """
import sys
from bootseer.trace.event import Event
from bootseer.trace.otlp import OtlpExporter
exporter = OtlpExporter(sys.argv[1])
begin = Event(1, 1, "j", "n", "s", "begin", "a")
exporter.feed([begin, begin._replace(phase="end", mono_ns=2)])
print(exporter.close(), exporter.exported, exporter.lost)
"""


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", [silent_server, no_server])
def test_a_dead_endpoint_does_not_hold_the_end_of_a_process(endpoint: Callable[[], Iterator[str]]) -> None:
    """Without output on stderr: it belongs to the job."""
    with endpoint() as url:
        ended = subprocess.run(
            [sys.executable, "-c", EXIT, url], capture_output=True, text=True, timeout=60, check=True
        )
    assert (ended.stdout, ended.stderr) == ("False 0 1\n", "")


def test_delivered_when_the_endpoint_comes_back() -> None:
    with collector(lambda number: (503, {"Retry-After": "0"}, b"") if number < 3 else (200, {}, b"")) as server:
        exporter = OtlpExporter(server.url)
        exporter.feed([BEGIN, END])
        assert exporter.close(LONG_S)
        assert (exporter.exported, exporter.lost, exporter.last_error) == (1, 0, "")
    assert len(server.requests) == 4


def test_the_budget_of_tries_is_bounded() -> None:
    with collector(lambda _: (503, {"Retry-After": "0"}, b"")) as server:
        exporter = OtlpExporter(server.url)
        exporter.feed(BEGIN._replace(phase="instant", span=f"{number:016x}") for number in range(1, 6))
        assert not exporter.close(LONG_S)
        assert (exporter.exported, exporter.lost, exporter.last_error) == (0, 5, "HTTP 503")
    assert len(server.requests) < 20


def test_memory_is_bounded_while_the_endpoint_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "MAX_QUEUE", 10)
    asked, go_on = threading.Event(), threading.Event()

    def answer(_: int) -> tuple[int, dict[str, str], bytes]:
        asked.set()
        go_on.wait(LONG_S)
        return 200, {}, b""

    with collector(answer) as server:
        exporter = OtlpExporter(server.url)
        instants = (BEGIN._replace(phase="instant", span=f"{number:016x}") for number in range(1, 1001))
        exporter.feed([next(instants) for _ in range(10)])
        assert asked.wait(LONG_S)
        exporter.feed(instants)
        go_on.set()
        assert not exporter.close(LONG_S)
        assert (exporter.exported, exporter.lost) == (20, 980)


def test_from_a_real_tracer_through_the_spool(tmp_path: Path) -> None:
    tracer = from_environment({"BOOTSEER_TRACE": f"spool:{tmp_path}", "BOOTSEER_JOB": "moe", "BOOTSEER_NODE": "n0"})
    assert tracer is not None
    tail = SpoolTail(str(tmp_path))
    with collector() as server:
        exporter = OtlpExporter(server.url)
        with tracer.span("outer") as outer:
            exporter.feed(tail.poll())
            with tracer.span("inner", {"bytes": 5}):
                pass
        exporter.feed(tail.poll(last=True))
        assert exporter.close(LONG_S)
    spans = server.spans()
    assert spans["outer"].trace_id.hex() == tracer.trace
    assert spans["inner"].parent_span_id.hex() == spans["outer"].span_id.hex() == outer.id
    assert spans["outer"].start_time_unix_nano <= spans["inner"].start_time_unix_nano
    assert attributes(spans["inner"])["bytes"] == 5


@pytest.mark.parametrize(
    ("endpoint", "env", "url"),
    [
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("https://c/otlp/", {}, "https://c/otlp/v1/traces"),
        (" http://c/v1/traces ", {}, "http://c/v1/traces"),
        (None, {}, "http://localhost:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1"}, "http://c:1/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x"}, "http://t/x"),
        ("http://c", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x"}, "http://c/v1/traces"),
    ],
)  # fmt: skip
def test_endpoint_url(endpoint: str | None, env: dict[str, str], url: str) -> None:
    assert endpoint_url(endpoint, env) == url


@pytest.mark.parametrize(
    "endpoint", ["c:4318", "ftp://c", "http://", "http://c:port", "//u:secret@c", "http://[", "x y"]
)
def test_what_is_no_endpoint_is_refused_without_its_secrets(endpoint: str) -> None:
    with pytest.raises(UsageError, match="not an OTLP/HTTP endpoint") as caught:
        OtlpExporter(endpoint)
    assert "secret" not in str(caught.value)
    assert caught.value.hint


def test_without_the_library_the_user_learns_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").write_text("raise ModuleNotFoundError('none', name='opentelemetry')\n")
    script = (
        "from threading import Event\n"
        "from bootseer.launch.observers import export_spool\n"
        "export_spool(None, 'http://c', Event())\n"
    )
    env = {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300, check=True
    )
    assert ended.stderr == (
        "bootseer: no export: export to OTLP needs opentelemetry, which is not installed"
        " (pip install 'bootseer[otlp]')\n"
    )

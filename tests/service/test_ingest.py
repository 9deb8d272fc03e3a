"""Requests of senders to a real service over HTTP: durable when acknowledged, stored once, and bounded."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import zstandard
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from sqlalchemy import select

from bootseer.service import ingest, schema
from bootseer.service.database import Database
from bootseer.service.ingest import Batch, Ingest
from bootseer.service.raw import RawStore
from bootseer.store.open import open_store
from bootseer.trace.event import decode
from fleet import Fleet
from registry import free_port
from running_service import RunningService, running_service


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with running_service(tmp_path / "data") as running:
        yield running


def lines(job: str = "moe", attempt: int = 0, num_nodes: int = 2) -> bytes:
    return b"".join(Fleet(num_nodes, job=job, attempt=attempt).lines())


def zstd_of_unknown_size(data: bytes) -> bytes:
    """Like the output of `zstd` to a pipe."""
    packer = zstandard.ZstdCompressor(level=1).compressobj()
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize("encoding", ["identity", "gzip", "zstd"])
def test_acknowledged_lines_are_there_and_become_a_start(service, encoding):
    data = lines()
    packed = {"identity": bytes, "gzip": gzip.compress, "zstd": zstd_of_unknown_size}[encoding](data)
    answer = service.post(
        "/v1/lines", packed, content_encoding=encoding, x_bootseer_sender="n0", x_bootseer_sequence="0"
    )
    assert (answer.status_code, answer.json()["accepted"]) == (202, len(data.splitlines()))
    assert service.raw_lines() == sorted(data.splitlines())
    (start,) = service.rows(schema.start, 1)
    assert (start.job, start.nodes_heard) == ("moe", 2)


def test_a_batch_that_comes_again_is_there_once_and_one_of_several_jobs_is_divided(service):
    data = lines("moe") + lines("../../etc/passwd", attempt=3) + b"no event\n"
    answers = [service.post("/v1/lines", data, x_bootseer_sender="n0", x_bootseer_sequence="4") for _ in range(2)]
    assert [answer.json()["duplicate"] for answer in answers] == [False, True]
    assert answers[0].json()["rejected"] == 1
    assert len(service.raw()) == 2
    assert {(row.job, row.attempt) for row in service.batches(2)} == {("moe", 0), ("../../etc/passwd", 3)}
    inside = service.settings.data / "raw"
    assert all(path.resolve().is_relative_to(inside) for path in inside.rglob("*"))


@pytest.mark.parametrize(
    ("headers", "data", "status"),
    [
        ({}, b"x", 400),
        ({"x_bootseer_sender": "n", "x_bootseer_sequence": "-1"}, b"x", 400),
        ({"x_bootseer_sender": "n", "content_encoding": "br"}, b"x", 415),
        ({"x_bootseer_sender": "n", "content_encoding": "gzip"}, b"x", 400),
        ({"x_bootseer_sender": "n", "content_encoding": "gzip"}, gzip.compress(lines())[:-20], 400),
        ({"x_bootseer_sender": "n", "content_encoding": "zstd"}, zstandard.compress(lines())[:-20], 400),
        ({"x_bootseer_sender": "n", "content_encoding": "zstd"}, zstandard.compress(lines()) * 2, 400),
        ({"x_bootseer_sender": "n", "content_encoding": "zstd"}, zstd_of_unknown_size(lines())[:-20], 400),
        ({"x_bootseer_sender": "n", "content_encoding": "gzip"}, gzip.compress(bytes(40 << 20)), 413),
        ({"x_bootseer_sender": "n", "content_encoding": "zstd"}, zstandard.compress(bytes(40 << 20)), 413),
        ({"x_bootseer_sender": "n"}, bytes(ingest.MAX_BODY_BYTES + 1), 413),
        ({"x_bootseer_sender": "n", "x_bootseer_kind": "log"}, b"x", 400),
    ],
)
def test_bad_batches_are_reported_and_leave_nothing(service, headers, data, status):
    answer = service.post("/v1/lines", data, **headers)
    assert answer.status_code == status
    assert "error" in answer.json()
    assert service.raw() == {}


def test_a_log_is_of_the_same_job_as_the_lines_whose_name_is_shortened(service):
    name = "moe" * 100
    assert service.post("/v1/lines", lines(name), x_bootseer_sender="n").status_code == 202
    log = {"x_bootseer_kind": "log", "x_bootseer_job": name}
    assert service.post("/v1/lines", b"epoch 1\n", x_bootseer_sender="n", **log).status_code == 202
    assert len({row.job for row in service.batches(2)}) == 1


def test_lines_that_no_table_could_hold_are_rejected(service):
    def line(**more: object) -> bytes:
        fields = {"wall_ns": 1, "mono_ns": 2, "job": "j", "node": "n", "stage": "run", "phase": "begin", "span": "0a"}
        return b"@bootseer1 " + json.dumps({**fields, **more}).encode()

    bad = [
        line(attempt=2**40),
        line(attempt=-1),
        line(restart=2**31),
        line(job="a\0b"),
        line(node="\0"),
        line(job=""),
        b"@bootseer1 {",
    ]
    good = [line(), b"pod/x " + line(attempt=7) + b" stderr", line(job="\ud800")]
    answer = service.post("/v1/lines", b"\n".join(bad + good), x_bootseer_sender="n")
    assert (answer.json()["accepted"], answer.json()["rejected"]) == (3, 7)


def test_a_batch_without_events_waits_for_no_row(service):
    assert service.post("/v1/lines", b"a line that is no event\n", x_bootseer_sender="n").status_code == 202
    assert service.service.ingest.lag_s == 0


def test_more_than_fits_into_memory_is_asked_for_later(service, monkeypatch):
    monkeypatch.setattr(ingest, "MAX_HELD_BYTES", 100)
    answer = service.post("/v1/lines", lines(), x_bootseer_sender="n")
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 0
    monkeypatch.undo()
    assert service.post("/v1/lines", lines(), x_bootseer_sender="n").status_code == 202


@pytest.mark.parametrize("form", ["content-length: 8388608\r\n\r\n", "transfer-encoding: chunked\r\n\r\n800000\r\n"])
def test_a_sender_of_too_much_gets_its_answer_after_the_last_byte(service, form):
    """Otherwise it would take the closed connection for a network error, and send the same data again and again."""
    head = f"POST /v1/lines HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-bootseer-sender: n\r\n{form}"
    with socket.create_connection(service.settings.listen, timeout=60) as connection:
        connection.sendall(head.encode())
        for _ in range(8):
            connection.sendall(bytes(1 << 20))
            time.sleep(0.02)
        connection.sendall(b"\r\n0\r\n\r\n" * form.endswith("800000\r\n"))
        assert b" 413 " in connection.makefile("rb").readline()


def test_a_log_that_grows_beyond_an_object_by_the_tokens_team_is_not_asked_for_again(service, monkeypatch):
    _, token = service.service.tokens.add("ingest", team="llm")
    headers = {"authorization": f"Bearer {token}", "x_bootseer_kind": "log", "x_bootseer_job": "moe"}
    monkeypatch.setattr(ingest, "MAX_OBJECT_BYTES", len(lines()))
    answer = service.post("/v1/lines", lines(), x_bootseer_sender="n", **headers)
    assert (answer.status_code, "send less" in answer.json()["error"]) == (413, True)
    assert service.raw() == {}


def test_lines_that_cannot_be_kept_are_not_acknowledged(service):
    """Like on a full or broken disk: there is a file in place of the folder of raw lines."""
    (service.settings.data / "raw").write_text("")
    answer = service.post("/v1/lines", lines(), x_bootseer_sender="n")
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert httpx.get(f"{service.url}/healthz").status_code == 503
    # The probe in deploy/: a pod that is not ready would get no requests, with which it could recover.
    assert httpx.get(f"{service.url}/static/service.css").status_code == 200
    (service.settings.data / "raw").unlink()
    assert service.post("/v1/lines", lines(), x_bootseer_sender="n").status_code == 202
    assert httpx.get(f"{service.url}/healthz").status_code == 200


def test_the_writer_of_rows_ends_while_the_database_is_unreachable(monkeypatch, tmp_path):
    monkeypatch.setattr(ingest, "_MAX_ROWS", 1)
    database = Database(f"postgresql://bootseer@127.0.0.1:{free_port()}/none")
    taking = Ingest(RawStore(open_store(str(tmp_path))), database)
    taking.start()
    until = time.monotonic() + 3 * ingest._GATHER_S
    while time.monotonic() < until:
        taking.keep(Batch("n", 0, "", {("moe", 0): [b"x"]}))
    assert len(taking._rows) == 1
    taking.close()
    assert not taking._thread.thread.is_alive()
    database.close()


def test_rows_that_wait_when_the_service_ends_are_written(tmp_path):
    database = Database.open(f"sqlite:///{tmp_path / 'd.sqlite'}")
    raw = RawStore(open_store(str(tmp_path / "raw")))
    taking = Ingest(raw, database)
    taking.start()
    taking.keep(Batch("n", 0, "", {("moe", 0): [b"x"]}))
    taking.close()
    with database.read() as connection:
        rows = [(row.raw_key, row.job, row.attempt, row.done) for row in connection.execute(select(schema.batch))]
    assert rows == [(name, "moe", 0, False) for name in raw.names()]
    database.close()


def test_senders_at_once_lose_nothing(service):
    sent = [lines("moe", attempt=number % 3, num_nodes=1 + number) for number in range(12)]

    def send(number: int) -> None:
        answers.append(service.post("/v1/lines", sent[number], x_bootseer_sender=f"n{number}").status_code)

    answers: list[int] = []
    threads = [threading.Thread(target=send, args=(number,)) for number in range(len(sent))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [202] * len(sent)
    assert service.raw_lines() == sorted(line for data in sent for line in data.splitlines())


def span(name: str, *, end_ns: int, job: str = "moe", **more: object) -> dict[str, object]:
    """In the form of OTLP's JSON."""
    resource = [{"key": "host.name", "value": {"stringValue": "n0"}}]
    resource += [{"key": "bootseer.job", "value": {"stringValue": job}}] if job else []
    one = {"traceId": "ab" * 16, "spanId": "cd" * 8, "name": name, "startTimeUnixNano": "1790000000000000000",
           "endTimeUnixNano": str(end_ns), "someNewField": 1, **more}  # fmt: skip
    return {"resource": {"attributes": resource}, "scopeSpans": [{"spans": [one]}]}


def test_spans_become_lines_and_unfinished_ones_a_begin(service):
    spans = [
        span("Import Torch", end_ns=1790000003000000000, status={"code": 2}),
        span("first_step", end_ns=0),
        span("x", end_ns=1790000003000000000, job=""),
        span("x", end_ns=0, job="a\0b"),
    ]
    answer = service.post("/v1/traces", json.dumps({"resourceSpans": spans}).encode(), content_type="application/json")
    assert answer.status_code == 200
    assert answer.json()["partialSuccess"]["rejectedSpans"] == "2"
    events = [decode(line) for line in service.raw_lines()]
    assert sorted((event.stage, event.phase, event.outcome) for event in events) == [
        ("first_step", "begin", ""),
        ("import_torch", "begin", ""),
        ("import_torch", "end", "failed"),
    ]
    assert {(event.job, event.node, event.trace, event.span) for event in events} == {
        ("moe", "n0", "ab" * 16, "cd" * 8)
    }


def test_lines_of_many_spans_are_divided_into_objects_that_can_be_read(service, monkeypatch):
    """They are several times as long as the spans: one object with those of 60,000 spans would be too large to read."""
    one = span("first_step", end_ns=1790000003000000000)
    spans = [{**one["scopeSpans"][0]["spans"][0], "spanId": f"{number:016x}"} for number in range(1, 21)]
    data = json.dumps({"resourceSpans": [{**one, "scopeSpans": [{"spans": spans}]}]}).encode()
    monkeypatch.setattr(ingest, "MAX_PLAIN_BYTES", len(data))
    assert service.post("/v1/traces", data, content_type="application/json").status_code == 200
    sizes = [len(lines) for lines in service.raw().values()]
    assert len(sizes) > 1
    assert max(sizes) <= len(data)
    assert len({decode(line).span for line in service.raw_lines()}) == 20
    assert len(service.batches(len(sizes))) == len(sizes)
    monkeypatch.setattr("bootseer.service.otlp_in._MAX_LINES_BYTES", len(data))
    assert service.post("/v1/traces", data, content_type="application/json").status_code == 413


def test_our_own_export_comes_back_as_the_lines_it_was_made_of(service, tmp_path):
    """Through OpenTelemetry's library, in protobuf with gzip."""
    from bootseer.trace.otlp import OtlpExporter

    events = [event for event in Fleet(1).events() if event.stage != "queue"]
    exporter = OtlpExporter(service.url)
    exporter.feed(events)
    assert exporter.close(10)
    came = {
        (e.stage, e.phase, e.span, e.node, e.wall_ns, e.mono_ns) for e in (decode(line) for line in service.raw_lines())
    }
    assert came == {(e.stage, e.phase, e.span, e.node, e.wall_ns, e.mono_ns) for e in events}


def test_lines_inside_of_log_records_are_found(service):
    request = ExportLogsServiceRequest()
    records = request.resource_logs.add().scope_logs.add().log_records
    data = lines().decode().splitlines()
    records.add().body.string_value = "nothing of ours"
    records.add().body.string_value = f"2026-11-23 stderr F {data[0]}"
    record = json.dumps({"log": data[1] + "\n", "stream": "stderr", "time": "2026-11-23T10:00:00Z"})
    records.add().body.string_value = record.replace('": "', '":"')  # as Docker writes it
    records.add().body.kvlist_value.values.add(key="log").value.string_value = "\n".join(data[2:])
    answer = service.post("/v1/logs", request.SerializeToString(), content_type="application/x-protobuf")
    assert answer.status_code == 200
    assert len(service.raw_lines()) == len(data)


@pytest.mark.parametrize(
    ("media", "data", "status"),
    [("application/x-protobuf", b"\xff\xff", 400), ("application/json", b"[]", 400), ("application/json", b"{", 400),
     ("application/json", b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"xyz"}]}]}]}', 400),
     ("application/json", rb'{"\ud800":1}', 400), ("text/plain", b"", 415), ("application/json", b"{}", 200)],
)  # fmt: skip
def test_what_is_no_otlp_is_reported(service, media, data, status):
    assert service.post("/v1/traces", data, content_type=media).status_code == status


def test_an_empty_export_gets_an_empty_answer(service):
    data = ExportTraceServiceRequest().SerializeToString()
    answer = service.post("/v1/traces", data, content_type="application/x-protobuf")
    assert ExportTraceServiceResponse.FromString(answer.content) == ExportTraceServiceResponse()


def test_where_many_send_each_is_told_to_send_less_often(service, monkeypatch):
    monkeypatch.setattr(ingest, "_RATE", 1)
    told = [service.post("/v1/lines", b"", x_bootseer_sender=f"n{n}").headers["x-bootseer-next"] for n in range(5)]
    assert told == ["2.0", "2.0", "3.0", "4.0", "5.0"]

"""OTLP over HTTP as event lines: spans exported by BootSeer or by others, and logs that contain event lines.

A span becomes a begin and an end. An unfinished span, as some libraries send it, becomes only a begin; its end follows
when it is sent again. Spans without a job are rejected in the response's `partial_success`. Accepts JSON and protobuf.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from google.protobuf.json_format import MessageToJson, ParseDict, ParseError
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from starlette.requests import Request
from starlette.responses import Response

from bootseer.service.access import Grant
from bootseer.service.ingest import Batch, Ingest, Outcome, Refused, sort_lines
from bootseer.trace.event import BEGIN, END, FAILED, INSTANT, KINDS, NO_RANK, OK, Event, encode, from_json, stage_name

TRACES: Final = "traces"
LOGS: Final = "logs"
_JSON = "application/json"
_PROTOBUF = "application/x-protobuf"
_JOB = ("bootseer.job", "slurm.job.id", "k8s.job.name")
_NODE = ("k8s.node.name", "host.name", "k8s.pod.name", "host.id")
_IDS = ("traceId", "spanId", "parentSpanId")
_INT64 = 2**63
_OUTCOMES = {1: OK, 2: FAILED}
_DEPTH = 8
_MAX_LINES_BYTES = 128 << 20
"""Of the lines made from the spans of one request, which are several times as long."""


async def answer(ingest: Ingest, kind: str, request: Request) -> Response:
    """The response to an export request, as specified by OTLP/HTTP."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    grant: Grant = request.state.grant

    def work(data: bytes) -> Outcome:
        lines, refused = (lines_of_spans if kind == TRACES else lines_of_logs)(_parsed(data, media, kind))
        parts, bad = sort_lines(lines)
        rejected = bad + refused
        return ingest.keep(Batch("otlp", 0, grant.team, parts), rejected) if parts else Outcome(0, rejected, True)

    try:
        if media not in (_JSON, _PROTOBUF):
            raise Refused(415, f"OTLP must be {_PROTOBUF} or {_JSON}")
        outcome: Outcome = await ingest.take(request, work)
    except Refused as error:
        return ingest.refuse(error)
    return _answer(kind, media, outcome.rejected)


def _answer(kind: str, media: str, refused: int) -> Response:
    what, name = ("spans", "rejected_spans") if kind == TRACES else ("lines", "rejected_log_records")
    made: Any = ExportTraceServiceResponse() if kind == TRACES else ExportLogsServiceResponse()
    if refused:
        why = f"{refused} {what} without a job (resource attribute bootseer.job), or not events"
        made.partial_success.error_message = why
        setattr(made.partial_success, name, refused)
    if media == _JSON:
        return Response(MessageToJson(made), media_type=_JSON)
    return Response(made.SerializeToString(), media_type=_PROTOBUF)


def _parsed(data: bytes, media: str, kind: str) -> Any:
    made: Message = ExportTraceServiceRequest() if kind == TRACES else ExportLogsServiceRequest()
    try:
        if media == _PROTOBUF:
            made.ParseFromString(data)
        else:
            document = json.loads(data)
            if not isinstance(document, dict):
                raise ParseError("no object")
            ParseDict(_with_base64(document, _DEPTH), made, ignore_unknown_fields=True)
    except (DecodeError, ParseError, ValueError, RecursionError, SystemError) as error:  # the last one for "\ud800"
        raise Refused(400, f"invalid OTLP request: {str(error)[:200]}") from None
    return made


def _with_base64(value: Any, depth: int) -> Any:
    """OTLP's JSON encodes ids in hexadecimal, but protobuf's JSON format expects base64."""
    if isinstance(value, list) and depth:
        return [_with_base64(one, depth - 1) for one in value]
    if not isinstance(value, dict) or not depth:
        return value
    return {
        key: base64.b64encode(bytes.fromhex(one)).decode()
        if key in _IDS and isinstance(one, str)
        else _with_base64(one, depth - 1)
        for key, one in value.items()
    }


def _values(pairs: Iterable[Any]) -> dict[str, Any]:
    found = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        if kind in ("string_value", "int_value", "double_value", "bool_value"):
            found[pair.key] = getattr(pair.value, kind)
    return found


def _first(values: Mapping[str, Any], names: Iterable[str]) -> str:
    return next((str(values[name]) for name in names if values.get(name) not in (None, "")), "")


def _number(values: Mapping[str, Any], name: str, default: int) -> int:
    value = values.get(name, default)
    return value if type(value) is int and -_INT64 <= value < _INT64 else default


def lines_of_spans(request: Any) -> tuple[list[bytes], int]:
    """The event lines of the spans in an `ExportTraceServiceRequest`, and the number of spans without a job."""
    lines: list[bytes] = []
    refused = size = 0
    for resource in request.resource_spans:
        about = _values(resource.resource.attributes)
        job, node = _first(about, _JOB), _first(about, _NODE)
        for scope in resource.scope_spans:
            for span in scope.spans:
                if not job or not node or not span.start_time_unix_nano or not span.span_id:
                    refused += 1
                    continue
                made = [encode(event).rstrip(b"\n") for event in _events(span, about, job, node)]
                if (size := size + sum(map(len, made))) > _MAX_LINES_BYTES:
                    raise Refused(413, "send fewer spans at once")
                lines += made
    return lines, refused


def _events(span: Any, about: Mapping[str, Any], job: str, node: str) -> Iterator[Event]:
    attrs = _values(span.attributes)
    begin_ns = min(span.start_time_unix_nano, _INT64 - 1)
    end_ns = min(span.end_time_unix_nano, _INT64 - 1)
    restart = max(_number(about, "bootseer.restart", 0), 0)
    kind = _first(about, ["bootseer.kind"])
    mono_ns = _number(attrs, "bootseer.mono_ns", begin_ns)
    own = ("bootseer.rank", "bootseer.mono_ns", "bootseer.instant", "bootseer.truncated", "process.pid")
    event = Event(
        wall_ns=begin_ns,
        mono_ns=mono_ns,
        job=job,
        attempt=max(_number(about, "bootseer.attempt", 0), 0),
        restart=restart,
        kind=kind if kind in KINDS else KINDS[2 if restart else 0],
        node=node,
        rank=_number(attrs, "bootseer.rank", NO_RANK),
        pid=_number(attrs, "process.pid", 0),
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        stage=stage_name(span.name),
        phase=INSTANT,
        attrs={name: value for name, value in attrs.items() if name not in own},
    )
    outcome = _OUTCOMES.get(span.status.code, "")
    if attrs.get("bootseer.instant"):
        yield event
        return
    is_cut, length_ns = bool(attrs.get("bootseer.truncated")), end_ns - begin_ns
    if is_cut and length_ns == 0 and outcome:  # an end without a begin
        yield event._replace(phase=END, outcome=outcome)
        return
    yield event._replace(phase=BEGIN)
    if end_ns and not is_cut:
        length_ns = max(length_ns, 0)
        yield event._replace(
            phase=END, wall_ns=begin_ns + length_ns, mono_ns=min(mono_ns + length_ns, _INT64 - 1), outcome=outcome or OK
        )


def lines_of_logs(request: Any) -> tuple[list[bytes], int]:
    """The event lines in the bodies of an `ExportLogsServiceRequest`, and 0: other logs are ignored."""
    lines: list[bytes] = []
    for resource in request.resource_logs:
        for scope in resource.scope_logs:
            for record in scope.log_records:
                for text in _texts(record.body, _DEPTH):
                    if "@bootseer" in text:
                        for line in text.encode("utf-8", "surrogatepass").splitlines():
                            lines += from_json(line).splitlines()
    return lines, 0


def _texts(value: Any, depth: int) -> Iterator[str]:
    """All strings in a value: a collector may have parsed a JSON line."""
    match value.WhichOneof("value") if depth else None:
        case "string_value":
            yield value.string_value
        case "bytes_value":
            yield value.bytes_value.decode("utf-8", "replace")
        case "array_value":
            for one in value.array_value.values:
                yield from _texts(one, depth - 1)
        case "kvlist_value":
            for pair in value.kvlist_value.values:
                yield from _texts(pair.value, depth - 1)

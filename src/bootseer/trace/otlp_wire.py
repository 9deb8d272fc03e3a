"""Send finished spans to an OTLP/HTTP endpoint, with the OpenTelemetry library.

The only module that imports opentelemetry; it is an optional extra, so only `trace.otlp` imports this module, when
an exporter is made. The library encodes, compresses, finds certificates and repeats within its timeout; what it does
not tell its caller (whether trying again makes sense, and when) is seen by a transport adapter below it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, NamedTuple

import requests
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode
from requests.adapters import HTTPAdapter

from bootseer.trace.event import FAILED, INSTANT, OK, encodable
from bootseer.trace.otlp_spans import Finished, span_id, trace_id

_TRY_AGAIN = frozenset({429, 502, 503, 504})
"""What the OTLP specification calls retryable; every other answer stays what it is."""
_MAX_RETRY_AFTER_S = 3600.0
_INT64 = 2**63
_STATUS = {OK: StatusCode.OK, FAILED: StatusCode.ERROR}
_SCOPE = InstrumentationScope("bootseer")

# Without a handler of its own the library's warnings would appear on the stderr of somebody's training job.
logging.getLogger("opentelemetry").addHandler(logging.NullHandler())


class Answer(NamedTuple):
    """What became of a batch."""

    delivered: bool
    again: bool
    """Not delivered, and may be when tried again."""
    num_rejected: int
    """Spans of a delivered batch that the endpoint says it threw away."""
    reason: str


class Wire:
    """One endpoint. `send` blocks for the library's timeout and more; `stop` may be called beside it."""

    def __init__(self, url: str, headers: Mapping[str, str] | None, timeout_s: float | None) -> None:
        """Headers and timeout come from `OTEL_EXPORTER_OTLP_*` where None. Raises what the library raises."""
        self._gate = _Gate()
        session = requests.Session()
        for scheme in ("http://", "https://"):
            session.mount(scheme, self._gate)
        self._exporter = OTLPSpanExporter(
            endpoint=url, headers=dict(headers) if headers else None, timeout=timeout_s, session=session
        )

    def send(self, spans: Sequence[Finished]) -> Answer:
        """Try to deliver; never raises."""
        self._gate.reset()
        try:
            result = self._exporter.export([_span(finished) for finished in spans])
        except Exception as error:  # the library's promise is not to raise; a job must not depend on it
            return Answer(False, False, 0, type(error).__name__)
        status = self._gate.status
        # The library takes a redirection for success, which delivers nothing.
        if result is SpanExportResult.SUCCESS and status is not None and status < 300:
            return Answer(True, False, self._gate.num_rejected, "")
        if status is None:
            return Answer(False, True, 0, self._gate.error or "no answer")
        return Answer(False, status in _TRY_AGAIN, 0, f"HTTP {status}")

    def stop(self) -> None:
        """Give up: ends waits, closes connections. `send` cannot be used afterwards."""
        self._gate.stopped.set()
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class _Gate(HTTPAdapter):
    """Sees every request and answer of the library; holds requests back while Retry-After asks for it."""

    def __init__(self) -> None:
        super().__init__(max_retries=0)
        self.stopped = threading.Event()
        self._not_before = 0.0
        self.reset()

    def reset(self) -> None:
        self.status: int | None = None
        self.error = ""
        self.num_rejected = 0

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        self.reset()
        if self.stopped.wait(max(0.0, self._not_before - time.monotonic())):
            raise requests.ConnectionError("the exporter was closed")
        try:
            response = super().send(request, *args, **kwargs)
        except Exception as error:
            self.error = type(error).__name__
            raise
        self.status = response.status_code
        if self.status in _TRY_AGAIN:
            self._not_before = time.monotonic() + _retry_after_s(response.headers.get("Retry-After", ""))
        elif self.status == 200 and response.headers.get("Content-Type", "") == "application/x-protobuf":
            self.num_rejected = _num_rejected(response.content)
        return response


def _retry_after_s(text: str) -> float:
    """Seconds to wait, 0 when the header tells none; both forms of RFC 9110, bounded to an hour."""
    try:
        wait_s = float(text) if text.strip().isdecimal() else parsedate_to_datetime(text).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return min(max(wait_s, 0.0), _MAX_RETRY_AFTER_S)


def _num_rejected(content: bytes) -> int:
    try:
        return max(0, ExportTraceServiceResponse.FromString(content).partial_success.rejected_spans)
    except DecodeError:
        return 0


def _span(finished: Finished) -> ReadableSpan:
    event = finished.event
    trace = trace_id(event)
    attributes = {encodable(key): _value(value) for key, value in finished.attrs.items() if value is not None}
    attributes |= {"bootseer.rank": event.rank, "process.pid": event.pid, "bootseer.mono_ns": event.mono_ns}
    if event.phase == INSTANT:
        attributes["bootseer.instant"] = True
    if finished.truncated:
        attributes["bootseer.truncated"] = True
    code = _STATUS.get(finished.outcome, StatusCode.UNSET)
    # Only an error may carry a description.
    description = encodable(str(finished.attrs.get("error", ""))) if code is StatusCode.ERROR else None
    return ReadableSpan(
        name=encodable(event.stage),
        context=_context(trace, span_id(event.span)),
        parent=_context(trace, span_id(event.parent)) if event.parent else None,
        resource=_resource(event.job, event.attempt, event.restart, event.kind, event.node),
        attributes=attributes,
        status=Status(code, description),
        start_time=_time(finished.start_ns),
        end_time=_time(finished.end_ns),
        instrumentation_scope=_SCOPE,
    )


def _context(trace: int, span: int) -> SpanContext:
    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


@lru_cache(maxsize=256)
def _resource(job: str, attempt: int, restart: int, kind: str, node: str) -> Resource:
    return Resource(
        {
            "service.name": "bootseer",
            "host.name": encodable(node),
            "bootseer.job": encodable(job),
            "bootseer.attempt": attempt,
            "bootseer.restart": restart,
            "bootseer.kind": encodable(kind),
        }
    )


def _time(ns: int) -> int:
    """OTLP has unsigned 64-bit times; a clock before 1970 must not cost the batch."""
    return min(max(ns, 0), _INT64 - 1)


def _value(value: Any) -> str | int | float | bool:
    if isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if -_INT64 <= value < _INT64 else float(min(max(value, -(2**1000)), 2**1000))
    return encodable(value if isinstance(value, str) else repr(value))

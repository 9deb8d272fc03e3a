"""Export events as OpenTelemetry spans without disturbing the job.

`feed` pairs events and passes the spans to the SDK's `BatchSpanProcessor`, whose thread delivers them. Memory is
bounded, every wait has a deadline, and lost spans are counted, not raised: the spool still has the events.

The only module that imports opentelemetry, of the extra `otlp`. The library batches, encodes, compresses, finds
certificates, and retries within its timeout. A hook on its answers observes what it does not report: the last status,
and refused spans. Its session notes why a request had no answer, which the library only logs.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final
from urllib.parse import urlsplit

import requests
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from bootseer.errors import UsageError
from bootseer.trace.event import FAILED, INSTANT, OK, Event
from bootseer.trace.otlp_spans import Finished, Pairing, span_id, trace_id

MAX_QUEUE: Final = 10_000
"""Maximum number of queued spans; beyond it the oldest are dropped."""
_CLOSE_S: Final = 1.5
_PATH = "/v1/traces"
_BATCH = 512
_GATHER_S = 2.0
_STATUS = {OK: StatusCode.OK, FAILED: StatusCode.ERROR}
_SCOPE = InstrumentationScope("bootseer")

# Without a handler the library's warnings would appear on the training job's stderr.
logging.getLogger("opentelemetry").addHandler(logging.NullHandler())


def endpoint_url(endpoint: str | None, env: Mapping[str, str]) -> str:
    """The URL for traces: `endpoint` or the base in the OTEL variables, with the path added if missing.

    Raises `UsageError` for other URLs than http and https; the message never contains the URL's credentials.
    """
    base = endpoint or env.get("OTEL_EXPORTER_OTLP_ENDPOINT") or "http://localhost:4318"
    url = base.strip()
    if not endpoint and env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        url = env["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"].strip()
    elif not url.rstrip("/").endswith(_PATH):
        url = url.rstrip("/") + _PATH
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        shown = url.rpartition("@")[2]
        raise UsageError(f"{shown!r} is not an OTLP/HTTP endpoint", hint="give a URL such as http://collector:4318")
    return url


class _Session(requests.Session):
    def __init__(self, exporter: OtlpExporter) -> None:
        """`exporter` gets the reason why a request had no answer."""
        super().__init__()
        self._exporter = exporter

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        try:
            return super().send(request, **kwargs)
        except Exception as error:
            cause: BaseException = error  # its innermost cause: the error itself shows the URL, which may have a token
            while inner := cause.__cause__ or cause.__context__:
                cause = inner
            self._exporter.last_error = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
            raise


class OtlpExporter(SpanExporter):
    """Delivers spans to one endpoint with the library's exporter, and counts the results. No method raises."""

    def __init__(self, endpoint: str | None = None) -> None:
        """Headers and timeout (seconds) come from `OTEL_EXPORTER_OTLP_HEADERS` and `_TIMEOUT`, the default endpoint
        from `OTEL_EXPORTER_OTLP_ENDPOINT`.

        Raises `UsageError` if the endpoint is not a URL, or a variable is invalid.
        """
        self.exported = 0
        """Number of spans accepted by the endpoint."""
        self.last_error = ""
        """Why the last request failed, which the library may be repeating; empty after a delivery."""
        self._status: int | None = None
        """HTTP status of the last answer to this batch."""
        self._num_rejected = 0
        self._pairing = Pairing()
        self._fed = 0
        url = endpoint_url(endpoint, os.environ)
        session = _Session(self)
        session.hooks["response"] = [self._note]
        delay_ms = 1000 * _GATHER_S * random.uniform(0.5, 1.5)  # noqa: S311 - jitter
        try:
            self._exporter = OTLPSpanExporter(endpoint=url, session=session)
            self._processor = BatchSpanProcessor(self, MAX_QUEUE, delay_ms, min(_BATCH, MAX_QUEUE))
        except Exception as error:  # an invalid OTEL_* variable; the type depends on the library's version
            raise UsageError(f"OpenTelemetry refuses its settings: {error}", hint="see the OTEL_* variables") from None

    @property
    def lost(self) -> int:
        """Number of spans not accepted; complete once closed: refused, abandoned, or still queued ones."""
        return self._fed - self.exported

    def feed(self, events: Iterable[Event]) -> None:
        """Add events of this node, in their order, as `decode` returns them."""
        self._enqueue(self._pairing.feed(events))

    def close(self, deadline_s: float = _CLOSE_S) -> bool:
        """Export open spans as truncated and end within `deadline_s`; returns whether all spans were delivered."""
        self._enqueue(self._pairing.finish())
        # The SDK's own shutdown waits half a minute, and longer for a running request.
        ending = threading.Thread(target=self._processor.shutdown, name="otlp-end", daemon=True)
        ending.start()
        ending.join(deadline_s)
        self.shutdown()
        return not self.lost

    def _enqueue(self, spans: list[Finished]) -> None:
        self._fed += len(spans)
        for finished in spans:
            self._processor.on_end(_readable(finished))

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Deliver a batch, in the processor's thread. The library retries within its timeout."""
        self._status, self._num_rejected = None, 0
        result = self._exporter.export(spans)
        # The library treats a redirect as success, although nothing is delivered.
        if result is SpanExportResult.SUCCESS and self._status is not None and self._status < 300:
            rejected = min(self._num_rejected, len(spans))
            self.exported += len(spans) - rejected
            self.last_error = f"{rejected} spans of a batch were refused" if rejected else ""
            return result
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """End the library's waits, so that the processor's thread ends."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _note(self, response: requests.Response, *args: Any, **kwargs: Any) -> None:
        """Note what the library does not report: the status, and refused spans."""
        self._status = response.status_code
        if self._status >= 300:
            self.last_error = f"HTTP {self._status}"
        if self._status == 200 and response.headers.get("Content-Type", "") == "application/x-protobuf":
            self._num_rejected = _num_rejected(response.content)


def _num_rejected(content: bytes) -> int:
    try:
        return max(0, ExportTraceServiceResponse.FromString(content).partial_success.rejected_spans)
    except DecodeError:
        return 0


def _readable(finished: Finished) -> ReadableSpan:
    event = finished.event
    trace = trace_id(event)
    attributes = {key: value for key, value in finished.attrs.items() if value is not None}
    attributes |= {"bootseer.rank": event.rank, "process.pid": event.pid, "bootseer.mono_ns": event.mono_ns}
    if event.phase == INSTANT:
        attributes["bootseer.instant"] = True
    if finished.truncated:
        attributes["bootseer.truncated"] = True
    code = _STATUS.get(finished.outcome, StatusCode.UNSET)
    # Only errors may have a description.
    description = str(finished.attrs.get("error", "")) if code is StatusCode.ERROR else None
    return ReadableSpan(
        name=event.stage,
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
            "host.name": node,
            "bootseer.job": job,
            "bootseer.attempt": attempt,
            "bootseer.restart": restart,
            "bootseer.kind": kind,
        }
    )


def _time(ns: int) -> int:
    """A time in OTLP's range. A single invalid time, from a clock before 1970, would make the batch invalid."""
    return min(max(ns, 0), 2**63 - 1)

"""Export events as OpenTelemetry spans without disturbing the job.

`feed` pairs events and passes the spans to the SDK's `BatchSpanProcessor`, whose thread delivers them. Memory is
bounded, every wait has a deadline, and lost spans are counted, not raised: the spool still has the events. Needs the
extra `otlp`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import urlsplit

from bootseer.errors import UsageError, needs_extra
from bootseer.trace.event import Event
from bootseer.trace.otlp_spans import Finished, Pairing

MAX_QUEUE: Final = 10_000
"""Maximum number of queued spans; beyond it the oldest are dropped."""
CLOSE_S: Final = 1.5
_PATH = "/v1/traces"


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


class OtlpExporter:
    """Delivers spans to one endpoint. No method raises."""

    def __init__(self, endpoint: str | None = None) -> None:
        """Headers and timeout (seconds) come from `OTEL_EXPORTER_OTLP_HEADERS` and `_TIMEOUT`, the default endpoint
        from `OTEL_EXPORTER_OTLP_ENDPOINT`.

        Raises `UsageError` if the endpoint is not a URL, a variable is invalid, or the extra `otlp` is not installed.
        """
        url = endpoint_url(endpoint, os.environ)
        with needs_extra("otlp", "export to OTLP"):
            from bootseer.trace import otlp_wire
        try:
            self._delivery = otlp_wire.Delivery(url)
            self._processor = otlp_wire.batch_processor(self._delivery, MAX_QUEUE)
        except Exception as error:  # an invalid OTEL_* variable; the type depends on the library's version
            raise UsageError(f"OpenTelemetry refuses its settings: {error}", hint="see the OTEL_* variables") from None
        self._span = otlp_wire.span
        self._pairing = Pairing()
        self._closing = False
        self._fed = 0

    @property
    def exported(self) -> int:
        """Number of spans accepted by the endpoint."""
        return self._delivery.exported

    @property
    def lost(self) -> int:
        """Number of spans not accepted; complete once closed: refused, abandoned, or still queued ones."""
        return self._fed - self.exported

    @property
    def last_error(self) -> str:
        """Why the last delivery failed; empty after a success."""
        return self._delivery.last_error

    def feed(self, events: Iterable[Event]) -> None:
        """Add events of this node, in their order."""
        if not self._closing:
            self._enqueue(self._pairing.feed(events))

    def close(self, deadline_s: float = CLOSE_S) -> bool:
        """Export open spans as truncated and end within `deadline_s`; returns whether all spans were delivered."""
        if not self._closing:
            self._closing = True
            self._enqueue(self._pairing.finish())
            # The SDK's own shutdown waits half a minute, and longer for a running request.
            ending = threading.Thread(target=self._processor.shutdown, name="otlp-end", daemon=True)
            ending.start()
            ending.join(deadline_s)
            self._delivery.shutdown()
        return not self.lost

    def _enqueue(self, spans: list[Finished]) -> None:
        self._fed += len(spans)
        for finished in spans:
            self._processor.on_end(self._span(finished))

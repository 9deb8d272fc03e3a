"""Export events as OpenTelemetry spans, beside the job and never in its way.

`feed` only pairs and queues; one thread delivers in batches. Memory is bounded, every wait has a deadline, and what
could not be delivered is counted, not raised: the spool keeps the events anyway. Who calls: `bootseer run`, with what
`otlp_tail` finds in the spool. Needs the extra `otlp`.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from bootseer.errors import UsageError
from bootseer.trace.event import Event
from bootseer.trace.otlp_spans import Finished, Pairing

if TYPE_CHECKING:
    from bootseer.trace.otlp_wire import Wire

MAX_QUEUE: Final = 10_000
"""Spans that wait for delivery; beyond it the newest are lost."""
_BATCH = 512
_GATHER_S = 2.0
"""How long a span waits for company. Jittered: the nodes of a job start in the same second."""
_MAX_ROUNDS = 5
"""Tries for one batch, each of which is some requests of the library within its timeout."""
_MAX_BACKOFF_S = 30.0
_PATH = "/v1/traces"
CLOSE_S: Final = 2.0


def endpoint_url(endpoint: str | None, env: Mapping[str, str]) -> str:
    """The URL for traces: `endpoint` or the OTEL variables' base, with the path added where it is missing.

    Raises `UsageError` for what is no http or https URL; the message never shows user name and password.
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
    """Delivers spans to one endpoint. All methods may be called from any thread, and none raises."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """What is None comes from `OTEL_EXPORTER_OTLP_ENDPOINT`, `_HEADERS` and `_TIMEOUT` (seconds).

        Raises `UsageError` when the endpoint is no URL, a variable is bad, or the extra `otlp` is not installed.
        """
        url = endpoint_url(endpoint, os.environ)
        try:
            from bootseer.trace.otlp_wire import Wire
        except ImportError as error:
            raise UsageError(
                f"export to OTLP needs OpenTelemetry, which is not installed ({error.name})",
                hint="pip install 'bootseer[otlp]'",
            ) from None
        try:
            self._wire: Wire = Wire(url, headers, timeout_s)
        except Exception as error:  # a bad OTEL_* variable; which exception depends on the library's version
            raise UsageError(f"OpenTelemetry refuses its settings: {error}", hint="see the OTEL_* variables") from None
        self.exported = 0
        """Spans that the endpoint took."""
        self.failed = 0
        """Spans that were given up: refused, tried too often, or beyond the queue's bound."""
        self.last_error = ""
        """Why the last try failed, in a few words; empty after a success."""
        self._pairing = Pairing()
        self._queue: deque[Finished] = deque()
        self._num_in_flight = 0
        self._hurry = False
        self._closing = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="otlp", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Finished spans that are neither delivered nor given up."""
        with self._changed:
            return len(self._queue) + self._num_in_flight

    def feed(self, events: Iterable[Event]) -> None:
        """Take events, in the order in which each node wrote them."""
        with self._changed:
            if not self._closing:
                self._enqueue(self._pairing.feed(events))

    def flush(self, deadline_s: float) -> bool:
        """Deliver what is finished, within `deadline_s` seconds; whether all of it was delivered."""
        end = time.monotonic() + deadline_s
        with self._changed:
            failed_before = self.failed
            self._hurry = True
            self._changed.notify_all()
            while self._queue or self._num_in_flight:
                left_s = end - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            self._hurry = False
            return not self._queue and not self._num_in_flight and self.failed == failed_before

    def close(self, deadline_s: float = CLOSE_S) -> bool:
        """Export open spans as truncated, flush and end; what is not delivered by then counts as failed."""
        with self._changed:
            if not self._closing:
                self._closing = True
                self._enqueue(self._pairing.finish())
        done = self.flush(deadline_s)
        with self._changed:
            if not self._closed:
                self._closed = True
                self.failed += len(self._queue) + self._num_in_flight
                self._queue.clear()
                self._num_in_flight = 0
                self._changed.notify_all()
                self._wire.stop()
        return done

    def _enqueue(self, spans: list[Finished]) -> None:
        room = MAX_QUEUE - len(self._queue)
        self._queue.extend(spans[:room])
        self.failed += max(0, len(spans) - room)
        if spans:
            self._changed.notify_all()

    def _work(self) -> None:
        rounds = _MAX_ROUNDS
        while batch := self._next_batch():
            # While the endpoint is down each further batch gets one try: the budget does not grow with the queue.
            rounds = _MAX_ROUNDS if self._deliver(batch, rounds) else 1

    def _next_batch(self) -> list[Finished]:
        """Wait for spans, and then for more of them. Empty when the exporter has been closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            gather_s = _GATHER_S * random.uniform(0.5, 1.5)  # noqa: S311 - spreads load, guards nothing
            self._changed.wait_for(lambda: len(self._queue) >= _BATCH or self._hurry or self._closing, gather_s)
            batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
            self._num_in_flight = len(batch)
            return batch

    def _deliver(self, batch: list[Finished], rounds: int) -> bool:
        """Whether the endpoint answers. Afterwards the batch is exported or failed."""
        for number in range(rounds):
            last_try = self._closing
            answer = self._wire.send(batch)
            self.last_error = answer.reason
            if not answer.again:
                self._settle(len(batch), min(answer.num_rejected, len(batch)) if answer.delivered else len(batch))
                return True
            self._wait(number)
            if last_try or self._closed:
                break
        self._settle(len(batch), len(batch))
        return False

    def _wait(self, number: int) -> None:
        """Back off before the next try; the end of the job cuts it short, Retry-After (in `otlp_wire`) does not end."""
        backoff_s = min(_MAX_BACKOFF_S, 2.0**number) * random.uniform(0.5, 1.5)  # noqa: S311
        with self._changed:
            self._changed.wait_for(lambda: self._closing, backoff_s)

    def _settle(self, num_spans: int, num_failed: int) -> None:
        with self._changed:
            if not self._closed:  # close has counted them already
                self.exported += num_spans - num_failed
                self.failed += num_failed
                self._num_in_flight = 0
                self._changed.notify_all()

"""A real OTLP/HTTP endpoint for tests, which decodes requests. Without the extra `otlp`, its importers are skipped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="extra otlp")


class Collector:
    """An OTLP endpoint. `answer` returns status, headers and body of the response to the n-th request."""

    def __init__(self, answer: Callable[[int], tuple[int, dict[str, str], bytes]]) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.times: list[float] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.times.append(time.monotonic())
                collector.requests.append(
                    (self.path, {key.lower(): value for key, value in self.headers.items()}, body)
                )
                status, headers, content = answer(len(collector.requests) - 1)
                self.send_response(status)
                for key, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def resources(self) -> list[tuple[dict[str, object], list[object]]]:
        """Resource attributes and spans, as received."""
        found = []
        for _, _, body in self.requests:
            for resource in trace_service.ExportTraceServiceRequest.FromString(body).resource_spans:
                spans = [span for scope in resource.scope_spans for span in scope.spans]
                found.append((attributes(resource.resource), spans))
        return found

    def spans(self) -> dict[str, object]:
        return {span.name: span for _, spans in self.resources() for span in spans}


def attributes(owner: object) -> dict[str, object]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in owner.attributes}


@contextmanager
def collector(
    answer: Callable[[int], tuple[int, dict[str, str], bytes]] = lambda _: (200, {}, b""),
) -> Iterator[Collector]:
    server = Collector(answer)
    try:
        yield server
    finally:
        server.close()

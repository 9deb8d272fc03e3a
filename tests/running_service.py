"""A real service for tests, on a loopback port, with SQLite and raw lines in the test's folder."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import select

from bootseer.service import schema
from bootseer.service.app import Service, Settings, _configured, _Server

_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def ask(method: str, url: str, **options: Any) -> httpx.Response:
    """Like `httpx.request`, which would load the machine's certificates for each request: 25 ms of processor time,
    unnecessary for http."""
    return httpx.request(method, url, verify=_NO_CERTIFICATES, timeout=300, **options)


class RunningService:
    """A service with the address `url`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings.made()
        self._listener = socket.create_server(settings.listen)
        self.settings = replace(self.settings, listen=self._listener.getsockname()[:2])
        self.url = f"http{'s' * bool(settings.certificate)}://{settings.listen[0]}:{self.settings.listen[1]}"
        self.service = Service(self.settings)
        self._server = _Server(_configured(self.settings, self.service))
        self._ready = threading.Event()
        self._server.on_ready = self._ready.set
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(30)

    def close(self) -> None:
        self._server.end()
        self._thread.join()
        self._listener.close()
        self.service.close()

    def post(self, path: str, data: bytes, **headers: str) -> httpx.Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return ask("POST", self.url + path, content=data, headers=sent)

    def raw(self) -> dict[str, bytes]:
        """The lines of all raw objects, by name."""
        return {name: self.service.raw.read(name) for name in self.service.raw.names()}

    def raw_lines(self) -> list[bytes]:
        return sorted(line for data in self.raw().values() for line in data.splitlines())

    def rows(self, table: object, num: int = 0) -> list[object]:
        """All rows of a table; waits until there are at least `num`."""
        until = time.monotonic() + 300
        while True:
            with self.service.database.read() as connection:
                rows = list(connection.execute(select(table)))
            if len(rows) >= num or time.monotonic() > until:
                return rows
            time.sleep(0.02)

    def batches(self, num: int) -> list[object]:
        return self.rows(schema.batch, num)


@contextmanager
def running_service(data: Path, **more: object) -> Iterator[RunningService]:
    running = RunningService(Settings(data, listen=("127.0.0.1", 0), **more))
    running.start()
    try:
        yield running
    finally:
        running.close()

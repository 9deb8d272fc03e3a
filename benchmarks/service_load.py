"""Two hundred readers of a service that ingests at full rate: errors, waiting times, and the slowdown of ingest.

Senders send starts of 360 nodes, each as soon as the last one is accepted. Then the same again with readers in another
process: each holds a stream of events, loads pages and API every second or two, and the page Now whenever the stream
reports a change, like its script.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if __name__ != "__main__":
    import httpx
    from harness import Benchmark, Must, Outcome
    from service_ingest import _batches, _Costs, _service
    from sqlalchemy import func, select

    from bootseer.service import schema
    from bootseer.service.database import Database, default_url
    from fleet import slow_installs
    from postgres import running_postgres

_READERS = 200
_SENDERS = 4
_NODES = 360
_PAGES = ("/", "/now", "/jobs", "/nodes", "/caches", "/compare", "/?since=7d", "/job/load-0-0", "/start/0/0/load-0-0",
          "/api/v1/fleet", "/api/v1/now", "/api/v1/starts", "/metrics", "/static/service.css")  # fmt: skip
_MOST_RSS = 400 << 20
_PAGE_P99_S = 2.0
_EVENTS_PER_S = 20_000
"""Ingest with readers, which use the same cores, as do the senders."""
_PATIENCE_S = 300.0


class _Reader:
    """A browser: a page, and its stream of events."""

    def __init__(self, host: str, port: int, pages: list[str], until_s: float) -> None:
        self._at = (host, port)
        self._pages = pages
        self._until_s = until_s
        self.took: dict[str, list[float]] = {}
        self.errors: list[str] = []
        self.events = 0
        self._changed = asyncio.Event()

    async def run(self, number: int) -> None:
        await asyncio.sleep(random.random())
        stream = asyncio.create_task(self._stream())
        link = None
        for turn in itertools.count():
            if time.monotonic() > self._until_s:
                break
            page = "/now" if self._changed.is_set() and number % 2 else self._pages[(number + turn) % len(self._pages)]
            self._changed.clear()
            began_s = time.perf_counter()
            try:
                link = link or await asyncio.open_connection(*self._at)
                status, size = await _get(*link, page)
                if status != 200 or not size:
                    self.errors.append(f"{page}: {status}, {size} bytes")
            except (OSError, EOFError, ValueError, TimeoutError) as error:
                self.errors.append(f"{page}: {type(error).__name__} {error}")
                link = None
            self.took.setdefault(page, []).append(time.perf_counter() - began_s)
            await asyncio.sleep(random.uniform(0.5, 1.5))
        stream.cancel()

    async def _stream(self) -> None:
        try:
            reader, writer = await asyncio.open_connection(*self._at)
            writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while line := await reader.readline():
                if line.startswith(b"event: changed"):
                    self.events += 1
                    self._changed.set()
            self.errors.append("/events: ended")
        except OSError as error:
            self.errors.append(f"/events: {error}")


async def _get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, page: str) -> tuple[int, int]:
    writer.write(f"GET {page} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return int(head.split()[1]), len(await reader.readexactly(int(length.split(b":")[1])))


async def _read(address: str, seconds: float, pages: list[str]) -> dict[str, Any]:
    parts = urlsplit(address)
    until_s = time.monotonic() + seconds
    readers = [_Reader(str(parts.hostname), int(parts.port or 80), pages, until_s) for _ in range(_READERS)]
    await asyncio.gather(*(reader.run(number) for number, reader in enumerate(readers)))
    took: dict[str, list[float]] = {}
    for reader in readers:
        for page, times in reader.took.items():
            took.setdefault(page, []).extend(times)
    errors = [error for reader in readers for error in reader.errors]
    return {"took": took, "errors": errors, "events": sum(reader.events for reader in readers),
            "streams": sum(reader.events > 0 for reader in readers)}  # fmt: skip


def _sent(address: str, lines: bytes, first: int, seconds: float) -> tuple[int, float, list[float], list[str]]:
    """Send starts for this long: their number, the time, the duration of each batch, and errors."""
    took: list[float] = []
    errors: list[str] = []
    counts = [0] * _SENDERS
    began_s = time.monotonic()

    def send(sender: int) -> None:
        sequence = itertools.count()
        with httpx.Client(base_url=address, timeout=120) as client:
            while time.monotonic() < began_s + seconds:
                job = f"load-{sender}-{first + counts[sender]}".encode()
                for batch in _batches(
                    lines.replace(b'"job":"fleet"', b'"job":"' + job + b'"').splitlines(keepends=True)
                ):
                    headers = {
                        "x-bootseer-sender": f"rack-{sender}-{first}",
                        "x-bootseer-sequence": str(next(sequence)),
                    }
                    began = time.perf_counter()
                    answer = client.post("/v1/lines", content=batch, headers=headers)
                    took.append(time.perf_counter() - began)
                    if answer.status_code != 202:
                        errors.append(f"/v1/lines: {answer.status_code} {answer.text[:100]}")
                counts[sender] += 1

    threads = [threading.Thread(target=send, args=(number,)) for number in range(_SENDERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts), time.monotonic() - began_s, took, errors


def lines_of(num_nodes: int) -> bytes:
    """A start whose job gets a new name each time it is sent."""
    lines = b"".join(slow_installs(num_nodes, ranks_per_node=3).lines())
    job = json.loads(lines.partition(b" ")[2].partition(b"\n")[0])["job"].encode()
    return lines.replace(b'"job":"' + job + b'"', b'"job":"fleet"')


def _part(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def loaded(
    address: str, lines: bytes, first: int, seconds: float, costs: _Costs, pages: Sequence[str] = ()
) -> dict[str, Any]:
    """The senders' rate, alone or with readers of these pages, and the readers' waiting times."""
    before_s, watched = costs.cpu_s(), threading.Event()

    def watch() -> None:
        while not watched.wait(0.25):
            costs.cpu_s()

    watcher = threading.Thread(target=watch)
    watcher.start()
    words = [sys.executable, __file__, address, str(seconds), *pages]
    child = subprocess.Popen(words, stdout=subprocess.PIPE) if pages else None
    num, took_s, batches, errors = _sent(address, lines, first, seconds)
    found: dict[str, Any] = {}
    if child is not None:
        found = json.loads(child.communicate(timeout=seconds + 120)[0])
        errors += found.pop("errors")
    watched.set()
    watcher.join()
    events = num * lines.count(b"\n")
    return {
        **found,
        "starts": num,
        "events_per_s": events / took_s,
        "service_cpu_share": (costs.cpu_s() - before_s) / took_s,
        "batch_p50_s": _part(batches, 0.5),
        "batch_p99_s": _part(batches, 0.99),
        "errors": errors,
    }


def _round(engine: str, lines: bytes, seconds: float) -> dict[str, Any]:
    server: Any = running_postgres() if engine == "postgres" else nullcontext()
    with tempfile.TemporaryDirectory() as folder, server as postgres:
        url = postgres.new_database() if postgres is not None else default_url(Path(folder))
        with _service(Path(folder), url) as (address, process):
            costs = _Costs(process)
            database = Database(url)
            alone = loaded(address, lines, 0, seconds, costs)
            _derived(database, alone["starts"])
            among = loaded(address, lines, 1_000_000, seconds, costs, _PAGES)
            ended_s = time.monotonic()
            _derived(database, alone["starts"] + among["starts"])
            database.close()
            return {"alone": alone, "among": among, "drained_s": time.monotonic() - ended_s, "rss": costs.peak_bytes}


def _derived(database: Database, num: int) -> None:
    """Wait until all accepted starts are complete in the database."""
    until_s, there = time.monotonic() + _PATIENCE_S, 0
    while there != num * _NODES:
        if time.monotonic() > until_s:
            raise RuntimeError(f"{there} node starts of {num * _NODES} were derived")
        time.sleep(0.5)
        with database.read() as connection:
            there = int(connection.execute(select(func.count()).select_from(schema.node_start)).scalar_one())


def measure(quick: bool) -> Outcome:
    lines = lines_of(_NODES)
    seconds = 8.0 if quick else 20.0
    samples, musts, details = {}, [], {}
    for engine in ("sqlite", "postgres"):
        found = _round(engine, lines, seconds)
        took = found["among"].pop("took")
        pages = [value for values in took.values() for value in values]
        errors = found["alone"]["errors"] + found["among"]["errors"]
        rates = [found[arm]["events_per_s"] for arm in ("alone", "among")]
        samples |= {f"{engine}: {page}": values for page, values in took.items()}
        details[engine] = {
            **found,
            "of_rate_alone": rates[1] / rates[0],
            "page_p50_s": _part(pages, 0.5),
            "page_p99_s": _part(pages, 0.99),
        }
        musts += [
            Must(f"errors, {engine}", len(errors), 0, ""),
            Must(
                f"readers whose stream told of changes, {engine}",
                found["among"]["streams"],
                _READERS,
                "",
                at_least=True,
            ),
            Must(f"99 % of pages, {engine}", _part(pages, 0.99), _PAGE_P99_S, "s"),
            Must(f"durable events with readers, {engine}", rates[1], _EVENTS_PER_S, "1/s", at_least=True),
            Must(f"most memory of a process, {engine}", found["rss"] / 2**20, _MOST_RSS / 2**20, "MiB"),
        ]
    return Outcome(
        parameters={"readers": _READERS, "senders": _SENDERS, "nodes": _NODES, "seconds": seconds,
                    "events": lines.count(b"\n"), "bytes": len(lines)},
        samples=samples,
        unit="seconds",
        must_reach=musts,
        details=details,
        method="each engine has one service: first senders alone, then senders and readers; all on the same cores",
    )  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(_read(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))))
else:
    BENCHMARK = Benchmark(
        "service_load", "What do 200 readers cost a service at full rate, and how long do they wait?", measure
    )

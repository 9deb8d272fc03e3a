"""What the service costs: events accepted, stored and analysed per second of processor time, on both databases.

The lines are those of 1,440 nodes that start together. They are sent to a running service by one sender for all nodes,
in batches of half a megabyte, and by a sender on each node, all at once. The time ends when their start is in the
database. Processor time is that of all processes of the service; PostgreSQL's is listed separately.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
from harness import Benchmark, Must, Outcome
from sqlalchemy import func, select

from bootseer.service import schema
from bootseer.service.database import Database, default_url
from fleet import slow_installs
from postgres import running_postgres

_BOOTSEER = str(Path(sys.executable).parent / "bootseer")
_NODES = 1440
_BATCH_BYTES = 512 << 10
_EVENTS_PER_CPU_S = 20_000
_MOST_RSS = 400 << 20
_VISIBLE_S = 5.0
_PATIENCE_S = 120.0
_AT_ONCE = 200
"""Concurrent connections of the nodes' senders."""


def measure(quick: bool) -> Outcome:
    rounds = 1 if quick else 3
    num_nodes = _NODES // 4 if quick else _NODES
    lines = slow_installs(num_nodes, ranks_per_node=3).lines()
    batches, by_node = list(_batches(lines)), _by_node(lines)
    rates: dict[str, list[float]] = {}
    details: dict[str, list[dict[str, float]]] = {}
    for number in range(rounds):
        for engine in ("sqlite", "postgres") if number % 2 else ("postgres", "sqlite"):
            for name, send in (
                (engine, partial(_send_all, batches)),
                (f"{engine}, {num_nodes} senders", partial(_send_each, by_node)),
            ):
                found = _round(engine, send, num_nodes, len(lines))
                rates.setdefault(name, []).append(found["events_per_cpu_s"])
                details.setdefault(name, []).append(found)
    every = [one for of_engine in details.values() for one in of_engine]
    return Outcome(
        parameters={"rounds": rounds, "lines": len(lines), "bytes": sum(map(len, lines)), "batches": len(batches)},
        samples=rates,
        unit="events per CPU second",
        must_reach=[
            *(
                Must(f"events per CPU second, {name}", median(values), _EVENTS_PER_CPU_S, "1/s", at_least=True)
                for name, values in rates.items()
                if "senders" not in name
            ),
            Must("most memory of a process", max(one["peak_bytes"] for one in every) / 2**20, _MOST_RSS / 2**20, "MiB"),
            Must(
                "from the last line to the start in the database",
                median(one["visible_s"] for one in every),
                _VISIBLE_S,
                "s",
            ),
        ],
        details={"rounds": details},
        method="each round has a new service and database; engines alternate",
    )


def _batches(lines: list[bytes]) -> Iterator[bytes]:
    batch, size = [], 0
    for line in lines:
        batch.append(line)
        size += len(line)
        if size >= _BATCH_BYTES:
            yield b"".join(batch)
            batch, size = [], 0
    if batch:
        yield b"".join(batch)


def _by_node(lines: list[bytes]) -> list[bytes]:
    nodes: dict[str, list[bytes]] = {}
    for line in lines:
        nodes.setdefault(json.loads(line.partition(b" ")[2])["node"], []).append(line)
    return [b"".join(of_node) for of_node in nodes.values()]


def _send_all(batches: list[bytes], address: str) -> None:
    with httpx.Client(base_url=address, timeout=60) as client:
        for number, batch in enumerate(batches):
            headers = {"x-bootseer-sender": "rack-1", "x-bootseer-sequence": str(number)}
            client.post("/v1/lines", content=batch, headers=headers).raise_for_status()


def _send_each(by_node: list[bytes], address: str) -> None:
    """Each over a separate connection. If the service is busy, it is retried, as senders do."""

    def send(number: int) -> None:
        headers = {"x-bootseer-sender": f"node-{number}", "x-bootseer-sequence": "0"}
        while True:
            connection = http.client.HTTPConnection(address.partition("://")[2].rstrip("/"), timeout=60)
            with contextlib.closing(connection):
                connection.request("POST", "/v1/lines", by_node[number], headers)
                answer = connection.getresponse()
                answer.read()
            if answer.status == 202:
                return
            if answer.status != 429:
                raise RuntimeError(f"the service answers {answer.status}")
            time.sleep(float(answer.headers.get("retry-after", 1)))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(send, range(len(by_node))))


def _round(engine: str, send: Callable[[str], None], num_nodes: int, num_events: int) -> dict[str, float]:
    server: Any = running_postgres() if engine == "postgres" else nullcontext()
    with tempfile.TemporaryDirectory() as folder, server as postgres:
        url = postgres.new_database() if postgres is not None else default_url(Path(folder))
        with _service(Path(folder), url) as (address, process):
            costs, of_engine = _Costs(process), _Costs(psutil.Process(postgres.pid)) if postgres is not None else None
            engine_s = of_engine.cpu_s() if of_engine is not None else 0.0
            began_s, before_s = time.monotonic(), costs.cpu_s()
            send(address)
            sent_s = time.monotonic()
            database = Database(url)
            while _nodes(database) != num_nodes:
                if time.monotonic() > sent_s + _PATIENCE_S:
                    raise RuntimeError("the start was not derived")
                costs.cpu_s()
                time.sleep(0.05)
            done_s = time.monotonic()
            database.close()
            cpu_s = costs.cpu_s() - before_s
            return {
                "events_per_cpu_s": num_events / cpu_s,
                "cpu_s": cpu_s,
                "postgres_cpu_s": of_engine.cpu_s() - engine_s if of_engine is not None else 0.0,
                "taken_s": sent_s - began_s,
                "visible_s": done_s - sent_s,
                "peak_bytes": costs.peak_bytes,
            }


def _nodes(database: Database) -> int:
    with database.read() as connection:
        return int(connection.execute(select(func.count()).select_from(schema.node_start)).scalar_one())


@contextmanager
def _service(data: Path, url: str) -> Iterator[tuple[str, psutil.Process]]:
    command = [_BOOTSEER, "serve", "--data", str(data), "--database", url, "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        told = process.stderr.readline()
        yield told.split(" at ")[1].split()[0], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=60)


class _Costs:
    """CPU time of a process and all its descendants, including ended ones."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self.peak_bytes = 0

    def cpu_s(self) -> float:
        total = 0.0
        for process in [self._process, *self._process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
                self.peak_bytes = max(self.peak_bytes, process.memory_info().rss)
        return total


BENCHMARK = Benchmark("service_ingest", "What does the service cost for each event?", measure)

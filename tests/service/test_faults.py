"""Acknowledged lines are never lost and never counted twice: kills, full disks, an unavailable database."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil
import pytest
import zstandard
from sqlalchemy import select

from bootseer.report.analysis.prepare import Options
from bootseer.report.read_logs import read_report
from bootseer.service import schema
from bootseer.service.app import Settings
from bootseer.service.database import Database
from bootseer.service.raw import RawStore
from bootseer.service.upkeep import reconcile
from bootseer.store.open import open_store
from bootseer.trace.ship import Link, Shipper, target
from conftest_launch import BOOTSEER
from fleet import INSTALL, Fleet
from postgres import running_postgres
from registry import free_port, make_certificate
from running_service import RunningService, ask, running_service
from small_disks import small_disk
from waiting import until

pytestmark = pytest.mark.slow


class Program:
    """`bootseer serve` as a separate process, always at the same address."""

    def __init__(self, env: dict[str, str], data: Path, *more: str, program: Sequence[str] = BOOTSEER) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [*program, "serve", "--data", str(data), "--listen", f"127.0.0.1:{self.port}", *more]
        self._env = {**env, "BOOTSEER_LOG": ""}  # only the first line of its stderr is read
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, env=self._env, stderr=subprocess.PIPE)
        assert self.process.stderr is not None
        assert b"the service is at" in self.process.stderr.readline()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stderr.close()  # its workers may have it open for a moment


def shipped(folder: Path, link: Link) -> None:
    shipper = Shipper(str(folder), link)
    until = time.monotonic() + 120
    while not shipper.all_sent():
        link.not_before = 0.0
        if not shipper.step():
            time.sleep(0.05)
        assert time.monotonic() < until
    shipper.close()
    link.close()


def test_a_service_that_is_killed_again_and_again_loses_nothing_and_counts_once(env, tmp_path, monkeypatch):
    """Meanwhile four nodes send small batches; in the end the service agrees with `bootseer report` on their spools."""
    monkeypatch.setattr("bootseer.trace.ship.BATCH_BYTES", 1200)
    fleet = Fleet(4, job="moe")
    root = tmp_path / "spool" / "moe"
    by_node: dict[str, list[bytes]] = {}
    for event, line in zip(fleet.events(), fleet.lines(), strict=True):
        by_node.setdefault(event.node, []).append(line)
    for node, lines in by_node.items():
        (root / node / "attempt-0").mkdir(parents=True)
        (root / node / "attempt-0" / f"{node}.1.1.events").write_bytes(b"".join(lines))
    program = Program(env, tmp_path / "data")
    try:
        links = [Link(target(program.url, {}), timeout_s=5) for _ in by_node]
        folders = [root / node / "attempt-0" for node in by_node]
        threads = [threading.Thread(target=shipped, args=pair) for pair in zip(folders, links, strict=True)]
        for thread in threads:
            thread.start()
        rng = random.Random(1)
        for _ in range(2):
            time.sleep(rng.uniform(0.05, 0.3))
            program.kill()
            program.start()
        for thread in threads:
            thread.join()
    finally:
        program.kill()
    with running_service(tmp_path / "data") as service:
        assert service.raw_lines() == sorted(line.rstrip() for lines in by_node.values() for line in lines)
        reconcile(service.service.database, service.service.raw)
        until = time.monotonic() + 300
        while [row.done for row in service.rows(schema.batch)] != [True] * len(service.raw()):
            assert time.monotonic() < until
            time.sleep(0.1)
        (kept,) = service.rows(schema.start_report)
        derived = json.loads(zstandard.decompress(kept.json))
        report = json.loads(read_report([str(root)], Options(), {}).to_text())
        assert (derived["stages"], derived["nodes"]) == (report["stages"], report["nodes"])


@pytest.mark.postgres
@pytest.mark.parametrize("seed", range(1, 1 + int(os.environ.get("BOOTSEER_TEST_SEEDS", "1"))))
def test_whatever_is_killed_at_any_moment_each_line_counts_once(env, tmp_path, seed):
    """The service, its fork server, PostgreSQL and senders are killed while nodes, whose clocks jump by minutes, write
    their spools; in the end the service agrees with `bootseer report` on the spools."""
    chance = random.Random(seed)
    fleet = Fleet(6, job="moe", seed=seed, clock_step={1: (INSTALL, 300.0), 4: (INSTALL, -200.0)})
    lines = list(zip([event.node for event in fleet.events()], fleet.lines(), strict=True))
    roots = [tmp_path / "spools" / str(number) for number in range(2)]

    def written(part: int, parts: int) -> None:
        for node, line in lines[part * len(lines) // parts : (part + 1) * len(lines) // parts]:
            folder = roots[int(node[-1]) % 2] / "moe" / "attempt-0"
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"{node}.1.1.events").open("ab") as file:
                file.write(line)

    def sender(root: Path) -> subprocess.Popen[bytes]:
        root.mkdir(parents=True, exist_ok=True)
        command = [*BOOTSEER, "ship", "--follow", "--to", program.url, str(root)]
        return subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)

    with running_postgres() as postgres:
        database = postgres.new_database()
        program = Program(env, tmp_path / "data", "--database", database)
        senders: list[subprocess.Popen[bytes]] = []
        try:
            senders += [sender(root) for root in roots]
            steps = [
                "service",
                "workers",
                "database",
                "sender",
                *chance.choices(["workers", "database", "sender"], k=3),
            ]
            chance.shuffle(steps)
            for number, victim in enumerate(steps):
                written(number, len(steps))
                time.sleep(chance.uniform(0.0, 1.5))
                if victim == "service":
                    program.kill()
                    program.start()
                elif victim == "workers":
                    for process in psutil.Process(program.process.pid).children(recursive=True):
                        with contextlib.suppress(psutil.NoSuchProcess):
                            process.kill()
                elif victim == "sender":
                    which = chance.randrange(2)
                    senders[which].kill()
                    senders[which].wait()
                    senders[which] = sender(roots[which])
                else:
                    postgres.kill()
                    time.sleep(chance.uniform(0.0, 0.5))
                    postgres.start()
            with (
                contextlib.closing(Database(database)) as looks,
                contextlib.closing(open_store(f"{tmp_path}/data/raw")) as store,
            ):
                raw, until = RawStore(store), time.monotonic() + 300
                # A sender that is killed before it has stored its position sends a batch again.
                wanted = {line.rstrip() for _, line in lines}
                while True:
                    came = {name: raw.read(name).splitlines() for name in raw.names()}
                    with looks.read() as connection:
                        done = {row.raw_key for row in connection.execute(select(schema.batch)) if row.done}
                        told = connection.execute(select(schema.start_report.c.json)).scalars().all()
                    if set(itertools.chain(*came.values())) == wanted and done == set(came):
                        break
                    assert time.monotonic() < until, (len(came), len(done))
                    time.sleep(0.2)
        finally:
            program.kill()
            for process in senders:
                process.kill()
                process.wait()
    assert len(told) == 1
    derived = json.loads(zstandard.decompress(told[0]))
    report = json.loads(read_report([str(root) for root in roots], Options(), {}).to_text())
    assert (derived["stages"], derived["nodes"]) == (report["stages"], report["nodes"])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=1m") as folder:
        yield folder


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_of_the_service_refuses_and_of_the_node_costs_a_repetition(disk, tmp_path):
    with running_service(tmp_path / "data", raw=str(disk / "raw")) as service:
        folder = disk / "moe" / "attempt-0"
        folder.mkdir(parents=True)
        data = b"".join(Fleet(2).lines())
        (folder / "node.1.1.events").write_bytes(data)
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        link = Link(target(service.url, {}))
        shipper = Shipper(str(folder), link)
        assert not shipper.step()
        assert "HTTP 503" in link.problem
        assert list(service.service.raw.names()) == []
        filler.unlink()
        link.not_before = 0.0
        assert shipper.step()
        shipper.close()
        link.close()
        assert service.raw_lines() == sorted(data.splitlines())
        assert httpx.get(f"{service.url}/healthz").status_code == 200


@pytest.mark.postgres
def test_lines_are_taken_while_the_database_is_away_and_derived_when_it_is_back(tmp_path):
    with (
        running_postgres() as server,
        running_service(tmp_path / "data", database=server.new_database()) as service,
    ):
        server.stop()
        for number in range(3):
            data = b"".join(Fleet(2, attempt=number).lines())
            answer = service.post("/v1/lines", data, x_bootseer_sender="n", x_bootseer_sequence=str(number))
            assert answer.status_code == 202
        server.start()
        assert {row.attempt for row in service.rows(schema.start, 3)} == {0, 1, 2}


@pytest.mark.postgres
def test_pages_report_a_database_that_hangs_and_the_service_ends_without_it(env, tmp_path):
    code = (
        "from bootseer.cli.main import main; from bootseer.service import access, app, pages; "
        "access._HUNG_S = pages._DEADLINE_S = 0.5; app._MUST_END_S = 3; main()"
    )
    with running_postgres() as server, contextlib.ExitStack() as stack:
        database = ("--database", server.new_database())
        program = Program(env, tmp_path / "data", *database, program=(sys.executable, "-c", code))
        stack.callback(program.kill)

        def is_shown() -> bool:
            return ask("GET", f"{program.url}/now").status_code == 200  # a page whose answers are not reused

        def sent(number: int) -> int:
            data = b"".join(Fleet(1, attempt=number).lines())
            sender = {"x-bootseer-sender": "n", "x-bootseer-sequence": str(number)}
            return ask("POST", f"{program.url}/v1/lines", content=data, headers=sender).status_code

        until(is_shown)  # on a busy machine a page may take as long as the deadline
        with server.hanging():
            # More requests than the pages have threads.
            found = [ask("GET", f"{program.url}/jobs?since={days}d") for days in (1, 7, 30, 90, 365)]
            assert {answer.status_code for answer in found} == {503}
            assert "no answer in 0.5 s" in found[0].text
            assert sent(0) == 202
            assert ask("GET", f"{program.url}/healthz").status_code == 200
        until(is_shown)
        with server.hanging():
            assert ask("GET", f"{program.url}/jobs?since=7d").status_code == 503
            assert sent(1) == 202  # so there is a row for which the end waits
            program.process.terminate()
            assert program.process.wait(60) == 1


def test_lines_over_tls(tmp_path, monkeypatch):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make_certificate(key, certificate)
    settings = Settings(tmp_path / "data", listen=("127.0.0.1", 0), certificate=certificate, key=key)
    service = RunningService(settings)
    service.start()
    try:
        folder = tmp_path / "spool" / "moe" / "attempt-0"
        folder.mkdir(parents=True)
        (folder / "n.1.1.events").write_bytes(b"".join(Fleet(1).lines()))
        stranger = Link(target(service.url, {}))
        shipper = Shipper(str(folder), stranger)
        assert not shipper.step()
        assert "CERTIFICATE_VERIFY_FAILED" in stranger.problem
        shipper.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        link = Link(target(service.url, {}))
        shipper = Shipper(str(folder), link)
        assert shipper.step()
        shipper.close()
        link.close()
    finally:
        service.close()

"""Blocks read by ended jobs on this node, served by the agent: a real agent and real runs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.agent.agent import PEERS, STATUS, request
from bootseer.agent.ended_jobs import _MAX_JOBS, EndedJobs
from bootseer.errors import AccessError, BootseerError, NotFoundError, PermanentError
from bootseer.peers.choice import Level
from bootseer.peers.client import Client, UnreachableError
from bootseer.peers.members import read_secret
from bootseer.peers.protocol import Request
from bootseer.peers.server import MAX_CONNECTIONS
from bootseer.store.file import FileStore
from conftest_launch import BOOTSEER
from fetch.files import BLOCK, content, stored
from registry import free_port
from waiting import until

DATA = content(12)
READ = """
import os, sys, time
from pathlib import Path
from bootseer.blocks.index import Index
from bootseer.cache.cache import Cache
from bootseer.peers.job import JobPeers
index, data, cache = Index.parse(Path("index").read_bytes()), Path("data").read_bytes(), Path("cache/blocks").absolute()
cached = Cache(cache).open(index)
JobPeers.of_environment().register_blocks(index.identity, "store", False, cache)
for block in range(index.num_blocks - 1):
    cached.put(block, data[block * index.block_size : (block + 1) * index.block_size])
cached.close()
Path("there").touch()
while len(sys.argv) > 1 and not Path("end").exists():
    time.sleep(0.02)
"""


class Lab:
    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.address = folder, f"127.0.0.1:{port}"
        self.index = stored(FileStore(folder / "store"), DATA)
        (folder / "index").write_bytes(self.index.encode())
        (folder / "data").write_bytes(DATA)
        (folder / "secret").write_bytes(os.urandom(32))
        (folder / "secret").chmod(0o600)
        self.runtime = folder / "run"
        self.tls = False
        self.env = {**os.environ, "BOOTSEER_CACHE": str(folder / "cache"), "BOOTSEER_RUNTIME": str(self.runtime)}
        self.agent = subprocess.Popen([*BOOTSEER, "agent", "run", "--every", "1"], env=self.env)
        until((self.runtime / "agent").exists)

    def job(self, *words: str) -> subprocess.Popen[bytes]:
        peers = [
            *["--peers-tls"] * self.tls,
            "--peers",
            self.address,
            "--peers-secret",
            str(self.folder / "secret"),
            "--job",
            "j",
        ]
        command = [*BOOTSEER, "run", *peers, "--", sys.executable, "-c", READ, *words]
        return subprocess.Popen(command, env=self.env, cwd=self.folder)

    def ask(self, block: int, *, secret: bytes = b"", file: str = "") -> bytes:
        into = bytearray(BLOCK)
        client = Client(secret or read_secret(self.folder / "secret"), tls=self.tls)
        asked = Request(file or self.index.identity, block * BLOCK, BLOCK, Level.GLOBAL, "m")
        try:
            client.read(self.address, asked, memoryview(into), on_progress=lambda _: 10.0)
        finally:
            client.close()
        return bytes(into)

    def held(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = request(self.runtime, STATUS)["peers"]
        return found


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path, free_port())
    yield lab
    (tmp_path / "end").touch()  # also after a failure
    lab.agent.kill()
    lab.agent.wait()


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True])
def test_the_agent_serves_what_an_ended_job_has_read_and_nothing_else(lab: Lab, tls: bool) -> None:
    lab.tls = tls
    assert lab.job().wait(300) == 0
    (held,) = lab.held()
    assert (held["addresses"], held["files"]) == ([lab.address], 1)
    assert lab.ask(3) == DATA[3 * BLOCK : 4 * BLOCK]
    with pytest.raises(NotFoundError):
        lab.ask(lab.index.num_blocks - 2, file="ab" * 32)
    with pytest.raises(UnreachableError if tls else AccessError):
        lab.ask(3, secret=b"x" * 32)
    until(lambda: lab.held()[0]["sent_bytes"] == BLOCK)  # counted after the last byte
    with pytest.raises(PermanentError, match="malformed"):
        request(lab.runtime, PEERS, {"secret": "00", "name": "n", "rate": 1, "addresses": [lab.address], "files": {}})
    assert read_secret(lab.folder / "secret").hex() not in json.dumps(request(lab.runtime, STATUS))


@pytest.mark.slow
def test_a_job_takes_its_address_back_and_does_not_notice_that_the_agent_is_killed(lab: Lab) -> None:
    assert lab.job().wait(300) == 0
    (lab.folder / "there").unlink()
    lab.address = lab.address.replace("127.0.0.1", "localhost")  # another list may have a different name for the node
    job = lab.job("stay")
    until((lab.folder / "there").exists)
    assert not lab.held()
    lab.agent.send_signal(signal.SIGKILL)
    lab.agent.wait()

    def answers() -> bool:
        try:
            return lab.ask(3) == DATA[3 * BLOCK : 4 * BLOCK]
        except BootseerError:
            return False

    until(answers)
    (lab.folder / "end").touch()
    assert job.wait(300) == 0
    with pytest.raises(BootseerError):
        lab.ask(3)


@pytest.mark.root
def test_a_node_whose_own_name_is_a_loopback_address_serves_others(tmp_path: Path) -> None:
    """Like in Debian's /etc/hosts."""
    (tmp_path / "hosts").write_text("127.0.1.1 node7\n")
    port = free_port()
    program = f"""
import socket
from bootseer.agent.ended_jobs import EndedJobs
job = {{"secret": "00" * 32, "name": "node7", "rate": 1, "addresses": ["node7:{port}"], "files": {{}}}}
EndedJobs(60.0).take_over(job)
socket.create_connection(("127.0.0.1", {port}))
"""
    script = 'mount --bind "$1" /etc/hosts && exec "$2" -c "$3"'
    words = ["unshare", "--mount", "sh", "-c", script, "sh", tmp_path / "hosts", sys.executable, program]
    subprocess.run(words, check=True)


def test_of_jobs_with_one_secret_the_files_that_were_read_last_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent of a fleet with one secret would otherwise remember all files of months."""
    monkeypatch.setattr("bootseer.agent.ended_jobs._MAX_FILES", 3)
    ended = EndedJobs(60.0)
    job = {"secret": "00" * 32, "name": "n", "rate": 1, "addresses": [f"127.0.0.1:{free_port()}"]}
    for names in ("ab", "ac", "de"):
        ended.take_over({**job, "files": {name * 64: "/cache" for name in names}})
    assert [list(each.files) for each in ended._jobs.values()] == [[name * 64 for name in "cde"]]
    ended.close()


def test_few_jobs_are_remembered_even_if_none_can_be_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        job = {"name": "n", "rate": 1, "addresses": [f"127.0.0.1:{other.getsockname()[1]}"], "files": {}}
        ended = EndedJobs(60.0)
        for number in range(_MAX_JOBS + 5):
            with pytest.raises(PermanentError, match="cannot listen"):
                ended.take_over({**job, "secret": f"{number:064x}"})
    assert len(ended._jobs) == _MAX_JOBS


def test_the_unit_allows_the_threads_of_all_ended_jobs() -> None:
    unit = Path(__file__).parents[2] / "contrib" / "systemd" / "bootseer-agent.service"
    allowed = re.search(r"(?m)^TasksMax=(\d+)$", unit.read_text())
    assert allowed is not None
    assert int(allowed[1]) > _MAX_JOBS * (MAX_CONNECTIONS + 2)  # two interfaces, each with an accepting thread

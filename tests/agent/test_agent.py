"""The node agent: it frees disk space, serves metrics, and may be killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

import warm
from bootseer.agent.agent import STATUS, Agent, AgentSettings, _Server, request
from bootseer.cache.cache import Cache
from bootseer.errors import NotFoundError, PermanentError, TransientError
from bootseer.mounts import control
from cached import content, index_of
from fleet import Fleet
from registry import free_port
from running_service import running_service

pytestmark = pytest.mark.slow

_DEADLINE_S = 300.0
_UNITS = Path(__file__).parents[2] / "contrib" / "systemd"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "BOOTSEER_CACHE": str(tmp_path / "cache"), "BOOTSEER_RUNTIME": str(tmp_path / "run")}


@pytest.fixture
def start(env: dict[str, str], tmp_path: Path) -> Iterator[Start]:
    agents: list[subprocess.Popen[str]] = []

    def run(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "bootseer", "agent", "run", "--every", "1", *options]
        agents.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        until = time.monotonic() + _DEADLINE_S
        while agents[-1].poll() is None and not status(env).stdout:
            assert time.monotonic() < until
            time.sleep(0.05)
        return agents[-1]

    yield run
    for agent in agents:
        agent.kill()
        agent.communicate(timeout=_DEADLINE_S)


def ended(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return warm.bootseer(("agent", *words), env=env, cwd=Path.cwd())


def status(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return ended(env, "status", "--json")


def said(env: dict[str, str]) -> dict[str, object]:
    document: dict[str, object] = json.loads(status(env).stdout)
    return document


def test_it_keeps_and_reports_the_limit_of_the_cache(env: dict[str, str], start: Start, tmp_path: Path) -> None:
    data = content(12)
    index = index_of(data)
    cached = Cache(tmp_path / "cache" / "blocks").open(index)
    for block in range(index.num_blocks):
        cached.put(block, data[block * index.block_size : (block + 1) * index.block_size])
    converted = tmp_path / "cache" / "converted" / "sha256" / "00" / ("0" * 64)  # of an image that no start has used
    converted.parent.mkdir(parents=True)
    converted.touch()
    os.utime(converted, (0, 0))
    port = free_port()
    start("--cache-limit", "4k", "--listen", f"127.0.0.1:{port}")
    assert said(env)["cache"]["files"] == 1, "what is in use stays"  # type: ignore[index]
    cached.close()
    until = time.monotonic() + _DEADLINE_S
    while not int(str(said(env)["freed_bytes"])):  # counted after the files are removed
        assert time.monotonic() < until
        time.sleep(0.05)
    assert said(env)["cache"]["files"] == 0  # type: ignore[index]
    assert not converted.exists()
    metrics = get(port, "/metrics")
    assert get(port, "/healthz") == (200, "ok\n")
    assert get(port, "/v1/status")[0] == 404, "names of images and folders are only on the socket"
    lines = metrics[1].splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values["bootseer_up"] == "1"
    assert float(values["bootseer_cache_freed_bytes_total"]) > 0
    assert values['bootseer_mounts{health="daemon dead"}'] == "0"
    named = re.compile(r'[a-z_]+(\{[a-z_]+="[a-z ]+"\})? [0-9.e+]+|# (HELP|TYPE) [a-z_]+ .+')
    assert [line for line in lines if not named.fullmatch(line)] == []


def get(port: int, path: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=_DEADLINE_S)
    connection.request("GET", path)
    answer = connection.getresponse()
    with answer:
        found = answer.status, answer.read().decode()
    connection.close()
    return found


def test_spools_without_a_service_are_an_error(env: dict[str, str], tmp_path: Path) -> None:
    agent = ended(env, "run", "--spool", str(tmp_path))
    assert (agent.returncode, "--spool needs --ship-to" in agent.stderr) == (2, True)


def test_there_is_one_agent_and_a_killed_one_leaves_nothing_in_the_way(
    env: dict[str, str], start: Start, tmp_path: Path
) -> None:
    first = start()
    second = ended(env, "run")
    assert second.returncode == 2
    assert "an agent runs already" in second.stderr
    elsewhere = ended({**env, "BOOTSEER_RUNTIME": str(tmp_path / "other")}, "run")
    assert elsewhere.returncode == 2
    assert f"an agent with another runtime folder cleans up {env['BOOTSEER_CACHE']}" in elsewhere.stderr
    assert said(env)["pid"] == first.pid
    first.kill()
    first.wait(_DEADLINE_S)
    third = status(env)
    assert (third.returncode, "no agent runs on this node" in third.stderr) == (1, True)
    again = start()
    assert said(env)["pid"] == again.pid
    again.send_signal(signal.SIGTERM)
    assert again.wait(_DEADLINE_S) == 0
    assert not Path(env["BOOTSEER_RUNTIME"], "agent").exists()


def test_slow_and_silent_connections_do_not_block_others(env: dict[str, str], start: Start) -> None:
    start()
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(20)]
        for link in links:
            link.connect(str(Path(env["BOOTSEER_RUNTIME"], "agent")))
        runtime = Path(env["BOOTSEER_RUNTIME"])
        # Not with the command: the connections are dropped after some seconds, maybe before a process has started.
        with pytest.raises(TransientError, match="try again"):
            request(runtime, STATUS)
        until = time.monotonic() + _DEADLINE_S
        refused = True
        while refused:  # even while they continue
            assert time.monotonic() < until
            for link in links:
                with contextlib.suppress(OSError):
                    link.send(b"x")
            time.sleep(0.1)
            with contextlib.suppress(TransientError):
                refused = not request(runtime, STATUS)


def test_a_request_without_a_thread_does_not_block_later_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    agent = Agent(AgentSettings(tmp_path / "cache", tmp_path))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with _Server(agent, control.listen(tmp_path, "agent")) as server, socket.socket(socket.AF_UNIX) as link:
        server.slots = threading.BoundedSemaphore(1)
        link.connect(str(tmp_path / "agent"))
        server.handle_request()
        assert link.recv(1) == b""
        assert server.slots.acquire(blocking=False)


@pytest.mark.parametrize(("gone", "named"), [("cache", "cache/blocks/files"), ("mounts", "mounts")])
def test_a_folder_that_cannot_be_read_is_named(gone: str, named: str, tmp_path: Path) -> None:
    """Its disk has failed, or it was deleted. The error was that the agent is busy, and metrics got no answer."""
    agent = Agent(AgentSettings(tmp_path / "cache", tmp_path))
    shutil.rmtree(tmp_path / gone)
    with _Server(agent, control.listen(tmp_path, "agent")) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        with pytest.raises(PermanentError, match=f"{named}: No such file"):
            request(tmp_path, STATUS)
        server.shutdown()


def test_the_journal_has_the_reason_for_a_failed_cleanup(start: Start, tmp_path: Path) -> None:
    port = free_port()
    agent = start("--listen", f"127.0.0.1:{port}")
    shutil.rmtree(tmp_path / "run" / "mounts")
    until, health = time.monotonic() + _DEADLINE_S, 200
    while health == 200:
        assert time.monotonic() < until
        time.sleep(0.05)
        with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=_DEADLINE_S)) as link:
            link.request("GET", "/healthz")
            health = link.getresponse().status
    agent.terminate()
    assert "cleaning up failed" in agent.communicate(timeout=_DEADLINE_S)[1]


def test_the_cache_is_limited_although_another_step_of_a_cleanup_fails(tmp_path: Path) -> None:
    agent = Agent(AgentSettings(tmp_path / "cache", tmp_path / "run", max_bytes=4096))
    data = content(12)
    index = index_of(data)
    with contextlib.closing(Cache(tmp_path / "cache" / "blocks").open(index)) as cached:
        cached.put(0, data[: index.block_size])
    shutil.rmtree(tmp_path / "run" / "mounts")
    agent.clean_up()
    assert "mounts" in agent.problem()
    assert not agent._cache.entries()


def test_the_units_are_what_systemd_reads(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for unit in _UNITS.iterdir():
        text = unit.read_text().replace("/usr/local/bin/bootseer", sys.executable)
        (tmp_path / unit.name).write_text(text)
    ran = subprocess.run(
        ["systemd-analyze", "verify", *map(str, tmp_path.iterdir())],
        capture_output=True, text=True, check=False, timeout=_DEADLINE_S,
    )  # fmt: skip
    assert [line for line in ran.stderr.splitlines() if "bootseer-agent" in line] == []


def test_the_agent_sends_spools_of_all_jobs_and_reports_its_progress(start, env, tmp_path):
    """Also while the service is down: the events are sent when it is back."""
    root = tmp_path / "spool"
    for job in ("a", "b"):
        folder = root / job / "attempt-0"
        folder.mkdir(parents=True)
        (folder / "node-0.1.1.events").write_bytes(b"".join(Fleet(1, job=job).lines()))
    with running_service(tmp_path / "data") as service:
        url = service.url
        start("--ship-to", url, "--spool", str(root))
        assert {row.job for row in service.batches(2)} == {"a", "b"}
    assert said(env)["service"] == {"batches": 2, "problem": ""}
    with (root / "a" / "attempt-0" / "node-0.1.1.events").open("ab") as file:
        file.write(b"".join(Fleet(1, job="a", attempt=1).lines()))
    until = time.monotonic() + _DEADLINE_S
    while not said(env)["service"]["problem"]:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert said(env)["problem"] == ""


def test_a_socket_that_cannot_be_made_or_used_is_one_line(start: Start, env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "run" / "agent"
    path.mkdir(parents=True, mode=0o700)
    refused = ended(env, "run")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr
    assert f"{path}: cannot create the socket" in refused.stderr
    path.rmdir()
    start()
    if os.geteuid() == 0:
        child = os.fork()
        if child == 0:  # another user, without access to the folder
            os.setuid(65534)
            try:
                request(tmp_path / "run", STATUS)
            except NotFoundError as error:
                os._exit(0 if f"{path}: Permission denied" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0

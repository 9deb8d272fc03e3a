"""Stacks of late processes: requested by a real service, taken by py-spy from a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bootseer.launch.doctor import check_stacks
from bootseer.service.deadlines import Deadlines
from bootseer.service.histogram import CLASSES
from bootseer.trace import stacks
from bootseer.trace.event import decode
from bootseer.trace.stacks import Sampler, StackRequest, read_requests
from conftest_launch import BOOTSEER
from fleet import INSTALL
from running_service import running_service

STUCK = f"""
import time, bootseer

def waits_for_the_licence():
    password = "hunter2"
    time.sleep(600)

with bootseer.stage({INSTALL!r}):
    waits_for_the_licence()
"""


@pytest.fixture(autouse=True, scope="module")
def py_spy() -> None:
    check = check_stacks()
    if check.status != "ok":
        pytest.skip(f"py-spy: {check.why}")


@contextmanager
def child(*words: str, **env: str) -> Iterator[int]:
    """A process that has written a line."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, **env}) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.mark.slow
def test_the_service_shows_where_a_late_process_stands(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootseer.service.deadlines._UNDER_WAY_S", 0.0)
    (tmp_path / "stuck.py").write_text(STUCK)
    with running_service(tmp_path / "data") as running:
        service = running.service
        days = [(bucket, "full", "off", INSTALL, (20, *[0] * (CLASSES - 1))) for bucket in range(-1, 7)]
        service.over_time._learned = time.monotonic(), Deadlines(days)
        words = ["run", "--job", "moe", "--trace-to", f"service={running.url}", "--", sys.executable, "stuck.py"]
        job = subprocess.Popen([*BOOTSEER, *words], cwd=tmp_path, env={**env, stacks.SWITCH: "1"})
        try:
            now: dict[str, Any] = {}
            until = time.monotonic() + 300
            while "waits_for_the_licence" not in json.dumps(now):
                assert time.monotonic() < until and job.poll() is None, now
                service.alerts.evaluate(time.time_ns())
                time.sleep(0.3)
                now = httpx.get(f"{running.url}/api/v1/now", timeout=60).json()
            (late,) = now["starts"][0]["late"]
            assert late["stack"].startswith("waits_for_the_licence (stuck.py:6) < <module> (stuck.py:9)")
            assert "waits_for_the_licence (stuck.py:6)" in httpx.get(f"{running.url}/now", timeout=60).text
            with subprocess.Popen(
                [*BOOTSEER, "watch", "moe", "--service", running.url], env=env, stdout=subprocess.PIPE, text=True
            ) as watch:
                assert watch.stdout is not None
                assert "over p99, in waits_for_the_licence (stuck.py:6))" in watch.stdout.readline()
                watch.kill()
        finally:
            job.kill()
            job.wait()
        while "waits_for_the_licence" not in (page := httpx.get(f"{running.url}/start/0/0/moe", timeout=60).text):
            assert time.monotonic() < until
            time.sleep(0.3)
        told = b"".join(running.raw_lines())
    assert told.count(b'"stack_sample"') == 1, "once"
    assert b"hunter2" not in told and "hunter2" not in page


def test_only_processes_that_agreed_are_sampled_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    python = (sys.executable, "-uc", "import time; print(); time.sleep(600)")
    job = f"moe-{uuid.uuid4()}"  # no other process on this machine
    whose = {"BOOTSEER_JOB": job, "BOOTSEER_NODE": "n1", "BOOTSEER_ATTEMPT": "2"}

    def told(sampler: Sampler, pid: int, node: str = "n1", attempt: int = 2) -> list[dict[str, Any]]:
        wanted = StackRequest(job, attempt, 0, node, 3, INSTALL, pid)
        (read,) = read_requests([wanted._asdict(), {"job": "moe"}, 7])
        return [dict(decode(line).attrs) for line in sampler.lines([read])]

    with child(*python, **whose) as silent:
        assert told(Sampler(), silent) == []
    with child(*python, **whose, **{stacks.SWITCH: "1"}) as pid:
        sampler = Sampler()
        assert told(sampler, pid, node="n2") == told(sampler, pid, attempt=1) == []
        (attrs,) = told(sampler, pid)
        assert attrs["stack"] == "<module> (<string>:1)" and attrs["of_rank"] == 3
        assert told(sampler, pid) == []
        (other,) = told(Sampler(), 1 << 30)
        assert other["stack"] == f"newest process of the job: {attrs['stack']}", "another program may tell of a stage"
        monkeypatch.setattr(stacks, "program", lambda: None)
        assert told(Sampler(), pid)[0]["why_not"] == "py-spy is not installed on the node"
    monkeypatch.undo()
    with child("sh", "-c", "echo; exec sleep 600", **whose, **{stacks.SWITCH: "1"}) as pid:
        assert told(Sampler(), pid)[0]["why_not"].startswith("py-spy: ")
    assert read_requests({"a": 1}) == read_requests(None) == []

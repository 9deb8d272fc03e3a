"""Schedulers' records of the time before the job got its node, and the events made from them."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bootseer.launch.queue_times import Times, parse_time, times
from bootseer.units import NS_PER_S
from conftest_launch import stages
from registry import make_certificate


def told(env: dict[str, str]):
    return times(env, threading.Event())


def ago(seconds: float) -> str:
    return datetime.fromtimestamp(time.time() - seconds, UTC).isoformat()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-20T17:54:26Z", 1795197266 * NS_PER_S),
        ("2026-11-20T17:54:26.123456789+00:00", 1795197266 * NS_PER_S + 123456000),
        ("1795197266", 1795197266 * NS_PER_S),
        ("1795197266.25", 1795197266 * NS_PER_S + 250_000_000),
        ("Unknown", None),
        ("", None),
        ("9" * 400, None),
        ("2026-13-45T00:00:00", None),
    ],
)
def test_times_are_read_or_unobserved(text, expected):
    assert parse_time(text) == expected


def test_kubernetes_tells_when_the_node_saw_the_pod(tmp_path):
    (tmp_path / "annotations").write_text(
        f'a="b"\nkubernetes.io/config.seen="{ago(20)}"\nkubernetes.io/config.source="api"\n'
    )
    found = told({"BOOTSEER_PODINFO": str(tmp_path)})
    assert found.submitted_ns is None
    assert found.started_ns == pytest.approx(time.time_ns() - 20 * NS_PER_S, abs=5 * NS_PER_S)
    assert found.started_by == "kubernetes"


@pytest.mark.parametrize("content", ["", 'kubernetes.io/config.seen="soon"', "\x00" * 100, None])
def test_annotations_without_a_time_are_unobserved(tmp_path, content):
    if content is not None:
        (tmp_path / "annotations").write_text(content)
    assert told({"BOOTSEER_PODINFO": str(tmp_path)}).started_ns is None


@pytest.fixture
def api(tmp_path, monkeypatch):
    """A pod's service account, and an API server that answers with the contents of `pods`."""
    make_certificate(tmp_path / "key.pem", tmp_path / "ca.crt")
    for name, text in (("token", "secret\n"), ("namespace", "train")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("bootseer.launch.queue_times.ACCOUNT", tmp_path)
    pods: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers["Authorization"] == "Bearer secret"
            body = pods.get(self.path.partition("?")[0]) if allowed else None
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *words: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key.pem")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = str(server.server_address[1])
        env = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port, "POD_NAME": "moe-0"}
        yield env | {"POD_UID": "u"}, pods
        server.shutdown()


def pod(restarts: int = 0, uid: str = "u") -> bytes:
    conditions = [{"type": "Initialized"}, {"type": "PodScheduled", "lastTransitionTime": "2026-11-20T17:54:30Z"}]
    status = {"conditions": conditions, "containerStatuses": [{"restartCount": restarts}]}
    return json.dumps(
        {"metadata": {"uid": uid, "creationTimestamp": "2026-11-20T17:54:26Z"}, "status": status}
    ).encode()


def test_a_pod_that_may_read_itself_learns_when_it_was_made(api, tmp_path):
    env, pods = api
    pods["/api/v1/namespaces/train/pods/moe-0"] = pod()
    found = told(env)
    assert found == (1795197266 * NS_PER_S, 1795197270 * NS_PER_S, "kubernetes api", "kubernetes")
    assert told(env | {"POD_UID": ""}) == found
    # The time at which the node saw the pod is more precise.
    (tmp_path / "annotations").write_text(f'kubernetes.io/config.seen="{ago(20)}"\n')
    found = told(env | {"BOOTSEER_PODINFO": str(tmp_path)})
    assert found.submitted_ns == 1795197266 * NS_PER_S
    assert found.started_ns == pytest.approx(time.time_ns() - 20 * NS_PER_S, abs=200 * NS_PER_S)


@pytest.mark.parametrize(
    "answer", [None, b"", b"[]", b'{"status": 7}', b'{"metadata": {"uid": "u"}}', pod(restarts=1), pod(uid="other")]
)
def test_times_are_unobserved_without_an_answer_of_the_api_server(api, answer):
    env, pods = api
    if answer is not None:
        pods["/api/v1/namespaces/train/pods/moe-0"] = answer
    assert told(env) == (None, None, "", "")
    assert told({**env, "KUBERNETES_SERVICE_PORT": "1"}) == (None, None, "", "")


def test_the_times_of_a_pods_first_start_are_not_those_of_a_restarted_container(api, tmp_path):
    env, pods = api
    pods["/api/v1/namespaces/train/pods/moe-0"] = pod(restarts=1)
    (tmp_path / "annotations").write_text(f'kubernetes.io/config.seen="{ago(1200)}"\n')
    assert told(env | {"BOOTSEER_PODINFO": str(tmp_path), "BOOTSEER_SUBMITTED": ago(1300)}) == Times()


def test_a_pod_that_was_seen_long_ago_is_a_container_started_again(tmp_path):
    (tmp_path / "annotations").write_text(f'kubernetes.io/config.seen="{ago(7200)}"\n')
    assert told({"BOOTSEER_PODINFO": str(tmp_path)}).started_ns is None


def test_times_of_two_clocks_are_no_times(tmp_path):
    (tmp_path / "annotations").write_text(f'kubernetes.io/config.seen="{ago(60)}"\n')
    found = told({"BOOTSEER_PODINFO": str(tmp_path), "BOOTSEER_SUBMITTED": ago(10)})
    assert (found.submitted_ns, found.started_ns) == (None, None)


def _program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_requeued_slurm_job_waits_from_when_it_was_eligible(tmp_path):
    line = "2026-11-20T10:00:00|2026-11-20T11:00:00|2026-11-20T11:05:00"
    _program(tmp_path, "sacct", f"echo '{line}'")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    first, again = told(env), told({**env, "SLURM_RESTART_COUNT": "1"})
    assert (first.started_ns - first.submitted_ns) / NS_PER_S == 3900
    assert (again.started_ns - again.submitted_ns) / NS_PER_S == 300


def test_only_the_first_task_asks_slurm(tmp_path):
    _program(tmp_path, "sacct", f"touch {tmp_path}/asked")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_START_TIME": "1795197266"}
    found = told({**env, "SLURM_PROCID": "3"})
    assert not (tmp_path / "asked").exists()
    assert (found.started_ns, found.started_by) == (1795197266 * NS_PER_S, "slurm environment")


REAPS = """
import os, sys, threading
from bootseer.launch.queue_times import times
found = []
thread = threading.Thread(target=lambda: found.append(times(dict(os.environ), threading.Event())))
thread.start()
while thread.is_alive():
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        pass
print(found[0].submitted_by)
"""


def test_slurm_is_asked_where_the_main_thread_reaps_all_children(tmp_path):
    _program(tmp_path, "sacct", "exit 3")
    _program(tmp_path, "scontrol", "echo SubmitTime=2026-11-20T10:00:00 EligibleTime=x StartTime=2026-11-20T10:05:00")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run([sys.executable, "-c", REAPS], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "scontrol\n", done.stderr


def test_a_hung_program_ends_with_the_run(tmp_path):
    _program(tmp_path, "sacct", f"echo $$ > {tmp_path}/pid; exec sleep 600")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    ended = threading.Event()
    thread = threading.Thread(target=lambda: times(env, ended))
    thread.start()
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.01)
    ended.set()
    thread.join(120)
    assert not thread.is_alive()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_queue_and_image_loading_become_stages(run, events, tmp_path):
    podinfo = tmp_path / "podinfo"
    podinfo.mkdir()
    (podinfo / "annotations").write_text(f'kubernetes.io/config.seen="{ago(20)}"\n')
    more = {"BOOTSEER_PODINFO": str(podinfo), "BOOTSEER_SUBMITTED": ago(50)}
    assert run("run", "--", "sleep", "0.5", more=more).returncode == 0
    found = events()
    assert {"queue", "image_loading"} <= set(stages(found))
    queue = [event for event in found if event.stage == "queue"]
    assert (queue[1].mono_ns - queue[0].mono_ns) / 1e9 == pytest.approx(30, abs=1)
    assert queue[0].attrs["told_by"] == "BOOTSEER_SUBMITTED"

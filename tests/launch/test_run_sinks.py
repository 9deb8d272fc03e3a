"""Destinations of a real run's events besides the spool: the job's own log, and a collector."""

from __future__ import annotations

import hashlib
import os
import select
import socket
import subprocess

import pytest

from bootseer.trace.event import decode
from conftest_launch import BOOTSEER, stages
from otlp_collector import collector


def test_stderr_carries_the_events_with_the_jobs_own_log(run, tmp_path):
    done = run("run", "--job", "logged", "--trace-to", "stderr", "--", "sh", "-c", "echo out; echo err >&2")
    assert done.stdout == "out\n"
    lines = [line for line in done.stderr.splitlines() if line.startswith("@bootseer1 ")]
    assert stages([decode(line.encode()) for line in lines]) == ["run", "command"]
    assert "err" in done.stderr.splitlines()
    (tmp_path / "job.log").write_text(done.stderr)
    assert "logged" in run("report", "job.log").stdout


@pytest.mark.parametrize("more", [[], ["--restarts", "1"], ["--trace-to", "service=http://127.0.0.1:9"]])
def test_the_jobs_own_log_needs_no_folder(run, more):
    """A pod's user may have no home that can be written."""
    words = ["run", "--job", "logged", "--trace-to", "stderr", *more, "--", "true"]
    done = run(*words, more={"BOOTSEER_SPOOL": "/proc/none"})
    lines = [line for line in done.stderr.splitlines() if not line.startswith("bootseer: events go only to stderr: ")]
    found = [decode(line.encode()) for line in lines]
    assert (done.returncode, stages(found), found[0].attempt) == (0, ["run", "command"], 0)
    assert (len(lines) < len(done.stderr.splitlines())) == ("--trace-to" in more)


@pytest.mark.parametrize(("more", "num_files"), [([], 0), (["--restarts", "0"], 1)])
def test_what_looks_for_events_of_the_command_finds_them_in_the_spool(run, tmp_path, more, num_files):
    assert run("run", "-q", "--trace-to", "stderr", *more, "--", "true").returncode == 0
    assert len(list((tmp_path / "spool").rglob("*.events"))) == num_files


@pytest.mark.parametrize("more", [[], ["--trace-to", "stderr"], ["--trace-to", "spool"]])
def test_a_collector_gets_the_spans_of_the_run(run, more):
    with collector() as server:
        words = ["run", "--job", "exported", *more, "--trace-to", f"otlp={server.url}", "--"]
        assert run(*words, "sh", "-c", "sleep 0.2; exit 3").returncode == 3
        spans = server.spans()
        assert set(spans) == {"run", "command"}
        assert spans["command"].parent_span_id == spans["run"].span_id
        assert server.resources()[0][0]["bootseer.job"] == "exported"


@pytest.mark.slow
def test_a_command_that_ends_before_the_exporter_is_imported_is_exported_too(run, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    with collector() as server:
        words = ["run", "--trace-to", f"otlp={server.url}", "--", "true"]
        assert (
            run(*words, more={"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}).returncode
            == 0
        )
        assert set(server.spans()) == {"run", "command"}


@pytest.mark.slow
def test_what_sends_the_last_events_holds_no_file_of_the_caller_open(env, tmp_path):
    """For example a lock of the batch script, or a pipe on whose end another program waits."""
    read, write = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as silent, os.fdopen(read, "rb") as pipe:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        words = [*BOOTSEER, "run", "-q", "--trace-to", f"service={url}", "--", "true"]
        done = subprocess.run(words, env=env, cwd=tmp_path, pass_fds=[write], capture_output=True, check=False)
        os.close(write)
        assert done.returncode == 0
        assert select.select([pipe], [], [], 15)[0], "the sender lives for up to 30 s"
        assert pipe.read() == b""


SLOW_IMPORT = """
import sys, time

class Slow:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "bootseer.trace.otlp":
            time.sleep(3)

sys.meta_path.insert(0, Slow)
"""


@pytest.mark.slow
def test_each_run_exports_only_its_own_events(run):
    """With several ranks on a node in one attempt, and with a restarted attempt."""
    with collector() as server:
        for rank in (0, 1, 1):
            words = ["run", "--job", "shared", "--attempt", "0", "--trace-to", f"otlp={server.url}", "--", "true"]
            assert run(*words, more={"RANK": str(rank)}).returncode == 0
        received = [span.span_id for _, spans in server.resources() for span in spans]
    assert len(received) == 6  # three runs, each with a span for the run and one for its command
    assert len(set(received)) == 6


def test_a_submission_in_the_past_is_exported_too(run):
    with collector() as server:
        words = ["run", "--trace-to", f"otlp={server.url}", "--", "sleep", "0.3"]
        assert run(*words, more={"BOOTSEER_SUBMITTED": "1795197266"}).returncode == 0
        assert "queue" in server.spans()


def test_a_requirements_file_that_may_not_be_read_is_reported(run, tmp_path):
    (tmp_path / "folder").mkdir()
    done = run("run", "-r", "folder", "--", "echo", "never")
    assert (done.returncode, done.stdout) == (2, "")
    assert "hint:" in done.stderr


@pytest.mark.parametrize("mode", [0o755, 0o2750])
def test_events_are_their_user_s_or_the_group_s_and_hold_no_output(run, events, tmp_path, mode):
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool").chmod(mode)
    words = ("--", "sh", "-c", "umask; echo step 1 token=s3cret")
    ran = run("run", "-q", "--began-pattern", "step 1", *words, umask=0o077)
    assert (ran.returncode, ran.stdout) == (0, "0077\nstep 1 token=s3cret\n")
    files = list((tmp_path / "spool").rglob("*.events"))
    assert files
    for path in files:
        assert b"s3cret" not in path.read_bytes()
        folder, closed = path.parent.stat().st_mode & 0o7777, path.stat().st_mode & 0o7777
        assert (folder, closed) == ((0o700, 0o600) if mode == 0o755 else (0o2750, 0o640))
    assert [event.attrs for event in events() if event.stage == "training_began"] == [{"by": "pattern"}]


def test_arguments_cannot_be_computed_from_the_digest_of_a_command(run, events):
    for word in ("secret-a", "secret-b", "secret-c"):
        assert run("run", "-q", "--", "true", word).returncode == 0
    digests = [event.attrs["command_digest"] for event in events() if "command_digest" in event.attrs]
    a, b, c = (int(digest, 16) for digest in digests)
    # For a linear function both differences would be equal, apart from the digits that were cut off.
    assert 8 < ((c - b) - (b - a)) % (2**63 - 1) < 2**63 - 8
    assert digests[0] == hashlib.blake2b(b"true\0secret-a", digest_size=8).hexdigest()

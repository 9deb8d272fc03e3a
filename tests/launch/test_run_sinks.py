"""Where the events of a real run go besides the spool: the job's own log, and a collector."""

from __future__ import annotations

import pytest

from bootseer.trace.event import decode
from conftest_launch import stages
from otlp_collector import collector


def test_stderr_carries_the_events_with_the_jobs_own_log(run, tmp_path):
    done = run("run", "--job", "logged", "--trace-to", "stderr", "--", "sh", "-c", "echo out; echo err >&2")
    assert done.stdout == "out\n"
    lines = [line for line in done.stderr.splitlines() if line.startswith("@bootseer1 ")]
    assert stages([decode(line.encode())[0] for line in lines]) == ["run", "command"]
    assert "err" in done.stderr.splitlines()
    (tmp_path / "job.log").write_text(done.stderr)
    assert "logged" in run("report", "job.log").stdout


@pytest.mark.parametrize("more", [[], ["--trace-to", "stderr"], ["--trace-to", "spool"]])
def test_a_collector_gets_the_spans_of_the_run(run, more):
    with collector() as server:
        words = ["run", "--job", "exported", *more, "--trace-to", f"otlp={server.url}", "--"]
        assert run(*words, "sh", "-c", "sleep 0.2; exit 3").returncode == 3
        spans = server.spans()
        assert set(spans) == {"run", "command"}
        assert spans["command"].parent_span_id == spans["run"].span_id
        assert server.resources()[0][0]["bootseer.job"] == "exported"


def test_each_run_exports_only_its_own_events(run):
    """Ranks that share a node and an attempt, and an attempt that is started again."""
    with collector() as server:
        for rank in (0, 1, 1):
            words = ["run", "--job", "shared", "--attempt", "0", "--trace-to", f"otlp={server.url}", "--", "true"]
            assert run(*words, more={"RANK": str(rank)}).returncode == 0
        received = [span.span_id for _, spans in server.resources() for span in spans]
    assert len(received) == 6  # three runs, each with its command
    assert len(set(received)) == 6


def test_a_submission_in_the_past_is_exported_too(run):
    with collector() as server:
        words = ["run", "--trace-to", f"otlp={server.url}", "--", "sleep", "0.3"]
        assert run(*words, more={"BOOTSEER_SUBMITTED": "1795197266"}).returncode == 0
        assert "queue" in server.spans()


def test_a_requirements_file_that_may_not_be_read_is_said(run, tmp_path):
    (tmp_path / "folder").mkdir()
    done = run("run", "-r", "folder", "--", "echo", "never")
    assert (done.returncode, done.stdout) == (2, "")
    assert "hint:" in done.stderr

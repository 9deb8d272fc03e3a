"""`bootseer run --process-snapshot` where CRIU, rights, space or time are missing: the job runs all the same."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.artifact.process_snapshots import ProcessSnapshot
from bootseer.hook.programs import KNOWN
from launch.test_process_snapshot import LIMIT_S, Job
from small_disks import small_disk
from waiting import processes, until

pytestmark = [pytest.mark.slow, pytest.mark.root]


@pytest.fixture
def job(tmp_path: Path, criu: str) -> Iterator[Job]:
    job = Job(tmp_path, criu)
    yield job
    until(lambda: not job.left(), "the end of all processes")


@pytest.fixture
def made(job: Job) -> Job:
    """A job with a process snapshot."""
    ran = job.run()
    assert (ran.code, ran.err, ran.warm, len(job.snapshots)) == (0, "", [False, False], 1), ran
    return job


@contextlib.contextmanager
def process_with(pid: int) -> Iterator[None]:
    """A process with this id."""
    script = "import signal\nfrom bootseer.hook.warm_child import Cloner\n"
    script += f"if not Cloner().clone({pid}):\n    signal.pause()\n"
    subprocess.run([sys.executable, "-c", script], check=True)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_without_criu_or_rights_the_command_starts_by_exec(made: Job, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho Version: 3.17.1\nexit 1\n")
    old.chmod(0o755)
    before = made.snapshots[0].read_bytes()
    right = made.env["BOOTSEER_CRIU"]
    for criu, reason, why_none in (
        ("/missing/criu", "/missing/criu: command not found", "BOOTSEER_CRIU: /missing/criu is not a program"),
        (str(old), "exit code 1", f"{old} is CRIU 3.17.1, older than 4.1.1"),
    ):
        made.env["BOOTSEER_CRIU"] = criu
        ran = made.run()
        assert (ran.code, ran.warm) == (0, [False, True]), ran
        assert reason in ran.refusals[0], ran
        assert why_none in ran.err
    made.env["BOOTSEER_CRIU"] = right
    without = ("setpriv", "--bounding-set=-checkpoint_restore,-sys_admin", "--inh-caps=-all")
    ran = made.run(before=without)
    assert (ran.code, ran.warm) == (0, [False, True]), ran
    assert "this needs CAP_CHECKPOINT_RESTORE" in ran.err
    assert made.snapshots[0].read_bytes() == before
    assert made.run().warm == [True, True]


def test_a_job_whose_working_folder_is_deleted_starts_by_exec(made: Job) -> None:
    made.write("launch.py", "print('ran')\n")
    (made.folder / "gone").mkdir()
    before = ("sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh")
    ran = made.run(before=before, cwd=made.folder / "gone")
    assert (ran.code, ran.lines) == (0, ["ran"]), ran


def test_two_runs_want_the_same_process_id(made: Job) -> None:
    pid = made.pid()
    with process_with(pid):
        ran = made.run()
    assert (ran.code, ran.warm) == (0, [False, True])
    assert ran.refusals[0].startswith("no process snapshot: criu restore: ")
    assert f" {pid}: File exists" in ran.refusals[0]
    runs = [made.start(stdin=subprocess.DEVNULL) for _ in range(4)]
    for run in runs:
        with run:
            out, err = run.communicate(timeout=LIMIT_S)
            lines = [line for line in made.parsed(out) if isinstance(line, list)]
            assert (run.returncode, err, lines[1][2]) == (0, "", lines[0][1]), out


def test_a_damaged_snapshot_is_made_anew(made: Job) -> None:
    (path,) = made.snapshots
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    ran = made.run()
    assert (ran.code, ran.warm, ran.refusals) == (0, [False, True], [""])
    assert "no process snapshot: " in ran.err
    assert made.run().warm == [True, True]
    for name in ("mm-*.img", "core-*.img", "files.img", "facts.json"):
        folder = made.folder / f"short-{name}"
        said: list[str] = []
        assert ProcessSnapshot(path, folder, said.append).unpack()
        assert (
            '"start_digest": ""' in (folder / KNOWN).read_text()
        )  # from that of all variables, secrets can be guessed
        (found,) = folder.glob(name)
        os.truncate(found, found.stat().st_size // 2)
        ProcessSnapshot(path, folder, said.append).keep(folder)
        ran = made.run()
        assert (ran.code, ran.warm, ran.err, said) == (0, [False, True], "", []), ran
        assert ran.refusals[0].startswith("no process snapshot: "), name
        assert made.run().warm == [True, True]


def test_a_command_that_fails_or_is_interrupted_makes_no_snapshot(job: Job) -> None:
    assert job.run("exit=3").code == 3
    with job.start("wait=1", stdin=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        until(lambda: process.stdout.readline() == "waits\n")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGINT
    assert job.snapshots == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_imports_or_the_dump_ends_the_run(job: Job, number: signal.Signals) -> None:
    job.write(
        "lib/tell.py",
        "import time\ntold = None\ntime.sleep(0.2 if __import__('sys').orig_argv[1][-8:] == 'child.py' else 100)\n",
    )
    began_s = time.monotonic()
    with job.start(stdin=subprocess.DEVNULL) as process:
        until(lambda: any(b"\0snapshot\0" in words and str(job.folder).encode() in words for _, words in processes()))
        process.send_signal(number)
        _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (0, "bootseer: no process snapshot was made: interrupted\n")
    assert time.monotonic() - began_s < 100
    assert job.snapshots == []


@pytest.mark.parametrize("restores", [False, True])
def test_a_run_that_is_killed_leaves_nothing_and_the_next_one_is_right(job: Job, restores: bool) -> None:
    """At any time: while it restores, runs the command, dumps and compresses."""
    if restores:
        job.run()
    whole_s = 0.5 if restores else 1.0
    for number in range(12):
        with job.start(stdin=subprocess.DEVNULL, start_new_session=True) as process:
            time.sleep(whole_s * number / 12)
            process.kill()
            process.communicate(timeout=LIMIT_S)
    ran = job.run()
    assert (ran.code, ran.err, len(ran.warm)) == (0, "", 2), ran
    until(lambda: not job.left(), "the end of all processes and folders")
    assert job.run().warm == [True, True]


def test_on_a_full_disk_the_job_runs_and_leaves_no_part_of_a_snapshot(job: Job) -> None:
    with small_disk(job.folder / "disk", "size=2m") as disk:
        job.cache = disk / "cache"
        job.env["BOOTSEER_CACHE"] = str(job.cache)
        ran = job.run()
        assert (ran.code, ran.warm, job.snapshots) == (0, [False, False], []), ran
        assert "no process snapshot was made: " in ran.err or "the process snapshot was not kept: " in ran.err
        ran = job.run()
        assert (ran.code, ran.warm[1], job.snapshots) == (0, True, [])
        assert job.left() == []
        job.cache = job.folder / "cache"

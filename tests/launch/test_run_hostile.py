"""`bootseer run` in a hostile environment: lost streams and readers, kills, limits, invalid variables."""

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

from bootseer.trace import spools
from conftest_launch import BOOTSEER, stages

pytestmark = pytest.mark.slow


def _state(pid: int) -> str:
    """The kernel's letter for a process's state; empty if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def _wait_for(pid: int, states: str) -> None:
    deadline = time.monotonic() + 120
    while _state(pid) not in states.split(","):
        assert time.monotonic() < deadline, f"{pid} is in state {_state(pid)!r}, not in {states}"
        time.sleep(0.02)


@contextlib.contextmanager
def _started(env: dict[str, str], script: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A running bootseer and the pid of its command, which has printed it."""
    words = [*BOOTSEER, "run", "-q", "--", sys.executable, "-c", script]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-", "2> >(true)"])
def test_the_exit_code_survives_lost_streams(env, closed):
    script = f"{sys.executable} -m bootseer run -- sh -c 'sleep 0.2; exit 7' {closed}"
    assert subprocess.run(["bash", "-c", script], env=env, check=False, timeout=180).returncode == 7


def test_no_message_is_written_into_a_file_that_has_the_number_of_a_closed_stream(env, tmp_path):
    script = f"{sys.executable} -m bootseer run --spool {tmp_path / 'spool'} -- readlink -q /proc/self/fd/2 2>&-"
    done = subprocess.run(["bash", "-c", script], env=env, check=False, timeout=180, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (1, b""), "the command's stream is closed, too"
    (file,) = (tmp_path / "spool").rglob("*.events")
    assert all(line.startswith(b"@bootseer1 ") for line in file.read_bytes().splitlines())


NO_THREADS = """
import sys, threading
from bootseer.cli.main import main
def refuse(_):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
main()
"""


def test_a_command_runs_unsearched_where_no_thread_can_be_started(env):
    words = ["run", "-q", "--began-pattern", "zz", "--", "sh", "-c", "echo out; exit 7"]
    done = subprocess.run(
        [sys.executable, "-c", NO_THREADS, *words], env=env, capture_output=True, text=True, check=False, timeout=180
    )
    assert (done.returncode, done.stdout) == (7, "out\n"), done.stderr
    assert "can't start new thread); the command runs without it" in done.stderr


def test_kill_9_of_bootseer_ends_the_command(env):
    """`timeout -k`, subprocess.run(timeout=...) and supervisors kill the process that they started."""
    with _started(env, SLEEP) as (process, command):
        process.kill()
        process.wait()
        _wait_for(command, ",Z,X")


def test_a_scheduler_s_rarer_signals_reach_the_command(env):
    numbers = [signal.SIGALRM, signal.SIGXCPU, signal.SIGPWR, signal.SIGABRT, signal.SIGRTMAX]
    script = f"""import os, signal, sys
missing = set({[int(number) for number in numbers]})
signal.pthread_sigmask(signal.SIG_BLOCK, missing)
print(os.getpid(), flush=True)
while missing: missing.discard(signal.sigwait(missing))
sys.exit(21)"""
    with _started(env, script) as (process, _):
        for number in numbers:
            process.send_signal(number)
        assert process.wait(timeout=180) == 21


def test_stop_and_continue_reach_the_command(env):
    with _started(env, SLEEP) as (process, command):
        process.send_signal(signal.SIGTSTP)
        _wait_for(command, "T")
        _wait_for(process.pid, "T")
        process.send_signal(signal.SIGCONT)
        _wait_for(command, "S")
        process.terminate()
        assert process.wait(timeout=180) == 143


def test_a_stop_that_the_command_catches_does_not_stop_the_run(env):
    with _started(env, f"import signal; signal.signal(20, lambda *_: exit(5)); {SLEEP}") as (process, _):
        process.send_signal(signal.SIGTSTP)
        assert process.wait(timeout=180) == 5


@pytest.mark.parametrize("flags", [[], ["--began-pattern", "zz"]], ids=["plain", "pattern"])
def test_a_reader_that_goes_ends_the_writer(env, flags):
    process = subprocess.Popen([*BOOTSEER, "run", "-q", *flags, "--", "yes"], env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read(2)
    process.stdout.close()
    assert process.wait(timeout=180) == 128 + signal.SIGPIPE


def test_the_pattern_s_relay_loses_nothing_to_a_slow_non_blocking_reader(env):
    read, write = os.pipe2(os.O_NONBLOCK)
    os.set_blocking(read, True)
    words = [*BOOTSEER, "run", "-q", "--began-pattern", "zz", "--", "head", "-c", "1000000", "/dev/zero"]
    process = subprocess.Popen(words, env=env, stdout=write)
    os.close(write)
    received = 0
    while data := os.read(read, 4096):
        received += len(data)
    os.close(read)
    assert (received, process.wait(timeout=180)) == (1_000_000, 0)


def test_the_pattern_s_relay_keeps_the_order_of_output_and_errors_in_one_log(env):
    script = "import os\nfor number in range(5000): os.write(1 + number % 2, b'%d\\n' % number)"
    words = [*BOOTSEER, "run", "-q", "--began-pattern", "zz", "--", sys.executable, "-c", script]
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True, timeout=180)
    assert done.stdout.split() == [b"%d" % number for number in range(5000)]


# Of one scheduler at a time: another one's would take precedence.
@pytest.mark.parametrize(
    "variables",
    ["BOOTSEER_JOB BOOTSEER_NODE TRACEPARENT RANK", "SLURM_JOB_ID SLURM_RESTART_COUNT", "POD_UID"],
)
@pytest.mark.parametrize("value", [b"\xff", b"a\nb\n@bootseer1 {}", b"../../etc", b"9" * 40], ids=str)
def test_wild_variables_cost_nothing(run, events, variables, value):
    more = dict.fromkeys(variables.split(), os.fsdecode(value))
    done = run("run", "-q", "--", "echo", "works", more=more)
    assert (done.returncode, done.stdout, done.stderr) == (0, "works\n", "")
    assert stages(events(), "end")[-2:] == ["command", "run"]


@pytest.mark.parametrize("more", [{}, {"BOOTSEER_DISABLE": "1"}], ids=["measured", "disabled"])
def test_a_variable_without_a_name_does_not_keep_the_command_from_its_start(run, more):
    done = run("run", "-q", "--", "env", "=x", *BOOTSEER, "run", "-q", "--", "echo", "works", more=more)
    assert (done.returncode, done.stdout, done.stderr) == (0, "works\n", "")


def test_a_huge_attempt_does_not_end_the_counting(tmp_path):
    spools.make_attempt(str(tmp_path), "job", 10**17)
    assert spools.make_attempt(str(tmp_path), "job", None)[1] == 0
    assert spools.make_attempt(str(tmp_path), "job", None)[1] == 1


def test_each_job_has_a_folder_of_its_own_and_is_found_by_its_name(run, env):
    jobs = ["a/b", "a\nb", "a b", "a_b", ".a_b", "x" * 90, "x" * 91]
    folders = {spools.make_attempt(env["BOOTSEER_SPOOL"], job, 0)[0] for job in jobs}
    assert len(folders) == len(jobs)
    assert run("run", "-q", "--job", "a/b", "--", "true").returncode == 0
    assert "a/b" in run("report", "a/b").stdout


def test_a_job_of_slurm_is_found_by_its_name_and_by_its_number(run):
    for number in ("77", "78"):
        assert run("run", "-q", "--", "true", more={"SLURM_JOB_ID": number, "SLURM_JOB_NAME": "moe"}).returncode == 0
    assert "moe-77," in run("report", "77").stdout
    assert "moe-78," in run("report", "moe").stdout
    assert "no such file" in run("report", "mo").stderr


def test_what_srun_starts_on_another_node_is_of_that_node(run, events):
    words = ["env", "SLURMD_NODENAME=n2", *BOOTSEER, "stage", "probe", "--", "true"]
    assert run("run", "-q", "--", *words, more={"SLURM_JOB_ID": "5", "SLURMD_NODENAME": "n1"}).returncode == 0
    stages = {(event.stage, event.node) for event in events() if event.stage != "alive"}  # of a slow start
    assert stages == {("run", "n1"), ("command", "n1"), ("probe", "n2")}


def test_a_command_that_never_ran_has_no_report(run):
    result = run("run", "--", "no-such-command")
    assert result.returncode == 127
    assert result.stderr == "bootseer: no-such-command: command not found\n"


@pytest.mark.parametrize(("words", "attempts"), [(["--nnodes=1"], {0, 1}), (["--nnodes", "2"], {0})])
def test_starts_of_one_node_get_numbers_of_their_own(run, events, words, attempts):
    for _ in range(2):
        assert run("run", "-q", "--", "true", *words).returncode == 0
    assert {event.attempt for event in events()} == attempts


def test_parallel_runs_of_one_job_get_numbers_of_their_own(env, tmp_path):
    words = [*BOOTSEER, "run", "-q", "--job", "many", "--", "true"]
    running = [subprocess.Popen(words, env=env) for _ in range(20)]
    assert {process.wait(timeout=180) for process in running} == {0}
    assert len(list((tmp_path / "spool" / "many").iterdir())) == 20


def test_a_scheduler_that_hangs_delays_the_end_only_by_the_flush(run, tmp_path):
    (tmp_path / "sacct").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "sacct").chmod(0o755)
    more = {"SLURM_JOB_ID": "3", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert run("run", "-q", "--", "echo", "works", more=more).stdout == "works\n"


def test_a_spool_that_vanishes_costs_events_only(run, tmp_path):
    done = run("run", "-q", "--spool", "gone", "--", "sh", "-c", "rm -rf gone; echo works")
    assert (done.returncode, done.stdout) == (0, "works\n")


def test_a_deleted_working_directory(run, tmp_path):
    script = f"mkdir d; cd d; rmdir ../d; exec {sys.executable} -m bootseer run -q -- echo works"
    done = run("run", "-q", "--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (0, "works\n")

"""Short commands: their output, their deadlines, and that they leave no processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from bootseer.env.installing.interpreter import ask, last_line, runner
from bootseer.errors import PermanentError


def _run(*argv, deadline_s=120.0, enter=None, **env):
    return runner(enter)(argv, env={"PATH": os.environ["PATH"], **env}, deadline_s=deadline_s)


def _runs(pid):
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # empty: a zombie
    except OSError:
        return False


def test_both_streams_and_the_exit_code_come_back():
    ran = _run("sh", "-c", "echo out; echo err >&2; exit 3")
    assert (ran.code, ran.stdout, ran.stderr) == (3, "out\n", "err\n")


def test_the_environment_is_the_given_one():
    assert _run("sh", "-c", 'echo "$MINE-$HOME"', MINE="here").stdout == "here-\n"


def test_a_signal_is_reported():
    ran = _run("sh", "-c", "kill -9 $$")
    assert (ran.code, last_line(ran)) == (-signal.SIGKILL, "exit code 137")


def test_a_missing_command_is_no_exception():
    ran = _run("no-such-command")
    assert (ran.code, bool(ran.error), ran.started) == (None, True, False)


def test_a_command_beyond_its_deadline_is_killed_with_what_it_started(tmp_path):
    for deadline_s in (1.0, 10.0, 60.0):  # on a busy machine it may not get far in a second
        ran = _run("sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; wait", deadline_s=deadline_s)
        assert (ran.code, ran.started) == (None, True)
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            break
    pid = int((tmp_path / "pid").read_text())
    end_s = time.monotonic() + 120
    while _runs(pid):
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_remaining_processes_do_not_delay_the_result():
    assert _run("sh", "-c", "setsid sleep 5 & echo done").stdout == "done\n"


def test_signals_that_we_hold_back_reach_the_command():
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        assert _run("sh", "-c", "kill -TERM $$; echo survived").code == -signal.SIGTERM
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def test_the_child_enters_where_it_is_told_to(tmp_path):
    assert _run("pwd", enter=lambda: os.chdir(tmp_path)).stdout == f"{tmp_path}\n"


def test_an_entrance_that_is_closed_is_an_error():
    def closed():
        raise OSError("gone")

    assert not _run("pwd", enter=closed).started


def test_output_of_start_up_files_does_not_hide_the_answer_of_a_python(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('hello')\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    python = ask(sys.executable, env, runner())
    assert python.prefix == sys.prefix


def test_what_is_no_python_is_reported():
    with pytest.raises(PermanentError, match="is not a working Python"):
        ask("/bin/true", os.environ, runner())

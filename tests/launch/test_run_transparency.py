"""The job is sacred: each sentence of rule 5 of the design, tested with the real program."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from bootseer.report.analysis.compose import analyse
from bootseer.report.analysis.prepare import Options
from conftest_launch import BOOTSEER, Run

pytestmark = pytest.mark.slow

PRINT_ARGS = "import sys; print(sys.argv[1:])"
# Collects signals for a number of seconds, or up to a number, then prints their names.
COUNT_SIGNALS = """
import os, signal, sys, time
got = []
for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "CONT"):
    signal.signal(getattr(signal, "SIG" + name), lambda n, f: got.append(n))
print("ready", flush=True)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end and len(got) < int(sys.argv[2]):
    time.sleep(0.01)
time.sleep(0.2)
print(*(signal.Signals(n).name for n in got), flush=True)
"""


@pytest.fixture
def run(run_anew: Run) -> Run:
    return run_anew


def start(env: dict[str, str], *words: str, **kwargs: object) -> subprocess.Popen[str]:
    options: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **kwargs}
    return subprocess.Popen([*BOOTSEER, *words], env=env, **options)  # type: ignore[call-overload]


def test_only_the_command_writes_to_stdout(run):
    done = run("run", "--", sys.executable, "-c", "print(1)")
    assert (done.returncode, done.stdout) == (0, "1\n")


@pytest.mark.parametrize(
    "words",
    [
        ["--job", "x"],
        ["--", "--help"],
        ["-h"],
        ["a b", "c\nd", "é", "", "*", "$HOME", "--version"],
        ["--json", "--requirements", "nothing"],
    ],
)
def test_arguments_arrive_untouched(run, words):
    done = run("run", "--", sys.executable, "-c", PRINT_ARGS, *words)
    assert done.stdout == f"{words}\n"


@pytest.mark.parametrize("code", [0, 1, 2, 127, 143, 255])
def test_exit_code_is_the_commands(run, code):
    assert run("run", "--", "sh", "-c", f"exit {code}").returncode == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGSEGV, signal.SIGUSR1])
def test_death_by_signal_is_128_plus_its_number(run, number):
    assert run("run", "--", "sh", "-c", f"kill -{int(number)} $$").returncode == 128 + number


def test_a_job_s_own_pythoninspect_starts_no_prompt_after_it(run):
    done = run("run", "-q", "--", "sh", "-c", "exit 7", more={"PYTHONINSPECT": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


def test_log_lines_come_when_they_are_asked_for_and_hold_no_arguments(run):
    words = ("run", "-q", "--", "sh", "-c", "exit 3", "--password=hunter2")
    assert run(*words).stderr == ""
    said = run(*words, more={"BOOTSEER_LOG": "launch=info"}).stderr
    assert "launch.session" in said
    assert re.search(r"launch.supervise .* ended with exit code 3", said)
    assert "hunter2" not in said


def test_a_command_that_does_not_exist_is_127(run):
    done = run("run", "--", "no-such-program-anywhere")
    assert done.returncode == 127
    assert "no-such-program-anywhere: command not found" in done.stderr


def test_a_script_with_line_ends_of_windows_is_distinguished_from_a_missing_one(run, tmp_path):
    script = tmp_path / "train.sh"
    script.write_bytes(b"#!/bin/sh\r\ntrue\r\n")
    script.chmod(0o755)
    done = run("run", "--", str(script))
    reason = "its loader, or the interpreter in its first line, is missing (or CRLF line ends)"
    assert (done.returncode, done.stderr) == (127, f"bootseer: {script}: {reason}\n")


@pytest.mark.parametrize("more", [{}, {"BOOTSEER_DISABLE": "1"}], ids=["measured", "disabled"])
def test_an_empty_command_is_127(run, more):
    done = run("run", "--", "", more=more)
    assert (done.returncode, done.stderr) == (127, "bootseer: '': command not found\n")


def test_a_command_that_cannot_be_executed_is_126(run, tmp_path):
    (tmp_path / "data").write_text("no program")
    assert run("run", "--", str(tmp_path / "data")).returncode == 126


@pytest.mark.parametrize("more", [{}, {"BOOTSEER_DISABLE": "1"}], ids=["measured", "disabled"])
def test_a_script_without_interpreter_line_runs_as_in_a_shell(run, tmp_path, more):
    script = tmp_path / "plain script"
    script.write_text('echo "$1"\n')
    script.chmod(0o755)
    found = more | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for name in (str(script), script.name):
        assert run("run", "--", name, "hello", more=found).stdout == "hello\n"


@pytest.mark.parametrize("more", [{}, {"BOOTSEER_DISABLE": "1"}], ids=["measured", "disabled"])
def test_no_signal_stays_blocked_after_a_setup(run, tmp_path, more):
    (tmp_path / "setup.sh").write_text("true\n")
    done = run("run", "--setup", "setup.sh", "--", "grep", "SigBlk", "/proc/self/status", more=more)
    assert int(done.stdout.split()[1], 16) == 0


def test_every_requirements_file_counts_for_the_digest(run, events, tmp_path):
    for name in ("first.txt", "second.txt"):
        (tmp_path / name).write_text("\n")
    for text in ("\n", "# changed\n"):
        (tmp_path / "first.txt").write_text(text)
        words = ["-r", "first.txt", "-r", "second.txt", "--env", "bypass"]
        assert run("run", *words, "--", "true").returncode == 0
    digests = [
        event.attrs["requirements_digest"] for event in events() if event.stage == "run" and event.phase == "begin"
    ]
    assert len(set(digests)) == 2


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "--"],
        ["run", "true"],
        ["run", "--no-such-option", "--", "true"],
        ["run", "--attempt", "9" * 30, "--", "true"],
        ["run", "--setup", "missing.sh", "--", "true"],
        ["run", "--image", "registry.test/box:1", "-r", "missing.txt", "--", "true"],
    ],
)
def test_usage_errors_are_2_and_start_nothing(run, words):
    done = run(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "missing" not in " ".join(words) or "no such file" in done.stderr


def test_a_job_with_the_name_of_a_file_is_reported_by_its_folder(run, tmp_path):
    (tmp_path / "true").mkdir()
    done = run("run", "--", "true", more={"BOOTSEER_SPOOL": "", "XDG_STATE_HOME": str(tmp_path)})
    assert done.stderr.endswith(f"bootseer report {tmp_path}/bootseer/jobs/true/attempt-0\n")


def test_stdin_is_inherited(run):
    assert run("run", "--", "cat", input="through\n").stdout == "through\n"


def test_each_signal_arrives_once(env):
    names = ["SIGCONT", "SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2"]
    with start(env, "run", "-q", "--", sys.executable, "-c", COUNT_SIGNALS, "100", str(len(names))) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for name in names:
            process.send_signal(getattr(signal, name))
        assert sorted(process.stdout.readline().split()) == names
        assert process.wait(100) == 0


def test_a_second_term_is_not_swallowed(env):
    code = """import signal, time
got = []
signal.signal(signal.SIGTERM, lambda *_: (got.append(1), print("got", flush=True)))
print("ready", flush=True)
while len(got) < 2:
    time.sleep(0.05)"""
    with start(env, "run", "-q", "--", sys.executable, "-c", code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(2):
            # The kernel merges two pending signals with the same number.
            process.terminate()
            assert process.stdout.readline() == "got\n"
        assert process.wait(100) == 0


@pytest.mark.parametrize("catches", [True, False])
def test_the_whole_process_group_gets_a_signal_that_the_command_does_not_catch(env, tmp_path, catches):
    trap = f"trap 'sleep 0.3; test ! -e {tmp_path}/child; exit $((7 + $?))' TERM;" if catches else ""
    script = (
        f"( trap 'touch {tmp_path}/child; exit 0' TERM; touch {tmp_path}/up; while :; do sleep 0.05; done ) & "
        f"{trap} touch {tmp_path}/both; while :; do sleep 0.05; done"
    )
    with start(
        env, "run", "-q", "--", "bash", "-c", script, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        _until(lambda: (tmp_path / "up").exists() and (tmp_path / "both").exists())
        process.terminate()
        # With a trap 7, not 8: the command may need its workers while it saves its state.
        assert process.wait(100) == (7 if catches else 143)
        _until((tmp_path / "child").exists)


def _until(true, timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_a_term_during_the_setup_ends_the_run(env, tmp_path):
    setup = tmp_path / "setup.sh"
    setup.write_text(f"touch {tmp_path}/up\nexec sleep 600\n")
    with start(env, "run", "--setup", str(setup), "--", "echo", "never") as process:
        _until((tmp_path / "up").exists)
        process.terminate()
        out, err = process.communicate(timeout=180)
    assert process.returncode == 143
    assert out == ""
    assert "environment setup failed" in err


def test_ignored_signals_stay_ignored(env):
    """`nohup bootseer run ...`: the command must inherit that HUP is ignored."""
    code = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    words = ["nohup", *BOOTSEER, "run", "-q", "--", sys.executable, "-c", code]
    done = subprocess.run(
        words, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=180, check=False
    )
    assert done.stdout == "True\n"


def test_the_command_starts_with_no_signal_blocked_or_ignored(run):
    done = run("run", "--", "grep", "-E", "Sig(Blk|Ign)", "/proc/self/status")
    plain = subprocess.run(
        ["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"], capture_output=True, text=True, check=True
    )

    def masks(text: str) -> list[int]:
        # glibc's posix_spawn ignores its two internal signals (32, 33) in the new process.
        return [int(line.split()[1], 16) & ~(0b11 << 31) for line in text.splitlines()]

    assert masks(done.stdout) == masks(plain.stdout)


def test_descriptors_do_not_leak_into_the_command(run):
    done = run("run", "--", "ls", "/proc/self/fd")
    assert done.stdout.split() == ["0", "1", "2", "3"]  # 3 is the folder that ls reads


def _on_a_terminal(env: dict[str, str], words: list[str], keys: bytes, ready: bytes) -> tuple[int, bytes]:
    """Run in a new session on a pseudo terminal, send keys once `ready` was printed. Returns exit code and output."""
    pid, master = pty.fork()
    if pid == 0:
        os.execve(words[0], words, env)
    output, pressed, end = b"", False, time.monotonic() + 100
    while time.monotonic() < end:
        if select.select([master], [], [], 0.1)[0]:
            try:
                data = os.read(master, 4096)
            except OSError:
                break
            if not data:
                break
            output += data
        if ready in output and not pressed:
            os.write(master, keys)
            pressed = True
    os.close(master)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output


@pytest.mark.parametrize(
    "front", [[], pytest.param(["/usr/bin/unshare", "-pf"], marks=pytest.mark.root)], ids=["plain", "pid namespace"]
)
def test_the_terminal_stays_the_commands(env, front):
    code = "import os,sys; print([os.isatty(n) for n in (0,1,2)]); print('ready', flush=True); print('<'+input()+'>')"
    status, output = _on_a_terminal(
        env, [*front, *BOOTSEER, "run", "-q", "--", sys.executable, "-c", code], b"typed\n", b"ready"
    )
    assert status == 0
    assert b"[True, True, True]" in output
    assert b"<typed>" in output


def test_ctrl_c_arrives_once(env):
    words = [*BOOTSEER, "run", "-q", "--", sys.executable, "-c", COUNT_SIGNALS, "100", "1"]
    status, output = _on_a_terminal(env, words, b"\x03", b"ready")
    assert status == 0
    assert re.findall(rb"SIG\w+", output) == [b"SIGINT"]


def test_ctrl_c_ends_a_script_as_without_bootseer(env):
    script = f"{' '.join(BOOTSEER)} run -q -- sh -c 'echo ready; sleep 60'; echo went on"
    status, output = _on_a_terminal(env, ["/bin/bash", "-c", script], b"\x03", b"ready")
    assert status == -signal.SIGINT
    assert b"went on" not in output


def test_ctrl_z_and_fg_work(env, tmp_path):
    """A shell with job control stops and continues the job as it would without us."""
    script = tmp_path / "job.sh"
    go = tmp_path / "go"
    wait = f"'echo ready; until [ -e {go} ]; do sleep 0.05; done; echo done'"
    words = " ".join([*BOOTSEER, "run", "-q", "--", "sh", "-c", wait])
    script.write_text(f"set -m\n{words}\necho stopped=$?\ntouch {go}\nfg >/dev/null\necho end=$?\n")
    bash = shutil.which("bash")
    assert bash
    status, output = _on_a_terminal(env, [bash, str(script)], b"\x1a", b"ready")
    assert b"stopped=148" in output  # 128 + SIGTSTP
    assert b"done" in output
    assert b"end=0" in output
    assert status == 0


def test_disable_is_a_plain_exec(env):
    with start({**env, "BOOTSEER_DISABLE": "1"}, "run", "--", "sh", "-c", "echo $$; env") as process:
        out, _ = process.communicate(timeout=180)
    pid, *variables = out.splitlines()
    assert int(pid) == process.pid
    assert not [v for v in variables if v.startswith(("BOOTSEER_TRACE", "TRACEPARENT", "PYTHONPATH"))]
    assert not Path(env["BOOTSEER_SPOOL"]).exists()


def test_disable_still_runs_the_setup(run, tmp_path):
    (tmp_path / "setup.sh").write_text(f"echo ran > {tmp_path}/mark\n")
    done = run("run", "--setup", "setup.sh", "--", "cat", f"{tmp_path}/mark", more={"BOOTSEER_DISABLE": "1"})
    assert done.stdout == "ran\n"


@pytest.mark.root
def test_orphans_are_reaped_as_pid_1(env):
    if os.geteuid() != 0:
        pytest.skip("making a PID namespace needs root")
    # The command leaves an orphan, and ends when it is gone, even as a zombie.
    script = "orphan=$( (sleep 0.2 >/dev/null & echo $!) ); while [ -e /proc/$orphan ]; do sleep 0.05; done; echo gone"
    words = ["unshare", "--pid", "--fork", "--mount-proc", *BOOTSEER, "run", "-q", "--", "bash", "-c", script]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stdout) == (0, "gone\n")


def test_an_unwritable_spool_costs_the_trace_and_not_the_job(run, tmp_path):
    (tmp_path / "file").write_text("")
    done = run("run", "--spool", str(tmp_path / "file"), "--", "echo", "works")
    assert (done.returncode, done.stdout) == (0, "works\n")
    assert "runs unmeasured" in done.stderr


def test_kill_9_of_the_command_is_reported(run, events):
    assert run("run", "--", "sh", "-c", "kill -9 $$").returncode == 137
    ends = {event.stage: event for event in events() if event.phase == "end"}
    assert ends["command"].outcome == "failed"
    assert ends["command"].attrs["exit_code"] == 137


def test_what_a_killed_run_leaves_tells_how_long_it_lived(env, events):
    words = [*BOOTSEER, "run", "--gpus", "8", "--", "sh", "-c", "echo runs; exec sleep 60"]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"runs\n"
        began_s = time.monotonic()
        while time.monotonic() - began_s < 60 and [e.stage for e in events()].count("alive") < 3:
            time.sleep(0.1)
        process.kill()
    found = events()
    report = analyse(found, Options())
    assert report.startup.outcome == "truncated"
    assert report.overhead.startup_s >= 3
    assert report.overhead.startup_s == pytest.approx((found[-1].mono_ns - found[0].mono_ns) / 1e9, abs=0.01)


def test_the_commands_terminal_follows_the_size_of_the_real_one(env):
    code = "import os\nprint('ready', flush=True)\nwhile os.get_terminal_size(1) != (77, 33): pass\nprint('resized')"
    words = [*BOOTSEER, "run", "-q", "--began-pattern", "never", "--", sys.executable, "-c", code]
    pid, master = pty.fork()
    if pid == 0:
        os.execve(words[0], words, env)
    try:
        output, end = b"", time.monotonic() + 60
        while b"resized" not in output and time.monotonic() < end:
            if select.select([master], [], [], 0.1)[0]:
                output += os.read(master, 4096)
            if b"ready" in output:
                termios.tcsetwinsize(master, (33, 77))
        assert b"resized" in output
    finally:
        os.close(master)
        os.waitpid(pid, 0)


def test_the_command_is_told_that_the_terminal_has_gone_away(env):
    """As in `ssh -t NODE bootseer run ...`: only the leader of the session, BootSeer, gets the kernel's SIGHUP."""
    words = [
        *BOOTSEER,
        "run",
        "-q",
        "--",
        "/bin/sh",
        "-c",
        "trap 'exit 9' HUP; echo ready; while :; do sleep 0.1; done",
    ]
    pid, master = pty.fork()
    if pid == 0:
        os.execve(words[0], words, env)
    output = b""
    while b"ready" not in output:
        output += os.read(master, 4096)
    os.close(master)
    until = time.monotonic() + 60
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.02)
    if ended == (0, 0):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 9

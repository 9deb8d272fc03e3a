"""Starting the command, also in other namespaces than ours, and waiting for it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bootseer.launch import supervise
from bootseer.launch.restart import end_processes
from hung_mount import hung_mount, needs_fuse


@pytest.fixture(autouse=True)
def held_back():
    supervise.block_signals()
    yield
    supervise.unblock_signals()


def run(command: list[str], **kwargs: object) -> int:
    pid = supervise.spawn(command, dict(os.environ), own_group=True, **kwargs)  # type: ignore[arg-type]
    return supervise.wait(pid, own_group=True)


def test_the_command_runs_where_enter_went(tmp_path: Path) -> None:
    code = run(["sh", "-c", f'test "$(pwd)" = "{tmp_path}" && exit 7'], enter=lambda: os.chdir(tmp_path))
    assert code == 7
    assert Path.cwd() != tmp_path


def test_what_enter_raises_is_reported_and_no_command_is_started(tmp_path: Path) -> None:
    def fail() -> None:
        raise FileNotFoundError(2, "no such folder", "/gone")

    with pytest.raises(supervise.StartError, match=r"^touch: .*no such folder.*/gone") as raised:
        supervise.spawn(["touch", str(tmp_path / "file")], dict(os.environ), own_group=True, enter=fail)
    assert raised.value.code == supervise.NOT_EXECUTABLE
    assert not list(tmp_path.iterdir())


def test_a_long_reason_is_cut_and_not_lost() -> None:
    def fail() -> None:
        raise ValueError("x" * 100_000)

    with pytest.raises(supervise.StartError, match=r"x{1000}"):
        supervise.spawn(["true"], dict(os.environ), own_group=True, enter=fail)


def test_a_missing_command_is_reported_as_usual() -> None:
    with pytest.raises(supervise.StartError, match="command not found") as raised:
        supervise.spawn(["no-such-program"], dict(os.environ), own_group=True, enter=lambda: None)
    assert raised.value.code == supervise.NOT_FOUND


def test_a_process_with_thousands_of_descriptors_starts_its_command() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    null = os.open(os.devnull, os.O_RDONLY)
    taken = [null, *(os.dup(null) for _ in range(1024))]
    try:
        assert run(["sh", "-c", "exit 7"]) == 7
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


SUBREAPER = """
import ctypes, os, sys
from bootseer.launch import supervise
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0
supervise.block_signals()
pid = supervise.spawn(["sh", "-c", sys.argv[1]], os.environ, own_group=True)
sys.exit(supervise.wait(pid, own_group=True, reaps_orphans=True))
"""


def test_a_subreaper_reaps_orphans_while_the_command_runs() -> None:
    orphan = "orphan=$(sleep 0 >/dev/null & echo $!)"
    script = f"{orphan}; for _ in $(seq 3000); do [ -e /proc/$orphan ] || exit 7; sleep 0.02; done"
    assert subprocess.run([sys.executable, "-c", SUBREAPER, script], check=False).returncode == 7


ALIVE = """
import os, sys
from bootseer.launch import supervise
class Counted:
    def emit(self, stage, phase):
        print(stage, flush=True)
supervise.block_signals()
pid = supervise.spawn(["sh", "-c", sys.argv[1]], os.environ, own_group=True)
supervise.wait(pid, own_group=True, tracer=Counted())
"""


def test_a_run_is_alive_where_signals_come_all_the_time() -> None:
    script = "for _ in $(seq 30); do kill -CHLD $PPID; sleep 0.1; done"
    done = subprocess.run([sys.executable, "-c", ALIVE, script], check=False, capture_output=True, text=True)
    assert set(done.stdout.split()) == {"alive"}, done.stderr


HUNG_SPOOL = """
import os, signal, sys, time
from bootseer.launch import supervise
class Hung:
    def emit(self, stage, phase):
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
script = 'trap "exit 7" TERM; sleep 600 & : > "$0"; wait'
supervise.block_signals()
pid = supervise.spawn(["sh", "-c", script, sys.argv[1]], os.environ, own_group=True)
sys.exit(supervise.wait(pid, own_group=True, tracer=Hung()))
"""


def test_a_signal_is_forwarded_while_the_spool_does_not_answer(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HUNG_SPOOL, str(tmp_path / "ready")]
    done = subprocess.run(words, check=False, timeout=120)
    assert done.returncode == 7


HUNG_END = """
import os, sys, time
from bootseer.launch import command, run, supervise
from bootseer.trace.sinks import SpoolSink
write = SpoolSink.write
def hang(sink, line):
    if os.path.exists(sys.argv[1]):
        time.sleep(600)
    write(sink, line)
SpoolSink.write, supervise.LAST_EVENT_S = hang, 0.1
words = ["sh", "-c", ': > "$0"; exit 7', sys.argv[1]]
sys.exit(run.run(words, command.Options(spool=sys.argv[2]), os.environ))
"""


def test_a_run_ends_while_the_spool_does_not_answer(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HUNG_END, str(tmp_path / "ended"), str(tmp_path / "spool")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (7, 1)
    assert "does not answer: the end of the run is not recorded" in done.stderr


@needs_fuse
def test_a_stop_that_outlasts_the_wait_is_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example by Ctrl-Z or `scontrol suspend`. Python 3.11 to 3.13 then returned such values."""
    rubbish = signal.struct_siginfo((418868984, 410200320, 32615, 418725608, 32615, 410189936, 140080777084648))
    monkeypatch.setattr(signal, "sigtimedwait", lambda *_: time.sleep(0.01) or rubbish)
    assert run(["sh", "-c", "exit 7"]) == 7


def test_a_command_that_never_starts_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_START_S", 0.5)
    late = pytest.raises(supervise.StartError, match="true: it did not start within 0 s; does the file system")
    with hung_mount(tmp_path / "hung") as path, late:
        supervise.spawn(["true"], dict(os.environ), own_group=True, enter=lambda: os.chdir(path))
    os.wait()


def test_processes_that_cannot_be_ended_delay_the_end_by_a_second() -> None:
    """For example another user's, or one that hangs in the kernel; here a zombie."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        began_s = time.monotonic()
        assert end_processes(lambda: {pid}, grace_s=0.1) == (1, {pid})
        assert time.monotonic() - began_s < 10
    finally:
        os.waitpid(pid, 0)

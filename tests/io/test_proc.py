"""Processes and threads in /proc: a child, this process, and ended ones (also tested by `test_writable_session` and
`test_killed`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from bootseer.io import proc
from bootseer.io.proc import end_child, is_dying, num_writers, process_of, was_killed
from hung_mount import child_that_asks, hung_mount, needs_fuse


def test_a_child() -> None:
    command = [sys.executable, "-c", "print(flush=True); input()"]
    env = {"WORD": "a=b", "LINES": "1\n2"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as child:
        assert child.stdout is not None
        child.stdout.readline()  # before that, its environment may be empty
        try:
            assert child.pid in proc.pids()
            assert proc.parent(child.pid) == os.getpid()
            assert proc.status(child.pid)["PPid"] == str(os.getpid())
            assert proc.environment(child.pid) == {"WORD": "a=b", "LINES": "1\n2"}
            assert not proc.is_dying(child.pid)
        finally:
            child.kill()
    assert child.pid not in proc.pids()


def test_the_status_of_a_child_that_ended_or_was_killed() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(end_child(pid, 60, kill=False)) == 7
    pid = os.fork()
    if pid == 0:
        signal.pause()
    assert os.waitstatus_to_exitcode(end_child(pid, 60)) == -signal.SIGKILL
    assert end_child(pid) is None, "it was already waited for"


@needs_fuse
def test_a_child_that_hangs_in_the_kernel_is_left_behind(tmp_path: Path) -> None:
    with hung_mount(tmp_path / "hung") as path:
        pid = child_that_asks(path)
        assert end_child(pid, 0.1) is None
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_nothing_is_shown_of_a_process_that_has_ended() -> None:
    with subprocess.Popen(["true"]) as child:
        pass
    pid = child.pid
    assert (proc.read(pid, "stat"), proc.stat(pid), proc.status(pid), proc.environment(pid)) == (b"", [], {}, {})
    assert proc.parent(pid) == 0
    assert not proc.is_dying(pid)


def test_a_name_may_contain_anything() -> None:
    """Fields are also found after a name with blanks and parentheses."""
    command = [sys.executable, "-c", "open('/proc/self/comm', 'w').write('x) R 1 ('); print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            assert proc.read(child.pid, "comm") == b"x) R 1 (\n"
            assert proc.parent(child.pid) == os.getpid()
        finally:
            child.kill()


def test_this_process() -> None:
    assert proc.status()["Pid"] == str(os.getpid())
    assert int(proc.status()["Threads"]) >= threading.active_count()


def test_a_file_is_written_while_a_descriptor_can_write_to_it(tmp_path: Path) -> None:
    path = tmp_path / "f"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    number = os.fstat(handle).st_ino
    me = os.getpid()
    assert num_writers(me, number)
    assert not num_writers(me, number + 1), "another file"
    copy = os.dup(handle)
    assert num_writers(me, number) == 2
    os.close(handle)
    assert num_writers(me, number)
    path.unlink()
    assert num_writers(me, number), "even if it has no name"
    os.close(copy)
    assert not num_writers(me, number)


def test_readers_are_not_writers(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    with (tmp_path / "f").open("rb") as file:
        assert not num_writers(os.getpid(), os.fstat(file.fileno()).st_ino)


def test_what_cannot_be_seen_is_not_open() -> None:
    assert not num_writers(0, 1)
    assert not num_writers(2**22 + 1, 1)
    assert process_of(0) == 0
    assert process_of(2**22 + 1) == 0


def test_a_thread_belongs_to_its_process() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(process_of(threading.get_native_id())))
    thread.start()
    thread.join()
    assert found == [os.getpid()]


def test_killed_and_ended_processes_are_distinguished() -> None:
    for code, killed in (("import os; os.kill(os.getpid(), 15)", True), ("", False)):
        child = subprocess.Popen([sys.executable, "-c", code])
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert was_killed(child.pid) == killed
        child.wait()
    assert not was_killed(os.getpid())
    assert not was_killed(0)


def test_a_thread_that_lives_or_cannot_be_seen_is_not_dying() -> None:
    assert not is_dying(os.getpid())
    assert not is_dying(threading.get_native_id())
    assert not is_dying(0)
    assert not is_dying(2**22 + 1)

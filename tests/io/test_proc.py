"""What /proc shows about processes, here of a child and of processes that have ended."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from bootseer.io import proc


def test_a_child() -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={"WORD": "a=b", "LINES": "1\n2"}) as child:
        try:
            assert child.pid in proc.pids()
            assert proc.parent(child.pid) == os.getpid()
            assert proc.status(child.pid)["PPid"] == str(os.getpid())
            assert proc.environment(child.pid) == {"WORD": "a=b", "LINES": "1\n2"}
            assert not proc.is_dying(child.pid)
        finally:
            child.kill()
    assert child.pid not in proc.pids()


def test_nothing_is_shown_of_a_process_that_has_ended() -> None:
    with subprocess.Popen(["true"]) as child:
        pass
    pid = child.pid
    assert (proc.read(pid, "stat"), proc.stat(pid), proc.status(pid), proc.environment(pid)) == (b"", [], {}, {})
    assert proc.parent(pid) == 0
    assert not proc.is_dying(pid)


def test_a_name_may_contain_anything() -> None:
    """Fields are found behind a name with blanks and parentheses too."""
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

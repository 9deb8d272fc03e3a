"""What /proc says of callers: their descriptors for writing, and whether they are being killed (also seen by
`test_writable_session` and `test_killed`)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from bootseer.fuse.callers import num_writers, process_of, was_killed
from bootseer.io.proc import is_dying


def test_a_file_is_written_while_a_descriptor_can_write_to_it(tmp_path: Path) -> None:
    path = tmp_path / "f"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    number = os.fstat(handle).st_ino
    me = os.getpid()
    assert num_writers(me, "f", number)
    assert not num_writers(me, "f", number + 1), "another file"
    copy = os.dup(handle)
    assert num_writers(me, "f", number) == 2
    os.close(handle)
    assert num_writers(me, "f", number)
    path.unlink()
    assert num_writers(me, "f", number), "whatever became of its name"
    os.close(copy)
    assert not num_writers(me, "f", number)


def test_readers_are_no_writers(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    with (tmp_path / "f").open("rb") as file:
        assert not num_writers(os.getpid(), "f", os.fstat(file.fileno()).st_ino)


def test_what_cannot_be_seen_is_not_open() -> None:
    assert not num_writers(0, "f", 1)
    assert not num_writers(2**22 + 1, "f", 1)
    assert process_of(0) == 0
    assert process_of(2**22 + 1) == 0


def test_a_thread_belongs_to_its_process() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(process_of(threading.get_native_id())))
    thread.start()
    thread.join()
    assert found == [os.getpid()]


def test_a_process_that_was_killed_is_told_from_one_that_ended() -> None:
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

"""Processes that are recognized later, and that end with their parents."""

from __future__ import annotations

import os
import resource
import select
import signal
from pathlib import Path

from bootseer.mounts.process import ProcessId, die_with, drop_descriptors


def test_a_child_that_asked_for_it_dies_with_its_parent() -> None:
    answer, report = os.pipe()
    parent = os.fork()
    if parent == 0:
        own = os.getpid()
        if os.fork() == 0:
            die_with(own)
            os.write(report, b"ready")
            signal.pause()
        signal.pause()
    os.close(report)
    assert os.read(answer, 5) == b"ready"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    # The pipe reaches its end when the last process that holds it has ended.
    assert select.select([answer], [], [], 10)[0]
    assert os.read(answer, 1) == b""
    os.close(answer)


def test_a_child_whose_parent_was_faster_dies_at_once() -> None:
    child = os.fork()
    if child == 0:
        die_with(1 if os.getppid() != 1 else 2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_descriptors_beyond_the_limit_are_dropped_too(tmp_path: Path) -> None:
    """`ulimit -n 64` in a shell whose parent has left descriptor 100 open."""
    answer, report = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(report, 100)
            os.closerange(3, 100)  # of the tests before this one, 64 may be open
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
            drop_descriptors(tmp_path / "log", lambda number: number == 100)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(report)
    assert os.read(answer, 1) == b""
    os.close(answer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_process_is_more_than_its_number() -> None:
    own = ProcessId.of(os.getpid())
    assert own is not None
    assert own.alive
    assert not ProcessId(own.pid, own.started + 1).alive

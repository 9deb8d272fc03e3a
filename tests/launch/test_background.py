"""A helper process of a run: its messages, and how it ends."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootseer.errors import PermanentError, TransientError
from bootseer.launch.background import Send, start_background
from bootseer.launch.environment.publish import Publishing
from bootseer.mounts.process import ProcessId

DEADLINE_S = 120.0


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_publication_that_was_cancelled_is_not_called_dead(capfd: pytest.CaptureFixture[str]) -> None:
    session = SimpleNamespace(tracer=SimpleNamespace(emit=lambda *_, **__: None), span="")
    task: Any = SimpleNamespace(outcome={}, session=session)
    killed: Any = SimpleNamespace(stop=lambda: None, messages=list)  # in a library, it did not end at SIGTERM
    Publishing(task, killed).stop()
    assert capfd.readouterr().err == "bootseer: no snapshot of the environment was published: it was cancelled\n"


def test_messages_arrive_in_order(tmp_path: Path) -> None:
    def work(send: Send) -> None:
        os.write(1, b"a word for the log\n")
        for number in range(3):
            send({"number": number})

    helper = start_background(work, name="test-helper", log=tmp_path / "log")
    assert helper.next_message(DEADLINE_S) == {"number": 0}
    assert helper.wait(DEADLINE_S)
    assert [said["number"] for said in helper.messages()] == [0, 1, 2]
    assert (tmp_path / "log").read_text() == "a word for the log\n"


def test_no_message_is_lost_when_two_arrive_at_once(tmp_path: Path) -> None:
    def work(send: Send) -> None:
        send({"number": 1})
        send({"number": 2})

    helper = start_background(work, name="test-helper", log=tmp_path / "log")
    os.waitid(os.P_PID, helper.pid, os.WEXITED | os.WNOWAIT)  # both messages are in the pipe
    assert [helper.next_message(DEADLINE_S)["number"] for _ in range(2)] == [1, 2]
    with pytest.raises(TransientError, match="without an answer"):
        helper.next_message(DEADLINE_S)


def test_its_error_keeps_its_type(tmp_path: Path) -> None:
    def work(send: Send) -> None:
        raise PermanentError("the disk is full")

    helper = start_background(work, name="test-helper", log=tmp_path / "log")
    assert helper.wait(DEADLINE_S)
    assert helper.messages() == [{"error": "the disk is full", "kind": "PermanentError", "hint": ""}]


def test_a_helper_that_ends_without_a_message_is_an_error(tmp_path: Path) -> None:
    helper = start_background(lambda send: None, name="test-helper", log=tmp_path / "log")
    with pytest.raises(TransientError, match=r"^the peer service ended without an answer$"):
        helper.next_message(DEADLINE_S, "the peer service")


def test_stopping_it_lets_it_undo_what_it_began(tmp_path: Path) -> None:
    undone = tmp_path / "undone"

    def work(send: Send) -> None:
        try:
            send({})
            signal.pause()
        finally:
            undone.touch()

    helper = start_background(work, name="test-helper", log=tmp_path / "log")
    helper.next_message(DEADLINE_S)
    helper.stop()
    assert undone.exists()
    assert ProcessId.of(helper.pid) is None


def test_it_holds_no_pipe_of_our_parent_and_has_no_terminal(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)

    def work(send: Send) -> None:
        send({"sid": os.getsid(0)})
        signal.pause()

    helper = start_background(work, name="test-helper", log=tmp_path / "log")
    try:
        assert helper.next_message(DEADLINE_S) == {"sid": helper.pid}
        os.close(write)
        assert os.read(read, 1) == b""  # it blocks while another process has the other end open
    finally:
        helper.stop()
        os.close(read)


def test_it_shares_the_locks_that_we_opened(tmp_path: Path) -> None:
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)

    def work(send: Send) -> None:
        send({})
        signal.pause()

    helper = start_background(work, name="test-helper", log=tmp_path / "log")
    helper.next_message(DEADLINE_S)
    os.close(lock)
    with (tmp_path / "lock").open() as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        helper.stop()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_it_ends_when_the_run_is_killed(tmp_path: Path) -> None:
    program = f"""
import signal, sys
from pathlib import Path
from bootseer.launch.background import start_background
def work(send):
    try:
        send({{}})
        signal.pause()
    finally:
        Path({str(tmp_path / "undone")!r}).touch()
helper = start_background(work, name="test-helper", log=Path({str(tmp_path / "log")!r}))
helper.next_message(20)
print(helper.pid, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        helper = ProcessId.of(int(run.stdout.readline()))
        run.kill()
    wait_for((tmp_path / "undone").exists)
    wait_for(lambda: helper is None or not helper.alive)

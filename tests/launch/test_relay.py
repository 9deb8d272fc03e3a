"""Watching the command's output: every byte passes, whatever happens to the search."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.launch import relay
from bootseer.launch.relay import Relay


def passed(output: bytes, pattern: bytes, found: Callable[[], None]) -> bytes:
    """The output of a relay when a command writes this. No descriptor stays open."""
    opened = len(list(Path("/proc/self/fd").iterdir()))
    read, write = os.pipe()
    between = Relay(write, re.compile(pattern), found)
    command = os.dup(between.write)
    pieces: list[bytes] = []

    def reader() -> None:
        while sum(map(len, pieces)) < len(output) and (piece := os.read(read, 1 << 16)):
            pieces.append(piece)

    def writer() -> None:
        with os.fdopen(command, "wb", buffering=0) as pipe:
            pipe.write(output)

    threads = [threading.Thread(target=work, daemon=True) for work in (reader, writer)]
    between.release()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    between.finish(time.monotonic() + 60)
    os.close(write)
    os.close(read)
    assert len(list(Path("/proc/self/fd").iterdir())) == opened
    return b"".join(pieces)


def test_an_error_after_the_pattern_does_not_hold_up_the_output(capfd: pytest.CaptureFixture[str]) -> None:
    def found() -> None:
        raise OSError("no space left")

    output = b"step 1\n" + b"x" * 300_000 + b"\n"
    assert passed(output, b"step 1", found) == output
    assert "seen and could not be recorded: no space left" in capfd.readouterr().err


def test_output_that_a_slow_reader_has_not_taken_yet_is_waited_for() -> None:
    read, write = os.pipe()
    between = Relay(write, re.compile(b"none"), lambda: None)
    command = os.dup(between.write)
    between.release()
    output = b"x" * 120_000  # more than the capacity of a pipe
    with os.fdopen(command, "wb", buffering=0) as pipe:
        pipe.write(output)
    ended = threading.Thread(target=lambda: (between.finish(time.monotonic()), os.close(write)), daemon=True)
    ended.start()
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == output
    ended.join(60)


def test_a_process_that_writes_without_end_is_not_waited_for() -> None:
    read, write = os.pipe()
    between = Relay(write, re.compile(b"none"), lambda: None)

    def take_slowly() -> None:
        while os.read(read, 1 << 14):
            time.sleep(0.01)

    with subprocess.Popen(["yes"], stdout=between.write) as endless:
        between.release()
        threads = [
            threading.Thread(target=work, args=words, daemon=True)
            for work, words in ((take_slowly, ()), (between.finish, (time.monotonic() + 0.2,)))
        ]
        for thread in threads:
            thread.start()
        threads[1].join(20)
        still_waits = threads[1].is_alive()
        endless.kill()
    between.finish(time.monotonic() + 60)
    os.close(write)
    threads[0].join(60)
    os.close(read)
    assert not still_waits


def test_of_a_long_line_the_end_is_searched() -> None:
    found: list[bool] = []
    output = b"begin " + b"x" * 100_000 + b" end\n"
    assert passed(output, b"begin", lambda: found.append(True)) == output
    assert found == []
    assert passed(output, b"end", lambda: found.append(True)) == output
    assert len(found) == 1


def test_a_pattern_that_takes_long_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(relay, "_SLOW_S", 0.0)
    found: list[bool] = []
    output = b"other\nstep 1\n"
    assert passed(output, b"step 1", lambda: found.append(True)) == output
    assert found == []
    assert "is no longer searched for" in capfd.readouterr().err

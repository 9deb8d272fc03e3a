"""Mounts and daemons that are removed after each test, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.mounts import kernel
from bootseer.mounts.daemon import Daemon
from bootseer.mounts.process import ProcessId
from mounts.starting import DEADLINE_S, JOB, CannotStart, Start


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder for mounts."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    yield tmp_path
    prefix = f"{os.path.realpath(tmp_path)}/"
    for point in reversed([point for point in kernel.mount_points() if point.startswith(prefix)]):
        kernel.unmount(Path(point), lazy=True)


@pytest.fixture
def start(place: Path) -> Iterator[Start]:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened")
    daemons: list[Daemon] = []
    programs: list[subprocess.Popen[str]] = []

    def run(image: Path, *, lifeline: bool = False) -> tuple[Daemon, subprocess.Popen[str]]:
        folder = place / f"daemon{len(programs)}"
        program = subprocess.Popen(
            [sys.executable, str(JOB), str(folder), str(image), *(["lifeline"] if lifeline else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        programs.append(program)
        assert program.stdout is not None
        said = json.loads(program.stdout.readline())
        if "error" in said:
            raise CannotStart(f"{said['kind']}: {said['error']}")
        daemons.append(Daemon(folder, ProcessId(said["pid"], said["started"])))
        return daemons[-1], program

    yield run
    for program in programs:
        program.kill()
        program.wait(DEADLINE_S)
        for stream in (program.stdin, program.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
    for daemon in daemons:
        daemon.process.signal(signal.SIGKILL)

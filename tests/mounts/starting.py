"""Helpers for tests of daemons: waiting for conditions, and starting daemons."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Protocol

from bootseer.mounts.daemon import Daemon

JOB = Path(__file__).with_name("daemon_job.py")
DEADLINE_S = 120.0


class Start(Protocol):
    """Starts a daemon by running `daemon_job.py`."""

    def __call__(self, image: Path, *, lifeline: bool = False) -> tuple[Daemon, subprocess.Popen[str]]:
        """Returns the daemon and the program that started it, which waits for a line."""


class CannotStart(Exception):  # noqa: N818 - the name of a test's helper
    """The output of the program if it started no daemon."""

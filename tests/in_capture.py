"""Run a program in a capture's view and wait for its end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from bootseer.env.capturing.capture_base import Capture
from bootseer.mounts.process import die_with

JOB_ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
"""The environment of tests' scripts that import this module."""


def run_in(
    capture: Capture, argv: Sequence[str], env: Mapping[str, str] | None = None, *, stdout: int | None = None
) -> int:
    """Returns the exit code, 128+N if signal N killed the program. It is killed if this process ends."""
    parent = os.getpid()

    def begin() -> None:
        capture.enter()
        die_with(parent)

    code = subprocess.run(argv, env=env, stdout=stdout, preexec_fn=begin, check=False).returncode
    return code if code >= 0 else 128 - code

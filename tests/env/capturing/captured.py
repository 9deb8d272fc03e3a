"""Captures in a separate process (`capture_job`), and their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import warm
from in_capture import JOB_ENV

DEADLINE_S = 600.0
"""Snapshots are written at a low priority: next to other tests they may get a fiftieth of a core."""
JOB = Path(__file__).with_name("capture_job.py")


@dataclass(frozen=True)
class Ended:
    """The job's output."""

    said: Mapping[str, Any]
    error: str

    @property
    def changes(self) -> Mapping[str, Any]:
        return self.said["changes"]

    def below(self, folder: str) -> dict[str, Any]:
        """Changes in a folder by relative path, without the rest of the machine."""
        return {path.removeprefix(folder): found for path, found in self.changes.items() if path.startswith(folder)}

    def actions(self, folder: str) -> dict[str, str]:
        return {path: found["action"] for path, found in self.below(folder).items()}


@dataclass(frozen=True)
class Machine:
    """Folders of a test, mounted over the machine's in the test's captures."""

    folder: Path
    work: Path
    """Mounted at `/srv`, as a separate disk."""
    home: Path
    """Mounted at `/home`."""

    @property
    def captures(self) -> Path:
        return self.folder / "captures"

    def spec(self, script: str, way: str, **more: Any) -> dict[str, Any]:
        env = {"HOME": "/home/user", "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
        return {
            "captures": str(self.captures),
            "way": way,
            "binds": {"/srv": str(self.work), "/home": str(self.home)},
            "cwd": "/srv",
            "own": [],
            "folders": [],
            "script": script,
            **more,
            "env": {**env, **more.get("env", {})},
        }

    def begin(
        self, script: str, way: str = "overlay", *, become: Callable[[], None] | None = None, **more: Any
    ) -> subprocess.Popen[str]:
        job = subprocess.Popen(
            [sys.executable, str(JOB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=become,  # noqa: PLW1509 - no threads in tests
            env=JOB_ENV,
        )
        assert job.stdin is not None
        job.stdin.write(json.dumps(self.spec(script, way, **more)) + "\n")
        job.stdin.flush()
        return job

    def capture(self, script: str, way: str = "overlay", **more: Any) -> Ended:
        if "become" in more:
            job = self.begin(script, way, **more)
            try:
                output, error = job.communicate(timeout=DEADLINE_S)
            finally:
                job.kill()
                job.wait()
            ended = subprocess.CompletedProcess(str(JOB), job.returncode, output, error)
        else:
            ended = warm.job(JOB, input=f"{json.dumps(self.spec(script, way, **more))}\n", env=JOB_ENV)
        assert ended.returncode == 0, ended.stderr
        return Ended(json.loads(ended.stdout), ended.stderr)

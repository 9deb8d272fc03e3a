"""Setups observed while they run, in a separate process (`watch_job`)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import warm
from env.capturing.captured import DEADLINE_S, Machine
from in_capture import JOB_ENV

_JOB = Path(__file__).with_name("watch_job.py")


def look_at(
    machine: Machine, script: str, way: str = "overlay", *, become: Callable[[], None] | None = None, **more: Any
) -> dict[str, Any]:
    """Run a script as a setup, with a folder of the test at /var/tmp."""
    scratch = machine.folder / "scratch"
    scratch.mkdir(mode=0o1777, exist_ok=True)
    spec = machine.spec(script, way, **more)
    spec["binds"]["/var/tmp"] = str(scratch)
    text = json.dumps(spec) + "\n"
    if become is None:
        ended = warm.job(_JOB, input=text, env=JOB_ENV)
    else:
        ended = subprocess.run(
            [sys.executable, str(_JOB)],
            input=text,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            preexec_fn=become,
            check=False,
            env=JOB_ENV,
        )
    assert ended.returncode == 0, ended.stderr
    said: dict[str, Any] = json.loads(ended.stdout)
    said["error"] = ended.stderr
    return said

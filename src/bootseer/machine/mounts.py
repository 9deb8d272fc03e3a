"""Ask a throw-away child process whether a namespace or a mount works here.

The parent's half of `sandbox`. Who calls: the probes in `kernel`.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bootseer.machine import child

_SCRIPT = Path(__file__).with_name("sandbox.py")
DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Trial:
    """`worked`, or the step that failed. `errno` is 0 when the failure was not a system call's."""

    worked: bool
    step: str = ""
    errno: int = 0
    error: str = ""

    @property
    def forbidden(self) -> bool:
        """The kernel can do it, this user or container may not."""
        return self.errno in (errno.EPERM, errno.EACCES)

    @property
    def reason(self) -> str:
        """Words for a user: the step and the error."""
        if self.error:
            return self.error
        return f"{self.step}: {os.strerror(self.errno)}" if self.errno else f"{self.step} did not work"


def attempt(trial: str, *arguments: str) -> Trial:
    """Run one trial of `sandbox`; a child that hangs or dies is a failed trial."""
    ended = child.run([sys.executable, "-I", "-S", str(_SCRIPT), trial, *arguments], deadline_s=DEADLINE_S)
    if ended.code is None:
        return Trial(False, error=ended.error)
    try:
        answer = json.loads(ended.output)
        step, number = str(answer["step"]), int(answer["errno"])
    except (ValueError, KeyError, TypeError):
        return Trial(False, error=f"the trial ended with code {ended.code}")
    return Trial(not step, step, number)

"""Run a short-lived program with a deadline, and be rid of it afterwards.

A probe may hang (a stuck mount, a wrapper script that waits for a network): its process group is killed by id and
the caller gets an answer in time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MAX_OUTPUT_BYTES = 65_536
_REAP_S = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the program ended. `code` is None when it could not be started or had to be killed."""

    code: int | None
    output: str
    """The beginning of what it wrote to stdout, then to stderr."""
    error: str = ""
    """Why there is no code, as words for a user."""


def run(argv: Sequence[str], *, deadline_s: float, env: Mapping[str, str] | None = None) -> Outcome:
    """Run `argv` with closed stdin for at most `deadline_s` seconds. Never raises for what the program does."""
    # Files, not pipes: a grandchild that keeps a pipe open would hold us beyond the deadline.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, start_new_session=True
            )
        except (OSError, ValueError) as error:
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            return Outcome(None, "", f"cannot run {Path(argv[0]).name}: {reason}")
        try:
            code: int | None = process.wait(deadline_s)
            error_text = ""
        except subprocess.TimeoutExpired:
            code, error_text = None, f"no answer within {deadline_s:g} s"
        finally:
            _end(process)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(_MAX_OUTPUT_BYTES).decode("utf-8", "replace"))
    return Outcome(code, "".join(texts), error_text)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the child's process group. A child stuck in the kernel is left to the kernel."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_S)

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MAX_OUTPUT_BYTES = 65_536
_REAP_S = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the program ended. `code` is None when it could not be started or had to be killed."""

    code: int | None
    stdout: str
    """The beginning of what it wrote."""
    stderr: str = ""
    error: str = ""
    """Why there is no code, as words for a user."""
    started: bool = True

    @property
    def output(self) -> str:
        """What it wrote to stdout, then to stderr."""
        return self.stdout + self.stderr


def run(
    argv: Sequence[str],
    *,
    deadline_s: float,
    env: Mapping[str, str] | None = None,
    in_child: Callable[[], None] | None = None,
    max_bytes: int = _MAX_OUTPUT_BYTES,
) -> Outcome:
    """Run `argv` with closed stdin for at most `deadline_s` seconds. Never raises for what the program does.

    `in_child` is called before the child becomes the program; at most `max_bytes` are kept of each output.
    """
    # Files, not pipes: a grandchild that keeps a pipe open would hold us beyond the deadline.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=env,
                start_new_session=True,
                preexec_fn=in_child,  # noqa: PLW1509 - callers that give one have one thread
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            return Outcome(None, "", error=f"cannot run {Path(argv[0]).name}: {reason}", started=False)
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
            texts.append(file.read(max_bytes).decode("utf-8", "replace"))
    stdout, stderr = texts
    return Outcome(code, stdout, stderr, error_text)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the child's process group. A child stuck in the kernel is left to the kernel."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_S)

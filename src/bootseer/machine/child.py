"""Run a short-lived program with a deadline.

A probe may hang (a dead mount, a wrapper script that waits for a network). After the deadline its process group is
killed and the caller gets a result.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MAX_OUTPUT_BYTES = 65_536
_REAP_S = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a program. `code` is its exit code; None if it could not be started or was killed."""

    code: int | None
    stdout: str
    """The beginning of its output."""
    stderr: str = ""
    error: str = ""
    """Why `code` is None, for users."""
    started: bool = True

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run(
    argv: Sequence[str],
    *,
    deadline_s: float,
    env: Mapping[str, str] | None = None,
    in_child: Callable[[], None] | None = None,
    max_bytes: int = _MAX_OUTPUT_BYTES,
) -> Outcome:
    """Run `argv` with empty stdin for at most `deadline_s` seconds. All failures are in the result; nothing is raised.

    `in_child` is called in the child before exec; at most `max_bytes` are kept of each output.
    """
    # Files, not pipes: a grandchild that keeps a pipe open would delay the end of reading beyond the deadline. They are
    # in memory, because containers with a read-only root have no folder for temporary files.
    with os.fdopen(os.memfd_create("stdout"), "rb") as out, os.fdopen(os.memfd_create("stderr"), "rb") as err:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=env,
                start_new_session=True,
                preexec_fn=in_child,  # noqa: PLW1509 - callers that pass one have a single thread
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
    """Kill the rest of the child's process group. A child in an uninterruptible system call is left behind."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_S)

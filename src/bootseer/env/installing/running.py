"""Run a short question of ours (a version, a check, an import) where the setup runs, and take its answer.

The installers themselves are not run here: they are commands of the launcher, with its signals. Called by the other
modules of this package and by `verifying`; the launcher makes `run` for a capture or a container.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

CANNOT_START = 127
TIMED_OUT = 124
_MAX_OUTPUT = 1 << 20
_REAP_S = 1.0


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended: its exit code as a shell gives it, and what it wrote (at most 1 MiB of each)."""

    code: int
    output: str
    errors: str = ""


class Run(Protocol):
    """Run a command with exactly this environment, for at most `deadline_s` seconds; never raises for its failure."""

    def __call__(self, argv: Sequence[str], env: Mapping[str, str], *, deadline_s: float) -> Ran: ...


def runner(enter: Callable[[], None] | None = None) -> Run:
    """`run` on this node. `enter` is called in the child before it becomes the command: `Capture.enter`."""

    def in_child() -> None:
        # The launcher holds signals back; what it starts must not.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if enter is not None:
            enter()

    def run(argv: Sequence[str], env: Mapping[str, str], *, deadline_s: float) -> Ran:
        # Files, not pipes: what the command leaves behind may keep a pipe open.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            try:
                child = subprocess.Popen(
                    list(argv),
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    process_group=0,
                    preexec_fn=in_child,  # noqa: PLW1509 - the launcher has one thread
                )
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                return Ran(CANNOT_START, "", str(error))
            try:
                code = child.wait(deadline_s)
            except subprocess.TimeoutExpired:
                code = TIMED_OUT
            finally:
                _end(child)
            return Ran(code if code >= 0 else 128 - code, _text(out), _text(err))

    return run


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the command's process group."""
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_REAP_S)  # one that hangs in the kernel is left to it


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MAX_OUTPUT).decode("utf-8", "replace")

"""The Python that packages are installed for, and short commands (a version, a check, an import) in the setup's view.

The interpreter answers as it would in the setup, with the user's own folder and PYTHONPATH, and is asked every time;
`keys.node` has the question, and the isolated, cached answer for request keys. Installers do not run here: they are
commands of the launcher, which handles their signals.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bootseer.env.keys.node import QUESTION, Interpreter, answered
from bootseer.errors import PermanentError
from bootseer.machine import child

CANNOT_START = 127
TIMED_OUT = 124
_MAX_OUTPUT = 1 << 20


@dataclass(frozen=True, slots=True)
class Ran:
    """Result of a command: its exit code as a shell gives it, and its output (at most 1 MiB per stream)."""

    code: int
    output: str
    errors: str = ""


class Run(Protocol):
    """Run a command with exactly this environment for at most `deadline_s` seconds; failures never raise."""

    def __call__(self, argv: Sequence[str], env: Mapping[str, str], *, deadline_s: float) -> Ran: ...


def runner(enter: Callable[[], None] | None = None) -> Run:
    """A `Run` for this node. `enter` is called in the child before exec: `Capture.enter`."""

    def in_child() -> None:
        # The launcher blocks signals; its children must not inherit that.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if enter is not None:
            enter()

    def run(argv: Sequence[str], env: Mapping[str, str], *, deadline_s: float) -> Ran:
        ended = child.run(argv, env=env, deadline_s=deadline_s, in_child=in_child, max_bytes=_MAX_OUTPUT)
        if ended.code is None:
            return Ran(TIMED_OUT if ended.started else CANNOT_START, ended.stdout, ended.stderr or ended.error)
        return Ran(ended.code if ended.code >= 0 else 128 - ended.code, ended.stdout, ended.stderr)

    return run


_DEADLINE_S = 20.0
SAFE_PATH = "import sys; sys.path[:] = [entry for entry in sys.path if entry]"
"""First line of code run with `-c`: nothing is imported from the working folder, which may contain a `pip.py`.

Python's `-P` does the same since 3.11; the job's may be older, and PYTHONSAFEPATH would be inherited by children of
pip.
"""
_RUN_MODULE = f"{SAFE_PATH}; import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def module_command(python: str, module: str, *words: str) -> tuple[str, ...]:
    """`python -m module words`, without imports from the working folder."""
    return python, "-c", _RUN_MODULE, module, *words


def ask(python: str, env: Mapping[str, str], run: Run) -> Interpreter:
    """Ask this Python about itself. Raises `PermanentError` if that fails."""
    ran = run([python, "-c", f"{SAFE_PATH}\n{QUESTION}"], env, deadline_s=_DEADLINE_S)
    found = answered(ran.output)
    if found is None:
        last = ran.errors.strip().rpartition("\n")[2]
        raise PermanentError(f"{python} is not a working Python (exit code {ran.code}): {last}")
    return found

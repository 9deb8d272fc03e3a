"""The Python that packages are installed for, and short commands (a version, a check, an import) in the setup's view.

The interpreter answers as it would in the setup, with the user's own folder and PYTHONPATH, and is asked every time;
`keys.node` has the question, and the isolated, cached answer for request keys. Installers do not run here: they are
commands of the launcher, which handles their signals.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from bootseer.env.keys.node import QUESTION, Interpreter, answered
from bootseer.errors import PermanentError
from bootseer.machine import child
from bootseer.machine.child import Outcome

_MAX_OUTPUT = 1 << 20


class Run(Protocol):
    """Run a command with exactly this environment for at most `deadline_s` seconds; failures never raise."""

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str], deadline_s: float) -> Outcome: ...


def runner(enter: Callable[[], None] | None = None) -> Run:
    """A `Run` for this node. `enter` is called in the child before exec: `Capture.enter`."""

    def in_child() -> None:
        # The launcher blocks signals; its children must not inherit that.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        if enter is not None:
            enter()

    return partial(child.run, in_child=in_child, max_bytes=_MAX_OUTPUT)


_DEADLINE_S = 20.0
SAFE_PATH = "import sys; sys.path[:] = [entry for entry in sys.path if entry]"
"""First line of code run with `-c`: nothing is imported from the working folder, which may contain a `pip.py`.

Python's `-P` does the same since 3.11; the job's may be older, and PYTHONSAFEPATH would be inherited by children of
pip.
"""
READ_RECORD = f"""{SAFE_PATH}
import csv, os

def files_in(record):
    try:
        with open(os.path.join(record, "RECORD"), encoding="utf-8", newline="") as file:
            return [row[0] for row in csv.reader(file) if row]
    except (OSError, ValueError, csv.Error):
        return []
"""
"""First lines of code run with `-c` that reads what distributions have installed; for any Python 3."""
_RUN_MODULE = f"{SAFE_PATH}; import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def module_command(python: str, module: str, *words: str) -> tuple[str, ...]:
    """`python -m module words`, without imports from the working folder."""
    return python, "-c", _RUN_MODULE, module, *words


def ask(python: str, env: Mapping[str, str], run: Run) -> Interpreter:
    """Ask this Python about itself. Raises `PermanentError` if that fails."""
    ran = run([python, "-c", f"{SAFE_PATH}\n{QUESTION}"], env=env, deadline_s=_DEADLINE_S)
    found = answered(ran.stdout)
    if found is None:
        raise PermanentError(f"{python} is not a working Python: {last_line(ran)}")
    return found


def last_line(ran: Outcome) -> str:
    """The message of an exception, or without one how the command ended."""
    code = 128 - ran.code if ran.code is not None and ran.code < 0 else ran.code  # as a shell gives it
    return ran.stderr.strip().rpartition("\n")[2][:300] or ran.error or f"exit code {code}"

"""The Python that packages are installed for, and short commands (a version, a check, an import) in the setup's view.

The interpreter answers as it would in the setup, with the user's own folder and PYTHONPATH, and is asked every time;
`keys.node` has the isolated, cached answer for request keys. Installers do not run here: they are commands of the
launcher, which handles their signals.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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
# For any Python 3: it may be older than BootSeer's.
_QUESTION = f"""{SAFE_PATH}
import json, os, sysconfig
from importlib.util import find_spec
paths = sysconfig.get_paths()
libraries = [paths["purelib"], paths["platlib"]]
known = [entry for entry in sys.path if os.path.isdir(entry)]
print(json.dumps({{
    "executable": sys.executable,
    "prefix": sys.prefix,
    "base_prefix": sys.base_prefix,
    "scripts": paths["scripts"],
    "folders": sorted(set(os.path.abspath(entry) for entry in libraries + known)),
    "writable": all(os.access(entry, os.W_OK) for entry in libraries if os.path.isdir(entry)),
    "pip": find_spec("pip") is not None,
    "uv": find_spec("uv") is not None,
}}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """One Python installation or virtual environment."""

    executable: str
    prefix: str
    base_prefix: str
    scripts: str
    """Folder of its console scripts."""
    folders: tuple[str, ...]
    """Folders of its distributions, absolute."""
    writable: bool
    """Whether packages can be installed into it; otherwise pip uses the user's own folder."""
    pip: bool
    """Whether `-m pip` works."""
    uv: bool
    """Whether `-m uv` works."""


def module_command(python: str, module: str, *words: str) -> tuple[str, ...]:
    """`python -m module words`, without imports from the working folder."""
    return python, "-c", _RUN_MODULE, module, *words


def ask(python: str, env: Mapping[str, str], run: Run) -> Interpreter:
    """Ask this Python about itself. Raises `PermanentError` if that fails."""
    ran = run([python, "-c", _QUESTION], env, deadline_s=_DEADLINE_S)
    try:
        # Its start-up files may print something before.
        facts = json.loads(ran.output.strip().rpartition("\n")[2])
        return Interpreter(
            executable=str(facts["executable"]),
            prefix=str(facts["prefix"]),
            base_prefix=str(facts["base_prefix"]),
            scripts=str(facts["scripts"]),
            folders=tuple(str(folder) for folder in facts["folders"]),
            writable=bool(facts["writable"]),
            pip=bool(facts["pip"]),
            uv=bool(facts["uv"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        last = ran.errors.strip().rpartition("\n")[2]
        raise PermanentError(f"{python} is not a working Python (exit code {ran.code}): {last}") from error

"""CRIU, which process snapshots need: where it is, and whether it can dump and restore processes here.

Imports only the standard library, because it also runs inside containers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

PROGRAM: Final = "BOOTSEER_CRIU"
"""The variable with the path of another `criu` than the one on PATH."""
OLDEST: Final = (4, 1, 1)
_VERSION_S: Final = 2.0
_CHECK_S: Final = 5.0
_MAX_REASON: Final = 300
_LAST_PID: Final = "/kernel/ns_last_pid "


def find_criu(env: Mapping[str, str]) -> str:
    """The absolute path of a CRIU that is recent enough: `BOOTSEER_CRIU`, else `criu` on `PATH`.

    Raises `LookupError` with the reason, for users, if there is none.
    """
    name = env.get(PROGRAM) or "criu"
    found = shutil.which(name, path=env.get("PATH", os.defpath))
    if found is None:
        raise LookupError(f"{PROGRAM}: {name} is not a program" if env.get(PROGRAM) else "criu is not on PATH")
    path = str(Path(found).resolve())
    version = criu_version(path, env)
    if tuple(map(int, version.split("."))) < OLDEST:
        raise LookupError(f"{path} is CRIU {version}, older than {'.'.join(map(str, OLDEST))}")
    return path


def criu_version(path: str, env: Mapping[str, str]) -> str:
    """The version of the CRIU at `path`. Raises `LookupError` if it prints none in time."""
    _, output = _run([path, "--version"], env, _VERSION_S)
    match = re.search(r"^Version: (\d+(?:\.\d+)*)", output, re.MULTILINE)
    if match is None:
        raise LookupError(f"{path} --version: {_last_words(output) or 'it printed no version'}")
    return match[1]


def check_criu(path: str, env: Mapping[str, str]) -> str:
    """Why the CRIU at `path` cannot dump and restore processes here without CAP_SYS_ADMIN; "" if it can."""
    # In this folder it would leave a file with what it found out about the kernel.
    env = {name: value for name, value in env.items() if name != "XDG_RUNTIME_DIR"}
    code, output = _run([path, "check", "--unprivileged"], env, _CHECK_S)
    if code == 0:
        return ""
    # In most containers /proc/sys is read-only. CRIU writes there only if clone3(2) cannot choose the process id.
    others = "\n".join(line for line in output.splitlines() if _LAST_PID not in line)
    if _LAST_PID in output and not _last_words(others):
        return ""
    return _last_words(others) or f"criu check ended with code {code}"


def _run(argv: list[str], env: Mapping[str, str], deadline_s: float) -> tuple[int, str]:
    """Exit code, and output with the errors; the reason why it did not run to its end is output, too."""
    try:
        ended = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no answer within {deadline_s:g} s"
    except OSError as error:
        return -1, f"cannot be run: {error.strerror}"
    return ended.returncode, ended.stdout.decode("utf-8", "replace")


def _last_words(output: str) -> str:
    """The last two lines, because an error may have two, without warnings."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("Warn ")]
    return " ".join(lines[-2:])[:_MAX_REASON]

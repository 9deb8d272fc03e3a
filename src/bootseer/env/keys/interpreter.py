"""What the job's Python says of itself: version, ABI, prefix, and where its distributions lie.

It is asked once; the answer is kept as long as the interpreter is the same file. A shim or wrapper script is asked each
time: what it starts depends on more than itself. Called by `request_key`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bootseer.env.keys.facts import Facts
from bootseer.env.keys.variables import search_path
from bootseer.errors import PermanentError
from bootseer.machine import child

DEADLINE_S = 10.0
_ASK = """
import json, sys, site, _imp
print("bootseer:" + json.dumps({
    "implementation": sys.implementation.name,
    "version": ".".join(map(str, sys.version_info[:3])) + sys.version_info[3].replace("final", ""),
    "abi": (_imp.extension_suffixes() or [""])[0],
    "prefix": sys.prefix,
    "base_prefix": sys.base_prefix,
    "folders": list(dict.fromkeys(site.getsitepackages() + [path for path in sys.path if path.endswith("-packages")])),
}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python."""

    path: str
    """As found on PATH, links not followed: a virtual environment is known by its link."""
    implementation: str
    version: str
    abi: str
    """The suffix of extension modules, which names version, flags and C library."""
    prefix: str
    base_prefix: str
    folders: Sequence[str]
    """`site-packages` and `dist-packages` of the installation, without the user's."""

    @property
    def name(self) -> str:
        """Implementation, version and ABI in one word."""
        return f"{self.implementation}-{self.version}{self.abi}"


def find(env: Mapping[str, str], python: str | None) -> str | None:
    """The interpreter that the setup's `python3` is; None when there is none."""
    if python is not None:
        return shutil.which(python, path=env.get("PATH"))
    return shutil.which("python3", path=env.get("PATH")) or shutil.which("python", path=env.get("PATH"))


def ask(path: str, env: Mapping[str, str], facts: Facts) -> Interpreter:
    """Its answer. Raises `PermanentError` when it gives none in time."""
    stamp = _stamp(path)
    known = facts.get("python", path, stamp) if stamp else None
    if known is None:
        known = _run(path, env)
        if stamp:
            facts.put("python", path, stamp, known)
    try:
        return Interpreter(path=path, **known)
    except TypeError as error:
        raise PermanentError(f"{path}: gives no usable answer about itself") from error


def _run(path: str, env: Mapping[str, str]) -> dict[str, object]:
    # -I: nothing of the user's or of the working folder may change the answer, which is kept.
    clean = {**env, "PYTHONPATH": search_path(env.get("PYTHONPATH", ""))}
    answer = child.run([path, "-I", "-c", _ASK], deadline_s=DEADLINE_S, env=clean)
    for line in answer.output.splitlines():
        if line.startswith("bootseer:"):
            try:
                found = json.loads(line.removeprefix("bootseer:"))
            except ValueError:
                break
            names = {name for name in Interpreter.__dataclass_fields__ if name != "path"}
            if isinstance(found, dict) and set(found) == names:
                return found
    why = answer.error or f"ended with code {answer.code}"
    raise PermanentError(f"{path}: cannot be asked for its version: {why}")


def _stamp(path: str) -> list[object]:
    """What the answer depends on; empty when that cannot be told."""
    try:
        real = os.path.realpath(path)
        status = Path(real).stat()
        with open(real, "rb") as file:  # noqa: PTH123 - a string
            if file.read(4) != b"\x7fELF":
                return []
    except OSError:
        return []
    stamp: list[object] = [real, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    for folder in (Path(path).parent, Path(path).parent.parent):
        try:
            config = (folder / "pyvenv.cfg").stat()
            stamp += [config.st_ino, config.st_mtime_ns, config.st_size]
        except OSError:
            stamp.append(None)
    return stamp

"""Choose the commands that install requirement files: uv where it has the same result as pip, else pip.

uv is an order of magnitude faster and resolved to the same versions in all tests (docs/adr/0019). It is used if it is
available and each of pip's effective settings can be translated; pip runs if it fails. Neither makes bytecode:
`bytecode_compile` does, on all cores. Files in other formats than pip's need uv or conda.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from bootseer.env.installing.interpreter import Run, module_command
from bootseer.env.installing.packages import installed, path_in_root
from bootseer.env.installing.pip_settings import Translation, has_sources, settings, translate
from bootseer.env.keys.files import FactCache, NodeFiles
from bootseer.env.keys.node import Interpreter
from bootseer.env.keys.requirement import FileKind
from bootseer.env.keys.requirements import Requirements
from bootseer.errors import PermanentError

_OLDEST_UV = (0, 7, 0)
"""The oldest uv that reads and writes `pylock.toml`; before 0.5 it would ignore an index."""
_CONDAS = ("micromamba", "mamba", "conda")
_FOR_LOCKS = {"UV_PREVIEW_FEATURES": "pylock", "UV_PYTHON_DOWNLOADS": "never"}
# A lock determines its versions; uv stops if it is given further ones.
_LOCKED = {"UV_CONSTRAINT": "", "UV_OVERRIDE": "", "UV_EXCLUDE": ""}
# A lock with addresses and digests, which files for pip cannot hold, in a folder that is removed afterwards.
_EXPORT = """
d=$(mktemp -d) && trap 'rm -rf "$d"' EXIT && p=$1 t=$2 && shift 2 &&
"$@" export -q --frozen --no-emit-project --format pylock.toml --python "$t" --project "$p" -o "$d/pylock.toml" &&
"$@" pip install --python "$t" -r "$d/pylock.toml"
"""
_QUIET = {"root-user-action": "ignore", "disable-pip-version-check": "1"}
"""Defaults for pip, against warnings at each start that no job can resolve."""
_PROBE_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Command:
    """One way to install the requirements."""

    installer: Literal["uv", "pip", "conda"]
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Additional variables; may contain passwords."""


@dataclass(frozen=True, slots=True)
class Installation:
    """The commands to try, the best first; each runs only if the one before it failed."""

    commands: tuple[Command, ...]
    why_not_uv: str = ""
    """Why uv is not used, or without commands why nothing can install; otherwise empty."""


def choose(
    requirements: Sequence[str],
    env: Mapping[str, str],
    python: Interpreter,
    run: Run,
    *,
    cwd: str,
    root: str = "/",
    at: Callable[[str], Path] | None = None,
    kind: FileKind = "requirements",
    own_uv: str = "",
) -> Installation:
    """How to install these files for this Python.

    `kind` is the format of the files (`keys.requirement.grouped`). `own_uv` is an additional path of uv for formats
    that pip cannot install. The job's `/` can be read at `root`, and single paths at `at(path)` where that differs;
    `cwd` is its working folder, and `run` asks uv for its version.
    """
    at = at or (lambda path: path_in_root(root, path))
    files = [word for path in requirements for word in ("-r", path)]
    if kind == "conda":
        prefix = env.get("CONDA_PREFIX") or (python.prefix if at(f"{python.prefix}/conda-meta").is_dir() else "")
        return _conda(requirements[0], prefix, env, run)
    job = _JobFiles(at)
    found = settings(env, cwd, python.prefix, env.get("HOME") or str(Path("~").expanduser()), job.text)

    def translated(texts: Sequence[str]) -> Translation:
        wanted = Requirements(env=env)
        wanted.add_files([(path, False) for path in texts], job, cwd)
        variables = translate(found, wanted, env, lambda path: bool(job.kind(os.path.join(cwd, path))))  # noqa: PTH118
        if has_sources(wanted):
            # uv regards an installation from a folder as satisfied; pip builds and installs it again each time.
            names = _installed_from_sources(python, root)
            variables.arguments += [word for name in names for word in ("--reinstall-package", name)]
        if not python.writable:
            variables.refusals.insert(0, f"{python.prefix} is not writable: pip installs for the user alone")
        return variables

    if kind != "requirements":
        program, reason = _find_uv(env, python, run, own_uv)
        if not program:
            install = "pip install 'bootseer[env]' where BootSeer is installed"
            return Installation((), f"{', '.join(requirements)}: uv alone installs from it, and {reason}; {install}")
        texts = [path for path in requirements if not path.endswith((".toml", ".lock"))]
        translation = translated(texts)
        variables, more = _FOR_LOCKS | translation.environment | _LOCKED, []
        if kind == "pyproject":  # its settings of sources and of uv are for uv
            variables = _FOR_LOCKS | translation.environment
            more = [word for word in translation.arguments if word not in ("--no-sources", "--no-config")]
        words = (program, "pip", "install", "--python", python.executable, *more, *files)
        if kind == "uv.lock":
            words = ("/bin/sh", "-c", _EXPORT, "sh", str(Path(requirements[0]).parent), python.executable, program)
        return Installation((Command("uv", words, variables),))
    names = {setting.name for setting in found}
    quiet = {f"PIP_{name.upper().replace('-', '_')}": value for name, value in _QUIET.items() if name not in names}
    pip = Command("pip", module_command(python.executable, "pip", "install", "--no-compile", *files), quiet)
    translation = translated(requirements)
    reason = translation.refusals[0] if translation.refusals else ""
    uv = ""
    if not reason:
        uv, reason = _find_uv(env, python, run, "" if python.pip else own_uv)
    if reason:
        return Installation((pip,), reason)
    words = (uv, "pip", "install", "--python", python.executable, *translation.arguments, *files)
    command = Command("uv", words, translation.environment)
    return Installation((command, pip) if python.pip else (command,))


def _conda(file: str, prefix: str, env: Mapping[str, str], run: Run) -> Installation:
    if not prefix:
        reason = "no conda environment is active to install it into (conda activate NAME, or set CONDA_PREFIX)"
        return Installation((), f"{file}: {reason}")
    answers = ((tool, run([tool, "--version"], env=env, deadline_s=_PROBE_DEADLINE_S)) for tool in _CONDAS)
    tool = next((tool for tool, ran in answers if ran.code == 0), "")
    if not tool:
        return Installation((), f"{file}: needs {' or '.join(_CONDAS)} on PATH; install one of them")
    words = ("install", "--yes") if tool == "micromamba" else ("env", "update")
    return Installation((Command("conda", (tool, *words, "--prefix", prefix, "--file", file), {}),))


def _find_uv(env: Mapping[str, str], python: Interpreter, run: Run, own: str) -> tuple[str, str]:
    """The path of a working uv, or why there is none."""
    beside = str(PurePosixPath(python.scripts) / "uv")
    on_path = shutil.which("uv", path=env.get("PATH"))
    reason = "there is no uv"
    for place in filter(None, dict.fromkeys((on_path, beside, own))):
        ran = run([place, "--version"], env=env, deadline_s=_PROBE_DEADLINE_S)
        found = re.match(r"uv (\d+)\.(\d+)\.(\d+)", ran.stdout)
        if ran.code == 0 and found:
            if tuple(map(int, found.groups())) >= _OLDEST_UV:
                return place, ""
            reason = f"uv {'.'.join(found.groups())} is too old"
    return "", reason


def _installed_from_sources(python: Interpreter, root: str) -> list[str]:
    found = installed(python.folders, root=root).distributions
    return sorted({each.name for each in found if path_in_root(root, f"{each.record}/direct_url.json").is_file()})


class _JobFiles(NodeFiles):
    """The job's files, each read at the path that `at` returns."""

    def __init__(self, at: Callable[[str], Path]) -> None:
        super().__init__(FactCache(None))
        self._at = at

    def kind(self, path: str) -> Literal["file", "folder", ""]:
        return super().kind(str(self._at(path)))

    def read(self, path: str) -> bytes:
        return super().read(str(self._at(path)))

    def text(self, path: str) -> str | None:
        """None if it does not exist or is not readable."""
        with contextlib.suppress(PermanentError):
            return self.read(path).decode(errors="surrogateescape")
        return None

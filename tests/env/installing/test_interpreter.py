"""Modules in the working folder are not run when BootSeer queries a Python or installs with it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bootseer.env.installing.bytecode_compile import compile_command
from bootseer.env.installing.choose import choose
from bootseer.env.installing.interpreter import ask, module_command, runner
from bootseer.env.installing.packages import Distribution, Installed, installed
from bootseer.env.installing.validate import conflicts, validate
from bootseer.env.keys.node import Interpreter
from wheels import make_wheel

pytestmark = pytest.mark.slow

PLANTED = [
    "pip",
    "uv",
    "json",
    "csv",
    "runpy",
    "sysconfig",
    "importlib",
    "py_compile",
    "compileall",
    "re",
    "site",
    "torch",
]


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with modules that record that they ran."""
    folder = tmp_path / "trap"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(folder)
    return folder


def test_questions_and_installations_leave_the_working_folder_alone(
    trap: Path, python: Interpreter, job_env: dict[str, str], tmp_path: Path
) -> None:
    wheel = make_wheel(tmp_path / "wheels", "alpha", "1.0", {"alpha.py": "VERSION = 1\n"})
    (trap / "requirements.txt").write_text(f"{wheel}\n")
    asked = ask(python.executable, job_env, runner())
    assert asked == python
    chosen = choose(["requirements.txt"], {**job_env, "PATH": ""}, python, runner(), cwd=str(trap))
    (pip,) = chosen.commands
    done = subprocess.run(pip.argv, env=job_env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = installed(python.folders).distributions
    compiled = subprocess.run(compile_command(python.executable, found, 1), env=job_env, check=False)
    assert compiled.returncode == 0
    assert validate(python, (), job_env, runner(), imports=["alpha", "json"]) == []
    assert conflicts(python, Installed(), job_env, runner()) == []
    assert "uv" in runner()(module_command(python.executable, "uv"), env=job_env, deadline_s=60).stderr
    assert not (trap / "ran").exists()


def test_a_module_of_the_users_own_is_imported_from_the_working_folder(
    trap: Path, python: Interpreter, job_env: dict[str, str]
) -> None:
    (trap / "mine.py").write_text("")
    assert validate(python, [Distribution("x", "1", "", 0)], job_env, runner(), imports=["mine"]) == []

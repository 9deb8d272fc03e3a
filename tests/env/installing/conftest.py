"""Real environments for tests that install: with the test's own wheels and without the machine's settings."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.env.installing.interpreter import ask, runner
from bootseer.env.keys.node import Interpreter
from once import lent_python_with_pip


@pytest.fixture
def job_env(tmp_path: Path) -> dict[str, str]:
    """The environment variables of a job on a machine without configuration of installers."""
    foreign = ("PIP_", "UV_", "PYTHON", "VIRTUAL_ENV", "SSL_", "REQUESTS_", "XDG_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**clean, "HOME": str(tmp_path / "home"), "PIP_CONFIG_FILE": os.devnull}


@pytest.fixture
def python(tmp_path: Path, job_env: dict[str, str]) -> Iterator[Interpreter]:
    """The Python of a new environment with only pip."""
    environment = tmp_path / "environment"
    with lent_python_with_pip(environment):
        yield ask(str(environment / "bin" / "python"), job_env, runner())


@pytest.fixture
def uv(job_env: dict[str, str]) -> str:
    """uv, on the job's path."""
    own = Path(sys.executable).parent
    found = shutil.which("uv", path=f"{own}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip("uv is not installed")
    job_env["PATH"] = f"{Path(found).parent}{os.pathsep}{job_env['PATH']}"
    return found


@pytest.fixture
def no_uv(job_env: dict[str, str], tmp_path: Path) -> None:
    """A path without uv."""
    (tmp_path / "bin").mkdir()
    for name in ("sh", "bash"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "/bin/sh")
    job_env["PATH"] = str(tmp_path / "bin")

"""What is made once in a run of the tests for all workers: `once("python", make)` is a folder that `make` has filled.

It is never changed; a test that wants to takes a copy.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

_run: list[Path] = []


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    # Workers have the temporary folder of the run and below it one of their own.
    base = None if config.option.basetemp is None else Path(config.option.basetemp)
    if base is not None:
        _run[:] = [(base.parent if hasattr(config, "workerinput") else base).with_name("once")]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _run and not hasattr(session.config, "workerinput"):
        shutil.rmtree(_run[0], ignore_errors=True)


def once(name: str, make: Callable[[Path], object]) -> Path:
    """The folder of this name; `make` is called with a path that is not there."""
    if not _run:
        _run.append(Path(tempfile.mkdtemp()))
    folder = _run[0] / name
    folder.parent.mkdir(exist_ok=True, mode=0o700)
    with folder.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            new = folder.with_suffix(".new")
            make(new)
            new.rename(folder)
    return folder


def python_with_pip(folder: Path) -> None:
    """Make this folder a virtual environment with pip and nothing else."""
    made = once("python", lambda new: venv.create(new, with_pip=True))
    copy(made, folder)


def copy(tree: Path, folder: Path) -> None:
    """Copy what there is, with its times and rights: for the 1,500 files of pip, shutil takes ten times as long."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", tree, folder], check=True)


def secret_rules() -> Path:
    """Where the rules for secrets are kept compiled, for all starts of the tests: that takes 3 s of processor time."""
    return once("rules", Path.mkdir)


def compiled_secret_rules() -> Path:
    """The same, with the rules in it. Snapshots are written at a low priority: beside other tests, a start that
    compiled them itself would take minutes."""

    def compile_rules(done: Path) -> None:
        from bootseer.env.capturing.exclude import Exclusions
        from bootseer.env.snapshot.secret_check import SecretCheck

        SecretCheck(Exclusions(), cache=secret_rules())
        done.mkdir()

    once("rules-compiled", compile_rules)
    return secret_rules()

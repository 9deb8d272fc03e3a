"""`bootseer bench`: runs the benchmarks of the checkout."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import bootseer

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_names_and_exit_code_are_those_of_the_benchmarks(run: Run) -> None:
    ran = run("bench", "--quick", "no-such")
    assert ran.returncode == 2
    assert "no such benchmark: no-such; there are run_overhead" in ran.stderr


def test_without_the_source_there_are_no_benchmarks(run: Run, tmp_path: Path) -> None:
    installed = tmp_path / "site-packages"
    shutil.copytree(Path(bootseer.__file__).parent, installed / "bootseer")
    ran = run("bench", more={"PYTHONPATH": str(installed)})
    assert ran.returncode == 2
    assert "they are part of the source checkout" in ran.stderr
    assert "hint: in a checkout: make bench" in ran.stderr

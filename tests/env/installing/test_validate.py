"""Defects for which an environment is not published."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bootseer.env.installing.interpreter import runner
from bootseer.env.installing.packages import installed, new_distributions
from bootseer.env.installing.validate import conflicts, validate
from wheels import make_wheel

pytestmark = pytest.mark.slow


@pytest.fixture
def install(python, job_env, uv):
    def call(*wheels: Path) -> None:
        argv = [uv, "pip", "install", "--python", python.executable, "--no-deps", "--no-index", "-q", *map(str, wheels)]
        subprocess.run(argv, env=job_env, check=True, timeout=120)

    return call


@pytest.fixture
def defects(python, job_env):
    before = installed(python.folders)

    def call(*imports: str, since=before) -> list[str]:
        new = new_distributions(since, installed(python.folders))
        return validate(python, new, job_env, runner(), imports=imports)

    return call


@pytest.fixture
def judge(python, job_env, defects):
    """`defects`, and conflicts, for which pip takes 0.4 s of processor time."""
    before = installed(python.folders)

    def call(*imports: str, since=before) -> list[str]:
        return [*defects(*imports, since=since), *conflicts(python, since, job_env, runner())]

    return call


def test_a_sound_environment_has_no_problems(install, judge, tmp_path):
    install(make_wheel(tmp_path, "app", "1.0", requires=["base>=1"]), make_wheel(tmp_path, "base", "1.0"))
    assert judge("app", "base") == []


def test_a_conflict_that_the_setup_made_is_a_problem(install, judge, tmp_path):
    install(make_wheel(tmp_path, "app", "1.0", requires=["base>=2", "gone"]), make_wheel(tmp_path, "base", "1.0"))
    assert judge() == [
        "app 1.0 has requirement base>=2, but you have base 1.0",
        "app 1.0 requires gone, which is not installed",
    ] or judge() == [
        "app 1.0 requires gone, which is not installed",
        "app 1.0 has requirement base>=2, but you have base 1.0",
    ]


def test_a_conflict_that_was_there_before_is_not_the_setup_s(install, judge, python, tmp_path):
    install(make_wheel(tmp_path, "app", "1.0", requires=["base>=2", "gone"]), make_wheel(tmp_path, "base", "1.0"))
    before = installed(python.folders)
    install(make_wheel(tmp_path, "other", "1.0"))
    assert judge(since=before) == []
    install(make_wheel(tmp_path, "base", "1.5"))
    assert judge(since=before) == ["app 1.0 has requirement base>=2, but you have base 1.5"]


def test_missing_code_is_a_problem(install, defects, python, tmp_path):
    install(make_wheel(tmp_path, "app", "1.0", {"app/a.py": "", "app/b.py": "", "app/c.txt": ""}))
    folder = Path(python.folders[-1]) / "app"
    (folder / "c.txt").unlink()
    assert defects() == []
    (folder / "a.py").unlink()
    assert defects() == ["app-1.0 is not whole: app/a.py is missing"]
    (folder / "b.py").unlink()
    assert defects() == ["app-1.0 is not whole: app/a.py and 1 more of its files are missing"]


def test_tests_that_a_setup_deleted_are_not_missed(install, defects, python, tmp_path):
    install(make_wheel(tmp_path, "app", "1.0", {"app/a.py": "", "app/tests/b.py": ""}))
    (Path(python.folders[-1]) / "app" / "tests" / "b.py").unlink()
    assert defects() == []


def test_what_was_broken_before_is_not_the_setup_s(install, judge, python, tmp_path):
    install(make_wheel(tmp_path, "app", "1.0"))
    (Path(python.folders[-1]) / "app.py").unlink()
    assert judge(since=installed(python.folders)) == []


def test_an_import_that_fails_is_a_problem_with_its_reason(install, defects, tmp_path):
    install(make_wheel(tmp_path, "app", "1.0", {"app.py": "raise OSError('no driver')\n"}))
    assert defects("app", "json") == ["import app fails: OSError: no driver"]
    assert defects("gone") == ["import gone fails: ModuleNotFoundError: No module named 'gone'"]


def test_each_import_has_a_process_of_its_own(install, defects, tmp_path):
    only = "import sys\nassert 'first' not in sys.modules\n"
    install(make_wheel(tmp_path, "first", "1.0"), make_wheel(tmp_path, "second", "1.0", {"second.py": only}))
    assert defects("first", "second") == []


def test_what_is_no_name_of_a_module_is_not_run(defects):
    names = ["os; print(1)", "", "a-b", "a."]
    assert defects(*names) == [f"{name!r} is not a module name" for name in names]


def test_a_python_that_does_not_run_any_more_is_a_problem(judge, python):
    (Path(python.prefix) / "bin" / "python").unlink()
    (problem,) = judge()
    assert "does not run in the new environment" in problem


def test_a_broken_pip_is_no_conflict(judge, python):
    (Path(python.folders[-1]) / "pip" / "__main__.py").write_text("raise SystemExit(2)\n")
    assert judge() == []

"""Bytecode of installed packages: complete, as compiled by pip, and the same for any number of workers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest

from bootseer.env.installing.bytecode_compile import by_interpreter, compile_command
from bootseer.env.installing.packages import Distribution, installed, new_distributions
from wheels import make_wheel

pytestmark = pytest.mark.slow

FILES = {
    "app/__init__.py": "def first(value):\n    return value + 1\n",
    "app/deep/__init__.py": "",
    "app/deep/other.py": "".join(f"NAME_{i} = ('text', {i}, {i}.5)\n" for i in range(300)),
    "app/template.py": "def {{ name }}():\n",
    "app/warns.py": "TEXT = '\\d'\n",
    "app/data.txt": "no code",
}
COMPILED = {"__init__.py", "other.py", "warns.py"}


@pytest.fixture
def library(python, job_env, uv, tmp_path):
    """A distribution, installed without bytecode."""
    wheel = make_wheel(tmp_path, "app", "1.0", FILES)
    before = installed(python.folders)
    argv = [uv, "pip", "install", "--python", python.executable, "--no-index", "-q", str(wheel)]
    subprocess.run(argv, env=job_env, check=True, timeout=120)
    new = new_distributions(before, installed(python.folders))
    assert [each.name for each in new] == ["app"]
    return new


def _compile(python, new, env, workers=2):
    done = subprocess.run(
        compile_command(python.executable, new, workers), env=env, capture_output=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    folder = Path(new[0].record).parent / "app"
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.pyc")}


def test_all_that_compiles_is_compiled_silently_and_nothing_else(python, library, job_env):
    found = _compile(python, library, {**job_env, "PYTHONDONTWRITEBYTECODE": "1"})
    assert {Path(importlib.util.source_from_cache(path)).name for path in map(str, found)} == COMPILED
    assert len(found) == 4


def test_it_is_the_bytecode_that_pip_writes(python, library, job_env, tmp_path):
    ours = _compile(python, library, job_env)
    wheel = tmp_path / "app-1.0-py3-none-any.whl"
    argv = [python.executable, "-m", "pip", "install", "--compile", "--no-index", "-q", "--force-reinstall", str(wheel)]
    subprocess.run(argv, env=job_env, check=True, timeout=120)
    folder = Path(library[0].record).parent / "app"
    theirs = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.pyc")}
    # Except for the time of the source in the header.
    assert {path: (code[:8], code[12:]) for path, code in ours.items()} == {
        path: (code[:8], code[12:]) for path, code in theirs.items()
    }


def test_an_import_compiles_nothing_more(python, library, job_env):
    _compile(python, library, job_env)
    argv = [python.executable, "-v", "-c", "import app.deep.other"]
    done = subprocess.run(argv, env=job_env, capture_output=True, text=True, check=True, timeout=180)
    assert "wrote" not in done.stderr
    assert "other.cpython" in done.stderr


@pytest.mark.parametrize("workers", [1, 3, 64])
def test_any_number_of_workers_writes_the_same(python, library, job_env, workers):
    two = _compile(python, library, job_env)
    for path in (Path(library[0].record).parent / "app").rglob("*.pyc"):
        path.unlink()
    assert _compile(python, library, job_env, workers) == two


def test_valid_bytecode_is_left_alone_and_stale_bytecode_is_replaced(python, library, job_env):
    first = _compile(python, library, job_env)
    folder = Path(library[0].record).parent / "app"
    known = {path: path.stat().st_ino for path in folder.rglob("*.pyc")}
    source = folder / "__init__.py"
    source.write_text("CHANGED = 1\n")
    os.utime(source, (1_700_000_000, 1_700_000_000))
    second = _compile(python, library, job_env)
    changed = {path for path in known if path.stat().st_ino != known[path]}
    assert {path.relative_to(folder).parts for path in changed} == {
        ("__pycache__", Path(importlib.util.cache_from_source("__init__.py")).name)
    }
    assert sum(first[path] != second[path] for path in first) == 1


def test_start_up_files_of_the_environment_have_no_effect(python, library, job_env, tmp_path):
    (Path(library[0].record).parent / "sitecustomize.py").write_text("raise SystemExit(9)\n")
    (tmp_path / "csv.py").write_text("raise SystemExit(9)\n")
    done = subprocess.run(
        compile_command(python.executable, library, 1), env=job_env, cwd=tmp_path, timeout=300, check=False
    )
    assert done.returncode == 0


def test_a_dead_worker_is_reported_by_the_exit_code(python, library, job_env):
    limited = ["sh", "-c", 'ulimit -v 60000; exec "$@"', "sh"]
    big = Path(library[0].record).parent / "app" / "deep" / "other.py"
    big.write_text("X = [" + "1.5, " * 2_000_000 + "]\n")
    argv = [*limited, *compile_command(python.executable, library, 2)]
    done = subprocess.run(argv, env=job_env, capture_output=True, timeout=120, check=False)
    assert done.returncode in (0, 1)  # without memory, a file fails or a worker ends
    assert not list(big.parent.glob("__pycache__/other*"))


def test_each_environment_s_own_python_compiles_it():
    def one(folder):
        return Distribution("a", "1", f"{folder}/a-1.dist-info", 0)

    own, venv, target = (
        one("/usr/lib/python3/dist-packages"),
        one("/opt/v/lib/python3.12/site-packages"),
        one("/srv/target"),
    )
    found = by_interpreter([own, venv, target], "/usr/bin/python3", ["/usr/lib/python3/dist-packages/"])
    assert found == {"/usr/bin/python3": [own, target], "/opt/v/bin/python3.12": [venv]}

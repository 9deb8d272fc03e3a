"""The injected sitecustomize in interpreters without torch: it must have no visible effect."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.hook import marks
from conftest_launch import stages


def test_a_python_without_torch_writes_nothing(run, events):
    assert run("run", "--", sys.executable, "-c", "import json, http.client").returncode == 0
    assert stages(events()) == ["run", "command"]


def test_the_jobs_own_sitecustomize_still_runs(run, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.marked = 'own'\n")
    code = "import sys; print(sys.marked, sys.modules['sitecustomize'].__file__)"
    done = run("run", "--", sys.executable, "-c", code, more={"PYTHONPATH": str(tmp_path)})
    assert done.stdout == f"own {tmp_path}/sitecustomize.py\n"


def test_an_error_in_the_jobs_sitecustomize_is_reported_as_ever(run, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('mine')\n")
    more = {"PYTHONPATH": str(tmp_path)}
    done = run("run", "-q", "--", sys.executable, "-c", "print('on')", more=more)
    assert (done.returncode, done.stdout) == (0, "on\n")
    assert "RuntimeError: mine" in done.stderr


def test_the_path_of_the_program_is_as_without_us(run):
    code = "import sys; print(sys.path, sys.flags, 'bootseer' in sys.modules)"
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run("run", "--", sys.executable, "-c", code).stdout == plain.stdout


def test_isolated_interpreters_run_without_the_hook(run):
    assert run("run", "--", sys.executable, "-I", "-c", "print(1)").stdout == "1\n"


def test_pythonpath_of_the_user_stays_after_ours(run, tmp_path):
    (tmp_path / "mine.py").write_text("value = 42\n")
    done = run("run", "--", sys.executable, "-c", "import mine; print(mine.value)", more={"PYTHONPATH": str(tmp_path)})
    assert done.stdout == "42\n"


@pytest.mark.parametrize("shell", ["exec {python} job.py", "sleep 0.2; exec {python} job.py"])
def test_a_shell_that_ran_programs_before_its_exec_is_not_the_interpreters_start(run, events, tmp_path, shell):
    (tmp_path / "safetensors.py").write_text("")
    (tmp_path / "job.py").write_text("import os; os.spawnlp(os.P_WAIT, 'true', 'true')\nimport safetensors")
    assert run("run", "--", "sh", "-c", shell.format(python=sys.executable)).returncode == 0
    begin, end = (event for event in events() if event.stage == "model_initialization.interpreter")
    assert (end.mono_ns > begin.mono_ns) == shell.startswith("exec")


def test_a_folder_of_our_name_next_to_the_program_does_not_hide_us(tmp_path):
    (tmp_path / "safetensors.py").write_text("")
    (tmp_path / "job.py").write_text("import safetensors")
    (tmp_path / "bootseer").mkdir()
    path = f"{Path(marks.__file__).parent}/path"
    env = {"PYTHONPATH": path, "BOOTSEER_TRACE": f"spool:{tmp_path}/spool", "BOOTSEER_JOB": "x"}
    # Without site-packages, like an interpreter without BootSeer.
    words = [sys.executable, "-S", "-c", "import sitecustomize, runpy; runpy.run_path('job.py')"]
    subprocess.run(words, env=env, cwd=tmp_path, check=True)
    assert len(list((tmp_path / "spool").iterdir())) == 1


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_program_without_torch_finds_bootseer_where_its_environment_has_none(tmp_path, is_folder):
    (tmp_path / "job.py").write_text("import bootseer; bootseer.training_began()")
    if is_folder:
        (tmp_path / "bootseer").mkdir()
    path = f"{Path(marks.__file__).parent}/path"
    env = {"PYTHONPATH": path, "BOOTSEER_TRACE": "stderr", "BOOTSEER_JOB": "x"}
    words = [sys.executable, "-S", "-c", "import sitecustomize, runpy; runpy.run_path('job.py')"]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, '"training_began"' in done.stderr) == (0, True), done.stderr


def test_an_earlier_bootseer_in_the_jobs_environment_is_called_as_it_wants(tmp_path):
    """For example version 0.2: `watch.start` takes one argument, and `import_errors` has another function."""
    hook = tmp_path / "bootseer" / "hook"
    hook.mkdir(parents=True)
    (tmp_path / "safetensors.py").touch()
    (hook.parent / "__init__.py").touch()
    (hook / "watch.py").write_text("find_spec = print\ndef start(started_ns): print('watches')")
    (hook / "import_errors.py").write_text("def tell(error): print(error)")
    env = {"PYTHONPATH": f"{Path(marks.__file__).parent}/path:{tmp_path}", "BOOTSEER_TRACE": "stderr"}
    words = [sys.executable, "-c", "import safetensors, missing"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "watches\nsafetensors None None\nNo module named 'missing'\n"


def test_it_is_valid_in_interpreters_of_system_tools():
    """Otherwise the job's own sitecustomize would not run, and each such tool would print an error."""
    source = (Path(marks.__file__).parent / "path" / "sitecustomize.py").read_text()
    tree = ast.parse(source, feature_version=(3, 6))
    assert not [one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and one.module == "__future__"]


def test_every_marked_package_begins_the_watch():
    """Some of them import torch themselves, before their marked parts."""
    source = (Path(marks.__file__).parent / "path" / "sitecustomize.py").read_text()
    (named,) = (line for line in source.splitlines() if line.startswith("TRIGGERS = "))
    packages = {name.partition(".")[0] for name in marks.after_import_of()}
    assert packages - {"bootseer", "deepspeed", "megatron"} == set(ast.literal_eval(named.partition(" = ")[2]))

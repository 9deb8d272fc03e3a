"""Imports unused before the first step: distinguished from used ones, and shown in the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import bootseer
from hook.test_hook import _write, needs_torch

_MODULE = """
import time
time.sleep(SLEEP)
def define():
    return [i for i in range(20)]
for _ in range(REPEAT):
    define()
class Kept:
    def method(self):
        return define
"""
_PROGRAM = """
import json, sys
from importlib.machinery import SourceFileLoader
from bootseer.hook import imports
imports.start()
import idle, used_once, used_again, used_often, pack.used, lazily
used_once.define()
used_again.define()
used_often.Kept()
used_often.define()
pack.used.Kept().method()
lazily.begin()
import broken
found = [[name, by] for name, took_s, by in imports._imports.unused() if took_s >= 0.1]
imports._imports.stop()
print(json.dumps(sorted(found)), "exec_module" in vars(SourceFileLoader))
"""
_JOB = """
import gc, torch, idle, used_again
used_again.define()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
idle.define()
gc.freeze()  # see `jobs.TRAIN`
"""


def _modules(folder: Path, sleep_s: float, *names: str) -> None:
    for name in names:
        repeat = 0 if name == "used_once" else 300 if name == "used_often" else 3
        (folder / f"{name}.py").write_text(_MODULE.replace("SLEEP", str(sleep_s)).replace("REPEAT", str(repeat)))


def test_modules_of_which_nothing_ran_are_distinguished_from_those_that_are_used(tmp_path: Path):
    (tmp_path / "pack").mkdir()
    _modules(tmp_path, 0.1, "idle", "used_once", "used_again", "used_often", "pack/used", "pack/idle", "lazily_idle")
    (tmp_path / "pack/__init__.py").write_text("from pack import idle\n")
    (tmp_path / "lazily.py").write_text("def begin():\n    import lazily_idle\n")
    (tmp_path / "broken.py").write_text("import idle\nraise ImportError('as it is told')\n")
    program = _PROGRAM.replace("import broken", "try:\n    import broken\nexcept ImportError:\n    pass")
    env = {"PYTHONPATH": str(Path(bootseer.__file__).parents[1])}
    words = [sys.executable, _write(tmp_path, program)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
    told = [["idle", ["", ""]], ["lazily_idle", ["", ""]], ["pack.idle", ["pack", "pack"]]]
    assert done.stdout == f"{json.dumps(told)} False\n", done.stderr

    done = subprocess.run(
        [sys.executable, _write(tmp_path, _PROGRAM)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stderr.splitlines()[-1] == "ImportError: as it is told"
    assert "imports.py" not in done.stderr


@needs_torch[0]
@needs_torch[1]
def test_a_job_that_asks_is_reported_in_events_and_report(run, events, tmp_path: Path):
    _modules(tmp_path, 3.0, "idle", "used_again")
    job = _write(tmp_path, _JOB)
    assert run("run", "-q", "--", sys.executable, job, more={"BOOTSEER_IMPORTS": "1"}).returncode == 0
    told = {event.attrs["module"]: event.attrs for event in events() if event.stage == "unused_import"}
    assert "used_again" not in told
    assert 3.0 <= told["idle"]["import_s"] < 100
    lines = json.loads(run("report", "--json").stdout)["unused_imports"]
    assert any(line.endswith("s idle, imported by the program") for line in lines)
    assert "Imports not used before the first step" in run("report").stdout


def test_imports_are_watched_only_where_a_job_asks(run, tmp_path: Path):
    job = _write(tmp_path, "import safetensors, sys\nprint('bootseer.hook.imports' in sys.modules)\n")
    for more, said in (({}, "False\n"), ({"BOOTSEER_IMPORTS": "1"}, "True\n")):
        assert run("run", "-q", "--", sys.executable, job, more=more).stdout == said


def test_errors_of_imports_show_the_same_frames_as_without_us(tmp_path: Path):
    (tmp_path / "broken.py").write_text("undefined\n")
    begin = "from bootseer.hook import imports; imports.start(); imports._imports"
    words = [[sys.executable, "-c", f"{code}\nimport broken"] for code in (begin, begin + ".stop()")]
    watched, plain = (subprocess.run(one, cwd=tmp_path, capture_output=True, text=True, check=False) for one in words)
    assert watched.stderr == plain.stderr
    assert "NameError" in watched.stderr

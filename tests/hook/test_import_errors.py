"""Processes that end with a failed import report it once, and are otherwise unchanged."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

_STARTED_TRAINING = """
from bootseer.hook import state
from bootseer.trace.tracer import process_tracer
state.begin(process_tracer()).began = True
"""


def _failed(events):
    return [event for event in events() if event.stage == "import_failed"]


def _python(run, program, *more, **kwargs):
    return run("run", "-q", "--", sys.executable, *more, "-c", textwrap.dedent(program), **kwargs)


def test_a_missing_module_is_reported_with_its_name(run, events):
    assert _python(run, "import json\nimport no_such_module.inner").returncode == 1
    (event,) = _failed(events)
    assert event.phase == "instant"
    assert event.attrs["module"] == "no_such_module"
    assert event.attrs["message"] == "ModuleNotFoundError: No module named 'no_such_module'"


def test_a_name_that_a_module_lacks_is_reported(run, events):
    assert _python(run, "from json import no_such_name").returncode == 1
    assert _failed(events)[0].attrs["module"] == "json"


def test_a_shared_library_that_is_missing_is_reported(run, events):
    assert _python(run, "import ctypes\nctypes.CDLL('libno_such_library.so.3')").returncode == 1
    assert "libno_such_library.so.3" in _failed(events)[0].attrs["message"]


def test_a_failed_import_that_caused_another_exception_is_reported(run, events):
    program = """
    try:
        import no_such_module
    except ImportError as error:
        raise RuntimeError("the backend is not there") from error
    """
    assert _python(run, program).returncode == 1
    assert _failed(events)[0].attrs["module"] == "no_such_module"


@pytest.mark.parametrize(
    "program",
    [
        "try:\n    import no_such_module\nexcept ImportError:\n    pass",
        "try:\n    import no_such_module\nexcept ImportError:\n    raise SystemExit(3)",
        "raise ValueError('a .so')",
        "open('/no/such/file.so')",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_other_ends_are_no_failed_imports(run, events, program):
    _python(run, program)
    assert not _failed(events)


def test_nothing_is_reported_once_training_has_begun(run, events):
    assert _python(run, _STARTED_TRAINING + "import no_such_module").returncode == 1
    assert not _failed(events)


def test_exit_code_and_words_are_as_without_us(run):
    program = "print('out', flush=True)\nimport no_such_module"
    plain = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    ours = _python(run, program)
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_the_programs_own_hook_for_exceptions_still_runs(run, events):
    program = "import sys\nsys.excepthook = lambda *_: print('mine')\nimport no_such_module"
    assert _python(run, program).stdout == "mine\n"
    assert len(_failed(events)) == 1


def test_an_interpreter_that_lacks_bootseer_tells_it_too(run, events):
    # Without site-packages, but with our sitecustomize.
    program = (
        "import sys\nsys.path[:] = [p for p in sys.path if 'site-packages' not in p and '/src' not in p]\nimport nope"
    )
    assert _python(run, program).returncode == 1
    assert _failed(events)[0].attrs["module"] == "nope"


def test_each_process_that_dies_tells_its_own(run, events):
    program = """
    import subprocess, sys
    for name in ("first", "second"):
        subprocess.run([sys.executable, "-c", f"import no_{name}"], stderr=subprocess.DEVNULL)
    """
    assert _python(run, program).returncode == 0
    assert [event.attrs["module"] for event in _failed(events)] == ["no_first", "no_second"]

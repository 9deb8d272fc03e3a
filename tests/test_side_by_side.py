"""What `pytest -n` runs side by side: everything once, whatever becomes of the workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

_ONE = """
import os, signal, time, pytest

def test_before(tmp_path):
    assert list(tmp_path.iterdir()) == []

def test_kills_its_process():
    os.kill(os.getpid(), signal.SIGKILL)

def test_fails():
    print("said")
    assert 1 == 2

@pytest.fixture(scope="module")
def broken():
    yield
    raise ValueError("at the end")

def test_leaves_a_broken_end(broken):
    pass
"""
_OTHER = """
import os, pytest

@pytest.mark.parametrize("number", range(3))
def test_passes(number):
    assert os.read(0, 1) == b""

def test_ends_its_process():
    os._exit(0)

def test_skips():
    pytest.skip("for a reason")
"""


COMMAND = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "side_by_side"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}


def run(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, list[str]]]:
    report = folder / "report.xml"
    ran = subprocess.run(
        [*COMMAND, f"--junitxml={report}", f"--basetemp={folder / 't'}", "-ra", *words],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    cases = list(ElementTree.parse(report).getroot()[0]) if report.exists() else []  # noqa: S314 - pytest has just written it
    found = {str(case.get("name")): [part.tag for part in case] for case in cases}
    assert len(found) == len(cases)
    return ran, found


def test_each_test_is_run_and_told_once_even_when_its_process_dies(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(_ONE)
    (tmp_path / "test_other.py").write_text(_OTHER)
    ran, found = run(tmp_path, "-n", "2")
    assert ran.returncode == 1
    assert found == {
        "test_before": [],
        "test_kills_its_process": ["failure"],
        "test_fails": ["failure"],
        "test_leaves_a_broken_end": ["error"],
        "test_passes[0]": [],
        "test_passes[1]": [],
        "test_passes[2]": [],
        "test_ends_its_process": ["failure"],
        "test_skips": ["skipped"],
    }
    assert "its process has ended with -9" in ran.stdout
    assert "for a reason" in ran.stdout
    assert "said" in ran.stdout
    assert "3 failed, 5 passed, 1 skipped, 1 error" in ran.stdout


def test_it_ends_at_the_first_failure_where_that_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(_ONE)
    ran, found = run(tmp_path, "-n", "2", "-x")
    assert ran.returncode == 1
    assert "test_kills_its_process" in found
    assert "test_leaves_a_broken_end" not in found


def test_files_run_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for the other."""
    for mine, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"test_{mine}.py").write_text(
            "import time\nfrom pathlib import Path\n\n"
            f"def test_{mine}():\n    Path({str(tmp_path)!r}, {mine!r}).touch()\n"
            f"    until = time.monotonic() + 100\n"
            f"    while not Path({str(tmp_path)!r}, {other!r}).exists():\n"
            "        assert time.monotonic() < until\n        time.sleep(0.01)\n"
        )
    ran, found = run(tmp_path, "-n", "2")
    assert (ran.returncode, found) == (0, {"test_a": [], "test_b": []}), ran.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_when_the_main_process_is_ended_workers_end_with_their_fixtures(tmp_path: Path, number: int) -> None:
    for name in ("a", "b"):
        (tmp_path / f"test_{name}.py").write_text(
            "import time, pytest\nfrom pathlib import Path\n\n"
            f"@pytest.fixture\ndef server():\n    yield\n    Path({str(tmp_path)!r}, 'ended-{name}').touch()\n\n"
            "@pytest.mark.parametrize('number', range(1000))\n"
            f"def test_{name}(number, server):\n    Path({str(tmp_path)!r}, 'begun-{name}').touch()\n"
            "    time.sleep(0.3)\n"
        )
    words = [*COMMAND, f"--basetemp={tmp_path / 't'}", "-n", "2"]
    # The pipe is open as long as one of them lives.
    main = subprocess.Popen(words, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while not all((tmp_path / f"begun-{name}").exists() for name in ("a", "b")):
        assert main.poll() is None
        time.sleep(0.05)
    main.send_signal(number)
    output = main.communicate(timeout=100)[0]
    assert main.returncode == (-number if number == signal.SIGKILL else 2), output
    assert all((tmp_path / f"ended-{name}").exists() for name in ("a", "b"))


def test_a_worker_that_cannot_end_well_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_sessionfinish(session):\n"
        "    if hasattr(session.config, 'workerinput'):\n        raise ValueError('odd')\n"
    )
    (tmp_path / "test_a.py").write_text("def test_a():\n    pass\n")
    ran, _ = run(tmp_path, "-n", "1")
    assert ran.returncode == 1
    assert "ValueError: odd" in ran.stdout + ran.stderr

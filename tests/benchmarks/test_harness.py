"""The harness of the benchmarks: results are saved after each round, and quick runs replace no measurement."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
with pytest.MonkeyPatch.context() as patched:
    # Only for this import: some test modules have the same names as benchmarks.
    patched.setattr(sys, "path", [*sys.path, BENCHMARKS])
    import harness
    from harness import Benchmark, Left, Outcome


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def outcome(*samples: float) -> Outcome:
    return Outcome(parameters={}, samples={"arm": list(samples)}, unit="ms")


def cut_in_the_third(quick: bool, rounds: int | None) -> Iterator[Outcome]:
    assert (quick, rounds) == (False, 5)
    yield outcome(1)
    yield outcome(1, 3)
    raise KeyboardInterrupt


def test_a_run_that_is_cut_keeps_the_rounds_that_it_has(results: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        harness.run(Benchmark("long", "?", by_rounds=cut_in_the_third), False, 5)
    kept = json.loads((results / "long.json").read_text())
    assert (kept["samples"], kept["summary"]["arm"]["median"]) == ({"arm": [1, 3]}, 2)
    assert [path.name for path in results.iterdir()] == ["long.json"]


def test_a_quick_run_does_not_replace_a_measurement(results: Path) -> None:
    one = Benchmark("one", "?", lambda quick: outcome(1.0 if quick else 2.0))
    harness.run(one, False)
    harness.run(one, True)
    assert json.loads((results / "one.json").read_text())["samples"] == {"arm": [2]}
    assert json.loads((results / "quick/one.json").read_text())["samples"] == {"arm": [1]}


def test_rounds_are_given_only_where_they_are_made(results: Path) -> None:
    with pytest.raises(ValueError, match="cannot be given"):
        harness.run(Benchmark("one", "?", lambda quick: outcome(1)), False, 2)
    assert not results.exists()


def test_the_remaining_time_is_shown_before_the_first_measurement() -> None:
    assert str(Left([300.0, 60.0, 60.0])) == "round 1 of 3, about 7 min are left"


STOPPED = """
import os, signal, sys, time
sys.path.insert(0, sys.argv.pop(1))
import run
def measure(*_):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        print("removed", flush=True)
run.harness.run = measure
sys.exit(run.main())
"""


def test_sigterm_does_not_leave_links_and_servers_behind() -> None:
    words = [sys.executable, "-c", STOPPED, BENCHMARKS, "run_overhead"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[-1:]) == (143, ["removed"]), done.stderr

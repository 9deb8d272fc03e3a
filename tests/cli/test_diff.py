"""`bootseer diff` in CI: the exit code distinguishes a slower start from errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleet import INSTALL, Fleet

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture
def logs(tmp_path):
    """fast.log, slow.log, and runs.log with attempts 0 to 5 of one job: the first is fast.log, the last slow.log."""
    runs = b""
    for attempt, seconds in enumerate((60.0, 61.0, 58.0, 59.5, 62.0, 90.0)):
        work = {(node, INSTALL): seconds + node / 50 for node in range(12)}
        lines = b"".join(Fleet(12, work_of=work, attempt=attempt, begin_s=attempt * 900).lines())
        runs += lines
        if attempt in (0, 5):
            (tmp_path / ("slow.log" if attempt else "fast.log")).write_bytes(lines)
    (tmp_path / "runs.log").write_bytes(runs)


def test_exit_codes(run, logs):
    slower = run("diff", "--baseline", "runs.log@0..4", "runs.log@5")
    assert (slower.returncode, slower.stderr) == (1, "")
    assert "environment_setup +30" in slower.stdout
    assert "5 runs against 1" in slower.stdout
    assert run("diff", "--baseline", "runs.log@0..4", "slow.log", "--exit-zero").returncode == 0
    assert run("diff", "--baseline", "runs.log@0..3", "runs.log@4").returncode == 0
    assert run("diff", "runs.log@5", "runs.log@0..4").returncode == 0
    pair = run("diff", "fast.log", "slow.log")
    assert pair.returncode == 0
    assert "One pair does not prove" in " ".join(pair.stdout.split())
    assert run("diff", "fast.log", "slow.log", "--run-variation", "0.02").returncode == 1
    same = run("diff", "fast.log", "fast.log")
    assert same.returncode == 0
    assert same.stdout.startswith("No difference beyond noise: +0.00 s")


def test_json_and_widths(run, logs):
    several = ("diff", "--baseline", "fast.log", "--baseline", "runs.log@1..4", "slow.log")
    told = json.loads(run(*several, "--json").stdout)
    assert (told["schema"], told["slower"], told["a_runs"], told["b_runs"]) == ("bootseer.diff/2", True, 5, 1)
    behind = json.loads(run("diff", "--json", "--baseline", "fast.log", "runs.log@1..4", "slow.log").stdout)
    assert behind == told
    for columns in ("60", "80", "200", "odd"):
        text = run(*several, more={"COLUMNS": columns}).stdout
        assert max(len(line) for line in text.splitlines()) <= (int(columns) if columns.isdecimal() else 80)


@pytest.mark.parametrize(
    ("place", "code", "words"),
    [
        ("nowhere", 2, "no such file"),
        ("nowhere@1", 2, "no such file"),
        ("n" * 4000, 2, "no such file"),
        ("/dev/null", 1, "no event"),
        (str(GOLDEN / "uv" / "plain.log"), 1, "contains no times"),
        (str(GOLDEN / "uv" / "plain.log@0"), 1, "contains no times"),
        ("fast.log@7", 2, "no such attempt"),
        ("runs.log@7..99999999999999999", 2, "its attempts: 0, 1, 2, 3, 4, 5"),
        ("runs.log@3..1", 2, "no such attempt"),
        ("fast.log@0..", 2, "no such file"),
        ("fast.log@" + "1" * 5000, 2, "no such file"),
    ],
)
def test_an_invalid_side(run, logs, place, code, words):
    for sides in ((place, "fast.log"), ("fast.log", place)):
        result = run("diff", *sides)
        assert (result.returncode, result.stdout) == (code, "")
        assert words in result.stderr
        assert "Traceback" not in result.stderr


def test_limits_are_numbers(run, logs):
    for option in ("--min-share", "--min-seconds", "--run-variation"):
        for value in ("nan", "inf", "-1"):
            result = run("diff", "fast.log", "slow.log", option, value)
            assert (result.returncode, result.stdout) == (2, "")
    for words in (("agent", "run", "--every"), ("snapshotter", "--record"), ("agent", "run", "--idle")):
        assert "is not a number up to 1,000,000,000" in run(*words, "nan").stderr


def test_how_many_sides(run, logs):
    for sides in (("fast.log",), ("fast.log", "slow.log", "runs.log"), ("--baseline", "fast.log")):
        result = run("diff", *sides)
        assert (result.returncode, result.stdout) == (2, "")
    assert "--baseline moe@0..9" in run("diff", "fast.log", "slow.log", "runs.log").stderr

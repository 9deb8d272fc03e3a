"""`bootseer diff` as CI meets it: the exit code tells slower, and errors are no verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fleet import INSTALL, Fleet

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture
def logs(tmp_path):
    for name, seconds in (("fast", 60.0), ("slow", 90.0)):
        fleet = Fleet(12, work_of={(node, INSTALL): seconds + node / 50 for node in range(12)})
        (tmp_path / f"{name}.log").write_bytes(b"".join(fleet.lines()))


def test_exit_codes(run, logs):
    slower = run("diff", "fast.log", "slow.log")
    assert (slower.returncode, slower.stderr) == (1, "")
    assert "environment_setup +30" in slower.stdout
    assert run("diff", "fast.log", "slow.log", "--exit-zero").returncode == 0
    assert run("diff", "slow.log", "fast.log").returncode == 0
    same = run("diff", "fast.log", "fast.log")
    assert same.returncode == 0
    assert same.stdout.startswith("No difference beyond noise: +0.00 s")


def test_json_and_widths(run, logs):
    told = json.loads(run("diff", "fast.log", "slow.log", "--json").stdout)
    assert (told["schema"], told["slower"]) == ("bootseer.diff/1", True)
    for columns in ("60", "80", "200", "odd"):
        text = run("diff", "fast.log", "slow.log", more={"COLUMNS": columns}).stdout
        assert max(len(line) for line in text.splitlines()) <= (int(columns) if columns.isdecimal() else 80)


@pytest.mark.parametrize(
    ("place", "code", "words"),
    [
        ("nowhere", 2, "no such file"),
        ("nowhere@1", 2, "no such file"),
        ("n" * 4000, 2, "no such file"),
        ("/dev/null", 1, "no event"),
        (str(GOLDEN / "uv" / "plain.log"), 1, "nothing in it has a time"),
        (str(GOLDEN / "uv" / "plain.log@0"), 1, "nothing in it has a time"),
        ("fast.log@7", 2, "no such attempt"),
        ("fast.log@" + "1" * 5000, 2, "no such file"),
    ],
)
def test_a_side_that_is_none(run, logs, place, code, words):
    for sides in ((place, "fast.log"), ("fast.log", place)):
        result = run("diff", *sides)
        assert (result.returncode, result.stdout) == (code, "")
        assert words in result.stderr
        assert "Traceback" not in result.stderr


def test_limits_are_numbers(run, logs):
    for option in ("--min-share", "--min-seconds"):
        for value in ("nan", "inf", "-1"):
            result = run("diff", "fast.log", "slow.log", option, value)
            assert (result.returncode, result.stdout) == (2, "")

"""`bootseer doctor`: table, JSON and exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from bootseer.cli.doctor import doctor_command as command
from bootseer.cli.doctor import table_of
from bootseer.machine.check import Check


@pytest.mark.slow
def test_json(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--json", "--spool", str(tmp_path)])
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert (answer["schema"], answer["ok"]) == ("bootseer.doctor/1", True)
    rows = {row["name"]: row for row in answer["checks"]}
    assert set(rows["spool"]) == {"name", "status", "found", "why", "install", "opens", "required"}
    assert rows["spool"]["required"]
    assert not rows["FUSE"]["required"]


@pytest.mark.slow
def test_unusable_spool_is_exit_1_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(command, ["--spool", str(tmp_path / "file")])
    assert result.exit_code == 1
    assert "is not a folder" in " ".join(result.stdout.split())
    assert "BootSeer cannot measure here" in result.stdout


def test_table_fits_80_columns() -> None:
    text = io.StringIO()
    console = Console(file=text, width=80, highlight=False)
    path = "/very/long/" + "folder/" * 20
    opens = ("lazy image mount", "checkpoint mount", "environment snapshots")
    checks = [Check("user namespaces", "limited", path, path, "apt-get install [some] package", opens)]
    console.print(table_of(checks))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "to do: apt-get install [some] package" in text.getvalue()  # square brackets are not markup here
    assert "".join(map(str.strip, lines)).count("folder/") == 40  # wrapped, not truncated


def test_names_in_the_table_cannot_control_the_terminal() -> None:
    text = io.StringIO()
    check = Check("cache", "limited", "/x\x1b[2J", "/y\x1b]0;title\x07", "free it\nor move it", ("\x9b2Jjobs",))
    Console(file=text, width=80, highlight=False).print(table_of([check]))
    assert text.getvalue().replace("\n", "").isprintable()
    assert "\\x1b[2J" in text.getvalue()


@pytest.mark.slow
def test_output_that_cannot_be_written_is_no_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "bootseer", "doctor", "--json"]
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=180, check=False)
    assert (ended.returncode, ended.stderr) == (
        1,
        "bootseer: standard output: cannot be written: No space left on device\n",
    )

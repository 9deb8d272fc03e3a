"""The demo script's care for folders that are not its own; `make demo` is the test of the rest."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (ROOT / ".venv/bin/bootseer").exists(), reason="needs the .venv that make setup makes")
def test_never_empties_a_folder_of_somebody_else(tmp_path: Path) -> None:
    kept = tmp_path / "thesis.txt"
    kept.write_text("years of work")
    result = subprocess.run([ROOT / "examples/demo.sh", tmp_path], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "holds something that is not of this demo" in result.stderr
    assert kept.read_text() == "years of work"

"""Every log under tests/golden gives exactly the findings in the JSON file next to it.

After an intended change: `BOOTSEER_WRITE_GOLDEN=1 pytest tests/report/foreign`, then read the diff.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bootseer.report.foreign.program_tables import PROGRAMS

GOLDEN = Path(__file__).parents[2] / "golden"
LOGS = sorted(GOLDEN.glob("*/*.log"))


def test_there_are_logs_of_each_kind() -> None:
    known = {"kubernetes", "nccl", "pip", "torchelastic"}
    assert {log.parent.name for log in LOGS} == known | set(PROGRAMS)


@pytest.mark.parametrize("log", LOGS, ids=lambda log: f"{log.parent.name}/{log.stem}")
def test_findings(log: Path, read: Any) -> None:
    found = read(log.read_text(), file=log.name)
    expected = log.with_suffix(".json")
    if os.environ.get("BOOTSEER_WRITE_GOLDEN"):
        expected.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(expected.read_text())

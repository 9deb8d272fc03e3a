from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.checkpoint import attempts
from bootseer.checkpoint.attempts import collect

from .conftest import Desk
from .killed import content

pytestmark = pytest.mark.slow

_TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["replayed", "stream"])
def test_a_writer_that_is_killed_at_any_step_leaves_a_whole_file_and_is_collected(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "LEASE_S", 0.0)
    monkeypatch.setattr(attempts, "_NO_LEASE_S", 0.0)
    program = [sys.executable, Path(__file__).with_name("killed.py"), tmp_path / "runs", kind]
    subprocess.run(program, check=True, timeout=300, env={**os.environ, "PYTHONPATH": str(_TESTS)})
    runs = sorted((tmp_path / "runs").iterdir(), key=lambda path: int(path.name))
    assert len(runs) > 15
    seen = []
    for run in runs:
        desk = Desk(run, tmp_path / "spool")
        before = desk.read("job/file")
        seen.append(before)
        collect(desk.place, "job")  # type: ignore[arg-type]
        assert desk.read("job/file") == before
        assert desk.leftovers() == []
    old, new = content(0), content(100)
    # The old content up to some step, the new one afterwards, and nothing else.
    switch = seen.index(new)
    assert seen == [old] * switch + [new] * (len(seen) - switch)
    assert switch > 10

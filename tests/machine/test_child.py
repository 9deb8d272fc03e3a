"""A program with a deadline: it ends, fails, hangs, or does not exist."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import pytest

from bootseer.machine import child


def test_output_and_code() -> None:
    ended = child.run(
        [sys.executable, "-c", "import sys; print('a'); sys.stderr.write('b'); sys.exit(3)"], deadline_s=120
    )
    assert (ended.code, ended.output, ended.error) == (3, "a\nb", "")


def test_no_folder_for_temporary_files_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a read-only root."""
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    assert child.run(["echo", "a"], deadline_s=120).output == "a\n"


def test_missing_program() -> None:
    ended = child.run(["/nonexistent/program"], deadline_s=5)
    assert ended.code is None
    assert ended.error == "cannot run program: No such file or directory"


def test_hanging_child_and_its_children_are_killed(tmp_path: Path) -> None:
    """The grandchild holds the output open and ignores SIGTERM: only its end removes its entry in /proc."""
    note = tmp_path / "pids"
    script = f"trap '' TERM; sh -c 'trap \"\" TERM; echo $$ >> {note}; sleep 600' & echo $$ >> {note}; wait"
    for deadline_s in (1, 10, 60):  # a second may be too short on a busy machine
        note.write_text("")
        ended = child.run(["sh", "-c", script], deadline_s=deadline_s)
        assert ended.code is None
        assert ended.error == f"no answer within {deadline_s} s"
        pids = [int(line) for line in note.read_text().split()]
        if len(pids) == 2:
            break
    assert len(pids) == 2
    until = time.monotonic() + 120
    while any(map(_runs, pids)):
        assert time.monotonic() < until, "it was not killed"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"  # an orphan may not have been reaped yet by its new parent


def test_output_is_bounded() -> None:
    ended = child.run([sys.executable, "-c", "print('x' * 10_000_000)"], deadline_s=120)
    assert len(ended.output) <= 2 * 65_536


def test_descriptors_are_given_back() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        child.run(["true"], deadline_s=120)
        child.run(["/nonexistent"], deadline_s=5)
    assert len(list(Path("/proc/self/fd").iterdir())) == before

"""Finding a job's folder among those of all jobs."""

from __future__ import annotations

import os
from pathlib import Path

from bootseer.trace import spools


def test_a_folder_that_cannot_be_looked_at_hides_no_other(tmp_path: Path) -> None:
    for number, name in enumerate(("moe-4711", "moe-4712", "dense-9")):
        (tmp_path / name / "attempt-0").mkdir(parents=True)
        os.utime(tmp_path / name, (number, number))
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dense-9" / "loop").symlink_to("loop")
    assert spools.job_names(str(tmp_path)) == ["dense-9", "moe-4712", "moe-4711"]
    assert spools.find_job(str(tmp_path), "moe") == str(tmp_path / "moe-4712")
    assert spools.find_job(str(tmp_path), "4711") == str(tmp_path / "moe-4711")
    assert spools.newest_attempt(str(tmp_path / "dense-9")) == str(tmp_path / "dense-9" / "attempt-0")


def test_a_job_is_not_taken_for_one_whose_name_is_written_like_its_folder(tmp_path: Path) -> None:
    (tmp_path / "a_b").mkdir()
    assert spools.find_job(str(tmp_path), "a/b") is None


def test_the_latest_attempt_has_events_and_the_newest_process(tmp_path: Path) -> None:
    assert spools.latest(str(tmp_path / "none")) is None
    for job, changed in (("moe", 3), ("dense", 2), ("empty", 4)):
        folder = tmp_path / job / "attempt-0"
        folder.mkdir(parents=True)
        if job != "empty":
            (folder / "n.1.1.events").touch()
        os.utime(folder, (changed, changed))
    assert spools.latest(str(tmp_path)) == str(tmp_path / "moe" / "attempt-0")

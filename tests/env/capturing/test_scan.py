"""Captures by two scans: what they find in real files, and what they cannot detect."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.env.capturing import scan
from bootseer.env.capturing.exclude import Exclusions
from bootseer.env.capturing.scan import ScanCapture
from bootseer.errors import PermanentError


def begun(folder: Path) -> ScanCapture:
    # Rules about temporary folders would hide all files of a test.
    return ScanCapture(Exclusions(homes=[f"{folder}/home"]), roots=(str(folder),))


def actions(capture: ScanCapture, folder: Path) -> dict[str, str]:
    return {change.path.removeprefix(f"{folder}/"): change.action.value for change in capture.changes()}


def test_all_kinds_of_changes_are_found(tmp_path: Path) -> None:
    for name in ("text", "mode", "same_size", "gone", "folder/gone", "folder/kept", "dir_mode/x", "linked"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("12345")
    state = (tmp_path / "same_size").stat()
    with begun(tmp_path) as capture:
        (tmp_path / "text").write_text("more text")
        (tmp_path / "mode").chmod(0o600)
        (tmp_path / "same_size").write_text("54321")
        os.utime(tmp_path / "same_size", ns=(state.st_atime_ns, state.st_mtime_ns))
        (tmp_path / "gone").unlink()
        (tmp_path / "folder/gone").unlink()
        (tmp_path / "folder/new").write_text("")
        (tmp_path / "dir_mode").chmod(0o700)
        (tmp_path / "tree/sub").mkdir(parents=True)
        (tmp_path / "tree/sub/caf\udce9").write_text("x")
        (tmp_path / "link").symlink_to("text")
        assert actions(capture, tmp_path) == {
            "text": "modified",
            "mode": "modified",
            "same_size": "modified",
            "gone": "deleted",
            "folder/gone": "deleted",
            "folder/new": "added",
            "dir_mode": "modified",
            "tree": "added",
            "tree/sub": "added",
            "tree/sub/caf\udce9": "added",
            "link": "added",
        }


def test_nothing_is_found_where_nothing_happened(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/f").write_text("x")
    with begun(tmp_path) as capture:
        (tmp_path / "a/f").read_text()
        assert capture.changes() == []


def test_a_deleted_folder_is_one_change(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    with begun(tmp_path) as capture:
        (tmp_path / "a/b").rmdir()
        (tmp_path / "a").rmdir()
        assert actions(capture, tmp_path) == {"a": "deleted"}


def test_rules_hold_in_both_walks(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.netrc").write_text("old")
    with begun(tmp_path) as capture:
        (tmp_path / "home/.netrc").write_text("newer")
        (tmp_path / "home/run.pid").write_text("1")
        assert actions(capture, tmp_path) == {}
        assert capture.left_out.paths == {
            "credentials": [f"{tmp_path}/home/.netrc"],
            "pid file": [f"{tmp_path}/home/run.pid"],
        }


@pytest.mark.parametrize("is_new", [True, False])
def test_a_folder_of_secrets_is_named_once(tmp_path: Path, is_new: bool) -> None:
    """Each name is a line for the user: a folder that the owner leaves out may have thousands of files."""
    left_out = tmp_path / "home/.azure"
    (tmp_path / "home").mkdir()
    if not is_new:
        left_out.mkdir()
    with begun(tmp_path) as capture:
        (left_out / "deep").mkdir(parents=True)
        files = [left_out / "one", left_out / "deep/two"]
        for file in files:
            file.write_text("x")
        assert actions(capture, tmp_path) == {}
        assert capture.left_out.paths == {"credentials": [str(left_out)]}
        assert len(capture.left_out.warnings) == 1
        assert capture.left_out.withheld.keys() >= {*map(str, files)}


def test_what_was_there_before_is_said_to_be_unknown(tmp_path: Path) -> None:
    for name in ("text", "gone"):
        (tmp_path / name).write_text("x")
    with begun(tmp_path) as capture:
        (tmp_path / "text").write_text("new")
        (tmp_path / "gone").unlink()
        (tmp_path / "added").write_text("new")
        changes = {change.path.rpartition("/")[2]: change for change in capture.changes()}
    assert {name: change.before for name, change in changes.items()} == {"text": "other", "gone": "other", "added": ""}
    assert changes["text"].source == str(tmp_path / "text")
    assert changes["gone"].source == ""


def test_the_number_of_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        (tmp_path / str(number)).write_text("")
    monkeypatch.setattr(scan, "MAX_ENTRIES", 9)
    with pytest.raises(PermanentError, match="more than 9 files"):
        begun(tmp_path)

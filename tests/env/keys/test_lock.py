"""Locks: uv resolves with wheels built by the test."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from bootseer.env.keys import lock
from bootseer.env.keys.files import FactCache, NodeFiles
from bootseer.env.keys.requirements import Requirements
from bootseer.errors import UsageError

UV = lock.own_uv()
needs_uv = pytest.mark.skipif(UV is None, reason="uv is not installed")


def _wheel(folder: Path, name: str, version: str, needs: str = "") -> None:
    stem = f"{name}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (
        f"Requires-Dist: {needs}\n" if needs else ""
    )
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{stem}.dist-info/METADATA", metadata)
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", f"{name}.py,,\n")


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    """An environment in which uv has two wheels and no index."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    _wheel(wheels, "first", "1.2", "second>=1")
    _wheel(wheels, "second", "1.1")
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "UV_FIND_LINKS": str(wheels),
        "UV_NO_INDEX": "1",
        "UV_OFFLINE": "1",
        "UV_NO_CONFIG": "1",
        "UV_CACHE_DIR": str(tmp_path / "cache"),
    }


@needs_uv
def test_a_lock_names_every_version_and_hash_and_leaves_nothing_open(tmp_path: Path, offline: dict[str, str]) -> None:
    (tmp_path / "r.txt").write_text("first\n")
    out = lock.resolve([str(tmp_path / "r.txt")], sys.executable, tmp_path / "lock.txt", env=offline, uv=UV)
    text = out.read_text()
    assert "first==1.2" in text
    assert "second==1.1" in text
    assert text.count("--hash=sha256:") == 2
    found = Requirements()
    found.add_files([(str(out), False)], NodeFiles(FactCache(None)), str(tmp_path))
    found.close()
    assert not found.unpinned
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".lock")] == []


@needs_uv
def test_the_file_that_settings_of_uv_name_is_not_written(
    tmp_path: Path, offline: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.txt").write_text("first\n")
    (tmp_path / "uv.toml").write_text("[pip]\noutput-file = 'r.txt'\n")
    lock.resolve(["r.txt"], sys.executable, tmp_path / "lock.txt", env={**offline, "UV_NO_CONFIG": "0"}, uv=UV)
    assert (tmp_path / "r.txt").read_text() == "first\n"


@needs_uv
def test_requirements_that_cannot_be_met_leave_the_old_lock(tmp_path: Path, offline: dict[str, str]) -> None:
    (tmp_path / "r.txt").write_text("first>2\n")
    (tmp_path / "lock.txt").write_text("old")
    with pytest.raises(UsageError, match="first"):
        lock.resolve([str(tmp_path / "r.txt")], sys.executable, tmp_path / "lock.txt", env=offline, uv=UV)
    assert (tmp_path / "lock.txt").read_text() == "old"


def test_without_uv_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uv", None)  # like after its removal by hand
    (tmp_path / "r.txt").write_text("first\n")
    with pytest.raises(UsageError, match="locking needs uv") as caught:
        lock.resolve([str(tmp_path / "r.txt")], None, tmp_path / "lock.txt", env={"PATH": str(tmp_path)})
    assert "pip install 'bootseer[env]'" in caught.value.hint


def test_a_uv_that_cannot_be_run_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("first\n")
    with pytest.raises(UsageError, match="cannot run uv") as caught:
        lock.resolve([str(tmp_path / "r.txt")], None, tmp_path / "lock.txt", env={}, uv=str(tmp_path / "uv"))
    assert "--uv" in caught.value.hint


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    program = shutil.which("true") or ""
    with pytest.raises(UsageError, match=r"nowhere\.txt"):
        lock.resolve(["nowhere.txt"], None, tmp_path / "lock.txt", env={}, uv=program)

"""`bootseer ckpt mount`, `umount` and `mounted`."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest_launch import Run

pytestmark = pytest.mark.fuse

Ckpt = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def ckpt(tmp_path: Path, run: Run) -> Iterator[Ckpt]:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened by this user")
    env = {"BOOTSEER_RUNTIME": str(tmp_path / "run"), "BOOTSEER_CACHE": str(tmp_path / "cache")}
    (tmp_path / "place").mkdir()

    def call(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return run("ckpt", *map(str, words), more=env)

    yield call
    call("umount", "--force", tmp_path / "m")


def test_a_mount_is_made_listed_and_taken_away(tmp_path: Path, ckpt: Ckpt, run: Run) -> None:
    target = tmp_path / "m"
    made = ckpt("mount", tmp_path / "place", target)
    assert made.returncode == 0, made.stderr
    assert "writable" in made.stdout
    assert f"bootseer ckpt umount {target}" in made.stdout
    (target / "f").write_bytes(b"x")
    listed = ckpt("mounted")
    assert listed.returncode == 0
    assert "writable, read 0 B" in listed.stdout
    (row,) = json.loads(ckpt("mounted", "--json").stdout)["mounts"]
    assert (row["target"], row["uri"], row["access"]) == (str(target), str(tmp_path / "place"), "rw")
    assert row["daemon"]["pid"] == row["daemon_pid"]
    assert f"at {target}, BootSeer" in Path(row["log"]).read_text()
    refused = run("image", "umount", str(target), more={"BOOTSEER_RUNTIME": str(tmp_path / "run")})
    assert (refused.returncode, f"hint: bootseer ckpt umount {target}" in refused.stderr) == (2, True)
    gone = ckpt("umount", target)
    assert (gone.returncode, gone.stdout) == (0, ""), gone.stderr
    assert ckpt("mounted").stdout == "nothing is mounted\n"
    assert (tmp_path / "place/f").read_bytes() == b"x"


def test_a_bundle_for_a_bug_report_has_states_and_logs_and_no_secrets(tmp_path: Path, ckpt: Ckpt, run: Run) -> None:
    (tmp_path / "core-site.xml").write_text(
        "<configuration><property><name>fs.defaultFS</name><value>hdfs://me:hidden@nn</value></property>"
        "<property>\n<name>fs.s3a.secret.key</name> <value>hidden</value></property></configuration>"
    )
    assert ckpt("mount", tmp_path / "place", tmp_path / "m").returncode == 0
    doctor = ("doctor", "--bundle", str(tmp_path / "b.tar.gz"))
    env = {
        "HADOOP_CONF_DIR": str(tmp_path),
        "BOOTSEER_API_TOKEN": "hidden",
        "BOOTSEER_RUNTIME": str(tmp_path / "run"),
    }
    assert run(*doctor, more=env).returncode == 0
    with tarfile.open(tmp_path / "b.tar.gz") as bundle:
        texts = {entry.name.removeprefix("bootseer-bundle/"): bundle.extractfile(entry).read() for entry in bundle}  # type: ignore[union-attr]
    assert b"hidden" not in b"".join(texts.values())
    assert b"fs.defaultFS = hdfs://***@nn" in texts["hadoop/core-site.xml.txt"]
    assert b"BOOTSEER_API_TOKEN=***" in texts["environment.txt"]
    (row,) = json.loads(texts["checkpoints/mounts.json"])
    assert (row["health"], row["unpublished"]) == ("mounted", [])
    assert b"BootSeer" in texts[f"checkpoints/{row['id']}/log"]
    again = run(*doctor, more=env)
    assert (again.returncode, "File exists" in again.stderr) == (2, True)


def test_failed_mounts_and_unmounts_are_errors_in_one_line(tmp_path: Path, ckpt: Ckpt) -> None:
    (tmp_path / "file").touch()
    for words, part in (
        (("mount", "ftp://bucket", tmp_path / "m"), "not a place for checkpoints"),
        (("mount", tmp_path / "none", tmp_path / "m"), "there is no file"),
        (("mount", tmp_path / "file", tmp_path / "m"), "a directory"),
        (("mount", tmp_path / "place", tmp_path / "m", "--memory", "much"), "is not a size"),
        (("umount", tmp_path / "m"), "no checkpoints are mounted there"),
    ):
        ended = ckpt(*words)
        assert ended.returncode != 0
        assert part in ended.stderr
        assert "Traceback" not in ended.stderr
    assert not (tmp_path / "m").exists()


def test_a_mount_in_use_stays_unless_it_is_forced(tmp_path: Path, ckpt: Ckpt) -> None:
    target = tmp_path / "m"
    ckpt("mount", tmp_path / "place", target, "--no-cache", "--json")
    handle = os.open(target / "f", os.O_WRONLY | os.O_CREAT)
    os.write(handle, b"half")
    refused = ckpt("umount", target)
    assert refused.returncode == 1
    assert "being written: f" in refused.stderr
    forced = ckpt("umount", "--force", target)
    assert (forced.returncode, forced.stdout) == (0, "published while open: f\n")
    assert (tmp_path / "place/f").read_bytes() == b"half"
    with pytest.raises(OSError):
        os.close(handle)


def test_a_read_only_mount_is_an_error(tmp_path: Path, ckpt: Ckpt) -> None:
    said = ckpt("mount", tmp_path / "place", tmp_path / "m", "--read-only", "--json")
    assert json.loads(said.stdout)["access"] == "ro"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's mounts are open to other users")
@pytest.mark.parametrize("only_me", [False, True])
def test_other_users_are_shut_out_of_a_mount_that_is_only_mine(open_folder: Path, ckpt: Ckpt, only_me: bool) -> None:
    (open_folder / "place").mkdir()
    (open_folder / "place" / "f").write_text("data")
    target = open_folder / "m"
    made = ckpt("mount", open_folder / "place", target, "--no-cache", *["--only-me"] * only_me)
    assert made.returncode == 0, made.stderr
    try:
        assert (target / "f").read_text() == "data"
        other: dict[str, Any] = {"user": 64321, "group": 64321, "extra_groups": []}
        theirs = subprocess.run(["cat", target / "f"], capture_output=True, check=False, **other)
        assert theirs.stdout == (b"" if only_me else b"data")
        assert theirs.returncode == only_me
    finally:
        ckpt("umount", "--force", target)

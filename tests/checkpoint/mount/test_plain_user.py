"""A mount by an unprivileged user, through fusermount3, with the command line."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from bootseer.fuse.attach import HELPER
from checkpoint.mounted_place import MIB
from conftest_launch import BOOTSEER
from plain_user import UID, as_plain_user, home_of

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
    pytest.mark.skipif(shutil.which(HELPER) is None, reason=f"{HELPER} is not installed"),
]


def as_user(folder: Path, script: str, *, named: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a shell script as that user, with access to the FUSE device."""
    home = home_of(folder)
    names = {"HOME": str(home), "BOOTSEER_RUNTIME": str(home / "runtime"), "BOOTSEER_CACHE": str(home / "cache")}
    return subprocess.run(
        ["sh", "-ec", script],
        preexec_fn=as_plain_user(folder, fuse=True, named=named),
        env={**os.environ, **names, "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_plain_user_mounts_writes_reads_and_unmounts(tmp_path: Path) -> None:
    for above in (tmp_path, *tmp_path.parents[:3]):
        above.chmod(above.stat().st_mode | 0o711)
    data = os.urandom(9 * MIB + 5)
    home = home_of(tmp_path)
    (home / "data").write_bytes(data)
    (home / "data").chmod(0o644)
    bootseer = shlex.join(BOOTSEER)
    ran = as_user(
        tmp_path,
        f"""
        mkdir place
        {bootseer} ckpt mount place m >&2
        umask 077
        cp data m/private
        mkdir m/folder
        cp data m/folder/new
        mv m/folder/new m/folder/f
        cmp data m/folder/f
        stat -c %u:%a m/private
        {bootseer} ckpt mounted --json
        {bootseer} ckpt umount m >&2
        ls -A m
        """,
    )
    assert ran.returncode == 0, ran.stderr
    owner, _, said = ran.stdout.partition("\n")
    assert owner == f"{UID}:600"
    (row,) = json.loads(said)["mounts"]
    assert (row["state"], row["daemon"]["lost"]) == ("mounted", [])
    (parts,) = (home / "place/.stripes").iterdir()
    assert {path.stat().st_mode & 0o777 for path in (home / "place/private", *parts.iterdir())} == {0o600}
    assert (home / "place/folder/f").stat().st_uid == UID


def test_files_that_a_plain_user_may_not_read_are_refused_but_listed(tmp_path: Path) -> None:
    for above in (tmp_path, *tmp_path.parents[:3]):
        above.chmod(above.stat().st_mode | 0o711)
    home = home_of(tmp_path)
    (home / "place").mkdir()
    (home / "place/secret").write_bytes(b"s")
    (home / "place/secret").chmod(0o600)
    (home / "place/readable").write_bytes(b"r")
    bootseer = shlex.join(BOOTSEER)
    ran = as_user(
        tmp_path,
        f"""
        {bootseer} ckpt mount place m >&2
        ls m
        cat m/readable m/secret || echo refused
        echo x > m/new || echo refused
        {bootseer} ckpt umount m >&2
        """,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "readable\nsecret\nrrefused\nrefused\n"
    assert ran.stderr.count("Permission denied") == 2


def test_a_plain_users_local_folder_is_read_in_place_or_mounted_elsewhere(tmp_path: Path) -> None:
    for above in (tmp_path, *tmp_path.parents[:3]):
        above.chmod(above.stat().st_mode | 0o711)
    run = f"{shlex.join(map(str, BOOTSEER))} run -q --spool spool --job j --checkpoint job"
    done = as_user(
        tmp_path,
        f"mkdir -p job/step-1 && echo step-1 > job/latest\n{run} -- sh -c 'cat $BOOTSEER_CHECKPOINT/latest'\n"
        f"{run} --checkpoint-dir at --checkpoint-read mount --"
        " sh -c 'cat at/latest; grep -c \" $PWD/at fuse.bootseer \" /proc/mounts'\n"
        f"mkdir -m 0 closed\n! {run}/../closed/job -- true\n",
    )
    assert (done.returncode, done.stdout) == (0, "step-1\nstep-1\n1\n"), done.stderr
    (closed,) = done.stderr.splitlines()
    assert "closed" in closed


def test_a_user_without_a_name_is_told_what_a_mount_needs(tmp_path: Path) -> None:
    for above in (tmp_path, *tmp_path.parents[:3]):
        above.chmod(above.stat().st_mode | 0o711)
    ran = as_user(tmp_path, f"mkdir place\n! {shlex.join(BOOTSEER)} ckpt mount place m", named=False)
    assert (ran.returncode, ran.stderr.count("\n")) == (0, 1), ran.stderr
    assert ran.stderr.endswith(f"could not determine username; user {UID} needs a line in /etc/passwd\n")

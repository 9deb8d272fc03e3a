"""The programs for Slurm: mounts of the prolog for comments of jobs, and errors of the health check."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

PROLOG = Path(__file__).parents[2] / "contrib" / "slurm" / "prolog.sh"
IMAGE = "registry.example/team/train:7"
STORE = ["--store", "/store"]


@pytest.mark.root
@pytest.mark.parametrize(
    ("comment", "words"),
    [
        (f"bootseer-image={IMAGE}", [*STORE, IMAGE]),
        (f"bootseer-image={IMAGE},bootseer-workload=train.py-01", [*STORE, "--workload", "train.py-01", IMAGE]),
        (f"x;bootseer-workload=moe bootseer-image={IMAGE}", [*STORE, "--workload", "moe", IMAGE]),
        (f"bootseer-image={IMAGE},bootseer-workload=-v", [*STORE, IMAGE]),
        (f"bootseer-image={IMAGE},bootseer-workload=$(id)", [*STORE, IMAGE]),
        ("bootseer-image=--rw", None),
        ("bootseer-workload=moe", None),
    ],
)
def test_the_image_and_hot_set_of_the_comment_are_mounted(
    comment: str, words: list[str] | None, tmp_path: Path
) -> None:
    program = tmp_path / "bootseer"
    program.write_text(f'#!/bin/sh\ncd {tmp_path}; printf "%s\n" "$@" >given.new; mv given.new given\n')
    program.chmod(0o755)
    env = {
        "BOOTSEER": str(program),
        "BOOTSEER_SLURM_RUN": str(tmp_path),
        "BOOTSEER_SLURM_IMAGE_OPTIONS": " ".join(STORE),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_USER": "root",
        "SLURM_JOB_UID": "0",
        "SLURM_JOB_GID": "0",
    }
    subprocess.run([PROLOG], env={**os.environ, **env, "SLURM_JOB_COMMENT": comment}, check=True)
    if words is None:
        assert not (tmp_path / "7").exists()
        return
    end = time.monotonic() + 60
    while not (tmp_path / "given").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    given = (tmp_path / "given").read_text().splitlines()
    assert given == ["image", "mount", *words, f"{tmp_path}/7/image"]


def test_a_health_check_reports_why_it_failed(tmp_path: Path) -> None:
    """slurmd logs the output of a failing program. It was discarded, so that a wrong token was not noticed."""
    health, program = tmp_path / "health.sh", tmp_path / "bootseer"
    health.write_bytes((PROLOG.parent / "health.sh").read_bytes())
    program.write_text("#!/bin/sh\necho the service denied access >&2\nexit 1\n")
    program.chmod(0o755)
    env = {**os.environ, "BOOTSEER": str(program), "SLURMD_NODENAME": "n1"}
    done = subprocess.run(["sh", health], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "the service denied access\n")

"""The doctor's line about environments: tried for real, and nothing of it stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.launch.doctor import ENVIRONMENTS, check_environments
from bootseer.mounts import kernel


@pytest.mark.root
def test_what_works_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    found = check_environments(tmp_path / "cache")
    assert (found.name, found.status) == (ENVIRONMENTS, "ok")
    assert "overlay" in found.found
    assert not list(tmp_path.iterdir())
    assert not [point for point in kernel.mount_points() if point.startswith(f"{tmp_path}/")]


# A resolver that hears questions and never answers, in a network of its own.
DEAD = """
import os, socket
from pathlib import Path
from bootseer.launch import doctor
from bootseer.mounts import kernel

kernel.unshare_mounts()
dead = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
dead.bind(("127.0.0.1", 53))
Path(os.environ["CONF"]).write_text("nameserver 127.0.0.1\\n")
kernel.attach(kernel.clone_mount(Path(os.environ["CONF"])), Path("/etc/resolv.conf").resolve())
doctor._NAMES_S = 0.5
check = doctor.check_names()
print(check.status, check.why)
os._exit(0)  # the look-up goes on for seconds
"""


@pytest.mark.root
def test_a_resolver_that_does_not_answer_is_told(tmp_path: Path) -> None:
    words = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$0" -u -c "$1"', sys.executable, DEAD]
    said = subprocess.check_output(words, env={**os.environ, "CONF": str(tmp_path / "conf")}, text=True)
    assert said.startswith("limited reverse DNS")

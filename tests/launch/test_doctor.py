"""The doctor's checks: done for real, without leaving anything behind."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bootseer.errors import UsageError
from bootseer.image.mounting import trial
from bootseer.launch.doctor import ENVIRONMENTS, check_environments, write_bundle
from bootseer.mounts import kernel


@pytest.mark.root
def test_working_environments_are_reported_and_leave_nothing_behind(tmp_path: Path) -> None:
    found = check_environments(tmp_path / "cache")
    assert (found.name, found.status) == (ENVIRONMENTS, "ok")
    assert "overlay" in found.found
    assert not list(tmp_path.iterdir())
    assert not [point for point in kernel.mount_points() if point.startswith(f"{tmp_path}/")]


@pytest.mark.root
def test_root_without_the_right_to_mount_is_told_to_get_it(tmp_path: Path) -> None:
    """As in most containers, where "run as root" is no help."""
    words = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-m", "bootseer", "doctor", "--json"]
    env = {**os.environ, "HOME": str(tmp_path), "BOOTSEER_CACHE": str(tmp_path), "BOOTSEER_SPOOL": str(tmp_path)}
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, check=True)
    todo = {row["name"]: row["install"] for row in json.loads(done.stdout)["checks"]}
    assert ("CAP_SYS_ADMIN" in todo[ENVIRONMENTS], "CAP_SYS_ADMIN" in todo[trial.CHECK]) == (True, True)


def test_a_bundle_for_a_bug_report_has_no_secrets(tmp_path: Path) -> None:
    (tmp_path / "etc" / "hadoop").mkdir(parents=True)
    site = "<property><name>fs.azure.sas.c.a.blob.core.windows.net</name><value>?sv=1&amp;sig=h4nter</value></property>"
    (tmp_path / "etc" / "hadoop" / "core-site.xml").write_text(f"<configuration>{site}</configuration>")
    secret = {"SLURM_JWT": "h4nter", "BOOTSEER_ALERT_TO": "slack=https://hooks.example/T0/h4nter"}
    secret |= {"BOOTSEER_STORE": "https://me:h4nter@host/x", "HADOOP_OPTS": "-Dx.password=h4nter"}
    places = {"HADOOP_HOME": str(tmp_path), "BOOTSEER_RUNTIME": str(tmp_path / "run"), "SLURM_JOB_ID": "77"}
    names = write_bundle(tmp_path / "bug.tar.gz", {}, secret | places)
    assert (tmp_path / "bug.tar.gz").stat().st_mode & 0o777 == 0o600
    with tarfile.open(tmp_path / "bug.tar.gz") as bundle:
        texts = [bundle.extractfile(entry).read() for entry in bundle.getmembers()]
    assert len(texts) == len(names)
    assert "hadoop/core-site.xml.txt" in names
    assert all(b"h4nter" not in text for text in texts)
    assert any(b"SLURM_JOB_ID=77" in text for text in texts)


def test_a_bundle_that_does_not_fit_on_the_disk_leaves_no_part_of_it(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(UsageError, match="too large"):
            write_bundle(tmp_path / "bug.tar.gz", {}, {"BOOTSEER_RUNTIME": str(tmp_path.parent / "none")})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    (tmp_path / "bug.tar.gz").write_text("there")
    with pytest.raises(UsageError, match="exists"):
        write_bundle(tmp_path / "bug.tar.gz", {}, {})
    assert (tmp_path / "bug.tar.gz").read_text() == "there"


# A DNS server that receives queries and never answers, in a separate network namespace.
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
os._exit(0)  # the look-up continues for seconds
"""


@pytest.mark.root
def test_a_resolver_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    words = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$0" -u -c "$1"', sys.executable, DEAD]
    said = subprocess.check_output(words, env={**os.environ, "CONF": str(tmp_path / "conf")}, text=True)
    assert said.startswith("limited reverse DNS")

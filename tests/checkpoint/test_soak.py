"""Several jobs repeatedly get the same striped file with parity from a real HDFS: no get hangs or has wrong bytes.

It lasts BOOTSEER_SOAK_S seconds, ten minutes in `make fuzz`, half of the time next to processes that keep all
processors busy. In the test suite, which loads the machine anyway, each job gets a smaller file once with all nodes and
once with one node killed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bootseer.places import open_place
from checkpoint.striped_files import content_of, put_striped
from hdfs_cluster import HdfsCluster, needs_hdfs

pytestmark = needs_hdfs
SOAK_S = float(os.environ.get("BOOTSEER_SOAK_S", "0"))
# A killed node is not restarted before the end.
PHASES = [(killed, loaded) for killed in (False, True) for loaded in (False, True) if SOAK_S or not loaded]
PHASE_S = SOAK_S / len(PHASES)
SIZE = (96 if SOAK_S else 16) << 20
JOBS = 3
_LAST = ("nice", "-n", "5")
HUNG_S = 120.0
"""Longer than the deadline of a read, so a get that takes longer hangs; on a loaded machine one takes a few seconds."""


@pytest.fixture(scope="module")
def cluster(shared_hdfs: HdfsCluster) -> Iterator[HdfsCluster]:
    yield shared_hdfs
    shared_hdfs.restart(0)


@pytest.fixture(scope="module")
def wanted(cluster: HdfsCluster) -> str:
    """Write the file; returns its digest. Its second part is on the node that is killed."""
    content = content_of(SIZE)
    place = open_place(f"{cluster.uri}/soak")
    place.make_folder("", parents=True)
    put_striped(place, "file", content, parity=True)
    place.close()
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(("killed", "loaded"), PHASES, ids=str)
def test_no_get_hangs(cluster: HdfsCluster, wanted: str, tmp_path: Path, killed: bool, loaded: bool) -> None:
    if killed:
        cluster.kill(0)
    until = time.monotonic() + PHASE_S
    problems: list[str] = []
    counts: list[int] = []

    def job(number: int) -> None:
        target = tmp_path / f"job{number}" / "file"
        log = tmp_path / f"log{number}"
        done = 0
        while (not done or time.monotonic() < until) and not problems:
            words = [sys.executable, "-m", "bootseer", "ckpt", "get", f"{cluster.uri}/soak/file", str(target)]
            with log.open("wb") as output:
                process = subprocess.Popen([*_LAST, *words, "--replace"], stdout=output, stderr=output)
            try:
                status = process.wait(HUNG_S)
            except subprocess.TimeoutExpired:
                problems.append(f"get {done} of job {number} hangs: {log.read_text()}")
                process.kill()
                process.wait()
                return
            if status:
                problems.append(f"get {done} of job {number}: {log.read_text()}")
            elif hashlib.sha256(target.read_bytes()).hexdigest() != wanted:
                problems.append(f"get {done} of job {number} has other bytes")
            done += 1
        counts.append(done)

    with ExitStack() as load:
        for _ in range(2 * (os.cpu_count() or 1) if loaded else 0):
            words = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", "while True: pass"]
            busy = subprocess.Popen([*_LAST, *words])
            load.callback(busy.wait)
            load.callback(busy.kill)
        jobs = [threading.Thread(target=job, args=(number,)) for number in range(JOBS)]
        for thread in jobs:
            thread.start()
        for thread in jobs:
            thread.join()
    assert not problems
    assert len(counts) == JOBS and min(counts) > 0
    print(f"{sum(counts)} gets")

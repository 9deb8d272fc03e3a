"""A real Slurm of four nodes: identity, queue time and one run for each rank come from it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from conftest_launch import BOOTSEER, stages
from slurm_cluster import MARKS, NODES, Cluster, slurm_cluster

pytestmark = MARKS


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def test_job_node_and_queue_come_from_slurm(slurm, env, events, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/sh\nsrun -n1 {' '.join(BOOTSEER)} run -q -- {sys.executable} -c 'import time; time.sleep(2)'\n"
    )
    words = ["sbatch", "--parsable", "--wait", "--begin=now+3", "-n1", "-o", str(tmp_path / "out"), str(script)]
    done = slurm.run(env, *words)
    assert done.returncode == 0, (tmp_path / "out").read_text()
    found = events()
    assert {event.job for event in found} == {f"job.sh-{done.stdout.strip()}"}
    (node,) = {event.node for event in found}
    assert node in NODES
    queue = [event for event in found if event.stage == "queue"]
    assert [event.phase for event in queue] == ["begin", "end"]
    assert 2 <= (queue[1].wall_ns - queue[0].wall_ns) / 1e9 <= 180
    assert queue[0].attrs["told_by"] in ("sacct", "scontrol")
    assert "allocation" in stages(found)


def test_one_run_for_each_task_is_one_attempt(slurm, env, events):
    done = slurm.run(env, "srun", "-N1", "-n2", *BOOTSEER, "run", "-q", "--", "true")
    assert done.returncode == 0, done.stderr
    runs = [event for event in events() if event.stage == "run" and event.phase == "begin"]
    assert sorted(event.rank for event in runs) == [0, 1]
    assert {event.attempt for event in runs} == {0}


def test_scancel_reaches_the_command(slurm, env, tmp_path):
    mark = tmp_path / "mark"
    script = f"trap 'echo got > {mark}; exit 5' TERM; touch {tmp_path}/up; while :; do sleep 0.1; done"
    words = ["srun", "-n1", *BOOTSEER, "run", "-q", "--", "sh", "-c", script]
    with subprocess.Popen(
        slurm.words(*words), env=slurm.env(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as ran:
        until = time.monotonic() + 300
        while not (tmp_path / "up").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        job = slurm.run(env, "squeue", "-h", "-o", "%A").stdout.split()[-1]
        assert slurm.run(env, "scancel", "--signal=TERM", job).returncode == 0
        ran.communicate(timeout=300)
    assert mark.read_text() == "got\n"
    assert ran.returncode == 5

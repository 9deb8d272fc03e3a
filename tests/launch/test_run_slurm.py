"""A real Slurm, on this machine alone: identity, queue time and one run for each rank come from it."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest_launch import BOOTSEER, stages
from registry import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.root,
    pytest.mark.skipif(
        bool(MISSING), reason=f"Slurm is not installed ({', '.join(MISSING)}): apt-get install slurm-wlm munge"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="starting Slurm's daemons needs root"),
]

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={dir}/munge.sock
CredType=cred/munge
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool
SlurmctldPidFile={dir}/ctld.pid
SlurmdPidFile={dir}/slurmd.pid
SlurmctldLogFile={dir}/ctld.log
SlurmdLogFile={dir}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
PropagateResourceLimits=NONE
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=500 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which `srun` and `sbatch` talk to a controller of this test's own."""
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    conf = folder / "slurm.conf"
    conf.write_text(
        CONF.format(
            host=socket.gethostname().split(".")[0],
            user=getpass.getuser(),
            ports=[free_port(), free_port()],
            dir=folder,
        )
    )
    env = {**os.environ, "SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    files = {name: str(folder / f"munge.{name}") for name in ("sock", "log", "pid", "seed")}
    munged = ["munged", "--foreground", "--force", "--key-file", str(key), "--socket", files["sock"]]
    daemons = [
        [*munged, "--log-file", files["log"], "--pid-file", files["pid"], "--seed-file", files["seed"]],
        ["slurmctld", "-D", "-f", str(conf)],
        ["slurmd", "-D", "-f", str(conf)],
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for words in daemons:
            with (folder / f"{words[0]}.out").open("wb") as log:
                running.append(subprocess.Popen(words, env=env, stdout=log, stderr=log))
            if words[0] == "munged":
                # The others end when they cannot sign what they say.
                _await(lambda: Path(files["sock"]).exists(), "munged listens")
        _await(lambda: _is_idle(env, running), "Slurm's node is idle")
        yield env
        # What is left of a job tells the controller of its end, and hangs when that is gone.
        _await(lambda: not _jobs(env), "Slurm's jobs have ended")
    finally:
        for process in reversed(running):
            process.terminate()
            try:
                process.wait(300)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _jobs(env: dict[str, str]) -> list[str]:
    words = ["squeue", "-h", "-o", "%A"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


def _is_idle(env: dict[str, str], running: list[subprocess.Popen[bytes]]) -> bool:
    assert all(process.poll() is None for process in running), "a daemon of Slurm ended"
    done = subprocess.run(["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True, check=False)
    return done.stdout.strip() == "idle"


def _await(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.1)


def _clean(env: dict[str, str], slurm: dict[str, str]) -> dict[str, str]:
    return {**env, "SLURM_CONF": slurm["SLURM_CONF"], "PATH": slurm["PATH"]}


def test_job_node_and_queue_come_from_slurm(slurm, env, events, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/sh\nsrun -n1 {' '.join(BOOTSEER)} run -q -- {sys.executable} -c 'import time; time.sleep(2)'\n"
    )
    words = ["sbatch", "--parsable", "--wait", "--begin=now+3", "-n1", "-o", str(tmp_path / "out"), str(script)]
    done = subprocess.run(words, env=_clean(env, slurm), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, (tmp_path / "out").read_text()
    found = events()
    assert {event.job for event in found} == {f"job.sh-{done.stdout.strip()}"}
    assert {event.node for event in found} == {socket.gethostname().split(".")[0]}
    queue = [event for event in found if event.stage == "queue"]
    assert [event.phase for event in queue] == ["begin", "end"]
    assert 2 <= (queue[1].wall_ns - queue[0].wall_ns) / 1e9 <= 180
    assert queue[0].attrs["told_by"] in ("sacct", "scontrol")
    assert "allocation" in stages(found)


def test_one_run_for_each_task_is_one_attempt(slurm, env, events):
    words = ["srun", "-n2", *BOOTSEER, "run", "-q", "--", "true"]
    done = subprocess.run(words, env=_clean(env, slurm), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    runs = [event for event in events() if event.stage == "run" and event.phase == "begin"]
    assert sorted(event.rank for event in runs) == [0, 1]
    assert {event.attempt for event in runs} == {0}


def test_scancel_reaches_the_command(slurm, env, tmp_path):
    mark = tmp_path / "mark"
    script = f"trap 'echo got > {mark}; exit 5' TERM; touch {tmp_path}/up; while :; do sleep 0.1; done"
    words = ["srun", "-n1", *BOOTSEER, "run", "-q", "--", "sh", "-c", script]
    with subprocess.Popen(words, env=_clean(env, slurm), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        _await((tmp_path / "up").exists, "the command has started")
        job = _jobs(_clean(env, slurm))[-1]
        subprocess.run(["scancel", "--signal=TERM", job], env=_clean(env, slurm), check=True)
        process.communicate(timeout=180)
    assert mark.read_text() == "got\n"
    assert process.returncode == 5

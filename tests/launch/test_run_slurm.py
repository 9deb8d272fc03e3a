"""A real Slurm with four nodes: identity, queue time and ranks of runs come from it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bootseer.image.sources.source import this_platform
from bootseer.report.inputs import sources
from bootseer.report.log_scan import scan
from bootseer.trace.event import Event
from busybox import CONFIG
from conftest_launch import BOOTSEER, stages
from fleet import EPOCH_NS, INSTALL, Fleet
from image_node import base_layers
from oci_images import write_layout
from once import compiled_secret_rules
from slurm_cluster import ACCOUNTING, MARKS, NODES, Cluster, slurm_cluster

pytestmark = MARKS


CONTRIB = Path(__file__).parents[2] / "contrib" / "slurm"
MODEL = os.urandom(3 << 20)


HEALTH_ONCE = """#!/bin/sh
[ "$1" = fleet ] || exec {bootseer} "$@"
keep={folder}/keep-$SLURMD_NODENAME
touch $keep
trap : TERM
{bootseer} "$@" || {{ code=$?; rm -f $keep; exit $code; }}
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    """With our prolog, epilog and health check, in a separate folder that every user can enter."""
    with tempfile.TemporaryDirectory(prefix="bootseer-slurm-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        with _cluster(Path(name)) as cluster:
            yield cluster


@contextmanager
def _cluster(folder: Path) -> Iterator[Cluster]:
    lines = (CONTRIB / "slurm.conf").read_text().replace("/etc/slurm/bootseer", str(folder))
    for path in CONTRIB.glob("*.sh"):
        shutil.copy2(path, folder)
    (folder / "spool").mkdir()
    # Starts in the last hours in which n2 was always the last node.
    first_s = time.time() - EPOCH_NS / 1e9 - 8 * 3600
    for number in range(8):
        fleet = Fleet(6, job="past", attempt=number, seed=number, begin_s=first_s + number * 3600,
                      work_of={(2, INSTALL): 100.0})  # fmt: skip
        lines_ = b"".join(fleet.lines()).replace(b"node-0002", b"n2")
        (folder / "spool" / f"{number}.events").write_bytes(lines_)
    # Health checks run every 3 s on each node, and each starts Python: the first that succeeds is enough.
    program = folder / "bootseer"
    program.write_text(HEALTH_ONCE.format(folder=folder, bootseer=Path(sys.executable).with_name("bootseer")))
    program.chmod(0o755)
    settings = {
        "SLURM_CONF": folder / "slurm.conf",
        "BOOTSEER": program,
        "BOOTSEER_CACHE": folder / "cache",
        "BOOTSEER_RUNTIME": folder / "runtime",
        "BOOTSEER_SLURM_RUN": folder / "run",
        "BOOTSEER_SLURM_IMAGE_OPTIONS": f"'--store {folder}/store'",
        "BOOTSEER_FLEET": folder / "spool",
    }
    (folder / "bootseer.env").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    _keep(folder)
    with slurm_cluster(folder, lines.replace("Interval=3600", "Interval=3")) as cluster:
        yield cluster


def _keep(folder: Path) -> None:
    """Switch off the health checks, which run every 3 s on four nodes: each would start Python."""
    for number in range(1, 5):
        (folder / f"keep-n{number}").touch()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


JOB = """#!/bin/sh
#SBATCH --job-name=moe --nodes=4 --ntasks-per-node=1
i=0  # the prolog mounts the image
until [ -e {slurm}/run/$SLURM_JOB_ID/image/hot ]; do i=$((i + 1)); [ $i -lt 3000 ] || exit 9; sleep 0.1; done
exec srun sh -c '
  export BOOTSEER_CACHE={folder}/cache-$SLURMD_NODENAME BOOTSEER_RUNTIME={folder}/runtime-$SLURMD_NODENAME
  exec {bootseer} run -q --image {digest} --store {slurm}/store --setup {folder}/setup.sh \
    --checkpoint {folder}/checkpoint --checkpoint-read mount --peers slurm --peers-secret {folder}/secret \
    --trace-to spool --trace-to service={url} --mount {folder}/out:/out \
    -- sh -c "cat /opt/mark /hot \\$BOOTSEER_CHECKPOINT/model > /out/$SLURMD_NODENAME"
'
"""


@pytest.mark.fuse
def test_one_job_of_four_nodes_through_image_snapshot_checkpoint_peers_and_service(
    slurm: Cluster, env: dict[str, str], events: Callable[[], list[Event]], tmp_path: Path
) -> None:
    layers = base_layers(tmp_path / "tree")
    write_layout(tmp_path / "layout", layers, tag="1", architecture=this_platform().architecture, **CONFIG)
    store = slurm.folder / "store"
    done = slurm.run(env, *BOOTSEER, "image", "convert", "--json", f"oci:{tmp_path}/layout:1", store)
    assert done.returncode == 0, done.stderr
    digest = json.loads((tmp_path / "layout" / "index.json").read_text())["manifests"][0]["digest"]
    for name in ("checkpoint", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint" / "model").write_bytes(MODEL)
    (tmp_path / "secret").write_bytes(os.urandom(32))
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "setup.sh").write_text("mkdir -p /opt && echo ready > /opt/mark\n")
    serve = slurm.words(*BOOTSEER, "serve", "--data", tmp_path / "data", "--listen", "127.0.0.1:0")
    with subprocess.Popen(serve, env=slurm.env(env), stderr=subprocess.PIPE, text=True) as service:
        try:
            assert service.stderr is not None
            url = re.search(r"http://[^/]+", service.stderr.readline())
            assert url is not None
            script = tmp_path / "job.sh"
            places = {"folder": tmp_path, "bootseer": " ".join(BOOTSEER), "digest": digest, "slurm": slurm.folder}
            script.write_text(JOB.format(**places, url=url[0]))
            words = ["sbatch", "--parsable", "--wait", "--comment", f"bootseer-image={digest}"]
            done = slurm.run(env, *words, "-o", tmp_path / "said", script)
            said = (tmp_path / "said").read_text()
            assert done.returncode == 0, said
            number = done.stdout.strip()
            job = f"moe-{number}"
            expected = b"ready\n" + (tmp_path / "tree" / "hot").read_bytes() + MODEL
            assert {name: (tmp_path / "out" / name).read_bytes() == expected for name in NODES} == dict.fromkeys(
                NODES, True
            )
            found = [event for event in events() if event.job == job]
            assert {(event.node, event.attempt) for event in found} == {(name, 0) for name in NODES}
            peers = [event.attrs["peers"] for event in found if event.stage == "peers_start"]
            assert peers == [4, 4, 4, 4], said
            assert sum(event.stage == "checkpoint_start" for event in found) == 4
            assert "queue" in stages(found)
            heard = ["history", job, "--service", url[0], "--json"]

            def starts() -> list[dict[str, object]]:
                done = slurm.run(env, *BOOTSEER, *heard)
                return json.loads(done.stdout)["starts"] if done.returncode == 0 else []

            until(lambda: [start["nodes_heard"] for start in starts()] == [4])
        finally:
            service.send_signal(signal.SIGINT)
            service.wait(300)
    # The epilog has unmounted what the prolog mounted.
    until(lambda: not list((slurm.folder / "run").iterdir()))


def test_a_node_that_is_often_last_is_drained(slurm: Cluster, env: dict[str, str]) -> None:
    shown = ("sinfo", "-h", "-N", "-o", "%N %t %E")
    assert "drain" not in slurm.run(env, *shown).stdout
    settings = slurm.folder / "bootseer.env"
    known = settings.read_text()
    settings.write_text(known.replace("/spool\n", "/missing\n"))
    (slurm.folder / "keep-n1").unlink()
    until(lambda: f"{slurm.folder}/missing" in (slurm.folder / "n1.log").read_text())
    settings.write_text(known)
    for path in slurm.folder.glob("keep-*"):
        path.unlink()
    until(lambda: "n2 drain bootseer: last in 8 of 8 starts" in slurm.run(env, *shown).stdout)
    assert slurm.run(env, *shown).stdout.count("drain") == 1
    _keep(slurm.folder)
    assert slurm.run(env, "scontrol", "update", "NodeName=n2", "State=RESUME").returncode == 0


@pytest.mark.parametrize(
    "told_by",
    [
        pytest.param("sacct", marks=pytest.mark.skipif(not ACCOUNTING, reason="no slurmdbd or MariaDB")),
        "scontrol",
    ],
)
def test_job_node_and_queue_come_from_slurm(slurm, env, events, tmp_path, told_by):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / told_by).symlink_to(shutil.which(told_by))
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/sh\nsrun -n1 env PATH={tmp_path}/bin {' '.join(BOOTSEER)} run -q -- "
        f"{sys.executable} -c 'import time; time.sleep(2)'\n"
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
    assert queue[0].attrs["told_by"] == told_by
    assert "allocation" in stages(found)


ORDINARY_JOB = """
export BOOTSEER_CACHE={home}/cache-$SLURMD_NODENAME-$SLURM_JOB_ID BOOTSEER_RUNTIME={home}/run-$SLURMD_NODENAME
exec {bootseer} run -q --store {home}/store --setup {home}/setup.sh --peers slurm --peers-secret {home}/secret \
  --wait-for-nodes 120 -- sh -c "sha256sum < {home}/tool/data > {home}/out-$SLURMD_NODENAME-$SLURM_JOB_ID"
"""


@pytest.mark.fuse
def test_an_ordinary_users_job_captures_on_one_node_and_restores_on_two_with_peers(
    slurm: Cluster, env: dict[str, str], events: Callable[[], list[Event]], open_folder: Path
) -> None:
    home, user = open_folder / "home", 65534
    home.mkdir()
    (home / "setup.sh").write_text(
        f"echo run >> {home}/setups; mkdir -p {home}/tool; head -c 3000000 /dev/urandom > {home}/tool/data\n"
    )
    (home / "secret").write_bytes(os.urandom(32))
    (home / "secret").chmod(0o600)
    shutil.copytree(compiled_secret_rules(), home / "rules")
    for path in (home, *home.rglob("*")):
        os.chown(path, user, user)
    text = ORDINARY_JOB.format(home=home, bootseer=" ".join(BOOTSEER))
    python = "import pathlib, sys, plain_user; plain_user.open_way_to(pathlib.Path(sys.base_prefix))"
    opened = slurm.run({**env, "PYTHONPATH": str(Path(__file__).parents[1])}, sys.executable, "-c", python)
    assert opened.returncode == 0, opened.stderr
    ordinary = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "env", f"HOME={home}")
    env = {**env, "BOOTSEER_SPOOL": str(home / "spool"), "KF_RULE_CACHE_DIR": str(home / "rules")}
    for nodes in (1, 2):
        done = slurm.run(env, *ordinary, "srun", f"-N{nodes}", "--ntasks-per-node=1", "--chdir=/", "sh", "-c", text)
        assert done.returncode == 0, done.stderr
        shutil.rmtree(home / "tool", ignore_errors=True)
    sums = [path.read_text() for path in home.glob("out-*")]
    assert (len(sums), len(set(sums))) == (3, 1)
    assert (home / "setups").read_text() == "run\n"
    found = scan(sources([str(home / "spool")])).events
    modes = sorted(event.attrs["mode"] for event in found if event.stage == "environment_start")
    assert modes == ["captured", "restored", "restored"]
    assert sorted(event.attrs["peers"] for event in found if event.stage == "peers_start") == [1, 2, 2]


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

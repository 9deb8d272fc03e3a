"""`bootseer run --peers` with two nodes on one machine: they find each other, serve, and leave nothing behind."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.artifact.process_snapshots import machine_key, process_name
from bootseer.artifact.workload import workload_key
from bootseer.mounts.process import ProcessId
from bootseer.report.inputs import sources
from bootseer.report.log_scan import scan
from bootseer.store.open import open_store
from conftest_launch import BOOTSEER
from image_node import LARGE_BYTES, have_converted
from image_node import Node as ImageNode
from process_snapshot_node import Node as SnapshotNode
from process_snapshot_node import folder_of
from registry import free_port

pytestmark = pytest.mark.slow

JOB = """
until [ -e $END ] || [ $(grep -o addresses $BOOTSEER_PEERS_DIR/members.json | wc -l) = 2 ]; do sleep 0.05; done
cat $BOOTSEER_PEERS_DIR/state.json > $STATE
touch $STATE.there
until [ -e $END ]; do sleep 0.05; done
"""


class Node:
    """One `bootseer run` of a job with two nodes, which runs until `end` is called."""

    def __init__(self, folder: Path, env: dict[str, str], name: str, *words: str) -> None:
        self.runtime = folder / f"runtime-{name}"
        self.state = folder / f"state-{name}"
        self._end = folder / "end"
        own = {"BOOTSEER_RUNTIME": self.runtime, "BOOTSEER_CACHE": folder / f"cache-{name}"}
        env = {
            **env,
            **{key: str(value) for key, value in own.items()},
            "STATE": str(self.state),
            "END": str(self._end),
        }
        options = ["--job", "two", "--node", name, "--num-nodes", "2", "--peers-interface", "lo", *words]
        self.run = subprocess.Popen(
            [*BOOTSEER, "run", *options, "--", "sh", "-c", JOB], env=env, stderr=subprocess.PIPE, text=True
        )

    def meet(self) -> ProcessId:
        """Wait until it has found the other node. Returns its service."""
        wait_until(self.state.with_suffix(".there").exists)
        service = ProcessId.of(json.loads(self.state.read_text())["pid"])
        assert service is not None
        return service

    def end(self) -> str:
        """End the command. Returns the run's stderr."""
        self._end.touch()
        return self.run.communicate(timeout=300)[1]

    @property
    def left(self) -> list[Path]:
        """Remaining folders of jobs."""
        return list((self.runtime / "peers").glob("job-*"))


def wait_until(is_so: Callable[[], object], timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture
def nodes(env: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Node]]:
    words = ["--peers", str(tmp_path / "meet"), *getattr(request, "param", [])]
    yield [Node(tmp_path, env, name, *words) for name in ("a", "b")]
    (tmp_path / "end").touch()  # also after a failure


def test_jobs_with_names_that_look_alike_have_services_of_their_own(run, tmp_path: Path) -> None:
    """For example in a sweep: Slurm's job names can be longer than file names, and only their ends differ."""
    words = ["--node", "n", "--num-nodes", "2", "--peers", str(tmp_path / "meet"), "--peers-interface", "lo"]
    show = f"ls {tmp_path}/runtime/peers {tmp_path}/meet/peers | grep -v -e : -e lock"
    more = {"BOOTSEER_RUNTIME": str(tmp_path / "runtime")}
    shown = [
        run("run", "-q", "--job", job, *words, "--", "sh", "-c", show, more=more).stdout.split()
        for job in (f"{'x' * 100}-1", f"{'x' * 100}-2")
    ]
    assert all(shown)
    assert not set(shown[0]) & set(shown[1])


def test_nodes_with_names_that_look_alike_meet(env: dict[str, str], tmp_path: Path) -> None:
    names = [f"{'pod-' * 25}{number}" for number in (1, 2)]
    nodes = [Node(tmp_path, env, name, "--peers", str(tmp_path / "meet")) for name in names]
    for node in nodes:
        node.meet()
    assert [node.end().count("no peers") for node in nodes] == [0, 0]


@pytest.mark.parametrize("nodes", [[], ["--peers-tls"]], indirect=True)
def test_two_nodes_meet_and_leave_nothing(nodes: list[Node], env: dict[str, str], tmp_path: Path) -> None:
    services = [node.meet() for node in nodes]
    assert [node.end().count("no peers") for node in nodes] == [0, 0]
    assert [node.run.returncode for node in nodes] == [0, 0]
    assert not any(service.alive for service in services)
    assert [node.left for node in nodes] == [[], []]
    assert list((tmp_path / "meet" / "peers").iterdir()) == []
    events = [event for event in scan(sources([env["BOOTSEER_SPOOL"]])).events if event.stage == "peers_start"]
    assert [event.attrs["peers"] for event in events] == [2, 2]


def test_a_killed_service_costs_no_job_and_a_killed_run_leaves_nothing(nodes: list[Node], tmp_path: Path) -> None:
    first, second = nodes
    services = [node.meet() for node in nodes]
    services[0].signal(signal.SIGKILL)
    os.kill(second.run.pid, signal.SIGKILL)
    wait_until(lambda: not services[1].alive and not second.left)
    assert not list((tmp_path / "meet").rglob("b.*.json"))
    second.end()
    first.end()
    assert first.run.returncode == 0
    assert first.left == []


def test_a_service_that_fails_leaves_its_folder_to_the_run(nodes: list[Node]) -> None:
    """Containers that are started later, or restarted, mount it."""
    first, second = nodes
    service = first.meet()
    second.meet()
    (folder,) = first.left
    (folder / "files" / f"{'a' * 64}.json").write_text("[" * 100_000)  # a RecursionError
    wait_until(lambda: not service.alive)
    assert (folder / "members.json").exists()
    first.end()
    second.end()
    assert (first.run.returncode, first.left) == (0, [])


def test_a_command_waits_for_the_node_whose_setup_goes_on(env: dict[str, str], tmp_path: Path) -> None:
    setup = tmp_path / "setup.sh"
    setup.write_text(f"until [ -e {tmp_path}/go ]; do sleep 0.05; done")
    words = ["--peers", str(tmp_path / "meet"), "--wait-for-nodes", "300"]
    first = Node(tmp_path, env, "a", *words)
    second = Node(tmp_path, env, "b", *words, "--setup", str(setup), "--env", "bypass")
    assert first.run.stderr is not None
    said = "bootseer: 1 of 2 nodes are ready; waiting for b (environment_setup.script)\n"
    assert said in iter(first.run.stderr.readline, "")
    assert not first.state.exists()
    (tmp_path / "go").touch()
    for node in (first, second):
        node.meet()
    assert [node.end().count("ready") for node in (first, second)] == [0, 0]
    events = [event for event in scan(sources([env["BOOTSEER_SPOOL"]])).events if event.stage == "nodes_ready"]
    assert sorted((event.node, event.attrs["ready"]) for event in events if "ready" in event.attrs) == [
        ("a", 2), ("b", 2),
    ]  # fmt: skip


def test_no_node_waits_for_one_whose_command_has_ended_at_once(env: dict[str, str], tmp_path: Path) -> None:
    setup = tmp_path / "setup.sh"
    setup.write_text(f"until [ -e {tmp_path}/end ]; do sleep 0.05; done")
    words = ["--peers", str(tmp_path / "meet"), "--wait-for-nodes", "3600"]
    last = Node(tmp_path, env, "a", *words, "--setup", str(setup), "--env", "bypass")
    first = Node(tmp_path, env, "b", *words)
    stages = first.runtime / "peers"
    wait_until(lambda: any(path.read_text() == "ready" for path in stages.glob("job-*/stage")))
    assert [node.end().count("after") for node in (last, first)] == [0, 0]


def test_a_job_does_not_wait_for_listed_nodes_that_are_not_its_own(env: dict[str, str], tmp_path: Path) -> None:
    """For example with one list of all nodes of a fleet."""
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    hosts = ",".join(f"127.0.0.1:{free_port()}" for _ in range(3))
    words = ["--peers", hosts, "--peers-secret", str(secret), "--wait-for-nodes", "3600"]
    nodes = [Node(tmp_path, env, name, *words) for name in ("a", "b")]
    for node in nodes:
        node.meet()
    assert [node.end().count("after") for node in nodes] == [0, 0]


def test_a_job_does_not_wait_for_nodes_when_its_peer_service_has_ended(env: dict[str, str], tmp_path: Path) -> None:
    node = Node(tmp_path, env, "a", "--peers", str(tmp_path / "meet"), "--wait-for-nodes", "3600")
    wait_until(lambda: [path for path in node.runtime.glob("peers/job-*/stage") if path.read_text() == "ready"])
    (state,) = node.runtime.glob("peers/job-*/state.json")
    os.kill(json.loads(state.read_text())["pid"], signal.SIGTERM)
    assert "bootseer: the peer service has ended: the command does not wait for other nodes\n" in node.end()


@pytest.mark.parametrize(
    ("known", "least", "code"),
    [
        (["--num-nodes", "2"], "1", 0),
        (["--num-nodes", "2"], "2", 1),
        ([], "2", 1),
        (["--spool", "/dev/null"], "2", 1),  # unmeasured
    ],
)
def test_a_missing_node_is_reported_and_the_command_starts_with_enough_nodes(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, known: list[str], least: str, code: int
) -> None:
    words = ["--job", "two", "--node", "a", *known, "--peers-interface", "lo"]
    words += ["--peers", str(tmp_path / "meet"), "--wait-for-nodes", "1", "--min-nodes", least]
    ran = run("run", "-q", *words, "--", "echo", "started")
    assert (ran.returncode, ran.stdout) == (code, "" if code else "started\n"), ran.stderr
    assert "1 of 2 nodes are ready after 1 s" in ran.stderr
    assert "missing: 1 that nothing was heard of" in ran.stderr


@pytest.mark.parametrize(
    ("least", "code", "said"),
    [("1", 0, "without peers the command does not wait"), ("2", 1, "no other node is known without peers")],
)
def test_without_peers_no_more_nodes_than_this_one_are_ready(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, least: str, code: int, said: str
) -> None:
    words = ["--peers", "127.0.0.1:1", "--peers-secret", str(tmp_path / "missing"), "--num-nodes", "2"]
    ran = run("run", "-q", *words, "--wait-for-nodes", "3600", "--min-nodes", least, "--", "echo", "started")
    assert (ran.returncode, ran.stdout) == (code, "" if code else "started\n"), ran.stderr
    assert "no peers: " in ran.stderr
    assert said in ran.stderr


@pytest.mark.parametrize(("words", "said"), [(["--num-nodes", "1"], ""), ([], "no other node is known after 1 s")])
def test_a_command_does_not_wait_for_nodes_that_are_not_listed(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, words: list[str], said: str
) -> None:
    wait = "1" if said else "3600"
    ran = run("run", "-q", *words, "--peers", str(tmp_path / "meet"), "--wait-for-nodes", wait, "--", "echo", "started")
    assert (ran.returncode, ran.stdout) == (0, "started\n"), ran.stderr
    assert said in ran.stderr


@pytest.mark.root
@pytest.mark.fuse
def test_an_image_comes_from_the_registry_once(env: dict[str, str], node: ImageNode, tmp_path: Path) -> None:
    """Three nodes with separate caches read a whole image; each block is fetched by one node and sent to the others."""
    have_converted(node)
    before = len(node.registry.requests())
    meet = f"while [ $(ls {tmp_path}/there | wc -l) -lt 3 ]; do sleep 0.05; done"
    (tmp_path / "there").mkdir()
    starts = []
    for name in ("a", "b", "c"):
        own = {"BOOTSEER_RUNTIME": str(tmp_path / name / "r"), "BOOTSEER_CACHE": str(tmp_path / name / "c")}
        words = ["--job", "three", "--node", name, "--num-nodes", "3", "--peers-interface", "lo"]
        words += ["--peers", str(tmp_path / "meet"), "--image", node.reference, "--loading", "lazy"]
        words += ["--mount", f"{tmp_path}/there:{tmp_path}/there"]
        script = f"grep -q by.BootSeer /etc/hosts && cat /hot /cold | sha256sum; touch {tmp_path}/there/{name}; {meet}"
        starts.append(
            subprocess.Popen(
                [*BOOTSEER, "run", *words, "--", "sh", "-c", script],
                env={**env, **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    digests = {start.communicate(timeout=120)[0] for start in starts}
    (digest,) = digests
    answers = node.registry.requests()[before:]
    sent = [logged.size_bytes for logged in answers if logged.status == 206]
    assert 2 * LARGE_BYTES < sum(sent) < 2.4 * LARGE_BYTES
    blobs = [logged for logged in answers if logged.status in (200, 206) and "/blobs/" in logged.path]
    layers = {logged.path for logged in blobs if logged.size_bytes >= LARGE_BYTES // 100}
    small = Counter(logged.path for logged in blobs if logged.path not in layers)
    indexes = {path: count for path, count in small.items() if hashlib.sha256(b"{}").hexdigest() not in path}
    assert list(indexes.values()) == [1, 1]
    data = b"".join((tmp_path / "tree" / name).read_bytes() for name in ("hot", "cold"))
    assert digest.split()[0] == hashlib.sha256(data).hexdigest()
    told = json.loads(subprocess.check_output([*BOOTSEER, "report", "three", "--json"], env=env))["peers"]
    assert sum(row["origin_bytes"] + row["filled_bytes"] for row in told) < 2.4 * LARGE_BYTES
    assert sum(row["sent_bytes"] for row in told) > 2 * LARGE_BYTES
    assert {row["interfaces"] for row in told} <= {"", *(f"lo={row['sent_bytes']}" for row in told)}


@pytest.mark.root
@pytest.mark.fuse
def test_a_process_snapshot_comes_from_the_registry_once(env: dict[str, str], node: ImageNode, tmp_path: Path) -> None:
    """Two nodes fetch it beside their mounts. Nothing could be restored in an image without Python."""
    have_converted(node)
    script = "while [ $(ls /there | wc -l) -lt 2 ]; do touch /there/$NAME; sleep 0.05; done; false"
    command = ["sh", "-c", script]
    publisher = SnapshotNode(tmp_path / "publisher")
    uri, files = f"oci://{node.registry.host}/team/box", {"pages-1.img": os.urandom(LARGE_BYTES)}
    publisher.fetch(uri, digest=node.digest, workload=workload_key(command))
    publisher.snapshot.keep(folder_of(tmp_path / "images", files))
    (tmp_path / "there").mkdir()
    blob = f"sha256:{hashlib.sha256(_object_of(uri, node.digest, command)).hexdigest()}"
    before = len(node.registry.requests())
    starts = []
    for name in ("a", "b"):
        own = {"BOOTSEER_RUNTIME": str(tmp_path / name / "r"), "BOOTSEER_CACHE": str(tmp_path / name / "c")}
        words = ["--job", "two", "--node", name, "--num-nodes", "2", "--peers-interface", "lo"]
        words += ["--peers", str(tmp_path / "meet"), "--image", node.reference, "--process-snapshot"]
        words += ["--mount", f"{tmp_path}/there:/there", "--container-env", f"NAME={name}"]
        program = [*BOOTSEER, "run", "-q", *words, "--", *command]
        starts.append(subprocess.Popen(program, env={**env, **own}, stderr=subprocess.PIPE, text=True))
    said = [start.communicate(timeout=300)[1].splitlines() for start in starts]
    assert [["no python3" in line for line in lines] for lines in said] == [[True], [True]], said
    assert [start.returncode for start in starts] == [1, 1]
    kept = [list((tmp_path / name / "c" / "processes").iterdir()) for name in ("a", "b")]
    assert [[len(path.read_bytes()) > LARGE_BYTES for path in found] for found in kept] == [[True], [True]]
    sizes = [logged.size_bytes for logged in node.registry.requests()[before:] if f"/blobs/{blob}" in logged.path]
    assert sizes.count(1 << 14) == 2
    assert LARGE_BYTES < sum(sizes) < LARGE_BYTES + 100_000


def _object_of(uri: str, digest: str, command: list[str]) -> bytes:
    with closing(open_store(uri)) as store:
        return b"".join(store.read(process_name(digest, f"{workload_key(command)}-{machine_key()}")))


def test_switched_off_peers_leave_no_trace(env: dict[str, str], tmp_path: Path) -> None:
    """The fleet's variable takes precedence over the job's option."""
    show = "import os, sys; print([name for name in os.environ if 'PEERS' in name])"
    runtime = tmp_path / "runtime"
    env = {**env, "BOOTSEER_PEERS": "0", "BOOTSEER_RUNTIME": str(runtime)}
    words = [*BOOTSEER, "run", "--peers", str(tmp_path / "meet"), "--", BOOTSEER[0], "-c", show]
    traced = [BOOTSEER[0], "-X", "importtime", *words[1:]]
    ran = subprocess.run(traced, env=env, capture_output=True, text=True, check=True)
    assert ran.stdout == "['BOOTSEER_PEERS']\n"
    assert "bootseer.launch.run" in ran.stderr
    assert "peers" not in ran.stderr
    assert not runtime.exists()
    assert not (tmp_path / "meet").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--peers", "a,b"], "--peers-secret FILE"),
        (["--peers", "slurm"], "not a Slurm job"),
        (["--peers", "auto", "--num-nodes", "2"], "BOOTSEER_STORE"),
        (["--peers", "oci://localhost/x"], "nodes cannot meet in a registry"),
        (["--peers", "auto", "--store", "oci://localhost/x"], "nodes cannot meet in a registry"),
        (["--peers", "a", "--peers-limit", "much"], "not a size"),
        (["--peers", "a", "--peers-limit", "0"], "none is no limit"),
        (["--peers-limit", "1g"], "give --peers too"),
        (["--peers", "/meet", "--peers-interface", "none0"], "there are: "),
    ],
)
def test_options_that_cannot_work_are_an_error_at_once(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, words: list[str], said: str
) -> None:
    ran = run("run", *words, "--", "true", more={"BOOTSEER_RUNTIME": str(tmp_path / "runtime")})
    assert ran.returncode == 2
    assert said in ran.stderr
    assert list(tmp_path.glob("runtime/peers/job-*")) == []


def test_a_process_whose_neighbour_fails_to_start_the_service_has_no_peers_and_does_not_wait(
    env: dict[str, str], tmp_path: Path
) -> None:
    """For example several tasks on a node, started by srun."""
    folder = tmp_path / "r" / "peers" / "job-j.0.n"
    folder.mkdir(parents=True, mode=0o700)
    (tmp_path / "file").touch()  # so that it could not start a service either, if it checked before the folder existed
    words = ["run", "-q", "--job", "j", "--attempt", "0", "--node", "n", "--peers", str(tmp_path / "file")]
    words += ["--", "sh", "-c", 'echo "${BOOTSEER_PEERS_DIR:-none}"']
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        env = {**env, "BOOTSEER_RUNTIME": str(tmp_path / "r")}
        with subprocess.Popen([*BOOTSEER, *words], env=env, stdout=subprocess.PIPE, text=True) as second:
            wait_until((tmp_path / "r" / "peers" / "lock").exists)
            time.sleep(0.2)
            shutil.rmtree(folder)
            assert second.communicate(timeout=300)[0] == "none\n"


def test_automatic_peers_are_slurms_where_there_is_a_secret_though_a_store_is_named(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    for name, text in (("secret", "s" * 32), ("setup.sh", "")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    words = ["--setup", str(tmp_path / "setup.sh"), "--env", "bypass", "--store", "oci://localhost/a-registry"]
    words += ["--peers", "auto", "--peers-secret", str(tmp_path / "secret")]
    more = {"BOOTSEER_RUNTIME": str(tmp_path / "r"), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[1-2]"}
    ran = run("run", *words, "--", "sh", "-c", "cat $BOOTSEER_PEERS_DIR/members.json", more=more)
    assert (ran.returncode, json.loads(ran.stdout)["peers"]) == (0, []), ran.stderr


def test_nodes_that_cannot_meet_start_without_peers(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "secret").write_text("s" * 32)
    (tmp_path / "secret").chmod(0o600)
    shared = tmp_path / "folder" / "peers" / f"j.0.u{os.getuid()}"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    show = ["--", "sh", "-c", 'echo "${BOOTSEER_PEERS_DIR:-none}"']
    for name, given in (("file", []), ("folder", ["--peers-secret", str(tmp_path / "secret")])):
        words = ["--job", "j", "--attempt", "0", "--peers", str(tmp_path / name), *given, *show]
        ran = run("run", *words, more={"BOOTSEER_RUNTIME": str(tmp_path / "r")})
        assert (ran.returncode, ran.stdout) == (0, "none\n")
        assert "no peers: " in ran.stderr
        assert list(tmp_path.glob("r/peers/job-*")) == []

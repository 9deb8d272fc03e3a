"""`bootseer run --peers` gives the job the names of its nodes, so that its connections do not wait for DNS."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from bootseer.launch.command import with_hosts_file
from bootseer.launch.supervise import block_signals, spawn, unblock_signals, wait
from bootseer.peers.choice import Peer
from bootseer.peers.names import SYSTEM, HostsFile, own_addresses
from conftest_launch import BOOTSEER
from plain_user import UID
from registry import free_port
from waiting import until

# Look-ups use only files: they must not depend on DNS on the machine that runs the test.
JOB = """
until grep -q ::ffff:127.0.0.3 /etc/hosts; do touch $THERE.waits; sleep 0.05; done
touch $THERE.knows
until [ -e $OTHER.knows ]; do sleep 0.05; done
getent -s files hosts ::ffff:127.0.0.2 ::ffff:127.0.0.3
"""


@pytest.mark.root
def test_a_job_knows_its_nodes_also_those_that_come_later(env: dict[str, str], tmp_path: Path) -> None:
    secret, ports = tmp_path / "secret", (free_port(), free_port())
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    before = SYSTEM.read_bytes()
    nodes = []
    for name in ("a", "b"):
        # The first run does not wait for the second; its job looks until the second one's name is there.
        words = ["--job", "two", "--node", name, "--peers-secret", str(secret)]
        words += ["--peers", f"127.0.0.2:{ports[0]},127.0.0.3:{ports[1]}", "--", "sh", "-c", JOB]
        other = "b" if name == "a" else "a"
        own = {"BOOTSEER_RUNTIME": str(tmp_path / name), "THERE": str(tmp_path / name), "OTHER": str(tmp_path / other)}
        run = subprocess.Popen([*BOOTSEER, "run", *words], env={**env, **own}, stdout=subprocess.PIPE, text=True)
        nodes.append(run)
        while name == "a" and not (tmp_path / "a.waits").exists():
            assert run.poll() is None
    said = [run.communicate(timeout=300)[0] for run in nodes]
    assert [run.returncode for run in nodes] == [0, 0]
    assert [text.split() for text in said] == [
        ["::ffff:127.0.0.2", "127-0-0-2.peer", "::ffff:127.0.0.3", "127-0-0-3.peer"]
    ] * 2
    assert SYSTEM.read_bytes() == before


@pytest.mark.parametrize(
    ("given", "seen"),
    [({}, "timeout:1 attempts:1"), ({"RES_OPTIONS": "timeout:9"}, "timeout:9"), ({"BOOTSEER_NAMES": "0"}, "")],
)
def test_without_root_the_resolver_gives_up_early_unless_the_user_says_otherwise(
    tmp_path: Path, given: dict[str, str], seen: str
) -> None:
    env: dict[str, str] = {"BOOTSEER_PEERS_DIR": str(tmp_path), "PATH": os.environ["PATH"], **given}
    enter = with_hosts_file(env, None)

    def become() -> None:
        if os.geteuid() == 0:
            os.setresuid(UID, UID, UID)
        if enter is not None:
            enter()

    block_signals()
    reader, writer = os.pipe()
    try:
        pid = spawn(["sh", "-c", 'printf %s "$RES_OPTIONS"'], env, {1: writer}, own_group=True, enter=become)
        assert wait(pid, own_group=True, tracer=None) == 0
    finally:
        unblock_signals()
        os.close(writer)
    with os.fdopen(reader) as said:
        assert said.read() == seen


@pytest.mark.root
def test_names_that_cannot_be_mounted_cost_only_a_message(env: dict[str, str], tmp_path: Path) -> None:
    """A sandbox in which nothing can be mounted: root without CAP_SYS_ADMIN."""
    words = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", *BOOTSEER, "run", "--num-nodes", "2"]
    words += ["--peers", str(tmp_path / "meet"), "--", "sh", "-c", "echo $RES_OPTIONS"]
    own = {"BOOTSEER_RUNTIME": str(tmp_path / "runtime")}
    ran = subprocess.run(words, env={**env, **own}, capture_output=True, text=True, check=True)
    assert ran.stdout == "timeout:1 attempts:1\n"
    assert ran.stderr.count("resolved by DNS") == 1


def test_a_resolver_that_does_not_answer_keeps_no_node_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    is_known, in_time = threading.Event(), []

    def look_up(_: str) -> str:
        in_time.append(is_known.wait(20))
        return "10.0.0.1"

    monkeypatch.setattr("socket.gethostbyname", look_up)
    own_addresses()
    is_known.set()
    until(lambda: in_time, "the resolver's answer")
    assert in_time == [True]


def test_a_name_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of 1,440 nodes changes often while they start."""
    file, looked_up = HostsFile(tmp_path), []
    monkeypatch.setattr(
        "socket.getaddrinfo", lambda name, *_, **__: looked_up.append(name) or [(0, 0, 0, "", (name, 0))]
    )
    for peers in (["a:1"], ["a:1", "b:1"], ["b:1"]):
        file.add(Peer(name, (name,)) for name in peers)
    assert looked_up == ["a", "b"]


def test_a_resolver_that_takes_seconds_for_each_name_is_asked_for_many_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, both = HostsFile(tmp_path), threading.Barrier(2)

    def look_up(name: str, *_: object, **__: object) -> list[object]:
        both.wait(60)
        return [(0, 0, 0, "", (name, 0))]

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    file.add(Peer(name, (name,)) for name in ("a:1", "b:1"))
    assert (tmp_path / "hosts").read_text().count("::ffff:") == 3


def test_a_name_leads_to_one_address_and_none_that_the_machine_knows_is_changed(tmp_path: Path) -> None:
    system = tmp_path / "system"
    system.write_bytes(b"127.0.0.1 localhost\n10.0.0.9 gpu9")
    file = HostsFile(tmp_path, system)
    inode = (tmp_path / "hosts").stat().st_ino
    peers = [Peer("gpu1", ("10.1.0.1:1",), "", ("10.0.0.1", "10.1.0.1")), Peer("gpu9", ("x:1",), "", ("10.9.0.9",))]
    file.add(peers[:1])
    file.add(peers)
    assert (tmp_path / "hosts").stat().st_ino == inode
    lines = (tmp_path / "hosts").read_text().splitlines()
    assert lines == [
        "127.0.0.1 localhost",
        "10.0.0.9 gpu9",
        "# by BootSeer: the nodes of this job",
        "::ffff:127.0.0.1 localhost.peer",
        "10.0.0.1 gpu1",
        "::ffff:10.0.0.1 gpu1.peer",
        "10.1.0.1 gpu1.peer",
        "::ffff:10.1.0.1 gpu1.peer",
        "10.9.0.9 gpu9.peer",
        "::ffff:10.9.0.9 gpu9.peer",
    ]


def test_a_node_without_ipv4_has_its_name_too(tmp_path: Path) -> None:
    (tmp_path / "system").touch()
    file = HostsFile(tmp_path, tmp_path / "system")
    file.add([Peer("gpu1", ("[fd00::1]:17507",)), Peer("[fd00::2]:17507", ("[fd00::2]:17507",))])
    assert (tmp_path / "hosts").read_text().splitlines()[-2:] == ["fd00::1 gpu1", "fd00::2 fd00--2.peer"]

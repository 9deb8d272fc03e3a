"""Members of a job: from lists and from shared folders, and which records are rejected."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import obstore
import pytest
from obstore.store import MemoryStore

from bootseer.errors import AccessError, BootseerError, CorruptError, TransientError, UsageError
from bootseer.peers.choice import Peer
from bootseer.peers.client import Client, UnreachableError
from bootseer.peers.interfaces import Interface, chosen, listen_at_own
from bootseer.peers.members import Listed, Membership, open_source, parse_list, slurm_hosts
from bootseer.peers.rendezvous import Rendezvous, parse_record
from bootseer.peers.server import Server
from bootseer.places.objects import ObjectPlace
from plain_user import UID, as_plain_user

SECRET = b"s" * 32
LOOPBACK = (Interface("lo", "127.0.0.1", 1),)


def test_a_malformed_list_of_slurm_is_an_error() -> None:
    assert slurm_hosts({"SLURM_JOB_NODELIST": "gpu[1-2]"}) == ["gpu1", "gpu2"]
    with pytest.raises(UsageError, match="is not a list of hosts"):
        slurm_hosts({"SLURM_JOB_NODELIST": "gpu[1-"})


def test_lines_of_a_list() -> None:
    peers = parse_list(["a:1,b:2 rack1 # fast", "", "# none", "::1", "[fd00::2]:9"], "LIST")
    assert peers == [
        Peer("a:1", ("a:1", "b:2"), "rack1"),
        Peer("[::1]:17507", ("[::1]:17507",)),
        Peer("[fd00::2]:9", ("[fd00::2]:9",)),
    ]


@pytest.mark.parametrize("line", ["a b c", "a:0", "a:99999", "a/b", "a;rm", "a..b", ".a", "a" * 64])
def test_lines_that_name_no_node(line: str) -> None:
    with pytest.raises(UsageError):
        parse_list([line], "LIST")


@pytest.mark.parametrize(
    "said",
    [
        [],
        {"name": "a", "addresses": [], "rack": ""},
        {"name": "a\r\nX: y", "addresses": ["10.0.0.1:1"], "rack": ""},
        {"name": "a", "addresses": ["10.0.0.1:1"] * 17, "rack": ""},
        {"name": "a", "addresses": ["10.0.0.1:1 "], "rack": ""},
        {"name": 7, "addresses": ["10.0.0.1:1"], "rack": ""},
        {"name": "a", "addresses": [1], "rack": ""},
        {"addresses": ["10.0.0.1:1"], "rack": ""},
    ],
)
def test_malformed_announcements_are_passed_over(said: object) -> None:
    with pytest.raises(CorruptError):
        parse_record(json.dumps(said).encode())


def test_an_announcement_that_is_nested_too_deeply_is_passed_over() -> None:
    with pytest.raises(CorruptError):
        parse_record(b"[" * 4096)


@pytest.mark.parametrize(
    "address", ["metadata.google.internal:80", "169.254.169.254:80", "224.0.0.1:17507", "0.0.0.0:1", "[fe80::1]:17507"]
)
def test_an_announced_address_that_is_no_nodes_is_passed_over(address: str) -> None:
    with pytest.raises(CorruptError):
        parse_record(json.dumps({"name": "a", "addresses": [address], "rack": ""}).encode())


def test_many_dead_nodes_do_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of probes lasts a second; the next one begins with the nodes that were not probed yet."""
    monkeypatch.setattr("bootseer.peers.members._ROUND_S", 0.05)
    monkeypatch.setattr("bootseer.peers.members._RETRY_S", 0.0)
    asked: list[str] = []

    def probe(address: str) -> str:
        asked.append(address)
        time.sleep(0.1)
        raise TransientError("silent")

    dead = [Peer(name, (name,)) for name in (f"{number}:1" for number in range(200))]
    members = Membership(Listed(SECRET, lambda: dead), probe)
    rounds = 0
    while len(set(asked)) < len(dead):
        before, known = len(asked), set(asked)
        members.refresh()
        rounds += 1
        num_asked = len(asked) - before
        assert 0 < num_asked < len(dead)
        num_new = len(set(asked) - known)
        assert num_new == min(num_asked, len(dead) - len(known)), "a node was probed again before all had been probed"
    assert rounds >= 2


def probe(address: str, secret: bytes = SECRET) -> str:
    client = Client(secret)
    try:
        return client.probe(address)
    finally:
        client.close()


def meeting(folder: Path, name: str, given: bytes | None = SECRET) -> Rendezvous:
    return Rendezvous(str(folder), "job.0", name, "", LOOPBACK, given)


def serve(source: Rendezvous | Listed) -> Server:
    listening = source.listen()
    assert source.own is not None
    return Server(listening, source.secret(), lambda _: None, name=source.own.name)


def test_nodes_meet_and_leave(tmp_path: Path) -> None:
    first, second = meeting(tmp_path, "a", None), meeting(tmp_path, "b", None)
    assert first.secret() == second.secret()
    secret = tmp_path / "peers" / "job.0" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert secret.parent.stat().st_mode & 0o777 == 0o700
    servers = [serve(first), serve(second)]
    client = Client(first.secret())
    members = Membership(first, client.probe)
    assert members.refresh()
    assert [peer.name for peer in members.peers] == ["a", "b"]
    assert not members.refresh()
    second.leave()
    assert members.refresh()
    assert [peer.name for peer in members.peers] == ["a"]
    first.leave()
    client.close()
    assert not (tmp_path / "peers" / "job.0").exists()
    for server in servers:
        server.close()


def test_a_secret_that_the_last_node_of_an_earlier_start_removes_is_put_back(tmp_path: Path) -> None:
    """Otherwise nodes that come later create another one, and this node and they refuse each other."""
    earlier, first = meeting(tmp_path, "a", None), meeting(tmp_path, "b", None)
    earlier.secret()
    listening = earlier.listen()
    secret = first.secret()
    earlier.leave()
    listening += first.listen()
    for sock in listening:
        sock.close()
    assert meeting(tmp_path, "c", None).secret() == secret


def test_so_is_one_that_was_read_while_the_last_node_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier, first = meeting(tmp_path, "a", None), meeting(tmp_path, "b", None)
    secret = earlier.secret()
    listening = earlier.listen()
    delete = earlier._files.delete

    def join_before(name: str) -> None:
        if name == "secret":
            first.secret()
            listening.extend(first.listen())
        delete(name)

    monkeypatch.setattr(earlier._files, "delete", join_before)
    earlier.leave()
    for sock in listening:
        sock.close()
    assert meeting(tmp_path, "c", None).secret() == secret


def test_nodes_meet_in_a_bucket_and_leave_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")  # memory needs none
    bucket = MemoryStore()
    nodes = [Rendezvous("s3://bucket/store", "job.0", name, "", LOOPBACK, None) for name in "ab"]
    for node in nodes:
        place = node._files._place
        assert isinstance(place, ObjectPlace)
        place._bucket.reader = place._bucket.writer = bucket
    assert len({node.secret() for node in nodes}) == 1
    for node in nodes:
        for sock in node.listen():
            sock.close()
    assert sorted(peer.name for peer in nodes[0].poll()) == ["a", "b"]
    nodes[1].leave()
    assert [peer.name for peer in nodes[0].poll()] == ["a"]
    nodes[0].leave()
    keys = [one["path"] for one in obstore.list(bucket).collect()]
    assert not [key for key in keys if key.endswith(("secret", ".json"))]


def test_an_earlier_process_of_the_node_is_forgotten(tmp_path: Path) -> None:
    killed, again = meeting(tmp_path, "a"), meeting(tmp_path, "a")
    for source in (killed, again):
        source.secret()
        for sock in source.listen():
            sock.close()
    assert again.poll() == [again.own]


def test_a_folder_that_others_can_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "peers" / "job.0").mkdir(parents=True)
    (tmp_path / "peers" / "job.0").chmod(0o777)
    with pytest.raises(AccessError, match="other users"):
        meeting(tmp_path, "a", None).secret()


def test_a_record_with_the_address_of_another_node_is_not_believed(tmp_path: Path) -> None:
    """All requests for its blocks would be sent to that other node."""
    honest, asking = meeting(tmp_path, "a"), meeting(tmp_path, "b")
    server = serve(honest)
    assert honest.own is not None
    asking.secret()
    spoofed = {"name": "c", "addresses": list(honest.own.addresses), "rack": ""}
    (tmp_path / "peers" / "job.0" / "c.0123456789ab.json").write_text(json.dumps(spoofed))
    members = Membership(asking, probe)
    members.refresh()
    assert [peer.name for peer in members.peers] == ["a"]
    assert members.unreachable == ["c"]
    server.close()


def test_a_node_of_another_job_is_not_believed() -> None:
    other = Server([sock := socket.create_server(("127.0.0.1", 0))], b"o" * 32, lambda _: None, name="a")
    with pytest.raises(AccessError):
        probe(f"127.0.0.1:{sock.getsockname()[1]}")
    other.close()


def test_a_node_with_another_secret_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootseer.peers.members._RETRY_S", 0.0)
    other = Server([sock := socket.create_server(("127.0.0.1", 0))], b"o" * 32, lambda _: None, name="a")
    address = f"127.0.0.1:{sock.getsockname()[1]}"
    members = Membership(Listed(SECRET, lambda: [Peer(address, (address,))]), probe)
    for _ in range(2):
        members.refresh()
    other.close()
    said = f"{address}: {address} does not know this job's secret"
    assert [one.message for one in caplog.records if one.levelname == "WARNING"] == [said]


def free_ports(number: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [sock.getsockname()[1] for sock in held]
    for sock in held:
        sock.close()
    return ports


def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


def test_each_node_of_a_list_finds_itself_and_others_come_later(tmp_path: Path) -> None:
    names = [f"127.0.0.1:{port}" for port in free_ports(2)]
    one, two, late = (
        open_source(",".join(names), {}, attempt="", name="", secret_file=secret_file(tmp_path)) for _ in range(3)
    )
    server = serve(one)
    members = Membership(one, lambda address: probe(address, one.secret()))
    members.refresh()
    assert [peer.name for peer in members.peers] == names[:1]
    other = serve(two)
    assert one.own is not None
    assert two.own is not None
    assert {one.own.name, two.own.name} == set(names)
    said: list[str] = []
    late.say = said.append
    assert late.listen() == late.listen() == []  # all addresses are in use: only a client
    assert said == [f"{names[0]} is taken by another program: this node sends no blocks to others until it is free"]
    members._probed.clear()
    members.refresh()
    assert [peer.name for peer in members.peers] == sorted(names)
    for each in (server, other):
        each.close()


def test_a_node_looks_up_its_own_name_first_and_no_thousand_others(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = []

    def look_up(host: str, port: int, **_: object) -> list[object]:
        looked_up.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu1440.cluster")
    names = [f"gpu{number}:0" for number in range(1, 1441)]
    source = Listed(SECRET, lambda: [Peer(name, (name,)) for name in names])
    for sock in source.listen():
        sock.close()
    assert source.own is not None
    assert (source.own.name, looked_up) == ("gpu1440:0", ["gpu1440"])


def test_a_probe_does_not_wait_for_a_resolver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def look_up(*_: object, **__: object) -> list[object]:
        answers.wait(20)
        return []

    monkeypatch.setattr("bootseer.peers.client._CONNECT_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        with pytest.raises(UnreachableError, match=r"gpu1: no complete answer within 0\.1 s"):
            probe("gpu1:17507")
    finally:
        answers.set()


def test_a_list_needs_a_secret_that_others_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="secret"):
        open_source("a,b", {}, attempt="", name="")
    path = secret_file(tmp_path)
    path.chmod(0o640)
    with pytest.raises(AccessError, match="chmod 600"):
        open_source("a,b", {}, attempt="", name="", secret_file=path)


@pytest.mark.root
def test_a_secret_of_root_may_be_for_the_users_group(tmp_path: Path) -> None:
    """Like the mode in pods with an `fsGroup` in Kubernetes; wider ones are refused."""
    read = "from bootseer.peers.members import *; read_secret(Path('/proc/self/fd/0'))"
    path = secret_file(tmp_path)
    os.chown(path, 0, UID)
    codes = []
    for mode in (0o440, 0o460, 0o444):
        path.chmod(mode)
        with path.open() as secret:
            codes.append(subprocess.run(
                [sys.executable, "-c", read], stdin=secret, stderr=subprocess.DEVNULL, check=False,
                preexec_fn=as_plain_user(tmp_path, fuse=False),
            ).returncode)  # fmt: skip
    assert codes == [0, 1, 1]


def test_slurm_names_the_nodes(tmp_path: Path) -> None:
    env = {"SLURM_JOB_NODELIST": "gpu[1-2]"}
    for text in ("slurm", "auto"):
        source = open_source(text, env, attempt="", name="", secret_file=secret_file(tmp_path))
        assert [peer.addresses for peer in source.poll()] == [("gpu1:17507",), ("gpu2:17507",)]
    with pytest.raises(UsageError, match="not a Slurm job"):
        open_source("slurm", {}, attempt="", name="", secret_file=secret_file(tmp_path))


def test_a_name_gives_a_node_for_each_address_of_one_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source("dns:localhost:9", {}, attempt="", name="", secret_file=secret_file(tmp_path))
    assert "127.0.0.1:9" in [peer.name for peer in source.poll()]
    both = [(socket.AF_INET6, "fd00::1"), (socket.AF_INET, "10.0.0.1"), (socket.AF_INET, "10.0.0.2")]
    with monkeypatch.context() as dual:
        dual.setattr(socket, "getaddrinfo", lambda *_, **__: [(kind, 1, 6, "", (address, 9)) for kind, address in both])
        assert [peer.name for peer in source.poll()] == ["10.0.0.1:9", "10.0.0.2:9"]
    missing = open_source("dns:none.invalid", {}, attempt="", name="", secret_file=secret_file(tmp_path))
    with pytest.raises(BootseerError):
        missing.poll()


def test_a_file_may_change(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("a:1\n")
    source = open_source(f"@{path}", {}, attempt="", name="", secret_file=secret_file(tmp_path))
    path.write_text("a:1\nb:1 rack\n")
    assert [peer.rack for peer in source.poll()] == ["", "rack"]


@pytest.mark.parametrize(
    ("there", "used"),
    [
        ([("ib0", 400), ("ib1", 400), ("eth0", 25)], ["ib0", "ib1"]),
        ([("eth0", 100), ("eth1", 60), ("eth2", 50)], ["eth0", "eth1"]),
        ([("ib0", 400), ("eth0", 0)], ["ib0", "eth0"]),
        ([], ["lo"]),
    ],
)
def test_the_fastest_interfaces_serve(
    there: list[tuple[str, int]], used: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interface with the default route may be the fastest if its speed is unknown."""
    found = [Interface(name, "10.0.0.1", speed or 1, is_main=not speed) for name, speed in there]
    monkeypatch.setattr("bootseer.peers.interfaces.interfaces", lambda: found)
    assert [each.name for each in chosen([])] == used


@pytest.mark.parametrize("address", ["[::1]:0", "[0:0:0:0:0:0:0:1]:0"])
def test_a_node_that_is_listed_by_a_loopback_address_listens_only_there(address: str) -> None:
    (listening,), taken = listen_at_own([address])
    with listening:
        assert (listening.getsockname()[0], taken) == ("::1", [])


@pytest.mark.root
def test_link_local_addresses_and_networks_of_containers_do_not_serve() -> None:
    """Such as of a management controller (IPMI over USB) or NodeLocal DNSCache: all nodes have the same address. Pairs
    of virtual interfaces report 10 Gbit/s."""
    script = """
    set -e
    mount -t sysfs sysfs /sys
    for each in "eth0 10.0.0.5" "usb0 169.254.3.1" "cilium_host 10.2.0.7"; do
        ip link add ${each% *} type veth peer name p-${each% *}
        ip addr add ${each#* }/24 dev ${each% *}
        ip link set ${each% *} up
        ip link set p-${each% *} up
    done
    """
    program = "from bootseer.peers.interfaces import chosen; print([each.address for each in chosen(())])"
    command = ["unshare", "-n", "-m", "sh", "-c", script + 'exec "$0" -c "$1"', sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "['10.0.0.5']\n", done.stderr


@pytest.mark.root
def test_a_sandbox_without_sys_serves_at_the_loopback_address() -> None:
    program = "from bootseer.peers.interfaces import chosen; print([each.address for each in chosen(())])"
    command = ["unshare", "-m", "sh", "-c", 'umount -l /sys && exec "$0" -c "$1"', sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "['127.0.0.1']\n", done.stderr

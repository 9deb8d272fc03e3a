"""A job's nodes get a process snapshot from the store once, and else from each other."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bootseer.artifact import process_snapshots
from bootseer.artifact.process_snapshots import ProcessSnapshot
from bootseer.peers import origins, shared_objects
from bootseer.peers.choice import Peer
from bootseer.peers.job import FOLDER, JobPeers
from bootseer.peers.server import Server
from bootseer.peers.shared_objects import open_object
from fault_proxy import Fault, FaultProxy
from process_snapshot_node import Node, folder_of
from registry import Registry, needs_registry
from waiting import until

pytestmark = needs_registry
SECRET = b"s" * 32
FILES = {"core-1.img": b"\x01core" * 3, "pages-1.img": os.urandom(10 << 20)}  # three parts
SIZE, PART = 10 << 20, 4 << 20
HEAD = 1 << 14
"""What a node reads to get the document."""


class PeerNode(Node):
    """One that serves the job's other nodes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.job = JobPeers.create(root.with_name(f"{root.name}-peers"), SECRET)
        listening = socket.create_server(("127.0.0.1", 0))
        self.peer = Peer(root.name, (f"127.0.0.1:{listening.getsockname()[1]}",))
        self.server = Server([listening], SECRET, partial(open_object, self.job), name=root.name)

    def begin(self, uri: str, monkeypatch: pytest.MonkeyPatch) -> int:
        """Fetch in a child process; returns its id."""
        monkeypatch.setenv(FOLDER, str(self.job.folder))
        child = self.fetch(uri)._child
        assert child is not None
        return child.pid

    @property
    def arrived(self) -> int:
        """How many bytes its child has written so far."""
        return sum(path.stat().st_size for path in self.path.parent.glob(".*"))


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PeerNode]]:
    # The machine may be busy.
    monkeypatch.setattr(process_snapshots, "_WAIT_S", 120.0)
    monkeypatch.setattr(shared_objects, "_SILENT_S", 25.0)
    monkeypatch.setattr(origins, "ANSWER_S", 25.0)
    made = [PeerNode(tmp_path / f"n{number}") for number in range(4)]
    for node in made:
        node.job.write_members(node.root.name, [one.peer for one in made])
    yield made
    for node in made:
        node.server.close()


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """It has the snapshot."""
    with Registry(tmp_path) as registry:
        Node(tmp_path / "publisher").fetch(f"oci://{registry.host}/team/train").keep(
            folder_of(tmp_path / "images", FILES)
        )
        yield registry


def sent(registry: Registry) -> list[int]:
    """Sizes of the parts of blobs that it sent."""
    return sorted(logged.size_bytes for logged in registry.requests() if logged.status == 206)


def test_the_store_sends_the_files_once_and_a_short_head_to_each_node(
    nodes: list[PeerNode], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(registry.host) as proxy:
        # Slow enough that all nodes ask before the first one has the files.
        proxy.plan = lambda request: Fault(drip_bytes=1 << 20) if request.headers.get("range", "")[-1:] == "-" else None
        for node in nodes:
            node.begin(f"oci://{proxy.host}/team/train", monkeypatch)
        assert [node.unpacked() for node in nodes] == [FILES] * 4
    assert [node.said for node in nodes] == [[]] * 4
    *heads, files = sent(registry)
    assert heads == [HEAD] * 4
    assert SIZE < files < SIZE + 10_000
    assert sum(node.server.served.bytes_sent for node in nodes) == 3 * files


def test_a_node_that_has_it_from_an_earlier_job_sends_it(
    nodes: list[PeerNode], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in nodes:
        monkeypatch.delenv(FOLDER, raising=False)
        node.fetch(f"oci://{registry.host}/team/train")
        assert node.unpacked() == FILES
        node.snapshot = ProcessSnapshot(node.path, node.into, node.said.append)
        node.begin("file:///no-store", monkeypatch)
        assert node.unpacked() == FILES
    before = sent(registry)
    (digest,) = nodes[0].job.identities()
    owner = nodes[0].job.members().owner(digest, 0)  # the only one that is asked
    new = next(node for node in nodes if node.peer != owner)
    new.path.unlink()
    new.job.unregister(digest)
    new.snapshot = ProcessSnapshot(new.path, new.into, new.said.append)
    new.begin(f"oci://{registry.host}/team/train", monkeypatch)
    assert new.unpacked() == FILES
    assert sent(registry) == sorted([*before, HEAD])
    assert [node.said for node in nodes] == [[]] * 4


@pytest.mark.parametrize("fault", ["wrong", "gone", "stalled"])
def test_what_a_node_does_not_send_comes_from_the_store(
    nodes: list[PeerNode], registry: Registry, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "stalled":
        monkeypatch.setattr(shared_objects, "_COPY_S", 5.0)
    uri, (first, second, *_) = f"oci://{registry.host}/team/train", nodes
    with FaultProxy(registry.host) as proxy:
        if fault != "wrong":
            proxy.plan = lambda request: Fault(stall_after=6 << 20)
        child = first.begin(f"oci://{proxy.host}/team/train", monkeypatch)
        if fault == "wrong":
            assert first.unpacked() == FILES
            with first.path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(bytes([first.path.read_bytes()[-1] ^ 1]))
        else:
            until(lambda: first.arrived > PART, "the first part is there")
        before = sent(registry)
        second.begin(uri, monkeypatch)
        if fault == "gone":
            until(lambda: second.arrived > PART, "the first part was sent")
            first.server.close()
        assert second.unpacked() == FILES
        if fault != "wrong":
            os.kill(child, signal.SIGKILL)
            assert first.unpacked() is None
    rest = sent(registry)
    for size in (*before, HEAD):
        rest.remove(size)
    parts_sent = 2 if fault == "wrong" else 1
    assert 0 < SIZE + 10_000 - rest[0] - parts_sent * PART < 10_000
    (digest,) = second.job.identities()
    assert second.said == [f"n0 sent wrong bytes of {digest[:16]}"] * (fault == "wrong")

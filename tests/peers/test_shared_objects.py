"""Indexes and other objects that all nodes read whole: once from the store, then from each other."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from bootseer.artifact.objects import LocalObjects
from bootseer.errors import NotFoundError, TransientError
from bootseer.peers.choice import Peer
from bootseer.peers.client import Client
from bootseer.peers.job import FOLDER, JobPeers
from bootseer.peers.origins import PeerGroup
from bootseer.peers.protocol import Question
from bootseer.peers.server import Server
from bootseer.peers.shared_objects import OfferedObject, open_object
from bootseer.store.file import FileStore
from bootseer.store.store import Stored

SECRET = b"s" * 32
DATA = os.urandom((5 << 20) + 7)  # more than the limit of one request
NAME = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
OBJECT = Stored(NAME, len(DATA))


class Node:
    """One node of a job in this process."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.folder = name, folder / name
        self.job = JobPeers.create(folder / f"{name}-peers", SECRET)
        self.said: list[str] = []
        listening = socket.create_server(("127.0.0.1", 0))
        self.peer = Peer(name, (f"127.0.0.1:{listening.getsockname()[1]}",))
        self.server = Server([listening], SECRET, partial(open_object, self.job), name=name)
        self.offered = OfferedObject(self.job, NAME.removeprefix("sha256:"), len(DATA), self.folder / "object")

    def offer(self) -> None:
        growing = self.offered.growing or ""
        fields = {"path": str(self.offered.path), "size_bytes": len(DATA), "growing": str(growing)}
        self.job.register(self.offered.digest, "object", fields)

    def start(self, read: Callable[[], bytes]) -> threading.Thread:
        """Get the object like a node that starts: from another node or with `read`."""

        def work() -> None:
            self.offer()
            data = self.offered.get(self.said.append)
            self.keep(read() if data is None else data)

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def keep(self, data: bytes) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "new").write_bytes(data)
        (self.folder / "new").rename(self.offered.path)

    def close(self) -> None:
        self.server.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    made = [Node(tmp_path, f"n{at}") for at in range(6)]
    for node in made:
        node.job.write_members(node.name, [one.peer for one in made])
    yield made
    for node in made:
        node.close()


def test_the_store_is_read_once_and_what_it_takes_is_waited_for(nodes: list[Node]) -> None:
    reads = []

    def read() -> bytes:
        reads.append(1)
        time.sleep(0.5)
        return DATA

    for thread in [node.start(read) for node in nodes]:
        thread.join()
    assert [node.offered.path.read_bytes() == DATA for node in nodes] == [True] * 6
    assert len(reads) == 1


def test_a_node_whose_read_fails_or_that_is_gone_is_replaced(nodes: list[Node]) -> None:
    keeper = nodes[0].job.members().owner(nodes[0].offered.digest, 0)
    failed, gone, *others = [node for node in nodes if node.peer != keeper]
    failed.offer()
    assert failed.offered.get(failed.said.append) is None  # it has to read the object from the store, but does not
    gone.server.close()
    gone.offer()
    threading.Timer(0.2, failed.offered.withdraw).start()
    assert gone.offered.get(gone.said.append) is None
    began = time.monotonic()
    for thread in [node.start(lambda: DATA) for node in others]:
        thread.join()
    assert all(node.offered.path.read_bytes() == DATA for node in others)
    assert time.monotonic() - began < 30


def test_nodes_that_do_not_get_it_are_waited_for_once_in_all(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootseer.peers.shared_objects._WAIT_S", 0.5)
    first, second, third = nodes[:3]
    for node in (first, second):
        node.offer()
        with closing(PeerGroup(node.job)) as group:
            group.ask(Question(node.offered.digest, 0, 1, node.peer.name, True))
    third.offer()
    assert third.offered.get(third.said.append) is None
    assert (first.server.served.requests, second.server.served.requests) == (0, 1)


def test_wrong_bytes_are_not_taken_and_their_node_is_named(nodes: list[Node]) -> None:
    first, second = nodes[:2]
    first.offer()
    assert first.offered.get(first.said.append) is None
    first.keep(DATA[:-1] + bytes([DATA[-1] ^ 1]))
    second.offer()
    assert second.offered.get(second.said.append) is None
    assert second.said == [f"n0 sent wrong bytes of {NAME[7:23]}"]


def test_nothing_that_is_not_offered_is_sent(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.peers.server._SOON_S", 0.1)
    first, second = nodes[:2]
    first.keep(DATA)
    with pytest.raises(NotFoundError):
        next(second.offered._read(Client(SECRET), first.peer, 0, time.monotonic() + 60))


def test_what_is_complete_of_a_large_object_is_sent_while_it_grows(nodes: list[Node]) -> None:
    first, second = nodes[:2]
    first.folder.mkdir()
    first.offered.growing = first.folder / "growing"
    first.offered.growing.write_bytes(DATA[: 4 << 20])
    first.offer()
    first.offered.copy(0, lambda part: True, first.said.append)  # it is the first one, and has to ask the store
    second.offer()
    parts: list[bytes] = []

    def keep(part: memoryview) -> bool:
        parts.append(bytes(part))
        if len(parts) == 1 and first.offered.growing is not None:
            with first.offered.growing.open("ab") as file:
                file.write(DATA[4 << 20 :])
            first.offered.growing.rename(first.offered.path)
        return True

    second.offered.copy(0, keep, second.said.append)
    assert b"".join(parts) == DATA
    assert len(parts) == 2
    assert first.said == second.said == []


@pytest.mark.parametrize("fault", ["wrong", "silent"])
def test_what_one_node_does_not_send_comes_from_another(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("bootseer.peers.shared_objects._SILENT_S", 0.5)
    # The third node is sent to the second one, and then to the first. The owner is none of them.
    owner = nodes[0].job.members().owner(nodes[0].offered.digest, 0)
    first, second, third = [node for node in nodes if node.peer != owner][:3]
    for node, data in ((first, DATA), (second, DATA[:-1] + bytes([DATA[-1] ^ 1]))):
        node.offer()
        with closing(PeerGroup(node.job)) as group:
            assert node.offered._ask(group) == (None if node is first else first.peer)
        node.keep(data)
    right, got = [DATA[: 4 << 20], DATA[4 << 20 :]], list[bytes]()

    def keep(part: memoryview) -> bool:
        got.extend([bytes(part)] if part == right[len(got)] else [])
        return part == right[len(got) - 1]

    with socket.create_server(("127.0.0.1", 0)) as silent:
        if fault == "silent":
            there = Peer(second.name, (f"127.0.0.1:{silent.getsockname()[1]}",))
            third.job.write_members(third.name, [there if node is second else node.peer for node in nodes])
        third.offer()
        third.offered.copy(0, keep, third.said.append)
    assert got == right
    assert third.said == [f"{second.name} sent wrong bytes of {NAME[7:23]}"] * (fault == "wrong")
    assert first.server.served.requests == (1 if fault == "wrong" else 2)


def test_another_object_in_its_place_is_not_sent(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.peers.shared_objects._WAIT_S", 0.1)
    first, second = nodes[:2]
    first.offer()
    first.offered.get(first.said.append)
    first.keep(DATA + b"!")
    second.offer()
    assert second.offered.get(second.said.append) is None
    assert second.said == []


def test_a_node_keeps_what_came_from_another_and_serves_it(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The node that ends is not the owner, which tracks who has the object; the next owner would use the store.
    owner = nodes[0].job.members().owner(OBJECT.name.removeprefix("sha256:"), 0)
    first, second, third = [node for node in nodes if owner is not None and node.name != owner.name][:3]
    first.offer()
    first.offered.get(first.said.append)
    first.keep(DATA)
    objects = {node: LocalObjects(tmp_path / f"{node.name}-objects", node.said.append) for node in (second, third)}
    for node in (second, third):
        monkeypatch.setenv(FOLDER, str(node.job.folder))
        # The store is empty.
        assert objects[node].content(OBJECT, FileStore(tmp_path / "store"), timeout_s=1) == DATA
        first.server.close()
    assert objects[third].store.stat(NAME).size_bytes == len(DATA)


def test_what_does_not_exist_is_not_offered_for_long(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(nodes[0].job.folder))
    with pytest.raises((NotFoundError, TransientError)):
        LocalObjects(tmp_path / "objects", print).content(OBJECT, FileStore(tmp_path / "store"), timeout_s=1)
    assert nodes[0].job.identities() == set()

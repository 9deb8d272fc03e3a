"""Nodes that read the same file at once, over real sockets: requests to the store, also with faults."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.artifact.mounting import numbers_of
from bootseer.blocks.index import Index
from bootseer.errors import TransientError
from bootseer.mounts.block_files import BlockFileService
from bootseer.peers.choice import Level, Members, Peer, Step
from bootseer.peers.job import BLOCKS, FOLDER, SWITCH, JobPeers
from bootseer.peers.origins import PeerOrigin
from bootseer.store.file import FileStore
from fetch.files import BLOCK, content, stored
from peers.nodes import SECRET, Node
from store_doubles import Fault, FaultyStore

pytestmark = pytest.mark.slow

RUN = 16 * BLOCK
DATA = content(512)


class Job:
    """Nodes of one job, and a store that counts the bytes read."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, data: bytes = DATA) -> None:
        monkeypatch.setattr("bootseer.peers.origins.RUN_BYTES", RUN)
        monkeypatch.setattr("bootseer.peers.service.open_store", lambda uri, **options: self.store)
        self.plan: Callable[[object], Fault | None] = lambda request: None
        self.inner = FileStore(folder / "store")
        self.data = data
        self.index: Index = stored(self.inner, data)
        self.store = FaultyStore(self.inner, lambda request: self.plan(request))  # noqa: PLW0108 - tests replace it
        self.nodes = [Node(f"n{at}", folder, self.store, self.index) for at in range(4)]
        self.peers = [node.peer for node in self.nodes]
        for node in self.nodes:
            node.meet(self.peers)

    @property
    def one_copy(self) -> int:
        return sum(stripe.size_bytes for stripe in self.index.stripes)

    @property
    def copies(self) -> float:
        """Bytes read from the store, in copies of the file."""
        return sum(self.store.bytes_read.values()) / self.one_copy

    def owned(self, name: str) -> list[int]:
        """The blocks that this node owns."""
        members = Members(self.peers, name)
        return [
            block
            for block in range(self.index.num_blocks)
            if not members.route(self.index.identity, block * BLOCK // RUN).steps
        ]

    def read_all(self, nodes: list[Node] | None = None) -> None:
        """Fetch the whole file on all of these nodes at once, and check the bytes."""
        nodes = self.nodes if nodes is None else nodes
        for thread in [node.start(lambda node: node.fetcher.pull_all()) for node in nodes]:
            thread.join(60)
        for node in nodes:
            assert node.cached.complete
            assert node.cached.path.read_bytes() == self.data

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def sent_by(self, name: str) -> list[dict[str, float]]:
        return [node.group.stats().get(name, {}) for node in self.nodes]


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that waits for another, or for a processor of a busy machine, is not late."""
    for limit in ("_SILENCE_S", "_LONG_SILENCE_S", "_MIN_SECONDS"):
        monkeypatch.setattr(f"bootseer.peers.health.{limit}", 60.0)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    with closing(Job(tmp_path, monkeypatch)) as job:
        yield job


def test_the_store_sends_one_copy_to_all(job: Job) -> None:
    job.read_all()
    assert job.copies == 1.0
    stats = job.nodes[0].fetcher.stats()
    assert len(job.owned("n0")) * BLOCK + stats.peer_bytes >= len(DATA) * 0.7  # a quarter of the blocks are zeros
    assert set(job.nodes[0].group.stats()) == {"n1", "n2", "n3"}


def test_waiting_for_an_owner_that_waits_for_the_store_is_not_lateness(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootseer.peers.health._SILENCE_S", 1.0)
    job.plan = lambda _: Fault(delay_s=1.2)  # longer than the silence after which a peer is late
    job.read_all()
    assert job.copies <= 1.05  # on a busy machine a process that is not scheduled for a while is late
    assert sum(node.group.health.num_given_up for node in job.nodes) == 0


def test_a_reader_gets_a_block_of_each_owner(job: Job) -> None:
    for name in ("n0", "n1", "n2", "n3"):
        block = next(block for block in job.owned(name) if job.index.place(block).length)
        offset = block * BLOCK + 7
        assert bytes(job.nodes[0].fetcher.read_blocking(0, offset, 100)) == DATA[offset : offset + 100]
    assert job.nodes[0].fetcher.stats().peer_bytes == 3 * BLOCK


def test_an_owner_that_is_killed_costs_its_share_at_most(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
    job.nodes[3].kill()
    job.read_all(job.nodes[:3])
    assert job.copies <= 1.25


def test_a_silent_owner_is_late_and_another_node_takes_its_place(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peers = [*job.peers[:3], Peer("n3", (f"127.0.0.1:{silent.getsockname()[1]}",))]
        for node in job.nodes[:3]:
            node.meet(peers)
        job.read_all(job.nodes[:3])
    assert job.copies <= 1.25
    assert sum(sent.get("late", 0) for sent in job.sent_by("n3")) > 0


def test_a_slow_node_is_compared_with_the_store_once(job: Job) -> None:
    """Compared with itself alone it would never be slow."""
    group, peer = job.nodes[0].group, job.nodes[1].peer
    asked = group.health.begin(peer.name, 0.0)
    group.health.received(asked, 1 << 20, 2.0)
    group.health.ended(asked, late=False, now_s=4.0)
    origin = PeerOrigin(group, Step(peer, Level.GLOBAL))
    with pytest.raises(TransientError, match="for comparison"):
        list(origin.read(job.index, range(64), 5.0))
    assert not group.must_compare(peer.name, 64 * BLOCK)


def test_a_wrong_byte_in_an_owners_cache_is_never_delivered_and_the_owner_is_named(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    liar = job.nodes[3]
    liar.fetcher.pull_all()
    wrong = next(block for block in job.owned("n3") if job.index.place(block).length)
    with liar.cached.path.open("r+b") as file:
        file.seek(wrong * BLOCK + 5)
        byte = file.read(1)[0]
        file.seek(wrong * BLOCK + 5)
        file.write(bytes([byte ^ 1]))
    reader = job.nodes[0]
    assert bytes(reader.fetcher.read_blocking(0, wrong * BLOCK, BLOCK)) == DATA[wrong * BLOCK : (wrong + 1) * BLOCK]
    assert reader.group.stats()["n3"]["wrong"] == 1
    assert f"block {wrong} " in caplog.text
    requests = reader.group.stats()["n3"]["requests"]
    job.read_all(job.nodes[:1])
    assert reader.group.stats()["n3"]["requests"] == requests


def test_lists_that_differ_make_no_node_wait_for_another(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
    for at, node in enumerate(job.nodes):
        node.meet([peer for number, peer in enumerate(job.peers) if number != (at + 1) % 4])
    job.read_all()
    assert job.copies <= 2.0
    assert sum(node.group.health.num_given_up for node in job.nodes) == 0


def test_nodes_that_come_late_to_a_file_get_it_from_those_that_were_ahead(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootseer.peers.server._SOON_S", 0.0)
    for node in job.nodes[2:]:
        node.uses_the_file = False
    job.read_all(job.nodes[:2])
    for node in job.nodes[2:]:
        node.uses_the_file = True
    job.read_all(job.nodes[2:])
    assert job.copies == 1.0


def test_a_node_that_joins_in_mid_start_takes_part(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.peers.job._LOOK_EVERY_S", 0.0)
    for node in job.nodes[:3]:
        node.meet(job.peers[:3])
    half = threading.Event()

    def plan(_: object) -> Fault | None:
        if sum(job.store.bytes_read.values()) > job.one_copy / 3 and not half.is_set():
            half.set()
            for node in job.nodes:
                node.meet(job.peers)
        return Fault(delay_s=0.02)

    job.plan = plan
    late = threading.Thread(target=lambda: half.wait(30) and job.nodes[3].fetcher.pull_all())
    late.start()
    job.read_all(job.nodes[:3])
    late.join(60)
    assert job.nodes[3].cached.path.read_bytes() == DATA
    assert job.copies <= 1.5
    assert any(sent for sent in job.sent_by("n3"))


def test_alone_a_node_asks_the_store(job: Job) -> None:
    job.nodes[0].meet([])
    job.read_all(job.nodes[:1])
    assert job.copies == 1.0
    assert job.nodes[0].group.stats() == {}


def test_a_mount_daemons_files_come_from_peers_and_its_start_says_so(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.nodes[1].fetcher.pull_all()
    folder = JobPeers.create(tmp_path / "client", SECRET)
    folder.write_members("client", job.peers[1:2])
    monkeypatch.setenv(FOLDER, str(folder.folder))
    said: list[str] = []
    gone = str(tmp_path / "no-store")
    served = BlockFileService((job.index,), gone, tmp_path / "cache", rest=False)(said.append)
    assert bytes(served.fetcher.read_blocking(0, 4 * BLOCK + 9, 3000)) == DATA[4 * BLOCK + 9 :][:3000]
    numbers = numbers_of(json.loads(json.dumps(served.status())), {})
    served.close()
    assert numbers["peer_bytes"] == numbers["demand_bytes"] == BLOCK
    assert (numbers["late_peers"], numbers["wrong_peers"]) == ("", "")
    fields = {"kind": BLOCKS, "store": gone, "plain_http": False, "cache": str(tmp_path / "cache")}
    assert folder.registered(job.index.identity) == fields
    assert not said


@pytest.mark.parametrize("without", ["variable", "switch"])
def test_without_peers_a_mount_daemon_asks_the_store_alone(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    if without == "switch":
        monkeypatch.setenv(FOLDER, str(job.nodes[0].job.folder))
        monkeypatch.setenv(SWITCH, "0")
    served = BlockFileService((job.index,), job.inner.uri, tmp_path / "cache", rest=False)(print)
    assert bytes(served.fetcher.read_blocking(0, 4 * BLOCK, 10)) == DATA[4 * BLOCK :][:10]
    numbers = numbers_of(served.status(), {})
    served.close()
    assert not {"peer_bytes", "late_peers"} & set(numbers)

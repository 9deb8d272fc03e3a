"""The peer service with a real store and a real cache: what it serves, fetches once, and refuses."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from bootseer.blocks.index import Index
from bootseer.blocks.writer import BlockWriter
from bootseer.cache.cache import Cache
from bootseer.cache.cached_file import CachedFile
from bootseer.errors import NotFoundError, TransientError
from bootseer.peers.choice import Level, Peer
from bootseer.peers.client import Client
from bootseer.peers.job import JobPeers
from bootseer.peers.members import Listed
from bootseer.peers.protocol import Question, Request
from bootseer.peers.readers import CHECKPOINT
from bootseer.peers.service import Limits, Service
from bootseer.store.file import FileStore
from registry import free_port

BLOCK = 64 << 10
DATA = os.urandom(8 * BLOCK + 100)
SECRET = b"s" * 32


@pytest.fixture
def index(tmp_path: Path) -> Index:
    store = FileStore(tmp_path / "store")
    with BlockWriter(store, block_size=BLOCK, threads=1) as writer:
        writer.write(DATA)
        written = writer.finish()
    return Index.parse(b"".join(store.read(written.index_name)))


class Node:
    """A service without its loop: its server answers, but the peers folder is not polled."""

    def __init__(self, tmp_path: Path, limits: Limits, others: Sequence[str] = ()) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        source = Listed(SECRET, lambda: [Peer(each, (each,)) for each in (self.address, *others)])
        self.service = Service(tmp_path / "peers", source, limits)
        self.client = Client(SECRET)
        self.job = JobPeers.open(tmp_path / "peers")

    def run_until_ready(self, wait_for: int = 0, wait_s: float = 300.0) -> None:
        """Run one iteration of the loop."""

        def end() -> None:
            raise InterruptedError

        with pytest.raises(InterruptedError):
            self.service.run(end, wait_for=wait_for, wait_s=wait_s)

    def ask(self, index: Index, block: int, level: Level = Level.GLOBAL) -> bytes:
        into = bytearray(index.length(block))
        request = Request(index.identity, block * BLOCK, len(into), level, "m")
        self.client.read(self.address, request, memoryview(into), on_progress=lambda _: 10.0)
        return bytes(into)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr("bootseer.peers.server._SOON_S", 0.1)
    node = Node(tmp_path, Limits(after=0))
    with contextlib.closing(node.service), contextlib.closing(node.client):
        yield node


Register = Callable[[Node], None]


@pytest.fixture
def register(index: Index, tmp_path: Path) -> Register:
    """Registers the file on a node, as a process that has opened it."""

    def register(node: Node) -> None:
        root = node.job.folder.parent / "cache"
        Cache(root).open(index).close()
        node.job.register_blocks(index.identity, str(tmp_path / "store"), False, root)

    return register


def test_only_registered_files_are_served(node: Node, index: Index, register: Register) -> None:
    with pytest.raises(NotFoundError):
        node.ask(index, 0)
    register(node)
    assert node.ask(index, 8) == DATA[8 * BLOCK :]


def test_a_file_that_cannot_be_opened_is_logged_once(
    node: Node, index: Index, register: Register, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    register(node)
    shutil.rmtree(tmp_path / "cache")
    for _ in range(3):
        with pytest.raises(NotFoundError):
            node.ask(index, 0)
    assert len([one for one in caplog.records if f"{index.identity} is not served" in one.message]) == 1


def test_registered_files_are_open_before_a_peer_asks(node: Node, register: Register, tmp_path: Path) -> None:
    register(node)
    node.run_until_ready()
    assert [entry.in_use for entry in Cache(tmp_path / "cache").entries()] == [True]


def test_a_thread_that_the_system_refuses_does_not_end_the_service_and_is_tried_again(
    node: Node, index: Index, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "bootseer-holders":
            refused.append(thread)
            if len(refused) < 3:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    register(node)
    node.run_until_ready(wait_for=2, wait_s=1.0)  # there is no other node
    assert len(refused) == 3
    assert node.ask(index, 8) == DATA[8 * BLOCK :]


def test_the_first_node_knows_who_is_ready_although_one_of_its_interfaces_is_down(tmp_path: Path) -> None:
    addresses = "192.0.2.1:17507", f"127.0.0.1:{free_port()}"
    source = Listed(SECRET, lambda: [Peer("first", addresses)])
    with contextlib.closing(Service(tmp_path / "peers", source, Limits(), name="first")) as service:
        service._membership.refresh()
        threading.Thread(target=service._report_readiness).start()
        job, until = JobPeers.open(tmp_path / "peers"), time.monotonic() + 20
        while job.readiness().nodes != 1 and time.monotonic() < until:
            time.sleep(0.02)
    assert job.readiness().nodes == 1


def test_a_node_that_has_ended_is_not_one_that_never_answered(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    other = Node(tmp_path / "other", Limits())
    one = Node(tmp_path / "one", Limits(), [other.address, "127.0.0.1:1"])
    with contextlib.closing(one.service):
        one.service._membership.refresh()
        one.service._write_members()
        other.service.close()
        one.service._membership._probed.clear()
        one.service._membership.refresh()
    state = one.job.state()
    assert (state["peers"], state["unreachable"]) == (sorted([one.address, other.address]), ["127.0.0.1:1"])


def test_what_is_asked_for_only_if_it_is_held_is_not_fetched(node: Node, index: Index, register: Register) -> None:
    register(node)
    with pytest.raises(TransientError, match="could not get it"):
        node.ask(index, 1, Level.HELD)
    node.ask(index, 1)
    assert node.ask(index, 1, Level.HELD) == DATA[BLOCK : 2 * BLOCK]


def test_a_node_that_has_a_file_from_an_earlier_job_is_asked_before_the_store(
    node: Node, index: Index, register: Register, tmp_path: Path
) -> None:
    register(node)
    for block in range(index.num_blocks):
        node.ask(index, block)
    for path in (tmp_path / "store").rglob("*"):
        path.unlink(missing_ok=True) if path.is_file() else None
    (tmp_path / "cold").mkdir()
    cold = Node(tmp_path / "cold", Limits(), [node.address])
    with contextlib.closing(cold.service), contextlib.closing(cold.client):
        cold.run_until_ready(wait_for=2)
        register(cold)
        cold.run_until_ready()
        until = time.monotonic() + 300
        while not cold.job.ahead(index.identity) and time.monotonic() < until:
            time.sleep(0.02)
        assert [cold.ask(index, block) for block in range(9)] == [
            DATA[at : at + BLOCK] for at in range(0, 9 * BLOCK, BLOCK)
        ]
        assert cold.service._blocks.figures() == {"filled_bytes": 0}


@pytest.mark.parametrize("level", [Level.RACK, Level.GLOBAL])
def test_a_missing_block_is_fetched_once_for_all_and_kept(
    node: Node, index: Index, register: Register, tmp_path: Path, level: Level
) -> None:
    register(node)
    asking = [threading.Thread(target=node.ask, args=(index, 1, level)) for _ in range(8)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert node.ask(index, 1) == DATA[BLOCK : 2 * BLOCK]
    assert 0 < node.service._blocks.figures()["filled_bytes"] <= BLOCK + 100  # type: ignore[operator]
    with contextlib.closing(Cache(tmp_path / "cache").open(index)) as cached:
        assert cached.num_ready == 1


def test_what_the_cache_cannot_keep_is_refused_and_no_hole_is_sent(
    node: Node, index: Index, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(node)
    monkeypatch.setitem(CachedFile.put.__kwdefaults__, "reserve_bytes", 1 << 60)
    monkeypatch.setattr("bootseer.cache.cached_file._RESERVE_SHARE", 1.0)
    with pytest.raises(NotFoundError):
        node.ask(index, 2)
    filled = node.service._blocks.figures()["filled_bytes"]
    with pytest.raises(NotFoundError):
        node.ask(index, 3)
    assert node.service._blocks.figures()["filled_bytes"] == filled > 0, "it is not fetched for every node that asks"  # type: ignore[operator]


def test_what_is_not_in_the_cache_is_not_served(node: Node, index: Index, tmp_path: Path) -> None:
    node.job.register_blocks(index.identity, str(tmp_path / "store"), False, tmp_path / "cache")
    with pytest.raises(NotFoundError):
        node.ask(index, 0)


def test_when_training_begins_it_may_stop(node: Node, index: Index, register: Register) -> None:
    register(node)
    assert node.ask(index, 0) == DATA[:BLOCK]
    node.service._training_began()
    with pytest.raises(TransientError):
        node.ask(index, 0)


@pytest.mark.parametrize(("before", "after"), [(1 << 30, 6_250_000), (1_000_000, 1_000_000)])
def test_when_training_begins_a_twentieth_of_the_links_is_left(tmp_path: Path, before: int, after: int) -> None:
    """Or what was allowed before, if that is less: eight links of 400 Gbit/s would get 20 GB/s. Loopback reports no
    speed; 1 Gbit/s is assumed."""
    node = Node(tmp_path, Limits(before))
    with contextlib.closing(node.service), contextlib.closing(node.client):
        node.client.probe(node.address)
        server = node.service._server
        assert server is not None
        assert server._max_rate == before
        node.service._training_began()
        assert server._max_rate == after
        assert f'"limit":{after}' in (tmp_path / "peers" / "members.json").read_text()


def test_what_a_node_that_serves_nothing_receives_is_limited_too_when_training_begins(tmp_path: Path) -> None:
    service = Service(tmp_path / "peers", Listed(SECRET, list), Limits())
    with contextlib.closing(service):
        service._training_began()
    assert '"limit":0' not in (tmp_path / "peers" / "members.json").read_text()


def test_when_training_begins_checkpoints_may_be_evicted(index: Index, tmp_path: Path) -> None:
    """The service may keep running for weeks."""
    cache = Cache(tmp_path / "cache")
    cache.open(index).close()
    service = Service(tmp_path / "peers", Listed(SECRET, list), Limits())
    with contextlib.closing(service):
        JobPeers.open(tmp_path / "peers").register(index.identity, CHECKPOINT, {"cache": str(tmp_path / "cache")})
        assert service._find(index.identity) is not None
        assert [entry.in_use for entry in cache.entries()] == [True]
        service._training_began()
        assert [entry.in_use for entry in cache.entries()] == [False]


def test_the_owner_of_a_checkpoint_answers_also_when_its_own_copy_was_evicted(index: Index, tmp_path: Path) -> None:
    """Otherwise it counts as late, and each node reads from the storage what another one has."""
    cache, address = Cache(tmp_path / "cache"), f"127.0.0.1:{free_port()}"
    cache.open(index).close()
    source = Listed(SECRET, lambda: [Peer(address, (address,))])
    service, client = Service(tmp_path / "peers", source, Limits()), Client(SECRET)
    with contextlib.closing(service), contextlib.closing(client):
        JobPeers.open(tmp_path / "peers").register(index.identity, CHECKPOINT, {"cache": str(tmp_path / "cache")})
        assert service._find(index.identity) is not None
        service._chunks.release_all()
        assert cache.prune(0).evicted
        first, second = (Question(index.identity, 0, 1, name, True) for name in "ab")
        assert client.ask(address, first, 5.0).readers == {}
        assert client.ask(address, second, 5.0).readers == {"a": 1}


def test_a_disk_that_is_full_for_a_while_ends_no_service(node: Node, tmp_path: Path) -> None:
    """Simulated by folders in the place of the files."""
    told, state = tmp_path / "peers" / "members.json", tmp_path / "peers" / "state.json"
    before = told.read_bytes()
    for path in (told, state):
        path.unlink(missing_ok=True)
        path.mkdir()
    node.service._training_began()
    node.run_until_ready()
    for path in (told, state):
        path.rmdir()
    until = time.monotonic() + 300
    while not told.exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert b'"limit":6250000' in told.read_bytes() != before

"""The threads in which callbacks of reads run: reads from a DataNode whose packets are released by the test."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("numpy")
pytest.importorskip("google_crc32c")

from bootseer.errors import BootseerError, Interrupted, PermanentError, TransientError
from bootseer.hdfs.addresses import Cluster
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.reads import HdfsReads
from bootseer.hdfs.requests import ReadSettings
from hdfs.asking import MIB, Waiting
from hdfs.peers import PACKET, FakeDataNode, FakeNameNode, block, located

DATA = random.Random(5).randbytes(4 * MIB)
PIECE = 10 * PACKET
"""Three receptions from an unknown node; one request has two pieces."""
SETTINGS = ReadSettings(silent_s=50.0, reconnect_s=50.0, min_late_s=50.0, connections_per_node=1, piece_bytes=PIECE)
PATIENCE_S = 120.0


class Gated:
    """One DataNode, which sends only packets that the test releases."""

    def __init__(self, settings: ReadSettings = SETTINGS) -> None:
        self._ends = contextlib.ExitStack()
        self._change = threading.Condition()
        self._passing = range(0)
        self._next = -1
        node = self._ends.enter_context(FakeDataNode({1: DATA}))
        node.before_packet = self._pass
        namenode = self._ends.enter_context(FakeNameNode())
        namenode.answers["getBlockLocations"] = lambda _: located(len(DATA), [block(0, 1, len(DATA), [node.port])])
        asked = NameNode(Cluster.of(f"127.0.0.1:{namenode.port}"), call_timeout_s=60.0)
        self._ends.callback(asked.close)
        self.reads = HdfsReads(asked, settings)
        self._ends.callback(self.reads.close)
        self._ends.callback(self.let, 0, len(DATA))

    def close(self) -> None:
        self._ends.close()

    def let(self, start: int, end: int) -> None:
        """Release the packets that begin in this range, and no others."""
        with self._change:
            self._passing = range(start, end)
            self._change.notify_all()

    def wait_for_packet(self, at: int) -> None:
        """Wait until the packet at this offset is about to be sent."""
        with self._change:
            assert self._change.wait_for(lambda: self._next == at, PATIENCE_S)

    def wait_until_received(self, num_bytes: int) -> None:
        """Wait until this number of bytes has been received."""
        until = time.monotonic() + PATIENCE_S
        while sum(node["bytes"] for node in self.reads.facts()["nodes"].values()) < num_bytes:  # type: ignore[attr-defined]
            assert time.monotonic() < until
            time.sleep(0.001)

    def connect(self) -> None:
        """Read one packet, and wait until there is an idle connection."""
        told = Waiting()
        self.reads.open("/gated").read_into(0, memoryview(bytearray(PACKET)), told)
        assert told.wait()[0].error is None
        until = time.monotonic() + PATIENCE_S
        while not self.reads._threads._connections._idle:
            assert time.monotonic() < until
            time.sleep(0.001)

    def _pass(self, at: int) -> None:
        with self._change:
            self._next = at
            self._change.notify_all()
            assert self._change.wait_for(lambda: at in self._passing, PATIENCE_S)


@pytest.fixture
def gated() -> Iterator[Gated]:
    with contextlib.closing(Gated()) as made:
        yield made


def test_queries_never_run_callbacks_of_reads(gated: Gated) -> None:
    """Queries are called with locks held that the callbacks may need. A read that was cancelled while its memory is
    being written ends in the middle of a request, and no thread runs its callback at that moment."""
    file = gated.reads.open("/gated")
    told_in: list[str] = []
    first, behind = Waiting(), Waiting()
    # While the only connection is in use, the others are queued: one request reads the first two.
    file.read_into(3 * MIB, memoryview(bytearray(PACKET)), first)
    gated.wait_for_packet(3 * MIB)
    ticket = file.read_into(0, memoryview(bytearray(PIECE)), lambda _: told_in.append(threading.current_thread().name))
    for start, end in ((PIECE, MIB), (MIB, 3 * MIB)):
        file.read_into(start, memoryview(bytearray(end - start)), behind)
    gated.let(3 * MIB, 4 * MIB)
    first.wait()
    gated.let(0, 5 * PACKET)
    gated.wait_until_received(5 * PACKET)
    ticket.cancel()
    gated.let(0, 9 * PACKET)
    gated.wait_until_received(9 * PACKET)
    until = time.monotonic() + PATIENCE_S
    while not told_in and time.monotonic() < until:
        file.delay_s(0, MIB)
        ticket.remaining_s()
        gated.reads.delay_s(file.nodes(0), MIB)
        gated.reads.facts()
    assert told_in
    assert threading.current_thread().name not in told_in
    assert behind.outcomes == []
    gated.let(0, len(DATA))
    assert [outcome.error for outcome in behind.wait(2)] == [None, None]


def test_closing_does_not_wait_for_a_connection_that_is_not_established() -> None:
    """Like with a DataNode whose link is cut; here its backlog of connections is full."""
    with contextlib.ExitStack() as ends:
        listener = ends.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(2):
            other = ends.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(("127.0.0.1", port))
        namenode = ends.enter_context(FakeNameNode())
        namenode.answers["getBlockLocations"] = lambda _: located(len(DATA), [block(0, 1, len(DATA), [port])])
        asked = NameNode(Cluster.of(f"127.0.0.1:{namenode.port}"), call_timeout_s=60.0)
        ends.callback(asked.close)
        before = set(threading.enumerate())
        reads = HdfsReads(asked, SETTINGS)
        done = Waiting()
        reads.open("/f").read_into(0, memoryview(bytearray(MIB)), done)
        until = time.monotonic() + PATIENCE_S
        while not any(node["requests"] for node in reads.facts()["nodes"].values()):  # type: ignore[attr-defined]
            assert time.monotonic() < until
            time.sleep(0.001)
        reads.close()
        assert isinstance(done.wait()[0].error, PermanentError)
        for thread in set(threading.enumerate()) - before:
            if thread.name == "bootseer-hdfs":
                thread.join(SETTINGS.reconnect_s / 2)
                assert not thread.is_alive()


def test_a_read_for_which_no_thread_can_be_started_is_refused_and_the_next_one_succeeds(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    file = gated.reads.open("/gated")
    told = Waiting()
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TransientError, match="refuses to start a thread"):
            file.read_into(0, memoryview(bytearray(MIB)), told)
    gated.let(0, len(DATA))
    into = bytearray(MIB)
    file.read_into(0, memoryview(into), told)
    assert told.wait()[0].error is None
    assert into == DATA[:MIB]
    assert len(told.outcomes) == 1


def test_a_callback_that_raises_does_not_stop_others(gated: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[type[BaseException]] = []
    both = threading.Semaphore(0)

    def report(args: threading.ExceptHookArgs) -> None:
        reported.append(args.exc_type)
        both.release()

    monkeypatch.setattr(threading, "excepthook", report)

    def broken(outcome: object) -> None:
        raise SystemExit

    file = gated.reads.open("/gated")
    told = Waiting()
    for done in (broken, told, broken, told):
        file.read_into(0, memoryview(bytearray(PACKET)), done)
    gated.let(0, len(DATA))
    assert [outcome.error for outcome in told.wait(2)] == [None, None]
    for _ in range(2):
        assert both.acquire(timeout=PATIENCE_S)
    assert reported == [SystemExit] * 2


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), Interrupted(15, "SIGTERM")])
def test_a_signal_during_a_callback_in_this_thread_is_not_swallowed(gated: Gated, interrupt: BaseException) -> None:
    def interrupted(outcome: object) -> None:
        raise interrupt

    file = gated.reads.open("/gated")
    gated.let(0, len(DATA))
    gated.connect()
    with pytest.raises(type(interrupt)):
        file.read_into(0, memoryview(bytearray(PACKET)), interrupted, inline=True)
    told = Waiting()
    file.read_into(0, memoryview(bytearray(PACKET)), told)
    assert told.wait()[0].error is None


def test_after_a_signal_before_a_read_begins_others_can_use_the_datanode(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    file = gated.reads.open("/gated")
    gated.let(0, len(DATA))
    first, told = Waiting(), Waiting()
    with monkeypatch.context() as once:
        once.setattr(gated.reads._threads, "_wake", interrupted)
        with pytest.raises(KeyboardInterrupt):
            file.read_into(0, memoryview(bytearray(PACKET)), first)
    file.read_into(0, memoryview(bytearray(PACKET)), told)
    assert told.wait(deadline_s=30.0)[0].error is None
    assert first.outcomes == []


def test_an_inline_read_ends_when_the_reads_are_closed(gated: Gated) -> None:
    file = gated.reads.open("/gated")
    gated.let(0, len(DATA))
    told = Waiting()
    gated.connect()
    gated.let(0, 0)
    failed: list[BootseerError] = []

    def read() -> None:
        try:
            file.read_into(2 * PACKET, memoryview(bytearray(PACKET)), told, inline=True)
        except BootseerError as error:
            failed.append(error)

    asking = threading.Thread(target=read)
    asking.start()
    gated.wait_for_packet(2 * PACKET)
    gated.reads.close()
    asking.join(PATIENCE_S)
    assert "was closed" in str(failed[0])
    assert told.outcomes == []

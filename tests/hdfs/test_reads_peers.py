"""Reads from DataNodes that violate the protocol, are slow or silent, with and without a healthy one."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest

pytest.importorskip("numpy")
pytest.importorskip("google_crc32c")

from bootseer.errors import BootseerError, CorruptError, PermanentError, TransientError
from bootseer.hdfs.addresses import Cluster
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.protobuf import Message
from bootseer.hdfs.reads import HdfsReads
from bootseer.hdfs.requests import ReadSettings
from hdfs.asking import Waiting, error_of, failures, read
from hdfs.peers import ODD, SPOILED, WRONG, FakeDataNode, FakeNameNode, block, located

DATA = random.Random(5).randbytes(3 * 1024 * 1024 + 777)
BLOCK = 1 << 21
BLOCKS = {1: DATA[:BLOCK], 2: DATA[BLOCK:]}
QUICK = ReadSettings(silent_s=0.2, reconnect_s=0.4, min_late_s=0.1)
PATIENT = ReadSettings(silent_s=50.0, reconnect_s=50.0, min_late_s=50.0)
"""With these, a healthy node on a busy machine is not considered late."""


class Small:
    """A cluster of a NameNode and DataNodes, each with all blocks of `/f`."""

    def __init__(self, *spoils: str, settings: ReadSettings = QUICK) -> None:
        self._ends = contextlib.ExitStack()
        self.nodes = [self._ends.enter_context(FakeDataNode(dict(BLOCKS), spoil)) for spoil in spoils]
        self.namenode = self._ends.enter_context(FakeNameNode())
        self.namenode.answers["getBlockLocations"] = self.answer
        self.asked = NameNode(Cluster.of(f"127.0.0.1:{self.namenode.port}"), call_timeout_s=60.0)
        self._ends.callback(self.asked.close)
        self.reads = HdfsReads(self.asked, settings)
        self._ends.callback(self.reads.close)
        self.first_block = 1

    def __enter__(self) -> Small:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def answer(self, request: Message) -> bytes | tuple[str, str]:
        """The NameNode's answer for the file."""
        ports = [node.port for node in self.nodes]
        first = block(0, self.first_block, BLOCK, ports)
        return located(len(DATA), [first, block(BLOCK, 2, len(DATA) - BLOCK, ports)])


@pytest.fixture
def well() -> Iterator[Small]:
    with Small("") as small:
        yield small


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("spoil", SPOILED)
def test_a_healthy_node_replaces_one_that_violates_the_protocol(spoil: str, check: bool) -> None:
    with Small(spoil, "") as small:
        file = small.reads.open("/f")
        assert read(file, check=check) == DATA
        assert small.nodes[0].num_connections > 0, "the test does not reach the spoiled node"


@pytest.mark.parametrize("spoil", [spoil for spoil in SPOILED if spoil not in ("silent", "stops")])
def test_a_single_node_that_violates_the_protocol_is_named_in_the_error(spoil: str) -> None:
    with Small(spoil) as small:
        error = error_of(small.reads.open("/f"), deadline_s=10.0)
        assert isinstance(error, TransientError)
        assert "/f: blk_" in str(error)
        assert f"127.0.0.1:{small.nodes[0].port}" in str(error)
        assert "\n" not in str(error)


@pytest.mark.parametrize("spoil", ["silent", "stops", "drips"])
def test_a_read_from_a_single_stalled_node_fails_at_the_deadline(spoil: str) -> None:
    with Small(spoil) as small:
        error = error_of(small.reads.open("/f"), deadline_s=1.0)
        assert isinstance(error, TransientError)
        node = f"127.0.0.1:{small.nodes[0].port}"
        assert f"was not read within 1.0 s; its only copy is on {node} ({node}" in str(error)


@pytest.mark.parametrize("spoil", WRONG)
def test_wrong_bytes_are_read_from_another_node_and_counted_as_failures(spoil: str) -> None:
    with Small(spoil, "", settings=PATIENT) as small:
        assert read(small.reads.open("/f")) == DATA
        assert failures(small.reads)[f"127.0.0.1:{small.nodes[0].port}"] > 0
        assert failures(small.reads)[f"127.0.0.1:{small.nodes[1].port}"] == 0
        assert small.reads.facts()["wrong"]


@pytest.mark.parametrize("spoil", WRONG)
def test_bytes_that_are_wrong_everywhere_are_an_error_that_names_all(spoil: str) -> None:
    with Small(spoil, spoil) as small:
        error = error_of(small.reads.open("/f"))
        assert isinstance(error, CorruptError)
        assert all(f"127.0.0.1:{node.port}: wrong bytes at " in str(error) for node in small.nodes)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("spoil", ODD)
def test_unusual_but_valid_packets_are_read(spoil: str, check: bool) -> None:
    with Small(spoil, settings=PATIENT) as small:
        file = small.reads.open("/f")
        assert read(file, check=check) == DATA
        assert read(file, 1000, 5000, check=check) == DATA[1000:6000]
        assert set(failures(small.reads).values()) == {0}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("spoil", ["", *ODD, *WRONG, "wrong place", "wrong sequence", "cut"])
def test_small_packets_are_read_together_and_checked(spoil: str, check: bool) -> None:
    if spoil in WRONG and not check:
        pytest.skip("cannot be detected without checksums")
    with Small(spoil, "", settings=PATIENT) as small:
        for node in small.nodes:
            node.packet_bytes = 4096
        file = small.reads.open("/f")
        assert read(file, check=check) == DATA
        assert read(file, 1000, 1 << 20, check=check) == DATA[1000 : 1000 + (1 << 20)]
        assert bool(failures(small.reads)[f"127.0.0.1:{small.nodes[0].port}"]) is (spoil not in ("", *ODD))


def test_a_dripping_node_is_hedged_and_no_thread_writes_after_the_end() -> None:
    with Small("drips", "") as small:
        file = small.reads.open("/f")
        for _ in range(3):
            assert read(file) == DATA
        assert small.reads.facts()["hedges_won"]


def test_memory_of_a_cancelled_read_is_not_written_to(well: Small) -> None:
    file = well.reads.open("/f")
    well.nodes[0].spoil = "drips"
    into = bytearray(len(DATA))
    done = Waiting()
    ticket = file.read_into(0, memoryview(into), done)
    ticket.cancel()
    assert done.wait()[0].error is not None
    into[:] = bytes(len(DATA))
    well.nodes[0].spoil = ""
    assert read(file) == DATA
    assert not any(into)


def test_an_expired_token_is_renewed_with_one_request(well: Small) -> None:
    well.nodes[0].spoil = "token"
    file = well.reads.open("/f")
    before = len(well.namenode.asked)

    def answer(request: Message) -> bytes | tuple[str, str]:
        well.nodes[0].spoil = ""
        return well.answer(request)

    well.namenode.answers["getBlockLocations"] = answer
    assert read(file) == DATA
    assert well.reads.facts()["refreshes"] == 1
    assert len(well.namenode.asked) == before + 1


def test_the_token_of_a_block_is_sent_to_the_datanode(well: Small) -> None:
    assert read(well.reads.open("/f")) == DATA
    assert {b"secret" in token for token in well.nodes[0].tokens} == {True}


def test_a_block_that_has_moved_is_found_again(well: Small) -> None:
    file = well.reads.open("/f")
    with FakeDataNode(dict(BLOCKS)) as other:
        well.nodes[0].blocks.clear()
        well.nodes.append(other)
        assert read(file) == DATA
        assert well.reads.facts()["refreshes"] == 1


def test_reading_a_replaced_file_is_an_error(well: Small) -> None:
    file = well.reads.open("/f")
    well.nodes[0].blocks[9] = bytes(BLOCK)
    del well.nodes[0].blocks[1]
    well.first_block = 9
    error = error_of(file)
    assert isinstance(error, PermanentError)
    assert "was replaced while it was read" in str(error)
    assert well.reads.open("/f").version != file.version


def test_reading_a_removed_file_is_an_error(well: Small) -> None:
    file = well.reads.open("/f")
    well.nodes[0].blocks.clear()
    well.namenode.answers["getBlockLocations"] = lambda _: ("java.io.FileNotFoundException", "File does not exist: /f")
    error = error_of(file)
    assert isinstance(error, PermanentError)
    assert "was removed while it was read" in str(error)


def test_a_block_without_replicas_is_a_clear_error() -> None:
    with Small() as small, contextlib.closing(HdfsReads(small.asked, ReadSettings(retry_s=()))) as reads:
        error = error_of(reads.open("/f"))
        assert isinstance(error, TransientError)
        assert "no DataNode has it" in str(error)


def test_an_error_of_the_namenode_after_one_of_the_datanode_is_transient(well: Small) -> None:
    file = well.reads.open("/f")
    well.nodes[0].spoil = "refuses"
    well.namenode.answers["getBlockLocations"] = lambda _: ("java.io.IOException", "safe mode")
    assert isinstance(error_of(file), TransientError)


def test_reads_after_close_end_with_an_error(well: Small) -> None:
    file = well.reads.open("/f")
    well.reads.close()
    assert isinstance(error_of(file), BootseerError)


def test_reads_underway_end_when_their_reader_is_closed(well: Small) -> None:
    file = well.reads.open("/f")
    well.nodes[0].spoil = "silent"
    done = Waiting()
    file.read_into(0, memoryview(bytearray(len(DATA))), done)
    well.reads.close()
    assert "closed" in str(done.wait()[0].error)


def test_ranges_outside_of_the_file_are_refused(well: Small) -> None:
    file = well.reads.open("/f")
    done = Waiting()
    with pytest.raises(PermanentError):
        file.read_into(len(DATA) - 1, memoryview(bytearray(2)), done)
    with pytest.raises(ValueError, match="written to"):
        file.read_into(0, memoryview(b"constant"), done)

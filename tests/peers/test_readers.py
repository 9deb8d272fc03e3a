"""Which nodes read chunks that others wait for, and how partial chunks are served."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bootseer.cache.cache import Cache
from bootseer.cache.cached_file import CachedFile
from bootseer.errors import CorruptError, NotFoundError
from bootseer.peers.choice import Level
from bootseer.peers.client import Client
from bootseer.peers.job import JobPeers
from bootseer.peers.protocol import Question, Request, Signer
from bootseer.peers.readers import CHECKPOINT, UNIT_BLOCKS, CachedFiles, Readers, bits
from bootseer.peers.server import Server
from cached import BLOCK, block_of, content, index_of

FILE = "ab" * 32
SECRET = b"s" * 32


def asked(sender: str, blocks: int = 1, *, unit: int = 0, keeps: bool = True, without: str = "") -> Question:
    return Question(FILE, unit * UNIT_BLOCKS, blocks, sender, keeps, without)


def test_the_first_reads_and_the_others_get_it_from_nodes_that_asked_before() -> None:
    readers = Readers()
    sources = [readers.answer(asked(f"n{at}"), 0, "owner") for at in range(64)]
    assert sources[:4] == [{}, {"n0": 1}, {"n1": 1}, {"n2": 1}]
    assert all(int(name[1:]) < at for at, source in enumerate(sources) for name in source)


def test_nodes_that_ask_in_the_same_order_for_all_units_send_about_as_much_as_they_get() -> None:
    readers = Readers()
    sources = [readers.answer(asked(f"n{at}", unit=unit), 0, "owner") for unit in range(64) for at in range(16)]
    sent = Counter(name for source in sources for name in source)
    assert sent["n0"] == 64
    assert max(sent.values()) < 2 * 64


def test_chunks_that_nodes_do_not_share_are_all_read_by_themselves() -> None:
    readers = Readers()
    assert readers.answer(asked("a", 0x00FF), 0, "owner") == {}
    assert readers.answer(asked("b", 0xFF00), 0, "owner") == {}
    assert readers.answer(asked("c", 0x0180), 0, "owner") == {"a": 0x0080, "b": 0x0100}


def test_a_repeated_question_has_the_same_answer() -> None:
    readers = Readers()
    for _ in range(2):
        assert [readers.answer(asked(name), 0, "owner") for name in "abc"] == [{}, {"a": 1}, {"b": 1}]


def test_a_node_that_did_not_give_it_is_replaced_by_the_first_that_says_so() -> None:
    readers = Readers()
    for name in "abcd":
        readers.answer(asked(name), 0, "owner")
    assert readers.answer(asked("b", without="a"), 0, "owner") == {}
    assert readers.answer(asked("c", without="a"), 0, "owner") == {"b": 1}
    assert readers.answer(asked("e"), 0, "owner") == {"d": 1}
    assert readers.answer(asked("f", unit=1), 0, "owner") == {}


def test_blocks_that_the_owner_has_are_read_from_it() -> None:
    readers = Readers()
    assert readers.answer(asked("a", 3, without="owner"), 3, "owner") == {}
    assert readers.answer(asked("b", 7, keeps=False), 4, "owner") == {"a": 3, "owner": 4}


def test_a_node_that_keeps_nothing_is_no_source() -> None:
    readers = Readers()
    assert [readers.answer(asked(name, keeps=False), 0, "owner") for name in "ab"] == [{}, {}]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7), st.sampled_from(["", "n0", "n1", "n2"]))))
def test_nodes_never_wait_for_each_other_in_a_circle(questions: list[tuple[int, int, str]]) -> None:
    readers = Readers()
    waits: dict[tuple[int, str], str] = {}
    for number, blocks, without in questions:
        name = f"n{number}"
        if without == name:
            continue
        found = readers.answer(asked(name, blocks, without=without), 0, "owner")
        for block in bits(blocks):
            waits.pop((block, name), None)
            for source, mask in found.items():
                if mask >> block & 1:
                    waits[block, name] = source
            passed = {name}
            while (name_before := waits.get((block, name), "")) and name_before not in passed:
                passed.add(name_before)
                name = name_before
            assert not waits.get((block, name)), "a circle"
            name = f"n{number}"


NAMES = st.from_regex(r"[!-~]{1,255}", fullmatch=True)


@given(NAMES, NAMES | st.just(""), st.integers(0, 10**9 - 1), st.integers(1, 2**32 - 1), st.booleans())
def test_a_question_survives_its_way(sender: str, without: str, first: int, blocks: int, keeps: bool) -> None:
    question = Question(FILE, first, blocks, sender, keeps, without)
    signed = Signer(SECRET).sign(question)
    assert Signer(SECRET).verify(signed) == question
    assert Signer(b"other").verify(signed) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"file": "x"}, {"file": f"{FILE}\n"}, {"first": -1}, {"first": 10**9}, {"blocks": -1}, {"blocks": 1 << 32},
        {"sender": ""}, {"sender": "a b"}, {"without": "a b"}, {"keeps": "yes"},
    ],
)  # fmt: skip
def test_a_malformed_question_is_refused(wrong: dict[str, object]) -> None:
    question = replace(Question(FILE, 0, 1, "a", keeps=False), **wrong)
    with pytest.raises(CorruptError):
        Signer(SECRET).verify(Signer(SECRET).sign(question))


DATA = content(8, zeros=False)
INDEX = index_of(DATA)


@pytest.fixture
def cached(tmp_path: Path) -> Iterator[CachedFile]:
    opened = Cache(tmp_path / "cache").open(INDEX)
    yield opened
    opened.close()


@pytest.fixture
def address(cached: CachedFile, tmp_path: Path) -> Iterator[str]:
    """The address of a server of this node's cache."""
    files = CachedFiles(idle_limit_s=0.1)
    job = JobPeers.create(tmp_path / "peers", SECRET)
    job.register(INDEX.identity, CHECKPOINT, {"cache": str(tmp_path / "cache")})
    listening = socket.create_server(("127.0.0.1", 0))
    server = Server([listening], SECRET, cache(partial(files.open, job)), name="owner")
    yield f"127.0.0.1:{listening.getsockname()[1]}"
    server.close()
    files.release_all()


def read(address: str, block: int, heard: list[int] | None = None) -> bytes:
    into = bytearray(BLOCK)
    client = Client(SECRET)

    def on(count: int) -> float:
        if heard is not None:
            heard.append(count)
        return 5.0

    try:
        request = Request(INDEX.identity, block * BLOCK, BLOCK, Level.GLOBAL, "")
        client.read(address, request, memoryview(into), on_progress=on)
    finally:
        client.close()
    return bytes(into)


def test_a_node_passes_on_what_its_cache_has(cached: CachedFile, address: str) -> None:
    cached.put(3, block_of(DATA, 3))
    assert read(address, 3) == block_of(DATA, 3)
    client = Client(SECRET)
    assert client.ask(address, Question(INDEX.identity, 0, 0b1111, "a", True), 5.0).readers == {"owner": 0b1000}
    assert client.ask(address, Question(INDEX.identity, 0, 0b1111, "b", True), 5.0).readers == {"a": 0b1111}
    client.close()


def test_what_a_local_process_fetches_is_waited_for(cached: CachedFile, address: str) -> None:
    assert cached.claim(2)
    heard: list[int] = []

    def on(count: int) -> float:
        heard.append(count)
        if len(heard) == 4:
            cached.put(2, block_of(DATA, 2))
        return 5.0

    into = bytearray(BLOCK)
    client = Client(SECRET)
    request = Request(INDEX.identity, 2 * BLOCK, BLOCK, Level.GLOBAL, "")
    client.read(address, request, memoryview(into), on_progress=on)
    client.close()
    assert into == block_of(DATA, 2)


def test_what_no_local_process_fetches_is_refused(address: str) -> None:
    with pytest.raises(NotFoundError):
        read(address, 5)


def test_what_its_node_could_not_keep_is_refused_at_once(cached: CachedFile, address: str) -> None:
    assert cached.claim(1)  # without the question below, the server would wait for it
    client = Client(SECRET)
    client.ask(address, Question(INDEX.identity, 0, 0b10, "owner", False, "owner"), 5.0)
    client.close()
    with pytest.raises(NotFoundError):
        read(address, 1)

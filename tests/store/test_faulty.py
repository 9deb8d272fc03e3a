"""A faulty store does what its script says, and nothing else."""

from __future__ import annotations

import threading
import uuid

import pytest

from bootseer.errors import AccessError, BootseerError, NotFoundError, TransientError
from bootseer.store.faulty import Fault, FaultyStore, Request
from bootseer.store.memory import MemoryStore
from bootseer.store.store import PIECE_BYTES, Store
from store.contract import DATA, StoreContract, get, put
from store.test_memory import Outside


class TestWithoutFaults(StoreContract):
    @pytest.fixture
    def place(self) -> str:
        return uuid.uuid4().hex

    @pytest.fixture
    def store(self, place: str) -> Store:
        return FaultyStore(MemoryStore(place))

    @pytest.fixture
    def outside(self, place: str) -> Outside:
        return Outside(place)


@pytest.fixture
def inner() -> MemoryStore:
    store = MemoryStore(uuid.uuid4().hex)
    put(store, DATA, "name")
    return store


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, AccessError), (403, AccessError), (404, NotFoundError), (429, TransientError), (503, TransientError)],
)
def test_a_status_is_the_error_that_a_server_means(inner: MemoryStore, status: int, kind: type[BootseerError]) -> None:
    store = FaultyStore(inner, lambda _: Fault(status=status, retry_after_s=3.0))
    calls = (lambda: get(store, "name"), lambda: store.stat("name"), store.upload, store.list)
    for call in (*calls, lambda: store.create("free", b"x")):
        with pytest.raises(kind, match=str(status)) as caught:
            call()
        if isinstance(caught.value, TransientError):
            assert caught.value.retry_after_s == 3.0


def test_faults_come_in_the_order_of_the_list_and_end_with_it(inner: MemoryStore) -> None:
    store = FaultyStore(inner, [None, Fault(status=500), None])
    assert get(store, "name") == DATA
    with pytest.raises(TransientError):
        get(store, "name")
    for _ in range(3):
        assert get(store, "name") == DATA


def test_a_function_sees_each_request(inner: MemoryStore) -> None:
    seen: list[Request] = []
    store = FaultyStore(inner, seen.append)
    get(store, "name", 5, 10)
    store.stat("name")
    list(store.list("na"))
    assert seen == [Request(0, "read", "name", 5, 10), Request(1, "stat", "name"), Request(2, "list", "na")]


def test_the_answer_to_a_create_may_be_lost(inner: MemoryStore) -> None:
    store = FaultyStore(inner, [Fault(cut_after=0)])
    with pytest.raises(TransientError, match="before the answer"):
        store.create("free", b"x")
    assert get(inner, "free") == b"x"
    assert not store.create("free", b"y")


def test_requests_and_bytes_are_counted_by_name(inner: MemoryStore) -> None:
    store = FaultyStore(inner)
    get(store, "name", 0, 1000)
    get(store, "name", 5, 500)
    store.stat("name")
    assert store.requests["name"] == 3
    assert store.bytes_read["name"] == 1500


def test_a_cut_gives_the_first_bytes_and_then_an_error(inner: MemoryStore) -> None:
    store = FaultyStore(inner, [Fault(cut_after=PIECE_BYTES + 7)])
    got = bytearray()
    with pytest.raises(TransientError, match="broke after"):
        for piece in store.read("name"):
            got += piece
    assert got == DATA[: PIECE_BYTES + 7]


def test_a_short_answer_ends_without_an_error(inner: MemoryStore) -> None:
    assert get(FaultyStore(inner, [Fault(short_after=1234)]), "name") == DATA[:1234]


@pytest.mark.parametrize("at", [0, PIECE_BYTES, 400_000])
def test_one_byte_of_the_answer_is_wrong(inner: MemoryStore, at: int) -> None:
    got = get(FaultyStore(inner, [Fault(corrupt_at=at)]), "name", 1000, 500_000)
    right = DATA[1000:501_000]
    assert [number for number in range(len(right)) if got[number] != right[number]] == [at]


def test_a_drip_is_small_pieces_with_waits(inner: MemoryStore) -> None:
    waits: list[float] = []
    store = FaultyStore(inner, [Fault(piece_bytes=10, bytes_per_s=100)], sleep=waits.append)
    assert [len(piece) for piece in store.read("name", 0, 25)] == [10, 10, 5]
    assert waits == [0.1, 0.1, 0.05]


def test_a_delay_beyond_the_deadline_is_a_timeout(inner: MemoryStore) -> None:
    waits: list[float] = []
    store = FaultyStore(inner, [Fault(delay_s=5), Fault(delay_s=1)], sleep=waits.append)
    with pytest.raises(TransientError, match="no answer"):
        list(store.read("name", timeout_s=2))
    assert waits == [2]
    assert len(b"".join(store.read("name", timeout_s=2))) == len(DATA)


def test_a_gate_holds_the_answer_until_it_opens(inner: MemoryStore) -> None:
    gate = threading.Event()
    store = FaultyStore(inner, lambda _: Fault(gate=gate))
    with pytest.raises(TransientError, match="no answer"):
        list(store.read("name", timeout_s=0.01))
    gate.set()
    assert get(store, "name") == DATA

"""One builder per key, in real stores, with real processes that are killed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.artifact import lease
from bootseer.artifact.lease import Held, Lease, NoLease, acquire, look, take_over
from bootseer.artifact.lease_state import LeaseObservation, LeaseRecord
from bootseer.artifact.objects import put
from bootseer.env.document import EnvironmentDocument, document_name
from bootseer.env.life.catalog import Catalog
from bootseer.env.life.election import elect, lease_name, wait
from bootseer.errors import NotFoundError, TransientError
from bootseer.store.file import FileStore
from bootseer.store.open import open_store
from bootseer.store.store import Store
from env.life.samples import KEY, OTHER_KEY, document
from registry import Registry, needs_registry
from store_doubles import Fault, FaultyStore, MemoryStore, Request

pytestmark = pytest.mark.slow

BUILDER = Path(__file__).with_name("builder.py")
NAME = lease_name(KEY)
DOWN = Fault(status=503, retry_after_s=3600)
_END_S = 120.0


@pytest.fixture
def store() -> Store:
    return MemoryStore(uuid.uuid4().hex)


@pytest.fixture
def catalog(store: Store) -> Catalog:
    return Catalog(store)


class Clock:
    """A clock that `sleep` moves forward; `at` schedules calls."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events: list[tuple[float, object]] = []

    def __call__(self) -> float:
        return self.now_s

    def at(self, when_s: float, call: object) -> None:
        self.events.append((when_s, call))

    def sleep(self, seconds: float) -> None:
        end_s = self.now_s + max(seconds, 0.001)
        for event in sorted([event for event in self.events if event[0] <= end_s], key=lambda event: event[0]):
            self.events.remove(event)
            self.now_s = max(self.now_s, event[0])
            event[1]()  # type: ignore[operator]
        self.now_s = end_s


def held(store: Store, key: str = KEY, node: str = "node-1", ttl_s: float = 30.0) -> Lease:
    lease = acquire(store, lease_name(key), node, ttl_s=ttl_s)
    assert isinstance(lease, Lease)
    return lease


def publish(catalog: Catalog, one: EnvironmentDocument) -> None:
    put(catalog.store, one.name, one.encode())


def test_one_of_many_threads_is_elected(catalog: Catalog) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: elect(catalog, KEY, f"node-{number}"), range(8)))
    assert sum(isinstance(one, Lease) for one in found) == 1
    assert all("has been building it for" in one.words for one in found if isinstance(one, Held))
    assert isinstance(elect(catalog, OTHER_KEY, "node"), Lease)


def test_a_lease_that_was_given_back_can_be_had(catalog: Catalog, store: Store) -> None:
    held(store).release()
    assert look(store, NAME) == LeaseObservation("free")
    lease = held(store, node="node-2")
    assert lease.beat()
    assert isinstance(elect(catalog, KEY, "node-3"), Held)


def test_beats_change_what_others_see(store: Store) -> None:
    lease = held(store)
    marks = [look(store, NAME).mark]
    for _ in range(3):
        assert lease.beat()
        marks.append(look(store, NAME).mark)
    assert len(set(marks)) == 4


def test_a_lost_lease_is_not_released(store: Store) -> None:
    lease = held(store)
    taken = take_over(store, NAME, "node-2", look(store, NAME), sleep=lambda seconds: None)
    assert isinstance(taken, Lease)
    assert not lease.beat()
    assert lease.lost
    lease.release()
    assert taken.beat()
    assert not taken.lost


def test_a_store_that_deletes_nothing_sees_the_lease_as_given_back(store: Store) -> None:
    keeping = FaultyStore(store, lambda request: Fault(status=403) if request.verb == "delete" else None)
    held(keeping).release()
    assert look(store, NAME).kind == "free"
    assert isinstance(acquire(keeping, lease_name(KEY), "node-2"), Lease)
    assert look(store, NAME).kind == "held"


@pytest.mark.parametrize("fault", [DOWN, Fault(status=403), Fault(status=429, retry_after_s=3600), Fault(delay_s=3600)])
def test_there_is_no_lease_in_a_store_that_does_not_take_it(store: Store, fault: Fault) -> None:
    faulty = FaultyStore(store, lambda request: fault, sleep=lambda seconds: None)
    found = elect(Catalog(faulty), KEY, "node-1")
    assert isinstance(found, NoLease)
    assert found.why


def test_a_lease_whose_answer_was_lost_is_ours(catalog: Catalog, store: Store) -> None:
    assert isinstance(elect(Catalog(FaultyStore(store, [Fault(cut_after=0)])), KEY, "node-1"), Lease)
    assert isinstance(elect(catalog, KEY, "node-2"), Held)


def test_a_lease_whose_answer_did_not_come_in_time_is_ours(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_LOOK_S", 0.1)
    create = store.create

    def silent_once(name: str, data: bytes, *, timeout_s: float = 60.0) -> bool:
        monkeypatch.setattr(store, "create", create)
        create(name, data)
        time.sleep(timeout_s)
        raise TransientError("no answer in time")

    monkeypatch.setattr(store, "create", silent_once)
    assert isinstance(acquire(store, NAME, "node-1"), Lease)


def test_a_request_that_fails_once_is_repeated(store: Store) -> None:
    stumble = Fault(status=500)
    assert isinstance(acquire(FaultyStore(store, [stumble]), lease_name(KEY), "node-1"), Lease)
    found = acquire(FaultyStore(store, [stumble, stumble]), lease_name(OTHER_KEY), "node-1")
    assert isinstance(found, NoLease)
    assert "500" in found.why
    assert look(store, lease_name(OTHER_KEY)).kind == "free"


def test_who_is_elected_looks_once_more_for_what_was_published_meanwhile(catalog: Catalog, store: Store) -> None:
    publish(catalog, document())
    assert elect(catalog, KEY, "node-1") == document()
    assert look(store, NAME).kind == "free"
    # The snapshot to be replaced is not accepted, also when this start sets a lower maximum age.
    assert isinstance(elect(catalog, KEY, "node-1", replaces=replace(document(), max_age_s=5.0)), Lease)


def test_a_store_that_goes_away_does_not_end_a_lease(store: Store) -> None:
    away: list[Fault | None] = [None]
    lease = held(FaultyStore(store, lambda request: away[0]))
    away[0] = DOWN
    assert lease.beat()
    lease.release()
    away[0] = None
    assert lease.beat()
    assert not lease.lost
    lease.release()


def waited(catalog: Catalog, clock: Clock, timeout_s: float = 600.0, **more: object) -> object:
    return wait(catalog, KEY, "waiter", timeout_s=timeout_s, clock=clock, sleep=clock.sleep, **more)  # type: ignore[arg-type]


def test_who_waits_gets_what_the_builder_publishes(catalog: Catalog, store: Store) -> None:
    clock, lease = Clock(), held(store)
    for second in range(0, 200, 10):
        clock.at(second, lease.beat)
    clock.at(195, lambda: publish(catalog, document()))
    clock.at(200, lease.release)
    ended = waited(catalog, clock)
    assert (ended.ended, ended.document, ended.lease) == ("published", document(), None)  # type: ignore[attr-defined]
    assert 195 < clock.now_s < 210


def test_who_waits_does_not_take_the_snapshot_that_shall_be_replaced(catalog: Catalog, store: Store) -> None:
    clock, lease, old = Clock(), held(store), document(max_age_s=1.0)
    new = replace(old, built_s=old.built_s + 500)
    publish(catalog, old)
    clock.at(20, lambda: publish(catalog, new))
    clock.at(20, lease.release)
    ended = waited(catalog, clock, replaces=old)
    assert (ended.ended, ended.document) == ("published", new)  # type: ignore[attr-defined]


def test_a_dead_builder_is_replaced_after_his_silence(catalog: Catalog, store: Store) -> None:
    clock = Clock()
    held(store)
    ended = waited(catalog, clock)
    assert ended.ended == "builder-died"  # type: ignore[attr-defined]
    assert 30 < clock.now_s < 40
    assert ended.lease.beat()  # type: ignore[attr-defined]


def test_what_a_builder_published_before_he_died_is_used(catalog: Catalog, store: Store) -> None:
    clock = Clock()
    held(store)
    publish(catalog, document())
    assert waited(catalog, clock).ended == "published"  # type: ignore[attr-defined]


def test_a_builder_whose_clock_is_wrong_lives_as_long_as_he_beats(
    catalog: Catalog, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong_s in (0.0, 4e9):
        monkeypatch.setattr(time, "time", lambda now_s=wrong_s: now_s)
        clock, lease = Clock(), held(store)
        monkeypatch.undo()
        for second in range(0, 120, 10):
            clock.at(second, lease.beat)
        assert waited(catalog, clock, timeout_s=100).ended == "waited-too-long"  # type: ignore[attr-defined]
        lease.release()


def test_one_of_the_waiting_nodes_builds_when_the_builder_gave_up(catalog: Catalog, store: Store) -> None:
    clock, lease = Clock(), held(store)
    clock.at(5, lease.release)
    ended = waited(catalog, clock)
    assert (ended.ended, clock.now_s < 10) == ("builder-gave-up", True)  # type: ignore[attr-defined]
    assert ended.lease.beat()  # type: ignore[attr-defined]


def test_no_node_waits_for_a_second_builder_after_the_first_gave_up(catalog: Catalog, store: Store) -> None:
    clock, lease = Clock(), held(store)
    clock.at(5, lambda: (lease.release(), held(store, node="node-2")))
    ended = waited(catalog, clock)
    assert (ended.ended, ended.lease) == ("builder-gave-up", None)  # type: ignore[attr-defined]
    assert clock.now_s < 10


def test_a_node_that_waits_for_a_dead_builder_waits_for_its_successor(catalog: Catalog, store: Store) -> None:
    clock = Clock()
    held(store)

    def take() -> None:
        lease = take_over(store, NAME, "node-2", look(store, NAME), sleep=lambda seconds: None)
        assert isinstance(lease, Lease)
        clock.at(40, lambda: publish(catalog, document()))
        clock.at(40, lease.release)

    clock.at(20, take)
    assert waited(catalog, clock).ended == "published"  # type: ignore[attr-defined]


def test_waiting_ends_at_its_deadline(catalog: Catalog, store: Store) -> None:
    clock, lease = Clock(), held(store)
    for second in range(0, 1000, 10):
        clock.at(second, lease.beat)
    ended = waited(catalog, clock, timeout_s=45)
    assert (ended.ended, ended.lease) == ("waited-too-long", None)  # type: ignore[attr-defined]
    assert 45 <= clock.now_s < 50


def test_a_store_that_is_unavailable_during_a_wait_makes_no_builder_dead(catalog: Catalog, store: Store) -> None:
    clock, lease = Clock(), held(store)
    away: list[Fault | None] = [None]
    clock.at(5, lambda: away.__setitem__(0, DOWN))
    clock.at(500, lambda: away.__setitem__(0, None))
    clock.at(500, lease.beat)
    clock.at(505, lambda: publish(catalog, document()))
    clock.at(505, lease.release)
    slow = Catalog(FaultyStore(store, lambda request: away[0]))
    assert waited(slow, clock).ended == "published"  # type: ignore[attr-defined]
    assert not lease.lost


@pytest.mark.parametrize("data", [b"", b"{", b"x" * 100_000], ids=["empty", "no JSON", "huge"])
def test_a_forged_lease_delays_no_node_for_longer_than_a_dead_one(catalog: Catalog, store: Store, data: bytes) -> None:
    put(store, NAME, data)
    found = elect(catalog, KEY, "node-1")
    assert isinstance(found, Held)
    clock = Clock()
    assert waited(catalog, clock).ended == "builder-died"  # type: ignore[attr-defined]
    assert clock.now_s < 40


def test_a_forged_time_to_live_is_bounded(catalog: Catalog, store: Store) -> None:
    put(store, NAME, LeaseRecord("ab" * 16, "evil", 1, 0.0, 1e12).encode())
    clock = Clock()
    assert waited(catalog, clock, timeout_s=3600).ended == "builder-died"  # type: ignore[attr-defined]
    assert clock.now_s < 320


def test_of_two_takeovers_one_succeeds(store: Store) -> None:
    held(store)
    dead = look(store, NAME)
    looked, written = threading.Barrier(2), threading.Barrier(2)

    def plan(request: Request) -> None:
        if request.verb == "upload":
            looked.wait(_END_S)

    def take(node: str) -> object:
        return take_over(FaultyStore(store, plan), NAME, node, dead, sleep=lambda seconds: written.wait(_END_S))

    with ThreadPoolExecutor(2) as pool:
        taken = list(pool.map(take, ["node-2", "node-3"]))
    assert sorted(type(one).__name__ for one in taken) == ["Held", "Lease"]


def test_a_holder_that_is_back_before_the_takeover_keeps_its_lease(store: Store) -> None:
    lease = held(store)
    seen = look(store, NAME)
    assert lease.beat()
    assert isinstance(take_over(store, NAME, "node-2", seen, sleep=lambda seconds: None), Held)
    assert lease.beat()


@contextmanager
def builder(uri: str, node: str, what: str, ttl_s: float) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(BUILDER), uri, KEY, node, str(ttl_s), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with Registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(params=["file", pytest.param("registry", marks=needs_registry)])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that processes share."""
    if request.param == "file":
        return f"file://{tmp_path}/store"
    return f"oci://{request.getfixturevalue('registry').host}/tests/{uuid.uuid4().hex}"


def test_of_processes_that_begin_at_once_one_builds(uri: str) -> None:
    with ExitStack() as stack:
        running = [stack.enter_context(builder(uri, f"node-{number}", "elect", 30.0)) for number in range(3)]
        assert [said(process) for process in running] == ["ready"] * 3
        for process in running:
            tell(process)
        answers = [said(process) for process in running]
        assert set(answers) <= {"held", "lease"}
        elected = [process for process, answer in zip(running, answers, strict=True) if answer == "lease"]
        # A registry has no atomic create: on a slow machine two may be elected there, and one of them detects it.
        assert len(elected) == 1 or (elected and uri.startswith("oci:"))
        for process in elected:
            tell(process)
        assert "True" in [said(process) for process in elected]


def test_a_builder_that_is_killed_is_replaced_and_a_living_one_is_not(uri: str) -> None:
    with builder(uri, "node-1", "take", 3.0) as first, closing(open_store(uri, plain_http=True)) as store:
        assert said(first) == "lease"
        catalog = Catalog(store)
        assert wait(catalog, KEY, "node-2", timeout_s=4.0).ended == "waited-too-long"
        first.kill()
        first.wait()
        ended = wait(catalog, KEY, "node-2", timeout_s=_END_S)
        assert ended.ended == "builder-died"
        assert ended.lease is not None
        assert ended.lease.beat()
        ended.lease.release()
        with pytest.raises(NotFoundError):
            store.stat(document_name(KEY))


def test_requests_of_a_waiter_are_few(store: Store) -> None:
    """A thousand nodes may wait for one builder."""
    asked: list[Request] = []
    counted = FaultyStore(store, asked.append)  # type: ignore[arg-type]
    clock, lease = Clock(), held(store)
    for second in range(0, 300, 10):
        clock.at(second, lease.beat)
    waited(Catalog(counted), clock, timeout_s=300)
    assert len(asked) < 150


def test_a_lease_in_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    lease = held(FileStore(tmp_path))
    lease.beat()
    lease.release()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

"""A scheduler with routes: which blocks are requested from which peers, and when from the store; in virtual time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.blocks.codec import Buffer
from bootseer.errors import BootseerError, TransientError
from bootseer.fetch.fetch_settings import FetchSettings, Purpose
from bootseer.fetch.ledger import Fetch
from bootseer.fetch.routed import RETRY_S, rotated
from bootseer.fetch.scheduler import Scheduler
from fetch.virtual import BLOCK, Fault, Layout, World, void

SETTINGS = FetchSettings()
RUN = 4


@dataclass(frozen=True)
class Way:
    steps: tuple[Hashable, ...]
    may_ask_store: bool
    may_read_ahead: bool = True


@dataclass
class Ring:
    """Like `peers.choice`: run r is owned by place r modulo the number of places, then by the next one not absent."""

    places: Sequence[str]
    own: str = "me"
    run_blocks: int = RUN
    turn: float = 0.0
    absent: set[str] = field(default_factory=set)

    def route(self, block: int, now: float) -> Way:
        run, number = block // RUN, len(self.places)
        ranked = [self.places[(run + k) % number] for k in range(number)]
        first = [name for name in ranked if name not in self.absent][:2]
        steps = () if first[:1] == [self.own] else tuple(name for name in first if name != self.own)
        return Way(steps, self.own in first)


def world(routes: Ring, sizes: Sequence[int] = (BLOCK,) * 64, **options: object) -> World:
    return World([Layout(sizes)], routes=routes, **options)  # type: ignore[arg-type]


def asked(w: World) -> dict[int, list[Hashable]]:
    """For each block the places from which it was requested, in order; None is the store."""
    found: dict[int, list[Hashable]] = defaultdict(list)
    for _, fetch in w.launched:
        for block in fetch.blocks:
            found[block].append(fetch.step)
    return found


def pull(w: World) -> None:
    w.scheduler.fetch_all_now()
    w.scheduler.want_cold(0, range(w.layouts[0].num_blocks), w.now)


FOUR = ["a", "b", "me", "c"]


def test_each_block_comes_from_its_owner_and_own_ones_from_the_store() -> None:
    w = world(Ring(FOUR))
    pull(w)
    w.run()
    assert len(w.here) == 64
    for block, steps in asked(w).items():
        owner = FOUR[block // RUN % 4]
        assert steps == [None if owner == "me" else owner]


def test_readers_and_hot_blocks_go_the_same_ways() -> None:
    w = world(Ring(FOUR))
    w.prefetch((0, block) for block in range(32))
    for block in (0, 9, 40, 63):
        void(w.read(0, [block], void))
    w.run()
    for block, steps in asked(w).items():
        assert steps == [{"me": None}.get(FOUR[block // RUN % 4], FOUR[block // RUN % 4])]
    assert {fetch.purpose for _, fetch in w.launched} == {Purpose.DEMAND, Purpose.HOT}


def test_readers_read_ahead_only_what_the_same_node_fetches_from_the_store() -> None:
    def requests(fault: Callable[[Fetch, int], Fault | None] | None = None) -> list[tuple[Hashable, range]]:
        w = world(Ring(FOUR), settings=FetchSettings(first_ahead_bytes=16 * BLOCK), fault=fault)
        for block in (1, 10, 5):  # of a, me and b
            void(w.read(0, [block], void))
            w.run()
        return [(fetch.step, fetch.blocks) for _, fetch in w.launched]

    assert requests() == [("a", range(1, 4)), (None, range(10, 12)), ("b", range(5, 8))]
    lost = Fault(TransientError("lost"))
    after_a = requests(lambda fetch, earlier: lost if fetch.step == "a" else None)
    assert after_a[:2] == [("a", range(1, 4)), ("b", range(1, 2))]


def test_after_a_wrong_set_only_blocks_near_the_readers_come_in_advance_and_the_others_as_cold_ones() -> None:
    w = world(Ring(FOUR), [BLOCK] * 600)
    w.scheduler.trust.was_wrong = True
    w.prefetch((0, block) for block in range(600))
    for block in (0, 300):
        void(w.read(0, [block], void))
        w.run(until=w.now + 5.0)
    ahead = SETTINGS.min_window_bytes // BLOCK
    come = {block for _, block in w.here}
    assert {*range(ahead), *range(300, 300 + ahead)} <= come <= {*range(2 * ahead), *range(300, 300 + 2 * ahead)}
    assert w.scheduler.tick(w.now).wake_at is None  # possibly for weeks, if the rest is not wanted
    w.scheduler.want_cold(0, range(600), w.now)
    w.run()
    assert len(w.here) == 600
    assert w.scheduler.idle


def test_a_wrong_set_that_is_read_to_its_end_is_fetched_in_advance_although_more_is_queued_than_is_examined() -> None:
    w = world(Ring(FOUR), [BLOCK] * 600)
    w.scheduler.trust.was_wrong = True
    w.prefetch((0, block) for block in range(600))
    w.reader(iter([(0.01, 0, [block]) for block in range(600)]), lambda: None)
    w.run()
    assert len(w.here) == 600
    assert sum(len(fetch.blocks) for _, fetch in w.launched if fetch.purpose is Purpose.DEMAND) < 30


def test_blocks_of_zeros_are_not_requested() -> None:
    w = world(Ring(["a", "b"]), [BLOCK, 0] * 16)
    pull(w)
    w.run()
    assert len(w.here) == 32
    assert all(steps == [None] for block, steps in asked(w).items() if block % 2)


def test_a_place_has_two_prefetches_at_a_time_and_all_of_them_twelve() -> None:
    w = world(Ring([f"p{at}" for at in range(20)]), (BLOCK,) * 400, fault=lambda fetch, earlier: Fault(hang=True))
    pull(w)
    w.tick()
    running = Counter(transfer.fetch.step for transfer in w.transfers.values())
    assert max(running.values()) <= SETTINGS.peer_requests
    assert sum(running.values()) == SETTINGS.total_peer_requests - SETTINGS.reserved_peer_requests


@pytest.mark.parametrize("are_hot", [True, False])
def test_a_store_that_is_faster_than_the_retries_is_never_out_of_own_blocks(are_hot: bool) -> None:
    w = world(Ring(["me"]), (BLOCK,) * 640, latency_s=0.001, bytes_per_s=2e9)
    if are_hot:
        w.scheduler.fetch_all_now()
        w.prefetch((0, block) for block in range(640))
    else:
        pull(w)
    w.run()
    assert len(w.here) == 640
    assert w.now < 0.2


def test_blocks_that_wait_for_busy_peers_are_not_examined_for_each_need_of_a_reader() -> None:
    class Counted(Ring):
        calls = 0

        def route(self, block: int, now: float) -> Way:
            self.calls += 1
            return super().route(block, now)

    ring = Counted(["a", "b"])
    w = world(ring, (BLOCK,) * 400, fault=lambda fetch, earlier: Fault(hang=fetch.purpose is Purpose.HOT))
    w.prefetch((0, block) for block in range(400))
    w.tick()
    before = ring.calls
    for block in range(300, 320):
        void(w.read(0, [block], void))
        w.tick()
    assert ring.calls - before < 400


def test_a_reader_does_not_wait_for_the_prefetches_of_its_owner() -> None:
    w = world(Ring(["a"]), fault=lambda fetch, earlier: Fault(hang=fetch.purpose is Purpose.COLD))
    pull(w)
    w.run(until=1.0)
    answers: list[object] = []
    void(w.read(0, [60], answers.append))
    w.run(until=2.0)
    assert answers == [b""]


def failing(*names: str) -> Callable[[Fetch, int], Fault | None]:
    return lambda fetch, earlier: Fault(error=TransientError("gone")) if fetch.step in names else None


def test_blocks_that_an_owner_lacks_are_requested_from_the_second_in_rank() -> None:
    w = world(Ring(FOUR), fault=failing("a"))
    pull(w)
    w.run()
    assert all(steps == ["a", "b"] for block, steps in asked(w).items() if block // RUN % 4 == 0)


def test_a_reader_whose_only_owner_is_busy_is_looked_at_again_although_nothing_happens() -> None:
    scheduler = Scheduler(SETTINGS, lambda: 0.0)
    scheduler.add(Layout((BLOCK,) * 4), "store", Ring(["a", "me"]))
    scheduler.want(0, [0], 0.0)
    (fetch,) = scheduler.tick(0.0).fetches
    scheduler.request_finished(fetch.number, 0.0, TransientError("busy", retry_after_s=5.0))
    plan = scheduler.tick(0.0)
    assert (plan.fetches, plan.wake_at) == ([], RETRY_S)
    assert [fetch.step for fetch in scheduler.tick(5.0).fetches] == ["a"]


def test_the_first_two_in_rank_ask_the_store_and_the_others_wait() -> None:
    w = world(Ring(FOUR), fault=failing("a", "b", "c"))
    for block in range(16):
        void(w.read(0, [block], void, 0.3))
    w.run(until=0.3)
    to_store = {block // RUN % 4 for block, steps in asked(w).items() if None in steps}
    assert to_store == {1, 2}  # owned by this node, or by the one before it


def test_a_block_that_its_places_never_give_comes_from_the_store_at_last() -> None:
    w = world(Ring(["a", "b", "c", "me"]), fault=failing("a", "b", "c"))
    answers: list[object] = []
    void(w.read(0, [0], answers.append))
    w.run(until=20.0)
    assert answers == [b""]
    assert asked(w)[0][:4] == ["a", "b", "a", "b"]


def test_a_place_that_is_busy_is_asked_again_and_no_other_in_its_stead() -> None:
    busy = [True] * 3
    w = world(
        Ring(["a", "b"]),
        (BLOCK,) * RUN,
        fault=lambda fetch, earlier: (
            Fault(error=TransientError("full", retry_after_s=1.0)) if busy and busy.pop() else None
        ),
    )
    pull(w)
    w.run()
    assert {step for steps in asked(w).values() for step in steps} == {"a"}
    assert 1.0 <= w.launched[-1][0] < 4.0


@pytest.mark.parametrize("places", [["a", "b"], ["me", "b"]])
def test_a_late_reader_is_hedged_neither_at_places_nor_at_the_store(places: list[str]) -> None:
    w = world(Ring(places), fault=lambda fetch, earlier: Fault(hang=True))
    void(w.read(0, [0], void, 20.0))
    w.run(until=SETTINGS.demand_timeout_s - 0.5)
    assert len(w.launched) == 1


@pytest.mark.parametrize("purpose", [Purpose.HOT, Purpose.COLD])
def test_a_reader_does_not_wait_for_the_end_of_a_prefetch_from_the_store_that_hangs(purpose: Purpose) -> None:
    w = world(Ring(["me", "b"]), fault=lambda fetch, earlier: Fault(hang=fetch.purpose is purpose))
    w.scheduler.fetch_all_now()
    w.scheduler.want_cold(0, range(RUN), w.now)
    if purpose is Purpose.HOT:
        w.prefetch((0, block) for block in range(RUN))
    w.run(until=1.0)
    answers: list[Buffer | BootseerError] = []
    w.read(0, [0], answers.append)
    w.run(until=1.0 + SETTINGS.demand_timeout_s + 0.5)
    assert answers == [b""]


def test_what_still_waits_follows_a_new_list() -> None:
    ring = Ring(["a", "b"])
    w = world(ring, (BLOCK,) * 400, bytes_per_s=20e6)
    pull(w)

    def change() -> None:
        ring.places = ["a", "b", "me", "c"]

    w.at(0.5, change)
    w.run()
    assert len(w.here) == 400
    late = {fetch.step for at, fetch in w.launched if at > 1.5}
    assert late == {"a", "b", "c", None}


def test_prefetch_ends_when_it_is_told_to() -> None:
    w = world(Ring(FOUR), (BLOCK,) * 400, bytes_per_s=10e6)
    w.prefetch((0, block) for block in range(200))
    pull(w)
    w.at(0.5, lambda: w.scheduler.stop_prefetch(0))
    w.run()
    assert len(w.here) < 200
    assert w.scheduler.idle


def test_a_window_begins_at_its_turn() -> None:
    assert rotated(list(range(10)), 4, 0.5) == [2, 3, 0, 1, 6, 7, 4, 5, 9, 8]
    assert rotated([1, 2, 3], 4, 0.0) == [1, 2, 3]


def test_nodes_of_a_job_begin_at_different_owners() -> None:
    first = set()
    for at in range(8):
        w = world(Ring("abcdefgh", turn=at / 8))
        pull(w)
        w.tick()
        first.add(w.launched[0][1].step)
    assert first == set("abcdefgh")


faults = st.one_of(
    st.none(),
    st.none(),
    st.builds(Fault, error=st.just(TransientError("reset")), after_blocks=st.integers(0, 3)),
    st.builds(Fault, error=st.just(TransientError("full", retry_after_s=0.5))),
    st.builds(Fault, hang=st.just(True), after_blocks=st.integers(0, 2)),
    st.builds(Fault, corrupt=st.frozensets(st.integers(0, 59), max_size=3)),
    st.builds(
        Fault,
        claimed_elsewhere=st.dictionaries(st.integers(0, 59), st.tuples(st.floats(0.01, 3), st.booleans()), max_size=4),
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1000, BLOCK, BLOCK]), min_size=1, max_size=60),
    script=st.lists(faults, max_size=30),
    places=st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True),
    absences=st.lists(st.tuples(st.floats(0, 3), st.sets(st.sampled_from("abcd"))), max_size=4),
    hot=st.lists(st.integers(0, 59), max_size=30),
    reads=st.lists(st.tuples(st.floats(0, 4), st.integers(0, 59)), max_size=10),
    rest=st.booleans(),
)
def test_whatever_places_do_all_wanted_blocks_arrive_and_each_read_is_answered_once(
    sizes: list[int],
    script: list[Fault | None],
    places: list[str],
    absences: list[tuple[float, set[str]]],
    hot: list[int],
    reads: list[tuple[float, int]],
    rest: bool,
) -> None:
    ring = Ring([*places, "me"])
    w = world(ring, sizes, bytes_per_s=20e6, fault=lambda fetch, earlier: script.pop() if script else None)
    for at, absent in absences:
        w.at(at, lambda absent=absent: setattr(ring, "absent", absent))  # type: ignore[misc]
    w.prefetch((0, block) for block in hot if block < len(sizes))
    if rest:
        w.scheduler.want_cold(0, range(len(sizes)), 0.0)
    answers: dict[int, list[bytes | BootseerError]] = defaultdict(list)
    for number, (at, block) in enumerate(reads):
        if block < len(sizes):
            answers[number] = []
            w.at(at, lambda number=number, block=block: void(w.read(0, [block], answers[number].append)))  # type: ignore[misc]
    w.run(until=2000.0)
    assert all(len(answer) == 1 for answer in answers.values())
    assert w.scheduler.idle or (w.scheduler.trust.was_wrong and not rest)
    assert w.scheduler.inflight_bytes == 0
    assert not w.transfers
    if rest:
        assert len(w.here) == len(sizes)


@settings(max_examples=100, deadline=None)
@given(
    own=st.integers(0, 5),
    gone=st.sets(st.sampled_from("abcde"), max_size=3),
    hot=st.lists(st.integers(0, 63), max_size=40),
)
def test_only_the_first_two_in_rank_ask_the_store_while_any_place_answers(
    own: int, gone: set[str], hot: list[int]
) -> None:
    places = [*"abcde"]
    places.insert(own, "me")
    ring = Ring(places)
    w = world(ring, fault=failing(*gone))
    # Like `peers.health`: a place that fails is known to be unavailable a moment later.
    w.at(0.05, lambda: ring.absent.update(gone))
    w.prefetch((0, block) for block in hot)
    pull(w)
    w.run()
    assert len(w.here) == 64
    for block, steps in asked(w).items():
        ranked = [name for name in (places[(block // RUN + k) % 6] for k in range(6)) if name not in gone]
        assert None not in steps or "me" in ranked[:2]
        assert all(count == 1 for step, count in Counter(steps).items() if step not in gone)


def naive(fetch: Fetch, earlier: int) -> Fault | None:
    return Fault(error=TransientError("gave up after 0.5 s")) if fetch.step is not None else None


@pytest.mark.parametrize(("fault", "expected"), [(None, 0.25), (naive, 0.75)])
def test_owners_that_are_given_up_though_they_fill_turn_nodes_to_the_store(
    fault: Callable[[Fetch, int], Fault | None] | None, expected: float
) -> None:
    """The effect of a limit of 0.5 s while owners wait for the store: therefore owners report that they are filling."""
    w = world(Ring(FOUR), fault=fault, bytes_per_s=20e6)
    pull(w)
    w.run()
    from_store = sum(None in steps for steps in asked(w).values()) / 64
    assert from_store >= expected
    assert (from_store == 0.25) == (fault is None)

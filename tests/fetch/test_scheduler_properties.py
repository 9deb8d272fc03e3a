"""Invariants for any files, readers, hot sets and faults, checked by `virtual.World` at each step and here at the
end."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bootseer.blocks.codec import Buffer
from bootseer.errors import AccessError, BootseerError, TransientError
from bootseer.fetch.fetch_settings import FetchSettings, Purpose
from bootseer.fetch.ledger import ELSEWHERE, Fetch
from fetch.virtual import BLOCK, Fault, Layout, Near, World

SMALL = FetchSettings(
    request_bytes=8 * BLOCK,
    demand_bytes=4 * BLOCK,
    inflight_bytes=24 * BLOCK,
    reserved_bytes=6 * BLOCK,
    min_window_bytes=8 * BLOCK,
    first_requests=3,
    max_requests=5,
    reserved_requests=2,
    cold_attempts=100,
)
AHEAD = replace(SMALL, ahead_s=1.0, first_ahead_bytes=3 * BLOCK, request_cost_s=1.0)
"""Readers read ahead, and hot requests span gaps, on each link."""


class Checked(World):
    """Compares the ledger's entries, queues and requests with each other at each step."""

    def tick(self) -> None:
        super().tick()
        for key in self.scheduler.demanded:  # no late block is forgotten
            wanted = self.scheduler.wanted[key]
            if self.scheduler._may_hedge(wanted):
                assert self.now < wanted.late_at
                assert self._wake_at is not None
                assert self._wake_at <= wanted.late_at + 0.0011

    def check(self) -> None:
        super().check()
        ledger = self.scheduler
        assert ledger.demanded == {key for key, wanted in ledger.wanted.items() if wanted.readers}
        assert ledger.hot_left == sum(wanted.prefetch is Purpose.HOT for wanted in ledger.wanted.values())
        assert ledger.claims.keys() == {key for key, wanted in ledger.wanted.items() if ELSEWHERE in wanted.requests}
        assert ledger.hung <= {ELSEWHERE, *ledger.running}
        queues = ledger.origins.values()
        cold = {(file, block) for queue in queues for file, blocks in queue.cold for block in blocks}
        hot = {key for queue in queues for key in queue.hot}
        postponed = {key for queue in queues for _, key in queue.postponed}
        for key, wanted in ledger.wanted.items():
            assert key not in self.here
            assert all(key[1] in request.left for request in ledger._running_for(wanted)), key
            assert wanted.requests.count(ELSEWHERE) <= 1, key
            if wanted.queued:
                assert any(key in queue.demand for queue in queues) == bool(wanted.readers), key
                assert wanted.readers or (wanted.prefetch is Purpose.HOT and key in hot) or key in cold, key
            else:
                assert wanted.in_flight or key in postponed, key
                assert wanted.in_flight or wanted.purpose is not None, key
        for number, request in ledger.running.items():
            for block in request.left:
                wanted = ledger.wanted[request.fetch.file, block]
                assert number in wanted.requests


layouts = st.builds(
    Layout,
    st.lists(st.sampled_from([0, 1000, BLOCK, BLOCK, 30 * BLOCK]), min_size=1, max_size=60),
)
faults = st.one_of(
    st.none(),
    st.none(),
    st.builds(Fault, error=st.just(TransientError("reset")), after_blocks=st.integers(0, 3)),
    st.builds(Fault, error=st.just(TransientError("busy", retry_after_s=2.0))),
    st.builds(Fault, hang=st.just(True), after_blocks=st.integers(0, 2)),
    st.builds(Fault, error=st.just(AccessError("refused"))),
    st.builds(Fault, corrupt=st.frozensets(st.integers(0, 59), max_size=3)),
    st.builds(
        Fault,
        error=st.none() | st.just(TransientError("cut")),
        after_blocks=st.integers(0, 3),
        corrupt=st.frozensets(st.integers(0, 59), max_size=2),
        claimed_elsewhere=st.dictionaries(st.integers(0, 59), st.tuples(st.floats(0.01, 3), st.booleans()), max_size=4),
    ),
)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_every_read_is_answered_once_by_its_deadline_and_nothing_is_left_over(data: st.DataObject) -> None:
    files = data.draw(st.lists(layouts, min_size=1, max_size=2))
    script = data.draw(st.lists(faults, max_size=30))

    def fault(fetch: Fetch, earlier: int) -> Fault | None:
        return script.pop() if script else None

    routes = data.draw(st.sampled_from([None, None, Near()]))
    limits = data.draw(st.sampled_from([SMALL, AHEAD]))
    world = Checked(files, settings=limits, latency_s=0.05, bytes_per_s=20e6, fault=fault, routes=routes)
    block = st.integers(0, len(files) - 1).flatmap(
        lambda file: st.tuples(st.just(file), st.integers(0, files[file].num_blocks - 1))
    )
    world.prefetch(data.draw(st.lists(block, max_size=40)))
    rest = data.draw(st.booleans())
    if rest:
        for number, layout in enumerate(files):
            world.scheduler.want_cold(number, range(layout.num_blocks), 0.0)
    stop_at = data.draw(st.none() | st.none() | st.floats(0, 5))
    if stop_at is not None:
        world.at(stop_at, lambda: [world.scheduler.stop_prefetch(number) for number in range(len(files))] and None)
    reads = data.draw(
        st.lists(
            st.tuples(st.floats(0, 5), block, st.integers(1, 6), st.floats(0.2, 20), st.none() | st.floats(0, 1)),
            max_size=12,
        )
    )
    answered: dict[int, list[tuple[float, Buffer | BootseerError]]] = {}
    cancelled = set()

    def begin(number: int, file: int, blocks: range, deadline_s: float, cancel_s: float | None) -> None:
        ticket = world.read(file, blocks, lambda answer: answered[number].append((world.now, answer)), deadline_s)
        if cancel_s is not None:

            def cancel() -> None:
                if not answered[number]:
                    cancelled.add(number)
                world.leave(ticket)

            world.at(world.now + cancel_s, cancel)

    for number, (at, (file, first), length, deadline_s, cancel_s) in enumerate(reads):
        answered[number] = []
        blocks = range(first, min(first + length, files[file].num_blocks))
        world.at(at, lambda args=(number, file, blocks, deadline_s, cancel_s): begin(*args))
    world.run(until=2000.0)

    for number, (at, _, _, deadline_s, _) in enumerate(reads):
        if number in cancelled:
            assert not answered[number]
        else:
            assert len(answered[number]) == 1
            assert answered[number][0][0] <= at + deadline_s + 0.001
    assert not world.tickets._reads
    # Blocks of a suspended hot set stay wanted; the rest of the file includes them.
    assert world.scheduler.idle or (world.scheduler.trust.was_wrong and not rest)
    assert not world.transfers
    assert world.scheduler.inflight_bytes == 0
    if rest and world.scheduler.prefetch_error is None and stop_at is None:
        assert len(world.here) == sum(layout.num_blocks for layout in files)


@settings(max_examples=200, deadline=None)
@given(
    hot=st.lists(st.integers(0, 199), unique=True, max_size=100),
    reads=st.lists(st.tuples(st.floats(0, 0.3), st.integers(0, 199)), min_size=1, max_size=40),
)
def test_with_a_sound_origin_a_reader_waits_for_its_own_request_and_never_for_a_slot(
    hot: list[int], reads: list[tuple[float, int]]
) -> None:
    world = World([Layout([BLOCK] * 200)], settings=SMALL, latency_s=0.01, bytes_per_s=1e9)
    world.prefetch((0, block) for block in hot)

    def check() -> None:
        world.tick()
        # The only reader's block is in flight or here.
        assert all(world.scheduler.in_flight(0, block) for block in waiting)

    waiting: set[int] = set()

    def steps(rest: list[tuple[float, int]]) -> None:
        if not rest:
            return
        (think_s, block), *others = rest

        def go() -> None:
            waiting.add(block)

            def done(answer: Buffer | BootseerError) -> None:
                waiting.discard(block)
                steps(others)

            world.read(0, [block], done)
            if waiting:
                check()

        world.at(world.now + think_s, go)

    steps(reads)
    world.run()
    assert not waiting
    cold = [fetch for _, fetch in world.launched if fetch.purpose is Purpose.COLD]
    assert not cold
    assert max(world.asked.values()) == 1

"""The fetcher when its origin, its disk or other processes fail."""

from __future__ import annotations

import os
import threading

import pytest
from msgspec.structs import replace

from bootseer.cache.cache import Cache
from bootseer.cache.disk import CacheFull
from bootseer.errors import AccessError, CorruptError, NotFoundError, TransientError
from bootseer.fetch.fetch_settings import FetchSettings
from bootseer.fetch.fetcher import Fetcher
from fetch.files import BLOCK
from small_disks import small_disk
from store_doubles import Fault, FaultyStore
from waiting import until

QUICK = FetchSettings(backoff_s=0.001, max_backoff_s=0.01, deadline_s=60.0, max_pause_s=0.05)


def test_a_dead_origin_costs_a_reader_its_deadline_and_the_next_read_tries_afresh(fetching, data):
    dead = [True]
    fetcher, store, _ = fetching(lambda request: Fault(status=503) if dead[0] else None, QUICK)
    with pytest.raises(TransientError, match=r"block 0 of file .* did not come in 1\.0 s.*503"):
        fetcher.read_blocking(0, 0, 10, deadline_s=1.0)
    assert sum(store.requests.values()) > 2
    dead[0] = False
    assert fetcher.read_blocking(0, 0, 10) == data[:10]
    assert fetcher.stats().failed_reads == 1


def test_connections_that_break_lose_no_block_that_had_arrived(fetching, data, index):
    fetcher, store, cached = fetching(
        lambda request: Fault(cut_after=3 * BLOCK) if request.number % 2 == 0 else None, QUICK
    )
    fetcher.pull_all()
    assert cached.path.read_bytes() == data
    assert sum(store.bytes_read.values()) < 2 * sum(stripe.size_bytes for stripe in index.stripes)


def test_answers_that_end_early_without_an_error_are_tried_again(fetching, data):
    fetcher, _, _ = fetching([Fault(short_after=100), Fault(short_after=BLOCK + 7)], QUICK)
    assert fetcher.read_blocking(0, 0, 12 * BLOCK) == data[: 12 * BLOCK]


@pytest.mark.slow
def test_a_request_with_a_very_slow_response_is_hedged(fetching, data):
    fetcher, _, _ = fetching([Fault(piece_bytes=16, bytes_per_s=100)], replace(QUICK, hedge_s=0.5, demand_timeout_s=4))
    assert fetcher.read_blocking(0, 0, BLOCK, deadline_s=30) == data[:BLOCK]
    assert fetcher.stats().hedges == 1


def test_wrong_bytes_once_or_twice_are_fetched_again(fetching, data):
    fetcher, _, _ = fetching([Fault(corrupt_at=5), Fault(corrupt_at=9)], QUICK)
    assert fetcher.read_blocking(0, 0, BLOCK) == data[:BLOCK]
    assert fetcher.stats().corrupt_blocks == 2


def test_wrong_bytes_each_time_are_an_error_that_names_file_block_and_source(fetching, index, origin):
    settings = replace(QUICK, max_hedges=0)  # on a busy machine a hedge would be an additional request
    fetcher, store, cached = fetching(lambda request: Fault(corrupt_at=5), settings)
    with pytest.raises(
        CorruptError, match=f"{origin.uri}: {index.stripes[0].name}: block 0 of file {index.identity[:16]}"
    ):
        fetcher.read_blocking(0, 0, BLOCK)
    assert sum(store.requests.values()) == 3
    assert not cached.ready(0)


def test_one_damaged_block_does_not_keep_the_others_from_being_pulled(fetching, index):
    place = index.place(40)

    def plan(request):
        at = place.offset - request.start
        return Fault(corrupt_at=at) if 0 <= at < (request.length or 0) else None

    fetcher, _, cached = fetching(plan, QUICK)
    with pytest.raises(CorruptError, match="block 40"):
        fetcher.pull_all()
    assert cached.num_ready == 99


@pytest.mark.slow
def test_retry_after_is_obeyed_and_the_read_succeeds_after_it(fetching, data):
    times = []
    clock = threading.Event()

    def plan(request):
        times.append(request.number)
        clock.set()
        return Fault(status=429, retry_after_s=2.0) if request.number == 0 else None

    fetcher, _, _ = fetching(plan, QUICK)
    answers = []
    fetcher.read(0, 0, 10, answers.append)
    assert clock.wait(120)
    until(lambda: fetcher._scheduler.error(0, 0))
    with pytest.raises(TransientError, match="429"):
        fetcher.read_blocking(0, 0, 10, deadline_s=0.05)
    assert times == [0]
    until(lambda: answers)
    assert answers == [data[:10]]


def test_a_disk_error_of_the_states_costs_a_request_instead_of_a_readers_error(fetching, data, tmp_path):
    fetcher, _, cached = fetching(settings=QUICK)
    assert fetcher.read_blocking(0, 0, BLOCK) == data[:BLOCK]
    folder = os.open(tmp_path, os.O_RDONLY)
    os.dup2(folder, cached._live.fd)  # reading it is an error
    os.close(folder)
    assert fetcher.read_blocking(0, 0, 2 * BLOCK) == data[: 2 * BLOCK]
    assert fetcher.read_blocking(0, 90 * BLOCK, BLOCK) == data[90 * BLOCK : 91 * BLOCK]
    assert fetcher.stats().failed_reads == 0


@pytest.mark.parametrize(("status", "error"), [(401, AccessError), (404, NotFoundError)])
def test_a_refusal_fails_the_reader_at_once_and_stops_prefetch(fetching, status, error):
    fetcher, store, _ = fetching(lambda request: Fault(status=status), QUICK)
    fetcher.prefetch((0, block) for block in range(0, 100, 2))
    fetcher.stream_rest()
    with pytest.raises(error):
        fetcher.read_blocking(0, 91 * BLOCK, 10)
    asked = sum(store.requests.values())
    assert asked < 40
    with pytest.raises(error):
        fetcher.pull_all()


def test_a_slow_answer_for_one_block_does_not_hold_up_others(fetching, data, index):
    gate = threading.Event()
    place = index.place(0)
    fetcher, _, _ = fetching(lambda request: Fault(gate=gate) if request.start == place.offset else None, QUICK)
    slow = []
    fetcher.read(0, 0, 10, slow.append)
    for block in range(2, 90):
        assert fetcher.read_blocking(0, block * BLOCK, BLOCK) == data[block * BLOCK : (block + 1) * BLOCK]
    assert not slow
    gate.set()
    until(lambda: slow)
    assert slow == [data[:10]]


class Panic(BaseException):
    """As those of Rust code, which are no Exceptions."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_an_adapter_that_lets_a_foreign_error_through_fails_no_other_request(fetching, data, monkeypatch, kind):
    reported = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_type))

    def plan(request):
        if request.number == 0:
            raise kind("not mapped")

    fetcher, _, _ = fetching(plan, replace(QUICK, max_hedges=0))  # a hedge would read the block as well
    assert fetcher.read_blocking(0, 0, 10) == data[:10]
    assert reported == [kind]
    until(lambda: not fetcher._scheduler.running)


@pytest.fixture
def disk(tmp_path):
    """256 KiB: the file's index fits, its data does not."""
    with small_disk(tmp_path / "disk", "size=256k") as folder:
        yield folder


@pytest.mark.root
def test_a_full_disk_serves_readers_from_memory_says_so_once_and_fails_a_pull(disk, index, origin, data):
    cached = Cache(disk).open(index)
    problems = []
    fetcher, store = Fetcher(QUICK, on_problem=problems.append), FaultyStore(origin)
    fetcher.add(index, store, cached)
    for start in range(20 * BLOCK, len(data), 5 * BLOCK):
        assert fetcher.read_blocking(0, start, 5 * BLOCK) == data[start : start + 5 * BLOCK]
    until(lambda: fetcher._scheduler.idle)
    before = store.bytes_read.total()
    assert fetcher.read_blocking(0, 3 * BLOCK, BLOCK) == data[3 * BLOCK : 4 * BLOCK]
    until(lambda: fetcher._scheduler.idle)
    assert store.bytes_read.total() - before == index.place(3).length  # blocks read ahead would not fit
    assert len(problems) == 1
    assert "No space left" in problems[0]
    with pytest.raises(CacheFull):
        fetcher.pull_all()
    fetcher.close()
    cached.close()


def test_each_read_of_a_corrupt_block_is_an_error_that_names_it(fetching, data, index):
    place = index.place(0)

    def plan(request):
        at = place.offset - request.start
        return Fault(corrupt_at=at) if 0 <= at < (request.length or 0) else None

    fetcher, _, _ = fetching(plan, QUICK)
    for _ in range(3):
        with pytest.raises(CorruptError, match="block 0 of file"):
            fetcher.read_blocking(0, 0, BLOCK)
    assert "block 0 of file" in fetcher.stats().first_corrupt
    assert fetcher.stats().failed_reads == 3
    assert fetcher.read_blocking(0, BLOCK, BLOCK) == data[BLOCK : 2 * BLOCK]


def test_a_cache_that_raises_an_unexpected_error_fails_the_read_and_later_ones_are_answered(
    fetching, data, monkeypatch
):
    fetcher, _, cached = fetching(settings=QUICK)
    fetcher.read_blocking(0, 0, BLOCK)
    reported, answers, over = [], [], threading.Semaphore(0)
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_type))
    broken = [True]
    inner = cached.read

    def read(offset, length):
        if broken and threading.current_thread() is not threading.main_thread():
            broken.pop()
            raise RuntimeError("unforeseen")
        return inner(offset, length)

    monkeypatch.setattr(fetcher._files[0].cached, "read", read)

    def done(answer):
        answers.append(answer)
        over.release()

    for _ in range(3):
        fetcher.read(0, 3 * BLOCK, 3 * BLOCK, done)
    for _ in range(3):
        assert over.acquire(timeout=120)
    errors = [answer for answer in answers if isinstance(answer, TransientError)]
    assert len(errors) == len(reported) == 1
    assert [bytes(answer) for answer in answers if answer not in errors] == [data[3 * BLOCK : 6 * BLOCK]] * 2


def test_a_pull_from_an_origin_that_only_fails_tells_what_it_answers(fetching):
    fetcher, _, _ = fetching(lambda request: Fault(status=503), replace(QUICK, stall_s=0.3))
    with pytest.raises(TransientError, match=r"no block came in .*503"):
        fetcher.pull_all()
    with pytest.raises(TransientError):
        fetcher.read_blocking(0, 0, BLOCK, 0.2)
    assert "503" in fetcher.stats().first_failure

"""All users of the executor and the timer continue after a job that raises, or a thread that cannot be started."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest

from bootseer.cache.cache import Cache
from bootseer.checkpoint import attempts
from bootseer.checkpoint.attempts import Attempt
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.head import Part
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.reading.context import LazyPart
from bootseer.checkpoint.reading.node_cache import CacheWriter
from bootseer.checkpoint.reading.transfer import Counters
from bootseer.checkpoint.writing.lane import Lane, WritingSettings
from bootseer.checkpoint.writing.writing import Writing
from bootseer.errors import TransientError
from bootseer.fetch.fetch_settings import FetchSettings
from bootseer.fetch.fetcher import Fetcher
from bootseer.io import deadline
from bootseer.io.executor import Executor
from bootseer.io.tasks import Tasks
from bootseer.io.timer import Timer
from bootseer.places.folder import FolderPlace
from fetch.files import content, stored
from store_doubles import MemoryStore
from waiting import until

Run = Callable[[Callable[[], object]], object]
"""Makes the user call this function soon, in one of its threads."""


class CallsWhat:
    """A wrapper of a real object whose named methods call `job` first."""

    def __init__(self, real, *names):
        self.real, self.names = real, names
        self.job = lambda: None

    def __getattr__(self, name):
        method = getattr(self.real, name)
        if name not in self.names:
            return method

        def call(*args, **options):
            self.job()
            return method(*args, **options)

        return call


@contextmanager
def executor(tmp_path) -> Iterator[Run]:
    yield Executor("test").submit


@contextmanager
def timer(tmp_path) -> Iterator[Run]:
    yield partial(Timer().after, 0.0)


@contextmanager
def tasks(tmp_path) -> Iterator[Run]:
    with Tasks("test", 2) as pool:
        yield pool.submit


@contextmanager
def call_with_a_deadline(tmp_path) -> Iterator[Run]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadline, "_threads", Executor("test", 2))
        yield partial(deadline.within, 60.0, "test")


@contextmanager
def step_of_a_lane(tmp_path) -> Iterator[Run]:
    lane = Lane(Executor("test", 2), 2)
    yield lambda job: lane.schedule(SimpleNamespace(order=(0, 0), step=lambda: bool(job()) and False))
    assert lane.wait_idle(60)


@contextmanager
def beside_a_lane(tmp_path) -> Iterator[Run]:
    lane = Lane(Executor("test", 2), 2)
    yield lane.run_blocking
    assert lane.wait_idle(60)


@contextmanager
def opening_a_part(tmp_path) -> Iterator[Run]:
    """Its readers get each error."""
    (tmp_path / "part").write_bytes(b"x" * 10)
    place, answers = CallsWhat(FolderPlace(tmp_path), "open"), []
    part = LazyPart(place, "part", Part("part", 10, "0" * 64, ()), Executor("test", 2))

    def run(job) -> None:
        place.job, before = job, len(answers)
        part.when_open(lambda file, problem: answers.append((file, problem)))
        until(lambda: len(answers) > before)

    yield run
    assert answers[-1][1] is None
    assert isinstance(answers[0][1], TransientError)
    part.close()


@contextmanager
def reading_a_folder(tmp_path) -> Iterator[Run]:
    (tmp_path / "file").write_bytes(b"x" * 10)
    with closing(FolderPlace(tmp_path)) as place, closing(place.open("file")) as file:
        yield lambda job: file.read_into(0, memoryview(bytearray(10)), lambda outcome: job())


@contextmanager
def keeping_a_chunk(tmp_path) -> Iterator[Run]:
    """Memory is returned, even if the chunk cannot be cached."""
    data, index = content(1), None
    index = stored(MemoryStore("keeper"), data)
    cached = CallsWhat(Cache(tmp_path / "cache").open(index), "put")
    cache_writer, given_back, put = CacheWriter(Counters()), [], []

    def run(job) -> None:
        cached.job = job
        put.append(1)
        cache_writer.put(cached, 0, memoryview(data)[: index.block_size], lambda: given_back.append(1))

    yield run
    until(lambda: len(given_back) == len(put))
    assert cache_writer.settle(60, 60)
    cached.close()


@contextmanager
def leases_of_files(tmp_path) -> Iterator[Run]:
    place = CallsWhat(FolderPlace(tmp_path), "write_bytes")
    settings = WritingSettings(lease_s=0.01, idle_s=0.01)
    with closing(Writing(Files(place), spool=tmp_path, settings=settings)) as writing:
        writer = []

        def run(job) -> None:
            place.job = job
            if not writer:
                writer.append(writing.open("file", policy=Policy(stripes=2)))

        yield run


@contextmanager
def lease_of_an_attempt(tmp_path) -> Iterator[Run]:
    place = CallsWhat(FolderPlace(tmp_path), "write_bytes")
    made = []

    def run(job) -> None:
        if not made:
            made.append(Attempt(place, "job"))
        place.job = job

    with mock.patch.object(attempts, "LEASE_S", 0.01):
        yield run
    made[0].__exit__(None, None, None)


@contextmanager
def fetching_a_block(tmp_path) -> Iterator[Run]:
    """A request is retried after an error or if no thread could be started."""
    data = content(3)
    origin = MemoryStore("fetch")
    index = stored(origin, data)
    store = CallsWhat(origin, "read")
    cached = Cache(tmp_path / "cache").open(index)
    with closing(Fetcher(FetchSettings())) as fetcher:
        fetcher.add(index, store, cached)
        answers, starts = [], iter(range(0, 3 * index.block_size, index.block_size))

        def run(job) -> None:
            store.job = job
            fetcher.read(0, next(starts), 1, answers.append)

        yield run
        until(lambda: len(answers) == 2)
    assert not [answer for answer in answers if isinstance(answer, Exception)]
    cached.close()


USERS = [
    executor, timer, tasks, call_with_a_deadline, step_of_a_lane, beside_a_lane, opening_a_part, reading_a_folder,
    keeping_a_chunk, leases_of_files, lease_of_an_attempt, fetching_a_block,
]  # fmt: skip


@pytest.fixture(params=USERS, ids=lambda user: user.__name__)
def user(request, tmp_path, monkeypatch):
    """Creates a user; errors raised by its jobs do not fail the test."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    return partial(request.param, tmp_path)


def test_a_job_that_raises_does_not_keep_the_next_one_from_being_done(user):
    begun, done = threading.Event(), threading.Event()

    def broken():
        begun.set()
        raise ZeroDivisionError("mistake")

    with user() as run:
        with suppress(ZeroDivisionError):
            run(broken)
        assert begun.wait(120)
        run(done.set)
        assert done.wait(120)


def test_a_thread_that_the_system_refuses_does_not_keep_the_next_job_from_being_done(user, monkeypatch):
    begun, done, start, refused = threading.Event(), threading.Event(), threading.Thread.start, []

    def refuse_once(thread):
        if refused:
            start(thread)
        else:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")

    with user() as run:
        monkeypatch.setattr(threading.Thread, "start", refuse_once)
        with suppress(TransientError):
            run(begun.set)
        run(done.set)
        assert done.wait(120)
        assert refused

"""What every store must do, tested against real servers.

`StoreContract` is for all stores; `SharedStoreContract` adds tests for those whose objects other processes see.
A subclass provides `store` and `outside`, which examines the place without the store under test.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Protocol

import pytest

from bootseer.artifact.objects import read_all
from bootseer.errors import CorruptError, NotFoundError, TooShortError, TransientError, UsageError
from bootseer.io.retry import retrying
from bootseer.store.store import MAX_CREATE_BYTES, PIECE_BYTES, Store, Stored

DATA = random.Random(7).randbytes(700_001)
HOSTILE = [
    "",
    "/",
    "/etc/passwd",
    "../up",
    "a/../b",
    "a/./b",
    "a//b",
    "a/",
    ".hidden",
    "a/.hidden",
    "a b",
    "a\nb",
    "a\0b",
    "ä",
    "a?b",
    "a#b",
    "a%2fb",
    "sha256:abc",
    "sha256:" + "A" * 64,
    "sha256:" + "0" * 63 + "g",
    "sha256/ab/abcdef",
    "x" * 513,
]
CHILD = Path(__file__).with_name("child.py")


class Outside(Protocol):
    """Access to the place without the store under test."""

    def get(self, name: str) -> bytes | None:
        """The bytes of an object; None if it does not exist."""

    def unfinished(self) -> list[str]:
        """Leftovers of uploads that have ended."""


def put(store: Store, data: bytes, name: str | None = None) -> Stored:
    upload = store.upload()
    for at in range(0, len(data), 100_000):
        upload.write(data[at : at + 100_000])
    return upload.commit(name)


def get(store: Store, name: str, start: int = 0, length: int | None = None) -> bytes:
    return b"".join(store.read(name, start, length))


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


class StoreContract:
    """Base of the tests of each store."""

    creates_in_one_step = True

    def test_a_content_name_is_the_sha256_of_the_bytes(self, store: Store, outside: Outside) -> None:
        stored = put(store, DATA)
        assert stored == Stored(sha256(DATA), len(DATA))
        assert outside.get(stored.name) == DATA
        assert store.stat(stored.name) == stored

    def test_an_object_has_the_path_name_that_it_was_given(self, store: Store, outside: Outside) -> None:
        stored = put(store, DATA, "images/sha256-ab.c_D")
        assert stored == Stored("images/sha256-ab.c_D", len(DATA))
        assert outside.get(stored.name) == DATA
        assert get(store, stored.name) == DATA
        assert store.stat(stored.name) == stored

    @pytest.mark.parametrize("size", [0, 1, 1000, 16 * 1024, 16 * 1024 + 1])
    def test_small_objects_read_back_equal_under_both_kinds_of_names(self, store: Store, size: int) -> None:
        assert get(store, put(store, DATA[:size]).name) == DATA[:size]
        # A registry closes the connection without notice after it has refused a range of an empty object.
        again = retrying(lambda _: put(store, DATA[:size], "small/object"))
        assert get(store, again.name) == DATA[:size]

    @pytest.mark.parametrize("name", [None, "named"])
    def test_a_range_is_exactly_these_bytes(self, store: Store, name: str | None) -> None:
        stored = put(store, DATA, name)
        for start, length in ((0, 1), (0, 1000), (1234, PIECE_BYTES + 1), (700_000, 1), (0, 700_001)):
            assert get(store, stored.name, start, length) == DATA[start : start + length]
        for start in (699_000, 700_001):
            assert get(store, stored.name, start, None) == DATA[start:]

    @pytest.mark.parametrize("size", [100, 100_000])
    @pytest.mark.parametrize("name", [None, "named"])
    def test_a_range_beyond_the_end_is_an_error(self, store: Store, size: int, name: str | None) -> None:
        stored = put(store, DATA[:size], name)
        for before_end, length in ((1, 2), (0, 1), (-1, 1), (-10, None)):
            with pytest.raises(TooShortError, match="were asked for"):
                get(store, stored.name, size - before_end, length)

    def test_an_empty_range_is_empty(self, store: Store) -> None:
        assert get(store, put(store, DATA).name, 5, 0) == b""
        assert get(store, put(store, DATA, "named").name, 5, 0) == b""

    @pytest.mark.parametrize(("start", "length"), [(-1, None), (0, -1)])
    def test_negative_ranges_are_refused(self, store: Store, start: int, length: int | None) -> None:
        name = put(store, DATA).name
        with pytest.raises(UsageError):
            get(store, name, start, length)

    def test_pieces_are_bounded(self, store: Store) -> None:
        assert max(len(piece) for piece in store.read(put(store, DATA).name)) <= PIECE_BYTES

    @pytest.mark.parametrize("name", ["sha256:" + "0" * 64, "nothing/here"])
    def test_what_does_not_exist_is_not_found(self, store: Store, name: str) -> None:
        put(store, DATA, "nothing-else/here")
        with pytest.raises(NotFoundError, match=name):
            store.stat(name)
        with pytest.raises(NotFoundError, match=name):
            get(store, name)
        store.delete(name)

    def test_an_untouched_place_is_empty(self, store: Store) -> None:
        assert list(store.list()) == []
        with pytest.raises(NotFoundError):
            store.stat("anything")

    def test_writing_a_name_again_replaces_the_object(self, store: Store, outside: Outside) -> None:
        put(store, DATA, "a/name")
        put(store, b"other", "a/name")
        assert get(store, "a/name") == outside.get("a/name") == b"other"

    def test_the_same_content_may_be_written_again(self, store: Store) -> None:
        assert put(store, DATA) == put(store, DATA)
        assert get(store, sha256(DATA)) == DATA

    def test_a_content_name_that_is_not_that_of_the_bytes_is_refused(self, store: Store, outside: Outside) -> None:
        upload = store.upload()
        upload.write(DATA)
        with pytest.raises(CorruptError):
            upload.commit(sha256(b"something else"))
        upload.abort()
        assert outside.get(sha256(b"something else")) is None
        assert outside.get(sha256(DATA)) is None

    def test_a_content_name_may_be_given_in_advance(self, store: Store) -> None:
        upload = store.upload()
        upload.write(DATA)
        assert upload.commit(sha256(DATA)) == Stored(sha256(DATA), len(DATA))

    def test_an_object_is_not_visible_before_its_commit(self, store: Store, outside: Outside) -> None:
        put(store, b"before", "a/name")
        upload = store.upload()
        for _ in range(30):
            upload.write(DATA)
        assert outside.get("a/name") == b"before"
        assert list(store.list()) == [Stored("a/name", 6)]
        upload.commit("a/name")
        assert get(store, "a/name") == DATA * 30

    @pytest.mark.parametrize("size", [0, 10, 20_000_000])
    def test_nothing_stays_of_an_aborted_upload(self, store: Store, outside: Outside, size: int) -> None:
        upload = store.upload()
        upload.write(bytes(size))
        upload.abort()
        upload.abort()
        assert list(store.list()) == []
        assert outside.unfinished() == []

    def test_a_committed_upload_leaves_nothing_else(self, store: Store, outside: Outside) -> None:
        upload = store.upload()
        upload.write(bytes(20_000_000))
        upload.commit("big")
        upload.abort()
        assert store.stat("big").size_bytes == 20_000_000
        assert outside.unfinished() == []

    def test_an_upload_that_has_ended_cannot_be_used(self, store: Store) -> None:
        upload = store.upload()
        upload.write(b"x")
        upload.commit("name")
        with pytest.raises(UsageError):
            upload.write(b"y")
        with pytest.raises(UsageError):
            upload.commit("other")
        assert get(store, "name") == b"x"

    def test_views_of_memory_can_be_written(self, store: Store) -> None:
        upload = store.upload()
        upload.write(memoryview(bytearray(DATA))[10:500_010])
        assert upload.commit().name == sha256(DATA[10:500_010])

    def test_create_writes_a_name_that_is_free_and_no_other(self, store: Store, outside: Outside) -> None:
        assert store.create("a/name", b"first")
        assert not store.create("a/name", b"second")
        assert get(store, "a/name") == outside.get("a/name") == b"first"
        assert store.stat("a/name") == Stored("a/name", 5)
        put(store, b"uploaded", "b/name")
        assert not store.create("b/name", b"created")
        assert get(store, "b/name") == b"uploaded"
        assert sorted(found.name for found in store.list()) == ["a/name", "b/name"]
        assert outside.unfinished() == []

    def test_the_same_bytes_are_created_once(self, store: Store) -> None:
        data = b"the same"
        assert store.create("name", data)
        assert not store.create("name", data)

    def test_what_was_created_can_be_replaced_deleted_and_created_again(self, store: Store) -> None:
        assert store.create("a/name", b"first")
        put(store, b"second", "a/name")
        assert get(store, "a/name") == b"second"
        store.delete("a/name")
        assert store.create("a/name", b"third")
        assert get(store, "a/name") == b"third"

    @pytest.mark.parametrize("size", [0, 1, 16 * 1024 + 1, MAX_CREATE_BYTES])
    def test_create_takes_small_objects_with_what_they_need(self, store: Store, size: int) -> None:
        needed = put(store, DATA)
        data = random.Random(size).randbytes(size)
        assert store.create("small/object", data, refs=[needed])
        assert get(store, "small/object") == data

    def test_create_refuses_names_other_than_paths(self, store: Store) -> None:
        assert _taken([*HOSTILE, sha256(b"")], lambda name: store.create(name, b"")) == []

    def test_create_refuses_large_objects(self, store: Store, outside: Outside) -> None:
        with pytest.raises(UsageError, match="too many to create at once"):
            store.create("name", bytes(MAX_CREATE_BYTES + 1))
        assert outside.get("name") is None

    def test_of_many_that_create_one_name_one_wins_and_its_bytes_stay(self, store: Store) -> None:
        barrier = threading.Barrier(6)

        def attempt(number: int) -> bool | None:
            barrier.wait(60)
            try:
                return store.create("a/name", b"%d" % number)
            except TransientError:  # a registry with tags in files fails if one is being written
                return None

        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(attempt, range(6)))
        stored = int(read_all(store, "a/name", 1))
        assert answers[stored] is not False
        if self.creates_in_one_step:
            assert answers == [number == stored for number in range(6)]

    def test_list_finds_path_names_by_their_beginning(self, store: Store) -> None:
        put(store, b"content")
        names = ["images/a", "images/ab", "images/b", "image", "layers/x/y"]
        for name in names:
            put(store, name.encode(), name)
        assert sorted(found.name for found in store.list()) == sorted(names)
        assert sorted(found.name for found in store.list("images/a")) == ["images/a", "images/ab"]
        assert sorted(found.name for found in store.list("images/")) == ["images/a", "images/ab", "images/b"]
        assert list(store.list("layers/x")) == [Stored("layers/x/y", 10)]
        assert list(store.list("nothing")) == list(store.list("../")) == list(store.list("sha256")) == []

    def test_what_was_deleted_is_gone(self, store: Store, outside: Outside) -> None:
        content = put(store, DATA).name
        put(store, DATA, "a/name")
        put(store, DATA, "a/other")
        for name in ("a/name", content, "a/name", content):
            store.delete(name)
        assert outside.get("a/name") is None
        assert outside.get(content) is None
        assert [found.name for found in store.list()] == ["a/other"]

    def test_hostile_names_are_refused(self, store: Store) -> None:
        def upload(name: str) -> None:
            begun = store.upload()
            begun.write(b"x")
            try:
                begun.commit(name)
            finally:
                begun.abort()

        for call in (store.stat, store.delete, lambda name: get(store, name), upload):
            assert _taken(HOSTILE, call) == []

    def test_the_uri_is_without_credentials(self, store: Store) -> None:
        assert "://" in store.uri
        assert "@" not in store.uri

    def test_many_threads_read_and_write_at_the_same_time(self, store: Store) -> None:
        name = put(store, DATA).name

        def work(number: int) -> None:
            own = random.Random(number).randbytes(50_000)
            assert get(store, put(store, own).name) == own
            assert get(store, name, number * 1000, 300_000) == DATA[number * 1000 : number * 1000 + 300_000]

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(24)))

    def test_a_reader_sees_the_old_or_the_new_object_and_nothing_else(self, store: Store) -> None:
        versions = [bytes([number]) * (30_000 + number) for number in range(12)]
        put(store, versions[0], "a/name")
        done = threading.Event()
        seen: list[bytes] = []

        def read() -> None:
            while not done.is_set():
                # With retries: a registry with tags in files fails if one is being written.
                seen.append(read_all(store, "a/name", 50_000))

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            try:
                for version in versions:
                    put(store, version, "a/name")
            finally:
                done.set()
            for reader in readers:
                reader.result()
        assert set(seen) <= set(versions)
        assert get(store, "a/name") == versions[-1]

    def test_closing_an_iterator_early_gives_back_what_it_held(self, store: Store) -> None:
        name = put(store, DATA * 4).name

        def first_piece() -> None:
            with closing(store.read(name)) as pieces:
                assert next(pieces)

        for _ in range(5):
            first_piece()
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - iterdir would hold one itself
        for _ in range(40):
            first_piece()
        assert len(os.listdir("/proc/self/fd")) <= before + 4  # noqa: PTH208
        assert get(store, name) == DATA * 4


class SharedStoreContract(StoreContract):
    """For places that other processes see; `store.uri` must be all that they need."""

    @pytest.fixture
    def child_environment(self) -> dict[str, str]:
        return {}

    def test_a_writer_that_is_killed_leaves_no_object(
        self, store: Store, outside: Outside, child_environment: dict[str, str]
    ) -> None:
        put(store, b"before", "a/name")
        with _child("write-for-ever", store.uri, child_environment) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"20000000\n"
            child.kill()
        assert outside.get("a/name") == b"before"
        assert list(store.list()) == [Stored("a/name", 6)]
        put(store, b"after", "a/name")
        assert get(store, "a/name") == b"after"

    def test_a_large_object_needs_little_memory(self, store: Store, child_environment: dict[str, str]) -> None:
        with _child("stream", store.uri, child_environment) as child:
            answer, _ = child.communicate()
        growth_kib, equal = answer.split()
        assert equal == b"True"
        # 128 MiB were transferred.
        assert int(growth_kib) < 100 * 1024

    def test_the_child_of_a_fork_reads_too(self, store: Store, child_environment: dict[str, str]) -> None:
        with _child("fork", store.uri, child_environment) as child:
            try:
                answer, _ = child.communicate(timeout=180)
            finally:
                child.kill()
        assert answer == b"True\n"


def _taken(names: list[str], call: Callable[[str], object]) -> list[str]:
    """The names that a call accepts."""
    taken = []
    for name in names:
        with contextlib.suppress(UsageError):
            call(name)
            taken.append(name)
    return taken


def _child(task: str, uri: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(CHILD), task, uri],
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
    )


def all_files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())

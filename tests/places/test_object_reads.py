"""Reading objects from a real S3 server through a proxy with faults."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import count
from typing import NoReturn

import obstore
import pytest

from bootseer.errors import AccessError, BootseerError, NoSpaceError, PermanentError, TransientError, UsageError
from bootseer.io.pooled_reads import ReadOutcome
from bootseer.places import object_data, open_place
from bootseer.places.bucket import Bucket
from bootseer.places.gets import Gets
from bootseer.places.objects import ObjectPlace
from bootseer.places.place import Place
from fault_proxy import Fault, FaultProxy, once
from places.contract import opened, read
from s3_server import environment_for

pytestmark = pytest.mark.slow

_MIB = 1 << 20


@pytest.mark.parametrize(
    "fault",
    [Fault(status=503), Fault(status=500), Fault(drop=True), Fault(cut_after=1000), Fault(hang=True)],
    ids=["slow-down", "error", "dropped", "cut", "hung"],
)
def test_a_request_that_fails_or_hangs_is_made_again(proxy: FaultProxy, uri: str, fault: Fault) -> None:
    data = os.urandom(_MIB)
    with closing(open_place(uri)) as place:
        place.write_bytes("file", data)
        with opened(place, "file") as file:
            assert read(file, 0, 9) == data[:9]  # from now on the usual pauses are known
            proxy.plan = once(fault, "/file", "GET")
            assert read(file, 0, len(data)) == data


@pytest.mark.parametrize("fault", [Fault(cut_after=2 * _MIB), Fault(stall_after=2 * _MIB)], ids=["cut", "stalled"])
def test_only_what_a_request_has_not_brought_is_asked_for_again(proxy: FaultProxy, uri: str, fault: Fault) -> None:
    data = os.urandom(4 * _MIB)
    with closing(open_place(uri)) as place:
        place.write_bytes("file", data)
        with opened(place, "file") as file:
            assert read(file, 0, 9) == data[:9]
            proxy.plan = once(fault, "/file", "GET")
            assert read(file, 0, len(data)) == data
    asked = [request for request in proxy.requests if request.method == "GET" and "/file" in request.path]
    assert len(asked) == 3
    assert int(re.findall(r"\d+", asked[-1].headers["range"])[0]) >= _MIB


def test_a_request_that_is_only_slow_is_not_made_twice(
    proxy: FaultProxy, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full link, the rest would be sent twice."""
    monkeypatch.setattr(object_data, "_MIN_LATE_S", 2.0)
    data = os.urandom(4 * _MIB)
    with closing(open_place(uri)) as place:
        place.write_bytes("file", data)
        with opened(place, "file") as file:
            assert read(file, 0, 9) == data[:9]
            proxy.plan = once(Fault(drip_bytes=64 << 10, drip_pause_s=0.06), "/file", "GET")
            assert read(file, 0, len(data)) == data
        assert place.facts()["hedges"] == 0


def test_the_threads_of_a_request_whose_first_hedge_failed_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    hung, numbers = threading.Event(), count()

    def pieces(self: Gets, file: object, start: int, end: int) -> Iterator[bytes]:
        if (number := next(numbers)) == 1:
            raise OSError("lost")
        if number == 0:
            hung.wait(30)
        yield bytes(end - start)

    monkeypatch.setattr(object_data, "_FIRST_LATE_S", 0.05)
    monkeypatch.setattr(Gets, "pieces", pieces)
    reads = object_data.ObjectReads(Bucket("s3://jobs"))
    ended: queue.SimpleQueue[ReadOutcome] = queue.SimpleQueue()
    file = object_data.ObjectFile(reads, "key", "file", {"e_tag": "x", "size": 9})
    file.read_into(0, memoryview(bytearray(9)), ended.put)
    assert ended.get(timeout=30).error is None
    hung.set()
    reads._threads.close(30)
    assert (reads.facts()["hedges"], reads._running) == (2, 0)
    reads.close()


def test_requests_that_hang_are_hedged_at_once_in_a_place_with_few_requests(
    proxy: FaultProxy, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_data, "_DEAD", 1000.0)
    data = os.urandom(_MIB)
    with closing(open_place(uri)) as place:
        place.write_bytes("file", data)
        with opened(place, "file") as file:
            assert read(file, 0, 9) == data[:9]
            for _ in range(3):
                proxy.plan = once(Fault(hang=True), "/file", "GET")
                assert read(file, 0, len(data)) == data
        assert place.facts()["hedges"] == 3


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(hang=True)], ids=["slow-down", "hung"])
def test_a_server_that_stays_dead_ends_a_read_in_its_time(proxy: FaultProxy, uri: str, fault: Fault) -> None:
    outcomes: queue.Queue[ReadOutcome] = queue.Queue()
    with closing(open_place(uri)) as place:
        place.write_bytes("file", b"x" * 1000)
        proxy.plan = lambda request: fault if request.method == "GET" else None
        with opened(place, "file") as file:
            file.read_into(0, memoryview(bytearray(1000)), outcomes.put, deadline_s=1.0)
            assert isinstance(outcomes.get(timeout=120).error, TransientError)


def test_connections_that_all_die_at_once_delay_neither_their_requests_nor_those_that_wait(
    proxy: FaultProxy, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like after a reset of a router: the old connections are dead, new ones work."""
    monkeypatch.setattr(object_data, "_MIN_LATE_S", 0.2)
    monkeypatch.setattr(object_data, "_REQUEST_BYTES", 1 << 18)
    data = os.urandom(4 * _MIB)
    outcomes: queue.Queue[ReadOutcome] = queue.Queue()
    with closing(open_place(uri)) as place:
        place.write_bytes("file", data)
        with opened(place, "file") as file:
            assert read(file, 0, 9) == data[:9]
            dead = iter([Fault(stall_after=1000)] * int(object_data._FIRST_CONCURRENT))
            proxy.plan = lambda request: next(dead, None) if request.method == "GET" else None
            found = bytearray(len(data))
            for at in range(0, len(data), 1 << 18):
                file.read_into(at, memoryview(found)[at : at + (1 << 18)], outcomes.put)
            for _ in range(0, len(data), 1 << 18):
                assert outcomes.get(timeout=40).error is None
        assert found == data
        until = time.monotonic() + 40
        while place._reads._running:  # type: ignore[attr-defined]
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(hang=True)], ids=["slow-down", "hung"])
def test_the_end_of_a_place_ends_reads_that_are_retried_or_in_flight(
    proxy: FaultProxy, uri: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_data, "pause_s", lambda *_: 30.0)
    outcomes: queue.Queue[ReadOutcome] = queue.Queue()
    place = open_place(uri)
    place.write_bytes("file", b"x" * 1000)
    proxy.plan = lambda request: fault if request.method == "GET" else None
    with opened(place, "file") as file:
        begun = len(proxy.requests)
        file.read_into(0, memoryview(bytearray(1000)), outcomes.put, deadline_s=60.0)
        until = time.monotonic() + 60
        while len(proxy.requests) == begun or (fault.status and not place.facts()["retries"]):
            assert time.monotonic() < until
            time.sleep(0.01)
        place.close()
        assert isinstance(outcomes.get(timeout=10).error, TransientError)


def test_a_large_request_is_not_kept_after_its_end(place: Place) -> None:
    place.write_bytes("file", bytes(9 * _MIB))
    with opened(place, "file") as file:
        read(file, 0, file.size_bytes)
        assert not place._reads._urgent  # type: ignore[attr-defined]


def test_a_file_that_is_replaced_while_it_is_read_is_an_error(place: Place) -> None:
    place.write_bytes("file", b"old content")
    with opened(place, "file") as file:
        place.write_bytes("file", b"new content")
        with pytest.raises(TransientError, match="changed"):
            read(file, 0, 11)


def test_a_bucket_in_another_region_is_an_error_at_once(proxy: FaultProxy, uri: str) -> None:
    """It was reported after a minute."""
    proxy.plan = lambda _: Fault(status=301)
    with closing(open_place(uri)) as place, pytest.raises(PermanentError, match="set AWS_REGION"):
        place.stat("file")


@pytest.mark.parametrize(
    ("status", "code", "kind", "said"),
    [
        (403, "InvalidObjectState", PermanentError, "cold storage"),
        (409, "BlobArchived", PermanentError, "cold storage"),
        (403, "QuotaExceeded", NoSpaceError, "no space"),
        (507, "XMinioStorageFull", NoSpaceError, "no space"),
        (400, "RequestTimeout", TransientError, "RequestTimeout: the reason"),
        (403, "AccessDenied", AccessError, "AccessDenied: the reason; check the credentials"),
    ],
)
def test_a_refusal_is_not_always_about_the_login(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str, kind: type[BootseerError], said: str
) -> None:
    body = f"<?xml version='1.0'?>\n<Error><Code>{code}</Code><Message>the reason</Message></Error>".encode()
    with FaultProxy("", lambda _: Fault(status=status, body=body)) as server:
        for name, value in environment_for(server.host).items():
            monkeypatch.setenv(name, value)
        asked = Bucket("s3://jobs")
        with pytest.raises(BootseerError, match=said) as caught:
            asked.call("file", lambda: obstore.get(asked.reader, "file"))
    assert type(caught.value) is kind


def test_a_panic_of_the_library_is_an_error_at_once(uri: str) -> None:
    """Listings, removals and copies ended with a traceback. Reads and saves had an error."""

    class PanicException(BaseException):
        pass

    def call() -> NoReturn:
        calls.append(0)
        raise PanicException("no reactor")

    calls: list[int] = []
    with pytest.raises(PermanentError, match="file: PanicException: no reactor"):
        Bucket(uri).retry("file", call)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("AWS_ENDPOINT", "minio:9000"), ("AWS_ENDPOINT_URL", ""), ("AWS_SESSION_TOKEN", "key\n"), ("AWS_REGION", " eu")],
)
def test_a_malformed_variable_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """It was a panic in Rust, with two tracebacks."""
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{name} is malformed"):
        Bucket("s3://jobs")


def test_a_login_that_cannot_be_read_is_not_blamed_on_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere")
    with pytest.raises(UsageError, match="/nowhere") as refused:
        Bucket("gs://jobs")
    assert refused.value.hint.endswith("the variables with the login")


@pytest.mark.parametrize("tag", ["", 'W/"1"'], ids=["ignored", "weak"])
def test_a_server_whose_conditions_are_of_no_use_sends_no_other_version(proxy: FaultProxy, uri: str, tag: str) -> None:
    """Bytes of the new version were returned as the old one's; with a weak tag, which never matches, reads failed."""
    with closing(open_place(uri)) as place:
        place.write_bytes("file", b"old content")
        proxy.plan = lambda _: Fault(headers={"etag": tag} if tag else {}, send={} if tag else {"if-match": ""})
        with opened(place, "file") as file:
            assert read(file, 0, 11) == b"old content"
            proxy.plan = lambda _: Fault(headers={"etag": 'W/"2"'} if tag else {}, send={"if-match": ""})
            place.write_bytes("file", b"new content")
            with pytest.raises(TransientError, match="changed"):
                read(file, 0, 11)


def test_a_response_without_an_entity_tag_is_an_error_that_says_so(proxy: FaultProxy, uri: str) -> None:
    """A folder was taken for missing, and a file was asked for for a minute."""
    with closing(open_place(uri)) as place:
        place.write_bytes("file", b"x")
        place.make_folder("folder")
    with closing(open_place(uri)) as place:
        proxy.plan = lambda _: Fault(headers={"etag": ""})
        for ask in (
            partial(place.open, "file"),
            partial(place.write_bytes, "file", b"y"),
            partial(place.stat, "folder"),
        ):
            with pytest.raises(PermanentError, match="without ETag"):
                ask()


@pytest.mark.parametrize(
    "fault",
    [
        Fault(send={"range": ""}),
        Fault(headers={"content-range": "bytes 5-1000/2000"}),
        Fault(headers={"content-length": "100"}),
    ],
    ids=["whole", "other", "short"],
)
def test_a_server_that_sends_another_range_than_it_is_asked_for_is_not_asked_for_ever(
    proxy: FaultProxy, uri: str, fault: Fault
) -> None:
    with closing(open_place(uri)) as place:
        place.write_bytes("file", b"x" * 2000)
        proxy.plan = lambda request: fault if request.method == "GET" else None
        with opened(place, "file") as file, pytest.raises(TransientError, match="requested"):
            read(file, 0, 1000)
        assert len(proxy.requests) < 20


@pytest.mark.parametrize("length", [9 * _MIB, 1000])
def test_plain_http_is_read_over_few_connections_without_obstore(
    proxy: FaultProxy, uri: str, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    data = os.urandom(9 * _MIB)
    proxy.plan = lambda _: Fault(headers={"connection": ""})  # moto closes each
    with closing(open_place(uri)) as place:
        place.write_bytes("a file+?", data)
        with opened(place, "a file+?") as file:
            before = proxy.num_connections
            monkeypatch.setattr(obstore, "get", lambda *_, **__: pytest.fail("not needed"))
            for _ in range(3):
                assert read(file, 0, length) == data[:length]
            assert proxy.num_connections == before + 1
            proxy._server.end_connections()
            assert read(file, 7, 1000) == data[7:1007]  # an idle connection that the server has closed is no failure
            assert not place.facts()["nodes"][""]["failures"]  # type: ignore[index]
        place.close()
        assert not place._reads._gets._idle._idle  # type: ignore[attr-defined]


@pytest.mark.parametrize(("fault", "num_failures"), [(Fault(status=403), 0), (Fault(drop=True), 1)])
def test_a_server_that_refuses_signed_addresses_is_read_by_obstore(
    proxy: FaultProxy, uri: str, fault: Fault, num_failures: int
) -> None:
    """Like one that needs other headers."""
    data = os.urandom(1000)
    proxy.plan = lambda request: fault if "X-Amz-Signature" in request.path else None
    with closing(open_place(uri)) as place:
        place.write_bytes("file", data)
        with opened(place, "file") as file:
            for _ in range(3):
                assert read(file, 0, len(data)) == data
            assert place.facts()["nodes"][""]["failures"] == num_failures  # type: ignore[index]
    assert sum("X-Amz-Signature" in request.path for request in proxy.requests) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_ENDPOINT", "https://localhost"),
        ("AWS_ENDPOINT", "http://user@localhost"),
        ("http_proxy", "http://localhost"),
        ("AWS_SKIP_SIGNATURE", "true"),
    ],
)
def test_tls_proxies_and_public_buckets_are_left_to_obstore(
    uri: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(Gets, "_connection", lambda *_: pytest.fail("not permitted"))
    bucket = Bucket(uri, allow_http=True)
    file = object_data.ObjectFile(object_data.ObjectReads(bucket), "file", "", {"e_tag": '"tag"', "size": 1})
    assert file.reads._gets._plain(file, 0, 1) is None


def test_a_read_that_ends_while_bytes_of_another_connection_arrive_is_delivered_once() -> None:
    outcomes: list[ReadOutcome] = []
    read_of_all = object_data._Read(None, 0, memoryview(bytearray(8)), outcomes.append, 0.0)  # type: ignore[arg-type]

    class EndedAfterRelease:
        """A lock after whose first release the other connection ends the read."""

        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            read_of_all._lock = threading.Lock()
            read_of_all.finish(TransientError("not read in time"))

    read_of_all._lock = EndedAfterRelease()  # type: ignore[assignment]
    assert not read_of_all.put(0, memoryview(b"abcd"))
    assert len(outcomes) == 1


def test_a_request_whose_two_connections_fail_at_the_same_moment_is_made_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like when a server dies: the retry must not be left to the other one by both."""
    monkeypatch.setattr(object_data, "_FIRST_LATE_S", 0.05)
    place.write_bytes("file", b"12345678")
    both = threading.Barrier(2)
    reads = place._reads  # type: ignore[attr-defined]
    receive, failed, begun = reads._receive, reads._failed, queue.SimpleQueue[None]()

    def fail_twice(request: object) -> bool:
        begun.put(None)
        if begun.qsize() > 2:
            return bool(receive(request))
        both.wait(60)
        raise TransientError("reset")

    def fail_together(*arguments: object, **options: object) -> None:
        failed(*arguments, **options)
        both.wait(60)

    monkeypatch.setattr(reads, "_receive", fail_twice)
    monkeypatch.setattr(reads, "_failed", fail_together)
    with opened(place, "file") as file:
        assert read(file, 0, 8) == b"12345678"


def test_a_read_for_which_no_thread_can_be_started_is_not_carried_out_later(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then the caller may have reused the memory."""
    place.write_bytes("file", b"12345678")
    threads = place._reads._threads  # type: ignore[attr-defined]
    memory = bytearray(8)
    with opened(place, "file") as file:
        with monkeypatch.context() as refused, pytest.raises(TransientError, match="no thread"):
            refused.setattr(threads, "submit", lambda job: (_ for _ in ()).throw(TransientError("no thread")))
            file.read_into(0, memoryview(memory), lambda outcome: None)
        assert read(file, 4, 4) == b"5678"
        assert read(file, 0, 4) == b"1234"
    assert memory == bytes(8)


def test_the_child_of_a_fork_is_refused_also_while_its_parent_reads(uri: str) -> None:
    """Otherwise it would wait for a lock held by a thread of the parent, or for a thread that only the parent has."""
    program = """if True:
        import os, signal, sys
        from bootseer.errors import PermanentError
        from bootseer.places import open_place
        place = open_place(sys.argv[1])
        place.write_bytes("file", b"12345678")
        file = place.open("file")
        with place._reads._lock:
            if (child := os.fork()) == 0:
                signal.alarm(60)
                try:
                    file.read_into(0, memoryview(bytearray(8)), print)
                except PermanentError as error:
                    print(error, flush=True)
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    ended = subprocess.run([sys.executable, "-c", program, uri], capture_output=True, text=True, check=True)
    assert "do not work in the child of a fork" in ended.stdout
    assert "multiprocessing_context=" in ended.stdout  # what a user of a DataLoader can do


@pytest.mark.parametrize("fault", [None, Fault(status=500)], ids=["answered", "failing"])
def test_a_read_ends_also_when_the_timer_gets_no_thread(
    proxy: FaultProxy, uri: str, monkeypatch: pytest.MonkeyPatch, fault: Fault | None
) -> None:
    def refuse(*_: object) -> None:
        raise TransientError("no thread")

    outcomes: queue.Queue[ReadOutcome] = queue.Queue()
    with closing(open_place(uri)) as place:
        place.write_bytes("file", b"12345678")
        monkeypatch.setattr(place._reads._timer, "after", refuse)  # type: ignore[attr-defined]
        with opened(place, "file") as file:
            proxy.plan = lambda _: fault
            file.read_into(0, memoryview(bytearray(8)), outcomes.put)
            assert (outcomes.get(timeout=60).error is None) == (fault is None)


@pytest.mark.parametrize(
    ("fault", "error"), [(Fault(status=503), "503"), (Fault(hang=True), "no complete answer")], ids=["refused", "hung"]
)
def test_a_server_that_answers_only_some_requests_is_not_taken_for_silent(
    proxy: FaultProxy, uri: str, fault: Fault, error: str
) -> None:
    with closing(open_place(uri)) as place:
        assert isinstance(place, ObjectPlace)
        place.write_bytes("file", b"x")
        key = place._key("file")
        proxy.plan = lambda request: fault if request.path.endswith("/busy") else None
        with pytest.raises(TransientError, match=error):
            place._bucket.retry("busy", lambda: obstore.head(place._bucket.reader, f"{key}/busy"), 2.0)
        assert place.read_bytes("file", 1) == b"x"

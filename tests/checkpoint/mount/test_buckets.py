"""A bucket as a mounted place: a real S3 server with errors, wrong answers and refused logins, and several mounts."""

from __future__ import annotations

import errno
import os
import random
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import obstore
import pytest

from bootseer.checkpoint.hot_list import Range
from bootseer.checkpoint.mount.hot_lists import HotLists
from bootseer.errors import TransientError
from bootseer.places import open_place
from bootseer.places.bucket import SilentError
from bootseer.places.objects import ObjectPlace
from checkpoint.mounted_place import MIB, MountedPlace, number_of
from fault_proxy import Fault, FaultProxy, Request
from s3_server import S3Server, environment_for
from waiting import until

pytestmark = [pytest.mark.fuse, pytest.mark.slow]

_LARGE, _SMALL = os.urandom(9 * MIB + 5), os.urandom(40_000)
Mount = Callable[[], MountedPlace]


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    if "mounted" not in s3_server.ask("GET", "/")[1].decode():
        s3_server.make_bucket("mounted")
    with FaultProxy(s3_server.host) as started:
        for name, value in environment_for(started.host).items():
            monkeypatch.setenv(name, value)
        yield started


@pytest.fixture
def mount(tmp_path: Path, proxy: FaultProxy) -> Iterator[Mount]:
    """Mounts the test's place, with a new mount for each call, like on another machine."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened by this user")
    uri = f"s3://mounted/{secrets.token_hex(4)}"
    made: list[MountedPlace] = []

    def one() -> MountedPlace:
        made.append(MountedPlace(tmp_path, tmp_path / f"mount{len(made)}", place=open_place(uri)))
        return made[-1]

    yield one
    proxy.plan = lambda _: None
    for mounted in made:
        mounted.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def is_data(request: Request) -> bool:
    path, _, query = request.path.partition("?")
    return request.method == "GET" and "links" not in path and (not query or "X-Amz-Signature" in query)


@pytest.mark.parametrize(
    "fault",
    [Fault(status=503, body=b"<Error><Code>SlowDown</Code></Error>"), Fault(drop=True), Fault(reset_after=100)],
    ids=["slow-down", "dropped", "reset"],
)
def test_a_server_that_fails_every_fifth_request_can_be_used(proxy: FaultProxy, mount: Mount, fault: Fault) -> None:
    chance, lock = random.Random(7), threading.Lock()

    def plan(_: Request) -> Fault | None:
        with lock:
            return fault if chance.random() < 0.2 else None

    proxy.plan = plan
    here, elsewhere = mount(), mount()
    (here.target / "step").mkdir()
    (here.target / "step" / "large").write_bytes(_LARGE)
    (here.target / "step" / "small").write_bytes(_SMALL)
    (here.target / "step").rename(here.target / "done")
    assert names(elsewhere.target / "done") == ["large", "small"]
    assert (elsewhere.target / "done" / "large").read_bytes() == _LARGE
    assert (elsewhere.target / "done" / "small").read_bytes() == _SMALL


@pytest.mark.parametrize(
    "fault",
    [
        Fault(corrupt_at=5),
        Fault(headers={"content-range": "bytes 5-1000/2000"}),
        Fault(send={"range": ""}),
        Fault(status=200, body=b"<html>", headers={"etag": '"x"', "last-modified": "Wed, 21 Oct 2015 07:28:00 GMT"}),
    ],
    ids=["wrong-bytes", "other-range", "whole", "page"],
)
def test_wrong_answers_of_a_server_are_errors_and_not_cached(proxy: FaultProxy, mount: Mount, fault: Fault) -> None:
    (mount().target / "large").write_bytes(_LARGE)
    elsewhere = mount()
    proxy.plan = lambda request: fault if is_data(request) else None
    assert number_of((elsewhere.target / "large").read_bytes) == errno.EIO
    proxy.plan = lambda _: None
    assert (elsewhere.target / "large").read_bytes() == _LARGE


def test_a_login_that_expires_during_a_write_is_reported_by_close_and_the_old_content_is_kept(
    proxy: FaultProxy, mount: Mount, s3_server: S3Server
) -> None:
    here = mount()
    (here.target / "kept").write_bytes(_SMALL)
    file = (here.target / "kept").open("wb")
    file.write(_LARGE)
    proxy.plan = lambda _: Fault(status=400, body=b"<Error><Code>ExpiredToken</Code></Error>")
    assert number_of(file.close) == errno.EACCES
    assert number_of(lambda: names(here.target)) == errno.EACCES
    assert any("the credentials have expired" in line for line in here.said)
    proxy.plan = lambda _: None
    assert (here.target / "kept").read_bytes() == _SMALL
    assert names(mount().target) == ["kept"]
    assert s3_server.uploads("mounted") == []


def test_of_two_mounts_one_writes_the_whole_file_and_readers_get_it_or_an_error(mount: Mount) -> None:
    one, other = mount(), mount()
    contents = (_LARGE, _LARGE[::-1])
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda of: (of[0].target / "f").write_bytes(of[1]), zip((one, other), contents, strict=True)))
    won = (mount().target / "f").read_bytes()
    assert won in contents
    assert (one.target / "f").read_bytes() == won
    with (one.target / "f").open("rb", buffering=0) as file:
        got = file.read(1000)
        (other.target / "f").write_bytes(_SMALL)
        with suppress(OSError):
            while piece := file.read(MIB):
                got += piece
    assert won.startswith(got)
    assert (one.target / "f").read_bytes() == _SMALL


def test_a_stopped_or_killed_server_delays_one_call_by_its_timeout_and_others_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with S3Server(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.make_bucket("mounted")
        mounted = MountedPlace(tmp_path, tmp_path / "mount", place=(place := open_place("s3://mounted/x")))
        try:
            assert isinstance(place, ObjectPlace)
            for name in ("one", "two"):
                (mounted.target / name).write_bytes(_SMALL)

            def is_away() -> None:
                # Otherwise each call would take a minute.
                with pytest.raises(TransientError):
                    place._bucket.retry("x/one", lambda: obstore.head(place._bucket.reader, "x/one"), 2)
                with pytest.raises(SilentError):
                    place.stat("one")
                assert [number_of((mounted.target / name).unlink) for name in ("one", "two")] == [errno.EIO] * 2
                assert number_of((mounted.target / "one").read_bytes) == errno.EIO
                assert any("the server" in line and "answer" in line for line in mounted.said)

            server.process.send_signal(signal.SIGSTOP)
            try:
                is_away()
            finally:
                server.process.send_signal(signal.SIGCONT)
            until(lambda: number_of((mounted.target / "one").stat) is None, "the server answers again")
            assert (mounted.target / "two").read_bytes() == _SMALL
            (mounted.target / "one").unlink()
            assert names(mounted.target) == ["two"]
            server.process.kill()
            server.process.wait()
            is_away()
        finally:
            mounted.close()


def test_hot_lists_are_saved_in_a_bucket(proxy: FaultProxy) -> None:
    said: list[str] = []
    shared, shard = Range("step-1/shared", 0, MIB), Range("step-1/shard", 0, MIB)
    with closing(open_place(f"s3://mounted/{secrets.token_hex(4)}")) as place:
        assert HotLists(place, "0 of 2", said.append).load("step-1") == []
        HotLists(place, "0 of 2", said.append).save([shared], "step-1", began=True)
        HotLists(place, "1 of 2", said.append).save([shard, shared], "step-1", began=True)
        assert HotLists(place, "1 of 2", said.append).load("step-1") == [shard, shared]
        assert HotLists(place, "3 of 4", said.append).load("step-1") == [shared]
    assert said == []

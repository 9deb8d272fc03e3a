"""Objects too large for one request, and files that are uploaded while they are written, on a real S3 server."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.checkpoint.download import get_checkpoint
from bootseer.checkpoint.files import Files, OtherFolderError
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.publish import PutSettings, put_checkpoint
from bootseer.checkpoint.reading.reading import Reading
from bootseer.errors import TransientError, UsageError
from bootseer.places import bucket, objects, open_place, uploads
from bootseer.places.place import Place
from fault_proxy import Fault, FaultProxy, Request, once
from places.contract import names, opened, read
from s3_server import S3Server, environment_for

pytestmark = pytest.mark.slow

_MIB = 1 << 20


@pytest.fixture
def place(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name, value in environment_for(s3_server.host).items():
        monkeypatch.setenv(name, value)
    if "large" not in s3_server.ask("GET", "/")[1].decode():
        s3_server.make_bucket("large")
    with closing(open_place(f"s3://large/{secrets.token_hex(4)}")) as opened_place:
        yield opened_place


def test_what_is_larger_than_one_copy_is_written_but_not_renamed(
    place: Place, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(objects.MAX_COPY_BYTES, "s3", 8 * _MIB)
    data = os.urandom(12 * _MIB + 3)
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "one").write_bytes(data)
    settings = PutSettings(policy=Policy(stripes=1), replace=True)
    put_checkpoint(place, tmp_path / "step-1", "step-1", settings=settings)
    with pytest.raises(OtherFolderError, match="copy it"):
        Files(place).rename("step-1/one", "step-1/two")
    with pytest.raises(UsageError, match="only in stripes"):
        put_checkpoint(place, tmp_path / "step-1" / "one", "step-2.pt", settings=settings)
    with opened(place, "step-1/one") as file:
        assert read(file, 0, len(data)) == data
    assert names(place, "step-1") == {"step-1/one"}
    assert s3_server.uploads("large") == []


@pytest.mark.parametrize("stripes", [1, 2])
def test_an_upload_whose_completion_was_lost_on_the_way_back_is_repeated(
    uri: str, proxy: FaultProxy, tmp_path: Path, stripes: int
) -> None:
    data = os.urandom(20 * _MIB + 3)
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "one").write_bytes(data)
    proxy.plan = once(Fault(cut_after=0), "?uploadId=", "POST")
    with closing(open_place(uri)) as place:
        put_checkpoint(place, tmp_path / "step-1", "step-1", settings=PutSettings(policy=Policy(stripes=stripes)))
        with closing(Reading(place)) as reading:
            get_checkpoint(Files(place), reading, "step-1", tmp_path / "got")
    assert (tmp_path / "got" / "one").read_bytes() == data


def test_files_of_many_parts_are_uploaded_in_larger_ones(place: Place) -> None:
    data = os.urandom(20 * _MIB)
    for most_bytes, num_parts in ((10_000 * 9 * _MIB, 3), (1 << 62, 3), (10_000 * 19 * _MIB, 2)):
        (part,) = place.begin_parts(["part"], part_bytes=most_bytes)
        part.write(data)
        part.close()
        assert place.stat("part").version.endswith(f'-{num_parts}"-{len(data):x}')


def test_a_large_part_is_sent_while_it_is_written_and_a_dropped_one_leaves_nothing(
    place: Place, s3_server: S3Server
) -> None:
    data = os.urandom(20 * _MIB)
    kept, dropped = place.begin_parts(["x/kept", "x/dropped"], part_bytes=64 * _MIB)
    for writer in (kept, dropped):
        for start in range(0, len(data), 3 * _MIB):
            writer.write(data[start : start + 3 * _MIB])
    place._bucket._fails_until_s = time.monotonic() + 600  # the server is silent for others
    dropped.abort()
    assert len(s3_server.uploads("large")) == 1
    kept.close()
    with opened(place, "x/kept") as file:
        assert read(file, 0, len(data)) == data
    assert names(place, "x") == {"x/kept"}
    assert s3_server.uploads("large") == []


def test_a_part_that_was_given_up_while_the_server_hung_leaves_nothing_when_it_answers_again(
    place: Place, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WRITE_S", "CALL_S"):
        monkeypatch.setattr(uploads, name, 0.5)
    monkeypatch.setattr(uploads, "PART_BYTES", 1 << 16)
    answers = threading.Event()
    with FaultProxy(
        s3_server.host, lambda request: Fault(gate=answers) if "partNumber" in request.path else None
    ) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT", f"http://{proxy.host}")
        (part,) = open_place(place.uri).begin_parts(["file"], part_bytes=_MIB)
        with pytest.raises(TransientError, match="no complete answer within"):
            for _ in range(20):
                part.write(bytes(1 << 16))
        part.abort()
        (left,) = s3_server.uploads("large")
        answers.set()
        until = time.monotonic() + 60
        while left in s3_server.uploads("large"):
            assert time.monotonic() < until
            time.sleep(0.1)


def num_copies(uri: str, proxy: FaultProxy, fault: Callable[[int], Fault | None]) -> int:
    """How many requests a rename by a copy on the server makes; `fault` is that of a copy, by the number of earlier
    ones."""
    numbers = itertools.count()
    with closing(open_place(uri)) as place:
        place.write_bytes("old", bytes(1000))
        proxy.plan = lambda request: fault(next(numbers)) if "x-amz-copy-source" in request.headers else None
        place.rename("old", "new")
        assert place.read_bytes("new", 1000) == bytes(1000)
    return next(numbers)


def test_a_copy_on_the_server_may_take_long(uri: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small requests are repeated after a twentieth of the time."""
    monkeypatch.setattr(objects, "_SMALL_BYTES", 100)
    monkeypatch.setattr(bucket, "WRITE_S", 40.0)
    answers = threading.Event()
    timer = threading.Timer(4.0, answers.set)
    timer.start()
    assert num_copies(uri, proxy, lambda number: Fault(gate=answers)) == 1
    timer.join()


def test_a_copy_on_the_server_survives_its_restart(
    uri: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore itself repeats a request four times."""
    monkeypatch.setattr(objects, "_SMALL_BYTES", 100)
    assert num_copies(uri, proxy, lambda number: Fault(status=503) if number < 6 else None) == 7


def test_a_page_of_a_list_that_fails_is_requested_again_and_not_the_whole_list(
    uri: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "CALL_S", 8.0)
    folder, num_pages = uri.rpartition("/")[2], 40

    def plan(request: Request) -> Fault | None:
        if request.number % 3 == 0:
            return Fault(status=503)
        found = re.search(r"continuation-token=(\d+)", request.path)
        page = int(found[1]) if found is not None else 0
        following = f"<NextContinuationToken>{page + 1}</NextContinuationToken>" if page + 1 < num_pages else ""
        entry = f"<Key>{folder}/{page}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        body = f"<ListBucketResult>{following}<Contents>{entry}</Contents></ListBucketResult>"
        return Fault(status=200, body=body.encode())

    proxy.plan = plan
    with closing(open_place(uri)) as place:
        pages = [f"{folder}/{page}" for page in range(num_pages)]
        assert [one["path"] for one in place._bucket.objects(f"{folder}/")] == pages  # type: ignore[attr-defined]
        assert [one["path"] for one in place._bucket.listed(f"{folder}/")["objects"]] == pages  # type: ignore[attr-defined]


def test_a_profile_that_does_not_exist_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nothing")
    with pytest.raises(UsageError, match="profile"):
        uploads.Uploads("s3://large")


def test_uploads_are_asked_for_where_objects_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://all.example")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://s3.example")
    asked = uploads.Uploads("s3://large")._client.meta
    assert (asked.endpoint_url, asked.config.s3["addressing_style"]) == ("https://s3.example", "path")

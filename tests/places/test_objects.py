"""A bucket as a place: the contract on a real S3 server, features of buckets, and servers with faults."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import obstore
import pytest
from obstore.store import LocalStore, from_url

from bootseer.checkpoint.catalog import checkpoints, remove
from bootseer.checkpoint.download import get_checkpoint
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.publish import PutSettings, put_checkpoint
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.verify import verify
from bootseer.errors import (
    AccessError,
    AlreadyExistsError,
    BootseerError,
    CorruptError,
    NotFoundError,
    PermanentError,
    UsageError,
)
from bootseer.places import bucket, open_place
from bootseer.places.objects import ObjectPlace
from bootseer.places.place import TEMPORARY_PREFIX, Place
from bootseer.places.uploads import Uploads
from fault_proxy import Fault, FaultProxy, Plan, Request, once
from places.contract import PlaceContract, names, read
from s3_server import S3Server

pytestmark = pytest.mark.slow

_MIB = 1 << 20
_STRIPED = PutSettings(policy=Policy(stripes=2, parity=True, min_bytes_per_stripe=_MIB))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source" / "step-1"
    (folder / "sub").mkdir(parents=True)
    (folder / "model").write_bytes(os.urandom(5 * _MIB + 7))
    (folder / "sub" / "config").write_bytes(b"{}")
    return folder


def keys(server: S3Server, uri: str) -> list[str]:
    prefix = f"{uri.rpartition('/')[2]}/"
    return [key.removeprefix(prefix) for key in server.keys("jobs") if key.startswith(prefix)]


def content(place: Place, path: str) -> dict[str, bytes]:
    """All files in a folder."""
    found = {}
    for entry in place.list(path):
        name = entry.path.rpartition("/")[2]
        if entry.is_folder:
            found |= {f"{name}/{below}": data for below, data in content(place, entry.path).items()}
        else:
            found[name] = place.read_bytes(entry.path, 1 << 20)
    return found


class TestObjectPlace(PlaceContract):
    """The contract."""

    keeps_modes = False


def test_what_other_tools_have_put_is_found_under_its_key(place: Place, uri: str, tmp_path: Path) -> None:
    data = os.urandom(3 * _MIB)
    obstore.put(from_url(uri, client_options={"allow_http": True}), "run/ck-5/weights.safetensors", data)
    found = checkpoints(Files(place), "run")
    assert [(one.name, one.size_bytes) for one in found] == [("ck-5", len(data))]
    with closing(Reading(place)) as reading:
        get_checkpoint(Files(place), reading, "run/ck-5", tmp_path / "out")
    assert (tmp_path / "out" / "weights.safetensors").read_bytes() == data
    place.rename("run/ck-5", "run/ck-6")
    assert names(place, "run") == {"run/ck-6"}
    assert place.stat("run/ck-6/weights.safetensors").size_bytes == len(data)


def test_keys_other_than_paths_are_skipped_and_reported(
    place: Place, server: S3Server, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = f"/jobs/{uri.rpartition('/')[2]}"
    place.make_folder("d")
    place.write_bytes("d/kept", b"1234")
    for key in ("//below", "/d//below", "/d/bad%0Dname", "/d/../x"):
        assert server.ask("PUT", root + key)[0] == 200, key
    assert names(place, "") == {"d"}
    (entry,) = place.list("d")
    assert entry == place.stat("d/kept")
    assert list(place.list("d")) == [entry]
    told = [record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()]
    assert len(told) == len(set(told)) == 4
    assert any("d/bad\\rname" in line for line in told)
    with pytest.raises(PermanentError, match="invalid path"):
        place.delete("d", recursive=True)


def test_a_folder_that_other_tools_have_made_stays_when_its_last_file_is_removed(place: Place, uri: str) -> None:
    obstore.put(from_url(uri, client_options={"allow_http": True}), "run/d/file", b"x")
    place.delete("run/d/file")
    assert names(place, "run") == {"run/d"}
    place.delete("run/d")
    assert names(place, "") <= {"run"}


def test_a_checkpoint_goes_there_and_back_is_replaced_and_leaves_nothing(
    place: Place, server: S3Server, uri: str, source: Path, tmp_path: Path
) -> None:
    files = Files(place)
    put_checkpoint(place, source, "step-1", settings=_STRIPED)
    with pytest.raises(AlreadyExistsError):
        put_checkpoint(place, source, "step-1", settings=_STRIPED)
    (source / "sub" / "config").write_bytes(b"{} ")
    put_checkpoint(place, source, "step-1", settings=PutSettings(policy=_STRIPED.policy, replace=True))
    put_checkpoint(place, source / "model", "step-2.pt", settings=_STRIPED)
    with closing(Reading(place)) as reading:
        assert not verify(files, "step-1").problems
        get_checkpoint(files, reading, "step-1", tmp_path / "out")
        get_checkpoint(files, reading, "step-2.pt", tmp_path / "out.pt")
    assert (tmp_path / "out" / "sub" / "config").read_bytes() == b"{} "
    for got in (tmp_path / "out" / "model", tmp_path / "out.pt"):
        assert got.read_bytes() == (source / "model").read_bytes()
    assert [(one.name, one.is_latest) for one in checkpoints(files, "")] == [("step-1", False), ("step-2.pt", True)]
    for name in ("step-2.pt", "step-1"):
        remove(files, "", name, force=True)
    assert all("/.attempts-links/" in f"/{key}" for key in keys(server, uri))
    assert server.uploads("jobs") == []


@pytest.mark.parametrize("cut", range(1, 22))
def test_a_rename_that_is_cut_short_loses_nothing(place: Place, uri: str, cut: int) -> None:
    """Like after a kill: the renaming process ends before its request number `cut` (from 0)."""
    place.make_folder("old/sub", parents=True)
    place.write_bytes("old/a", b"1")
    place.write_bytes("old/sub/b", b"2")
    wanted = content(place, "old")
    killed = ObjectPlace(uri)
    left = [cut]
    call = killed._bucket.retry

    def count(*arguments: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise SystemExit
        return call(*arguments)

    killed._bucket.retry = count  # type: ignore[method-assign, assignment]
    with suppress(SystemExit):
        killed.rename("old", "new")
    killed.close()
    with closing(open_place(uri)) as other:
        there = [path for path in ("old", "new") if path in names(other, "")]
        assert there
        assert all(content(other, path) == wanted for path in there)
        with suppress(BootseerError):
            other.rename("old", "new", replace=False)  # like the recovery after a crash
        other.delete("old", recursive=True) if "old" in names(other, "") else None
        if "new" in there or "new" in names(other, ""):
            assert content(other, "new") == wanted
            assert {name for name in names(other, "") if not name.startswith(TEMPORARY_PREFIX)} == {"new"}


def test_of_many_that_rename_to_one_name_one_gets_it_and_the_others_keep_theirs(place: Place, uri: str) -> None:
    for number in range(6):
        place.make_folder(f"from{number}")
        place.write_bytes(f"from{number}/file", b"%d" % number)

    def take(number: int) -> bool:
        with closing(open_place(uri)) as own:
            try:
                own.rename(f"from{number}", "to", replace=False)
            except AlreadyExistsError:
                return False
            return True

    with ThreadPoolExecutor(6) as threads:
        won = list(threads.map(take, range(6)))
    assert won.count(True) == 1
    assert content(place, "to") == {"file": b"%d" % won.index(True)}
    for number in (number for number in range(6) if not won[number]):
        assert content(place, f"from{number}") == {"file": b"%d" % number}
        place.delete(f"from{number}", recursive=True)
    assert content(place, "to") == {"file": b"%d" % won.index(True)}


def test_of_many_that_rename_one_folder_one_does(place: Place, uri: str) -> None:
    place.make_folder("from")
    place.write_bytes("from/file", b"x")

    def take(number: int) -> bool:
        with closing(open_place(uri)) as own, suppress(NotFoundError):
            own.rename("from", f"to{number}", replace=False)
            return True
        return False

    with ThreadPoolExecutor(6) as threads:
        won = list(threads.map(take, range(6)))
    assert won.count(True) == 1
    assert names(place, "") == {f"to{won.index(True)}"}
    assert content(place, f"to{won.index(True)}") == {"file": b"x"}


def test_what_has_moved_out_of_a_folder_stays_when_that_is_removed(place: Place, server: S3Server, uri: str) -> None:
    for path in ("job/step", "job/other"):
        place.make_folder(path, parents=True)
        place.write_bytes(f"{path}/file", path.encode())
    place.rename("job/step", "kept")
    place.delete("job", recursive=True)
    assert names(place, "") == {"kept"}
    assert content(place, "kept") == {"file": b"job/step"}
    place.make_folder("job/step", parents=True)
    place.write_bytes("job/step/file", b"new")
    assert (content(place, "kept"), content(place, "job/step")) == ({"file": b"job/step"}, {"file": b"new"})
    for path in ("job", "kept"):
        place.delete(path, recursive=True)
    assert all("/.attempts-links/" in f"/{key}" for key in keys(server, uri))


def test_a_conditional_write_during_another_one_is_repeated_as_s3_demands(
    place: Place, proxy: FaultProxy, uri: str
) -> None:
    place.make_folder("a")
    conflict = Fault(status=409, body=b"<Error><Code>ConditionalRequestConflict</Code></Error>")
    proxy.plan = once(conflict, "/.attempts-links/b", "PUT")
    with closing(open_place(uri)) as other:
        other.make_folder("b", parents=True)
        assert names(other, "") == {"a", "b"}


def test_the_answer_about_a_folder_that_is_cut_is_requested_again(place: Place, proxy: FaultProxy, uri: str) -> None:
    place.make_folder("d")
    place.write_bytes("d/file", b"1234")
    proxy.plan = once(Fault(cut_after=3), "/.attempts-links/d", "GET")
    with closing(open_place(uri)) as other:
        assert other.read_bytes("d/file", 10) == b"1234"


def test_a_file_whose_name_could_not_be_claimed_is_refused_before_it_is_sent(
    place: Place, server: S3Server, uri: str, tmp_path: Path
) -> None:
    large = tmp_path / "step-1.pt"
    large.write_bytes(bytes(8 * _MIB + 1))
    for dry_run in (True, False):
        settings = PutSettings(policy=Policy(stripes=1), dry_run=dry_run)
        with pytest.raises(UsageError, match="only in stripes"):
            put_checkpoint(place, large, "step-1.pt", settings=settings)
    assert keys(server, uri) == []
    put_checkpoint(place, large, "step-1.pt", settings=PutSettings(policy=Policy(stripes=1), replace=True))
    put_checkpoint(place, large, "step-2.pt", settings=PutSettings(policy=Policy(stripes=1, parity=True)))
    assert {one.name for one in checkpoints(Files(place), "")} == {"step-1.pt", "step-2.pt"}


def test_wrong_bytes_of_a_server_are_never_delivered(proxy: FaultProxy, uri: str, source: Path, tmp_path: Path) -> None:
    settings = PutSettings(policy=Policy(stripes=2, parity=False, min_bytes_per_stripe=_MIB))
    with closing(open_place(uri)) as place:
        put_checkpoint(place, source, "step-1", settings=settings)
        proxy.plan = lambda request: (
            Fault(corrupt_at=5) if "/.stripes/" in request.path and "-links/" not in request.path else None
        )
        with closing(Reading(place)) as reading, pytest.raises(CorruptError):
            get_checkpoint(Files(place), reading, "step-1", tmp_path / "out")
        proxy.plan = lambda request: None
        with closing(Reading(place)) as reading:
            get_checkpoint(Files(place), reading, "step-1", tmp_path / "out2")
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out2" / "model").read_bytes() == (source / "model").read_bytes()


@pytest.mark.parametrize("fault", [Fault(status=501), Fault(send={"if-none-match": ""})], ids=["refused", "overlooked"])
def test_a_server_without_conditional_writes_is_a_clear_error(
    proxy: FaultProxy, uri: str, source: Path, fault: Fault
) -> None:
    proxy.plan = lambda request: fault if "if-none-match" in request.headers else None
    with closing(open_place(uri)) as place, pytest.raises(PermanentError, match="conditional writes"):
        put_checkpoint(place, source, "step-1", settings=_STRIPED)


def some(fault: Fault, share: float) -> Plan:
    """Applies the fault to this share of all requests, at random."""
    chance, lock = random.Random(7), threading.Lock()

    def plan(request: object) -> Fault | None:
        with lock:
            return fault if chance.random() < share else None

    return plan


@pytest.mark.parametrize(
    "fault",
    [Fault(status=503), Fault(status=429, headers={"retry-after": "1"}), Fault(drop=True), Fault(cut_after=100)],
    ids=["slow-down", "too-many", "dropped", "cut"],
)
def test_a_server_that_fails_every_fifth_request_of_whatever_kind_is_asked_again(
    proxy: FaultProxy, uri: str, source: Path, tmp_path: Path, fault: Fault
) -> None:
    proxy.plan = some(fault, 0.2)
    with closing(open_place(uri)) as place:
        put_checkpoint(place, source, "step-1", settings=_STRIPED)
        assert not verify(Files(place), "step-1").problems
        with closing(Reading(place)) as reading:
            get_checkpoint(Files(place), reading, "step-1", tmp_path / "out")
    assert (tmp_path / "out" / "model").read_bytes() == (source / "model").read_bytes()


def test_a_list_that_takes_longer_than_other_requests_comes_to_its_end(
    proxy: FaultProxy, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "CALL_S", 1.0)
    name = uri.rpartition("/")[2]
    with closing(open_place(uri)) as place:
        place.write_bytes("file", b"x")
        proxy.plan = lambda request: Fault(drip_bytes=20) if "delimiter" in request.path else None
        found = place._bucket.listed(f"{name}/")  # type: ignore[attr-defined]
        assert [one["path"] for one in found["objects"]] == [f"{name}/file"]

        monkeypatch.setattr(bucket, "CALL_S", 4.0)
        monkeypatch.setattr(obstore, "list", lambda *_, **__: ([time.sleep(0.5) or number] for number in range(5)))
        assert place._bucket.objects("a") == [0, 1, 2, 3, 4]  # type: ignore[attr-defined]


def test_a_name_that_is_asked_for_in_vain_is_asked_for_again_soon(
    proxy: FaultProxy, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.plan = once(Fault(hang=True), "", "HEAD")
    with closing(open_place(uri)) as place:
        place.write_bytes("file", b"x")
        assert place.stat("file").size_bytes == 1


def test_a_create_whose_answer_was_lost_is_recognized(proxy: FaultProxy, uri: str) -> None:
    with closing(open_place(uri)) as place:
        assert place.create_bytes("first", b"")
        for name, there in (("own", b"own"), ("others", b"another's")):
            if name == "others":
                place.write_bytes(name, there)
            proxy.plan = once(Fault(headers={"content-length": "?"}), f"/{name}", "PUT")
            assert place.create_bytes(name, b"own") == (name == "own")
            assert place.read_bytes(name, 100) == there


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (400, "ExpiredToken", "credentials have expired"),
        (403, "RequestTimeTooSkewed", "clocks of this machine and of the server"),
        (403, "InvalidAccessKeyId", "does not know AWS_ACCESS_KEY_ID"),
        (403, "AccessDenied", "AccessDenied; check the credentials"),
        (400, "AuthorizationHeaderMalformed", "AWS_REGION is not"),
    ],
)
def test_a_refused_login_has_the_servers_message(
    proxy: FaultProxy, uri: str, status: int, code: str, said: str
) -> None:
    answer = f"<?xml version='1.0'?>\n<Error><Code>{code}</Code></Error>".encode()
    with closing(open_place(uri)) as place:
        place.write_bytes("file", b"x" * 100)
        file = place.open("file")
        proxy.plan = lambda _: Fault(status=status, body=answer)
        with pytest.raises(AccessError, match=said):
            place.stat("file")  # a HEAD request, whose answer has no body
        with pytest.raises(AccessError, match=said):
            read(file, 0, 50)
        with pytest.raises(AccessError, match=said):
            place.write_bytes("other", b"x")


def test_credentials_for_one_folder_serve_a_place_above_it(proxy: FaultProxy, uri: str, source: Path) -> None:
    """The adapters open the bucket, even if a policy permits only `jobs/TEAM/*`."""
    team = uri.rpartition("/")[2]
    denied = b"<?xml version='1.0'?>\n<Error><Code>AccessDenied</Code></Error>"

    def plan(request: Request) -> Fault | None:
        is_own = f"jobs/{team}/" in request.path or f"prefix={team}%2F" in request.path or b"<Delete" in request.body
        return None if is_own else Fault(status=403, body=denied)

    proxy.plan = plan
    with closing(open_place("s3://jobs")) as bucket, closing(open_place(uri)) as place:
        bucket.make_folder(f"{team}/moe/step-1", parents=True)
        assert bucket.create_bytes(f"{team}/moe/step-1/file", b"1")
        put_checkpoint(place, source, "step-2", folder="moe", settings=_STRIPED)
        bucket.rename(f"{team}/moe/step-1", f"{team}/moe/step-3")
        assert names(bucket, f"{team}/moe") >= {f"{team}/moe/step-2", f"{team}/moe/step-3"}
        assert content(bucket, f"{team}/moe/step-3") == {"file": b"1"}
        bucket.delete(f"{team}/moe/step-3", recursive=True)
        with pytest.raises(NotFoundError):
            bucket.stat(f"{team}/moe/step-3")
        for path in ("other", "other/file"):
            with pytest.raises(AccessError):
                bucket.stat(path)


_KILLED = """
import os, sys
from bootseer.places import object_data, open_place
(part,) = open_place(sys.argv[1]).begin_parts(["killed & gone"], part_bytes=64 << 20)
for _ in range(3):
    part.write(bytes(8 << 20))
print("sent", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_writer_has_sent_is_found_and_ended_but_not_what_is_young(
    proxy: FaultProxy, server: S3Server, uri: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, uri], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "sent\n"
        while not server.uploads("jobs"):
            time.sleep(0.05)
        writer.kill()
    left = server.uploads("jobs")
    begun = f"<Initiated>{datetime.now(UTC) - timedelta(hours=2):%Y-%m-%dT%H:%M:%S.000Z}</Initiated>"
    listed = re.sub("<Initiated>.*?</Initiated>", begun, server.ask("GET", "/jobs?uploads")[1].decode())
    folder = uri.rpartition("/")[2]
    proxy.plan = lambda request: (
        Fault(status=200, body=listed.encode())
        if request.method == "GET" and "uploads" in request.path and f"prefix={folder}%2F" in request.path
        else None
    )
    clean = [sys.executable, "-m", "bootseer", "ckpt", "clean", f"s3://jobs//{folder}", "--json"]
    assert json.loads(subprocess.run(clean, check=True, capture_output=True).stdout)["uploads"] == []
    assert server.uploads("jobs") == left
    ended = json.loads(subprocess.run([*clean, "--older-than", "100m"], check=True, capture_output=True).stdout)
    assert ended["uploads"] == [f"{folder}/killed & gone"]
    assert server.uploads("jobs") == []


def test_uploads_elsewhere_than_in_s3_and_without_a_login_are_a_clear_error(
    proxy: FaultProxy, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="in S3 only"):
        Uploads("gs://bucket/x")
    proxy.plan = lambda _: Fault(status=400, body=b"<Error><Code>ExpiredToken</Code></Error>")
    with pytest.raises(AccessError, match="credentials have expired"):
        list(Uploads(uri).left(0))
    profiles = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profiles))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(AccessError, match="AWS_ACCESS_KEY_ID"):
        list(Uploads(uri).left(0))
    profiles.write_text("[default]\naws_access_key_id = file\naws_secret_access_key = secret\n")
    proxy.plan = lambda _: None
    assert list(Uploads(uri).left(0)) == []
    assert "Credential=file/" in proxy.requests[-1].headers["authorization"]


def test_objects_after_one_removed_meanwhile_are_removed_too(tmp_path: Path) -> None:
    removed_from = bucket.Bucket("s3://jobs")
    removed_from.reader = removed_from.writer = LocalStore(tmp_path)  # stops at a missing object, as Azure and GCS may
    keys = [f"{number:02}" for number in range(40)]
    for key in keys:
        obstore.put(removed_from.reader, key, b"")
    removed_from.remove(["missing", *keys])
    assert removed_from.objects("") == []


def test_google_cloud_gets_generations_instead_of_entity_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"etag": '"tag"', "x-goog-generation": "17", "last-modified": "Thu, 26 Nov 2026 08:00:00 GMT"}
    with FaultProxy("", lambda _: Fault(status=200, headers=headers, body=b"some/prefix/")) as server:
        account = {"gcs_base_url": f"http://{server.host}", "disable_oauth": True}
        (tmp_path / "account").write_text(
            json.dumps({**account, "private_key": "", "private_key_id": "", "client_email": ""})
        )
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account"))
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        with closing(ObjectPlace("gs://jobs")) as place:
            _, tag, _ = place._bucket.read_small("link")
            assert place._put("link", b"", e_tag=tag) == "17"
        assert server.requests[-1].headers["x-goog-if-generation-match"] == "17"


def test_a_bucket_that_does_not_exist_is_called_so(uri: str) -> None:
    with closing(open_place("s3://nothing/job")) as place, pytest.raises(NotFoundError, match="no such bucket"):
        list(place.list("job"))

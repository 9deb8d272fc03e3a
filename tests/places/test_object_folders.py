"""Folders of a bucket that are renamed, created again and removed: which name has which objects."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore

from bootseer.checkpoint.catalog import remove
from bootseer.checkpoint.download import get_checkpoint
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.publish import PutSettings, put_checkpoint
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.verify import verify
from bootseer.errors import NotEmptyError, NotFolderError, NotFoundError, PermanentError, TransientError
from bootseer.places import objects
from bootseer.places.bucket import link_text
from bootseer.places.objects import ObjectPlace
from bootseer.places.place import TEMPORARY_PREFIX, join
from fault_proxy import Fault, FaultProxy
from places.contract import names
from s3_server import S3Server


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectPlace]:
    monkeypatch.setattr(objects, "_CACHED_S", 0.0)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")  # memory needs none
    with closing(ObjectPlace("s3://bucket/jobs")) as opened:
        opened._bucket.reader = opened._bucket.writer = MemoryStore()
        yield opened


def put_by_another_tool(place: ObjectPlace, path: str) -> None:
    obstore.put(place._bucket.writer, f"jobs/{path}", path.encode())


def content(place: ObjectPlace, path: str = "") -> dict[str, bytes | None]:
    """All entries below a folder: the bytes of files, None for folders."""
    found: dict[str, bytes | None] = {}
    for entry in place.list(path):
        if not entry.path.rpartition("/")[2].startswith(TEMPORARY_PREFIX):
            found[entry.path] = None if entry.is_folder else place.read_bytes(entry.path, 1 << 10)
            found |= content(place, entry.path) if entry.is_folder else {}
    return found


def test_a_checkpoint_that_replaces_one_of_another_tool_stays_when_that_is_removed(
    place: ObjectPlace, tmp_path: Path
) -> None:
    put_by_another_tool(place, "step-1/model")
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "weights").write_bytes(b"new")
    put_checkpoint(place, tmp_path / "step-1", "step-1", settings=PutSettings(policy=Policy(stripes=1), replace=True))
    assert not verify(Files(place), "step-1").problems
    assert content(place, "step-1") == {"step-1/weights": b"new"}


def test_what_is_listed_can_be_opened_whatever_its_name(place: ObjectPlace) -> None:
    for name in ("a b", "\u65e5\u672c\u3000\u8a9e", "a\u00a0b", "a\u200db", "\ue000", "%2F", "a+b?#&<"):
        put_by_another_tool(place, f"step-1/{name}")
        assert place.name_problem(name) == ""
    assert content(place, "step-1") == {path: path.encode() for path in names(place, "step-1")}
    assert len(names(place, "step-1")) == 7
    assert place.name_problem("a\nb") != "" != place.name_problem("a\udcff")


def test_a_folder_that_another_tool_has_copied_into_itself_is_an_error(place: ObjectPlace) -> None:
    place.make_folder("job")
    place.write_bytes("job/file", b"x")
    for key in ("job/file", f"{TEMPORARY_PREFIX}links/job"):
        obstore.copy(place._bucket.writer, f"jobs/{key}", f"jobs/job/backup/{key}")
    with pytest.raises(PermanentError, match="job/backup/job contains itself: remove the object"):
        content(place)


def test_a_file_with_the_name_of_a_folder_is_reported_and_removed_with_it(place: ObjectPlace, tmp_path: Path) -> None:
    for path in ("step-1/a", "step-1/a/b", "step-1/c"):
        put_by_another_tool(place, path)
    files, said = Files(place), "is a file and a folder; rename one of them"
    (problem,) = verify(files, "step-1").problems
    assert (problem.path, problem.what.startswith(said)) == ("step-1/a", True)
    with closing(Reading(place, cache=None)) as reading, pytest.raises(PermanentError, match=f"step-1/a {said}"):
        get_checkpoint(files, reading, "step-1", tmp_path / "got")
    remove(files, "", "step-1")
    assert content(place) == {}


def test_an_address_that_names_a_file_is_not_an_empty_folder(place: ObjectPlace) -> None:
    """A job started with `s3://…/latest` found no checkpoint, and trained from the beginning."""
    assert place.stat("").is_folder
    obstore.put(place._bucket.writer, "jobs", b"step-1")
    with pytest.raises(NotFolderError):
        place.stat("")
    put_by_another_tool(place, "step-1/model")
    assert place.stat("").is_folder


def test_what_was_moved_out_of_a_folder_stays_when_its_name_was_given_again(place: ObjectPlace) -> None:
    put_by_another_tool(place, "job/step/file")
    put_by_another_tool(place, "job/step/inner/file")
    place.rename("job/step/inner", "job/step/kept")
    place.rename("job/step", "kept")
    place.make_folder("job/step")
    place.write_bytes("job/step/file", b"new")
    kept = content(place, "kept")
    assert set(kept) == {"kept/file", "kept/kept", "kept/kept/file"}
    place.delete("job", recursive=True)
    assert content(place) == {"kept": None, **kept}


def test_a_name_that_was_given_again_and_is_removed_shows_nothing_of_what_had_it_before(place: ObjectPlace) -> None:
    put_by_another_tool(place, "step-1/file")
    place.rename("step-1", "backup")
    place.make_folder("step-1")
    place.delete("step-1", recursive=True)
    assert content(place) == {"backup": None, "backup/file": b"step-1/file"}


@pytest.mark.parametrize("seed", range(24))
def test_folders_are_what_a_file_system_would_make_of_them(place: ObjectPlace, seed: int) -> None:
    """Random sequences of operations, beginning with folders of other tools."""
    chance = random.Random(seed)
    model: dict[str, bytes | None] = {}
    for folder in chance.sample(["a", "b", "c"], 2):
        for path in (folder, f"{folder}/{chance.choice('abc')}"):
            put_by_another_tool(place, f"{path}/file")
            model |= {path: None, f"{path}/file": f"{path}/file".encode()}
    for step in range(30):
        folders = ["", *(path for path, data in model.items() if data is None)]
        folder = chance.choice(folders)
        path = join(chance.choice(folders), chance.choice("abc"))
        what = chance.choice(["make", "write", "rename", "rename", "delete"])
        if what == "write":
            place.write_bytes(join(folder, "file"), b"%d" % step)
            model[join(folder, "file")] = b"%d" % step
        elif what == "make" and path not in model:
            place.make_folder(path)
            model[path] = None
        elif what == "rename" and folder and path not in model and not f"{path}/".startswith(f"{folder}/"):
            place.rename(folder, path)
            inside = [one for one in model if f"{one}/".startswith(f"{folder}/")]
            model |= {path + one[len(folder) :]: model.pop(one) for one in inside}
        elif what == "delete" and folder:
            place.delete(folder, recursive=True)
            model = {one: data for one, data in model.items() if not f"{one}/".startswith(f"{folder}/")}
    assert content(place) == model


@pytest.mark.slow
def test_a_folder_with_the_marks_that_hadoop_leaves_is_removed_and_made_again(server: S3Server, uri: str) -> None:
    root = f"/jobs/{uri.rpartition('/')[2]}"
    for key in ("/run/", "/run/step-1/", "/run/step-1/sub/", "/run/step-1/sub/file"):
        assert server.ask("PUT", root + key)[0] == 200, key
    with closing(ObjectPlace(uri)) as place:
        assert names(place, "run") == {"run/step-1"}
        place.delete("run/step-1", recursive=True)
        assert names(place, "run") == set()
        place.make_folder("run/step-1")
        place.write_bytes("run/step-1/file", b"new")
        assert content(place, "run/step-1") == {"run/step-1/file": b"new"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [lambda text: text[:-3], lambda text: text[:-2] + b"/", lambda text: 2 * text, lambda _: b""]
)
def test_a_link_that_was_damaged_on_the_way_leads_nowhere(
    proxy: FaultProxy, uri: str, change: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint was published as an empty folder, and its predecessor removed."""
    monkeypatch.setattr(objects, "_CACHED_S", 0.0)
    with closing(ObjectPlace(uri)) as place:
        for name in ("d", "e"):
            place.make_folder(name)
            place.write_bytes(f"{name}/file", name.encode())
            text = change(link_text(place._folder(name).prefix))
            headers = {"ETag": f'"{place._folder(name).e_tag}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
            damaged = Fault(status=200, body=text, headers=headers)
            proxy.plan = lambda one, damaged=damaged, end=f"links/{name}": (
                damaged if one.method == "GET" and one.path.endswith(end) else None
            )
            with pytest.raises(TransientError, match="damaged on the way"):
                place.rename("d", "e")
            with pytest.raises(TransientError, match="damaged on the way"):
                place.read_bytes(f"{name}/file", 10)
            proxy.plan = lambda _: None
            assert content(place, name) == {f"{name}/file": name.encode()}


def test_an_owner_that_was_damaged_on_the_way_removes_nothing(
    place: ObjectPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.make_folder("d")
    place.write_bytes("d/file", b"x")
    place.rename("d", "e")
    read = place._bucket.read_small
    for change in (lambda text: text[:-1], lambda text: text + text, lambda _: ""):

        def damaged(key: str, change: Any = change) -> tuple[str, str | None, int]:
            text, *rest = read(key)
            return change(text) if key.endswith("owner") else text, *rest

        monkeypatch.setattr(place._bucket, "read_small", damaged)
        with pytest.raises(TransientError, match="damaged on the way"):
            place.delete("e", recursive=True)
    monkeypatch.setattr(place._bucket, "read_small", read)
    assert content(place) == {"e": None, "e/file": b"x"}


def test_links_that_were_written_without_checksum_stay_readable(
    place: ObjectPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "link_text", str.encode)
    put_by_another_tool(place, "step-1/file")
    for old, new in (("step-1", "step-2"), ("step-2", "step-3")):
        place.rename(old, new)
    place.make_folder("step-1")
    monkeypatch.undo()
    monkeypatch.setattr(objects, "_CACHED_S", 0.0)
    place.write_bytes("step-1/file", b"new")
    place.rename("step-1", "step-2")
    place.rename("step-3", "step-1")
    assert content(place) == {"step-1": None, "step-1/file": b"step-1/file", "step-2": None, "step-2/file": b"new"}
    place.delete("step-2", recursive=True)
    place.delete("step-1", recursive=True)
    assert content(place) == {}


def test_a_folder_that_other_tools_have_made_stays_when_its_last_file_is_moved(place: ObjectPlace) -> None:
    put_by_another_tool(place, "run/d/file")
    place.rename("run/d/file", "run/file")
    assert content(place) == {"run": None, "run/d": None, "run/file": b"run/d/file"}


def test_what_comes_into_a_folder_while_it_is_removed_is_not_lost(
    place: ObjectPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.make_folder("d")
    listed = place._bucket.objects

    def comes_first(prefix: str) -> list[Any]:
        place.write_bytes("d/file", b"x")
        return listed(prefix)

    monkeypatch.setattr(place._bucket, "objects", comes_first)
    with pytest.raises(NotEmptyError):
        place.delete("d")
    assert content(place) == {"d": None, "d/file": b"x"}


def test_the_old_name_of_an_interrupted_rename_goes_with_the_next_one(
    place: ObjectPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_by_another_tool(place, "step-1/model")

    def fail(link: str) -> None:
        raise TransientError("the bucket fails")

    with monkeypatch.context() as failing:
        failing.setattr(place, "_remove_link", fail)
        with pytest.raises(TransientError):
            place.rename("step-1", "removed")
    with pytest.raises(NotFoundError):
        place.rename("step-1", "again")
    assert content(place) == {"removed": None, "removed/model": b"step-1/model"}

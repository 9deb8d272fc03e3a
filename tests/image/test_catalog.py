"""Removing converted images: what is deleted, what is kept, what must not be removed; in a folder and a registry."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.artifact.hotsets import hotset_name
from bootseer.artifact.objects import missing, put, read_index
from bootseer.artifact.process_snapshots import process_name
from bootseer.artifact.prune import GRACE_S
from bootseer.cache.cache import Cache
from bootseer.errors import PermanentError
from bootseer.image.catalog import CONVERTING, delete_idle, images_in, prune, read_document, remove
from bootseer.image.conversion.convert import convert
from bootseer.image.conversion.layer import ConvertOptions
from bootseer.image.document import ImageDocument, document_name
from bootseer.image.reference import parse_reference
from bootseer.image.sources.source import open_source
from bootseer.io.locks import flocked
from bootseer.store.file import FileStore
from bootseer.store.open import open_registry, open_store
from bootseer.store.store import Store
from image_node import push
from oci_images import directory, file, layer, write_layout
from registry import Registry

pytestmark = pytest.mark.slow

BASE = layer(directory("d"), file("d/base", bytes(range(256)) * 999))
NOW_S = 1_900_000_000.0
LATER_S = NOW_S + GRACE_S + 1


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with Registry(tmp_path_factory.mktemp("registry")) as started:
        yield started


@pytest.fixture(params=["folder", "registry"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "folder":
        yield FileStore(tmp_path / "store")
        return
    host = request.getfixturevalue("registry").host
    with closing(open_store(f"oci://{host}/catalog{abs(hash(tmp_path)):x}")) as opened:
        yield opened


def converted(tmp_path: Path, store: Store, name: str, options: ConvertOptions | None = None) -> ImageDocument:
    """An image with a layer that all share and one that only it has."""
    folder = tmp_path / name
    if not folder.exists():
        write_layout(folder, [BASE, layer(file(f"own-{name}", name.encode() * 5000))])
    with closing(open_source(parse_reference(f"oci:{folder}"))) as source:
        return convert(source, store, options=options)


def test_a_removed_image_goes_and_what_others_share_stays(tmp_path: Path, store: Store) -> None:
    old, new = (converted(tmp_path, store, name) for name in ("old", "new"))
    put(store, hotset_name(old.digest, "w"), b"x")
    images = images_in(store)
    assert remove(images, old.digest, NOW_S, mounted={}) == ""
    assert images.find(old.digest) is None
    assert (prune(images, NOW_S + 1).num_waiting, missing(store, old.objects)) == (1, [])
    done = prune(images, LATER_S)
    assert done.problems == []
    shared = set(old.objects) & set(new.objects)
    assert shared
    assert set(missing(store, old.objects)) == set(old.objects) - shared
    assert read_document(store, new.digest)[0] == new
    assert missing(store, new.objects) == []
    assert list(store.list("image-trash/")) == list(store.list(hotset_name(old.digest, ""))) == []
    assert converted(tmp_path, store, "old") == old
    assert missing(store, old.objects) == []


def test_an_image_that_was_deleted_from_its_repository_takes_its_converted_form_along(
    tmp_path: Path, registry: Registry
) -> None:
    documents = []
    for name in ("gone", "there"):
        write_layout(tmp_path / name, [BASE, layer(file(name, name.encode() * 5000))])
        push(tmp_path / name, registry.host, "team/deleted", name)
        source = open_source(parse_reference(f"{registry.host}/team/deleted:{name}"))
        with closing(source), closing(open_store(source.location)) as store:
            documents.append(convert(source, store))
    gone, there = documents
    with closing(open_store(f"oci://{registry.host}/team/deleted")) as store:
        images = images_in(store)
        for name in (hotset_name(gone.digest, "work"), process_name(gone.digest, "work")):
            put(store, name, b"x", [])
        assert prune(images, NOW_S).expired == []
        with closing(open_registry(registry.host, "team/deleted")) as opened:
            opened.delete_manifest(gone.digest)
        done = prune(images, NOW_S)
        assert (done.expired, done.num_waiting, missing(store, gone.objects)) == ([gone.digest], 1, [])
        done = prune(images, LATER_S)
        assert done.deleted == {one.name for one in gone.objects} - {one.name for one in there.objects}
        assert not {"hotsets", "processes"} & {stored.name.partition("/")[0] for stored in store.list()}
        assert read_document(store, there.digest)[0] == there


def test_what_is_mounted_is_not_removed(tmp_path: Path, store: Store) -> None:
    image, other = (converted(tmp_path, store, name) for name in ("image", "other"))
    images = images_in(store)
    assert remove(images, image.digest, NOW_S, mounted={image.digest: "/mnt"}) == "it is mounted at /mnt"
    assert remove(images, other.digest, time.time(), mounted={}) == ""
    assert "does not have it" in remove(images, other.digest, time.time(), mounted={})
    assert images.find(image.digest) == image
    assert remove(images, image.digest, NOW_S, mounted={}, dry_run=True) == ""
    assert images.find(image.digest) == image
    assert prune(images, time.time() + 10, grace_s=0).deleted


def test_what_environments_or_a_replaced_conversion_need_is_known(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    first = converted(tmp_path, store, "image")
    second = converted(tmp_path, store, "image", ConvertOptions(block_size=64 << 10))
    assert first.digest == second.digest
    images = images_in(store)
    kept = {first.layers[1].file.index_name}
    now_s = time.time() + GRACE_S + 1
    done = prune(images, now_s, also_used=lambda: kept)
    assert done.deleted == {stored.name for stored in set(first.objects) - set(second.objects)} - kept
    assert missing(store, second.objects) == []
    assert prune(images, now_s).deleted == kept


def test_a_conversion_whose_layers_were_deleted_meanwhile_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path / "store")
    real = FileStore.upload
    document = converted(tmp_path, store, "image")
    gone = document.objects[0].name

    def upload(self: FileStore) -> object:
        self.delete(gone)
        return real(self)

    images_in(store).remove(document.digest, NOW_S)
    monkeypatch.setattr(FileStore, "upload", upload)
    with pytest.raises(PermanentError, match="was not published"):
        images_in(store).publish(document, replace=True)
    assert images_in(store).find(document.digest) is None


def age(folder: Path, seconds: float) -> None:
    """Let everything in a folder be older."""
    for path in folder.rglob("*"):
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))


def files(folder: Path) -> set[str]:
    """The files of a store, without its locks."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


def test_what_a_node_converted_goes_when_it_is_idle(tmp_path: Path) -> None:
    folder, cache = tmp_path / "converted", Cache(tmp_path / "blocks")
    store = FileStore(folder)
    delete_idle(tmp_path, cache, idle_s=0)  # nothing was converted
    old, new = (converted(tmp_path, store, name) for name in ("old", "new"))
    before = files(folder)
    delete_idle(tmp_path, cache, idle_s=0)
    assert files(folder) == before  # starts may be about to use them
    age(folder, 1000)
    delete_idle(tmp_path, cache, idle_s=2000)
    assert files(folder) == before
    with flocked(folder / CONVERTING, deadline_s=1, shared=True):  # another conversion may reuse their layers
        delete_idle(tmp_path, cache, idle_s=0)
        assert files(folder) == before
    os.utime(folder / new.name)
    with closing(cache.open(read_index(store, old.layers[-1].file))):
        delete_idle(tmp_path, cache, idle_s=0)
        assert files(folder) == before
    delete_idle(tmp_path, cache, idle_s=0)
    assert [stored.name for stored in store.list("images/")] == [new.name]
    assert set(missing(store, old.objects)) == set(old.objects) - set(new.objects)
    assert missing(store, new.objects) == []
    assert len(list(store.list("layers/"))) == 2  # those of the shared layer and of the new one
    age(folder, 1000)
    delete_idle(tmp_path, cache, idle_s=0)
    assert files(folder) == set()
    assert converted(tmp_path, store, "old") == old


def test_what_nothing_can_use_goes_too(tmp_path: Path) -> None:
    """A document of another version, what a killed conversion has stored, and its upload."""
    folder = tmp_path / "converted"
    image = converted(tmp_path, FileStore(folder), "image")
    other = document_name(f"sha256:{'0' * 64}")
    for name in (other, f"sha256/00/{'0' * 64}", f".uploads/{'0' * 32}"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    age(folder, 1000)
    os.utime(folder / image.name)
    delete_idle(tmp_path, Cache(tmp_path / "blocks"), idle_s=0)
    assert missing(FileStore(folder), image.objects) == []
    assert not [name for name in files(folder) if "0" * 32 in name]


def test_an_image_whose_document_cannot_be_read_for_a_moment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = tmp_path / "converted", Cache(tmp_path / "blocks")
    image = converted(tmp_path, FileStore(folder), "image")
    age(folder, 1000)
    before = files(folder)

    def fail(store: FileStore, name: str, *more: object, **named: object) -> Iterator[bytes]:
        raise PermanentError(f"{name}: Input/output error")

    with monkeypatch.context() as patched, pytest.raises(PermanentError, match="Input/output error"):
        patched.setattr(FileStore, "read", fail)
        delete_idle(tmp_path, cache, idle_s=0)
    assert files(folder) == before
    delete_idle(tmp_path, cache, idle_s=0)
    assert image.name not in files(folder)


def test_a_document_of_another_version_can_be_removed_and_replaced(tmp_path: Path, store: Store) -> None:
    image = converted(tmp_path, store, "image")
    images = images_in(store)
    put(store, image.name, b'{"schema":"bootseer.image/1"}')
    assert converted(tmp_path, store, "image") == image == images.find(image.digest)
    put(store, image.name, b'{"schema":"bootseer.image/1"}')
    assert remove(images, image.digest, NOW_S, mounted={}) == ""
    assert images.find(image.digest) is None


def test_on_a_file_system_of_several_machines_they_stay_for_a_month(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootseer.image.catalog.may_be_shared", lambda fd: True)
    folder, cache = tmp_path / "converted", Cache(tmp_path / "blocks")
    converted(tmp_path, FileStore(folder), "image")
    before = files(folder)
    for days, left in ((29, before), (2, set())):
        age(folder, days * 86_400)
        delete_idle(tmp_path, cache, idle_s=0)
        assert files(folder) == left

"""A node's local copies of documents, with which it starts while the store is unavailable."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.artifact.places import environments_folder
from bootseer.env.document import EnvironmentDocument, document_name
from bootseer.env.life.catalog import Catalog, NodeCatalog
from bootseer.env.life.decide import Lookup
from bootseer.errors import NotFoundError, TransientError
from bootseer.store.store import Store
from env.life.samples import KEY, OTHER_KEY, document, store_objects
from small_disks import small_disk
from store_doubles import Fault, FaultyStore, MemoryStore

DOWN = Fault(status=503, retry_after_s=3600)


@pytest.fixture
def store() -> Store:
    return MemoryStore(uuid.uuid4().hex)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def local(tmp_path: Path, said: list[str]) -> NodeCatalog:
    return NodeCatalog(tmp_path, said.append)


def keep(local: NodeCatalog, document: EnvironmentDocument) -> None:
    local.keep(document, document.encode())


@pytest.fixture
def away(store: Store) -> Catalog:
    return Catalog(FaultyStore(store, lambda request: DOWN))


def published(store: Store, key: str = KEY, content: str = "content") -> Catalog:
    store_objects(store, content)
    catalog = Catalog(store)
    assert catalog.publish(document(key, content))
    return catalog


def test_a_snapshot_that_was_found_once_is_known_when_the_store_is_away(
    store: Store, local: NodeCatalog, away: Catalog
) -> None:
    assert local.look_up(away, KEY).document is None
    assert local.look_up(published(store), KEY) == Lookup("found", document())
    found = local.look_up(away, KEY)
    assert (found.kind, found.document) == ("unreachable", document())
    assert "503" in found.why
    assert local.look_up(away, OTHER_KEY).document is None


def test_the_next_process_knows_it_too(store: Store, local: NodeCatalog, away: Catalog, tmp_path: Path) -> None:
    local.look_up(published(store), KEY)
    assert NodeCatalog(tmp_path, lambda line: None).look_up(away, KEY).document == document()


def test_what_was_replaced_is_replaced_here(store: Store, local: NodeCatalog, away: Catalog) -> None:
    catalog = published(store)
    local.look_up(catalog, KEY)
    store_objects(store, "new")
    catalog.publish(document(content="new"), replace=True)
    local.look_up(catalog, KEY)
    assert local.look_up(away, KEY).document == document(content="new")


def test_a_removed_snapshot_is_not_used_when_the_store_is_unavailable(
    store: Store, local: NodeCatalog, away: Catalog
) -> None:
    catalog = published(store)
    local.look_up(catalog, KEY)
    catalog.remove(KEY, 0.0)
    assert local.look_up(catalog, KEY).kind == "none"
    assert local.look_up(away, KEY).document is None


def test_what_was_built_here_is_known_here(local: NodeCatalog, away: Catalog) -> None:
    keep(local, document())
    assert local.look_up(away, KEY).document == document()


def test_a_damaged_memory_is_no_memory(local: NodeCatalog, away: Catalog, tmp_path: Path) -> None:
    keep(local, document())
    (environments_folder(tmp_path) / document_name(KEY)).write_bytes(b"{")
    assert local.look_up(away, KEY).document is None
    keep(local, document())
    assert local.look_up(away, KEY).document == document()


def test_a_manifest_is_fetched_once_and_verified(store: Store, local: NodeCatalog, tmp_path: Path) -> None:
    store_objects(store)
    manifest = document().manifest
    with pytest.raises(TransientError):
        local.object(manifest, FaultyStore(store, lambda request: DOWN))
    data = local.object(manifest, store)
    assert data == b"manifest of content"
    down = FaultyStore(store, lambda request: DOWN)
    assert local.object(manifest, down) == data
    assert sum(down.requests.values()) == 0
    kept = next(path for path in environments_folder(tmp_path).rglob("*") if path.name == manifest.name[7:])
    kept.write_bytes(b"manifest of another")
    assert local.object(manifest, store) == data
    with pytest.raises(NotFoundError):
        local.object(document(content="none").manifest, store)


def test_copies_that_were_not_used_for_long_are_deleted(local: NodeCatalog, away: Catalog, tmp_path: Path) -> None:
    origin = MemoryStore(uuid.uuid4().hex)
    keys = [f"{number:064x}" for number in range(3)]
    folder = environments_folder(tmp_path)
    names = {}
    for key in keys[:2]:
        store_objects(origin, key)
        keep(local, document(key, key))
        names[key] = document(key, key).manifest.name[7:]
        local.object(document(key, key).manifest, origin)
    copies = [path for path in folder.rglob("*") if path.name in ("document", *names.values())]
    for path in copies:
        os.utime(path, (1, 1))
    keep(local, document(keys[1], keys[1]))  # used again: its copies count as recent
    local.object(document(keys[1], keys[1]).manifest, origin)
    keep(local, document(keys[2]))
    known = [key for key in keys if local.look_up(away, key).document is not None]
    assert (len(copies), known) == (4, keys[1:])
    assert [path.name for path in (folder / "sha256").rglob("*") if path.is_file()] == [names[keys[1]]]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=64k") as folder:
        with (folder / "rest").open("wb", buffering=0) as rest, contextlib.suppress(OSError):
            while rest.write(bytes(4096)):
                pass
        yield folder


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_costs_the_memory_and_no_start(full_disk: Path, store: Store) -> None:
    said: list[str] = []
    local = NodeCatalog(full_disk, said.append)
    assert local.look_up(published(store), KEY) == Lookup("found", document())
    assert local.object(document().manifest, store) == b"manifest of content"
    assert ["no copy was stored on this node" in line for line in said] == [True]  # once, not for each object

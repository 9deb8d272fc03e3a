"""Pruning: unused objects are deleted, in steps that may be interrupted; used ones never are."""

from __future__ import annotations

import contextlib
import itertools
import json
import uuid
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from bootseer.artifact.document import encode
from bootseer.artifact.hotsets import hotset_name
from bootseer.artifact.objects import missing, put
from bootseer.artifact.process_snapshots import process_name
from bootseer.artifact.prune import GRACE_S
from bootseer.env.document import document_name
from bootseer.env.life.catalog import ENVIRONMENTS, TOMBSTONE_SCHEMA, TRASH, Catalog, prune
from bootseer.env.life.unsafe import MAX_AGE_S, Mark, mark_name, write_mark
from bootseer.errors import PermanentError, TransientError
from bootseer.store.file import FileStore
from bootseer.store.store import Store
from env.life.samples import BUILT_S, KEY, OTHER_KEY, NoSecrets, document, store_objects
from store_doubles import Fault, FaultyStore, MemoryStore, Request

LATER_S = BUILT_S + GRACE_S + 1
DOWN = Fault(status=503, retry_after_s=3600)


@pytest.fixture
def store() -> Store:
    return MemoryStore(uuid.uuid4().hex)


@pytest.fixture
def catalog(store: Store) -> Catalog:
    return Catalog(store)


def published(catalog: Catalog, key: str = KEY, content: str = "content", **changes: object) -> None:
    store_objects(catalog.store, content)
    assert catalog.publish(document(key, content, **changes), now_s=BUILT_S)


def is_complete(catalog: Catalog, content: str = "content") -> bool:
    return not missing(catalog.store, document(content=content).objects)


def num_missing(catalog: Catalog, content: str = "content") -> int:
    return len(missing(catalog.store, document(content=content).objects))


def trash(store: Store) -> list[str]:
    return [stored.name for stored in store.list(TRASH)]


def test_objects_of_a_removed_snapshot_go_after_the_grace(catalog: Catalog, store: Store) -> None:
    published(catalog)
    published(catalog, OTHER_KEY, "other")
    catalog.remove(KEY, BUILT_S)
    early = prune(catalog, BUILT_S + GRACE_S)
    assert (len(early.deleted), early.num_waiting) == (0, 1)
    assert is_complete(catalog)
    done = prune(catalog, LATER_S)
    assert (len(done.deleted), done.num_waiting, done.problems) == (3, 0, [])
    assert done.freed_bytes == sum(stored.size_bytes for stored in document().objects)
    assert num_missing(catalog) == 3
    assert is_complete(catalog, "other")
    assert trash(store) == []
    assert len(prune(catalog, LATER_S).deleted) == 0


def test_objects_that_another_snapshot_shares_stay(catalog: Catalog, store: Store) -> None:
    published(catalog)
    published(catalog, OTHER_KEY)
    catalog.remove(KEY, BUILT_S)
    assert len(prune(catalog, LATER_S).deleted) == 0
    assert is_complete(catalog)
    assert trash(store) == []
    catalog.remove(OTHER_KEY, LATER_S)
    assert len(prune(catalog, LATER_S + GRACE_S + 1).deleted) == 3


def test_objects_that_another_removed_snapshot_shares_have_its_grace(catalog: Catalog) -> None:
    published(catalog)
    published(catalog, OTHER_KEY)
    catalog.remove(KEY, BUILT_S)
    catalog.remove(OTHER_KEY, LATER_S)
    done = prune(catalog, LATER_S)
    assert (len(done.deleted), done.num_waiting) == (0, 1)
    assert is_complete(catalog)
    assert len(prune(catalog, LATER_S + GRACE_S + 1).deleted) == 3


def test_what_is_mounted_on_this_node_stays_however_long_ago_it_was_removed(catalog: Catalog) -> None:
    published(catalog)
    catalog.remove(KEY, BUILT_S)
    mounted = [document().file.identity]
    done = prune(catalog, BUILT_S + 1e8, in_use=mounted)
    assert (len(done.deleted), done.num_in_use) == (0, 1)
    assert is_complete(catalog)
    assert len(prune(catalog, BUILT_S + 1e8).deleted) == 3


def test_what_an_image_shares_stays_until_it_does_not(catalog: Catalog, store: Store) -> None:
    published(catalog)
    catalog.remove(KEY, BUILT_S)
    shared = document().file.stripes[0].name
    done = prune(catalog, LATER_S, also_used=lambda: [shared])
    assert (len(done.deleted), done.num_in_use) == (2, 1)
    assert store.stat(shared)
    assert prune(catalog, LATER_S).deleted == {shared}
    assert num_missing(catalog) == 3


def test_nothing_goes_while_it_is_not_known_what_is_used(catalog: Catalog, store: Store) -> None:
    published(catalog)
    catalog.remove(KEY, BUILT_S)

    def unknown() -> list[str]:
        raise TransientError("no answer about images")

    done = prune(catalog, LATER_S, also_used=unknown)
    assert done.problems == ["nothing was deleted, because it is unknown what else is used: no answer about images"]
    put(store, document_name(OTHER_KEY), json.dumps({"schema": "bootseer.environment/9"}).encode())
    assert "not all environments could be read" in prune(catalog, LATER_S).problems[0]
    assert is_complete(catalog)
    assert len(trash(store)) == 1


def test_nothing_goes_while_a_tombstone_that_may_share_it_cannot_be_read(catalog: Catalog, store: Store) -> None:
    published(catalog)
    catalog.remove(KEY, BUILT_S)
    (due,) = trash(store)
    published(catalog, OTHER_KEY)
    catalog.remove(OTHER_KEY, BUILT_S + GRACE_S)  # a job on another node may still have it mounted
    (young,) = set(trash(store)) - {due}

    def fails(request: Request) -> Fault | None:
        return DOWN if (request.verb, request.name) == ("read", young) else None

    done = prune(Catalog(FaultyStore(store, fails)), LATER_S)
    assert (len(done.deleted), len(done.problems)) == (0, 2)
    assert "nothing was deleted" in done.problems[1]
    assert is_complete(catalog)


def test_a_document_that_is_none_holds_up_nothing(catalog: Catalog, store: Store) -> None:
    published(catalog)
    catalog.remove(KEY, BUILT_S)
    put(store, document_name(OTHER_KEY), b"{")
    assert len(prune(catalog, LATER_S).deleted) == 3


def test_snapshots_past_their_age_are_removed_and_wait_for_the_grace(catalog: Catalog) -> None:
    published(catalog, max_age_s=100.0)
    published(catalog, OTHER_KEY, "other", max_age_s=1e9)
    done = prune(catalog, BUILT_S + 101)
    assert (done.expired, done.num_waiting, len(done.deleted)) == ([KEY], 1, 0)
    assert catalog.find(KEY) is None
    assert catalog.find(OTHER_KEY) is not None
    assert len(prune(catalog, BUILT_S + 101 + GRACE_S + 1).deleted) == 3


def test_a_clock_that_went_back_removes_nothing(catalog: Catalog) -> None:
    published(catalog, max_age_s=100.0)
    catalog.remove(OTHER_KEY, BUILT_S)
    assert prune(catalog, 0.0).expired == []
    assert catalog.find(KEY) is not None


def test_a_tombstone_from_the_future_is_counted_from_today(catalog: Catalog, store: Store) -> None:
    published(catalog)
    catalog.remove(KEY, BUILT_S + 1e9)
    assert prune(catalog, BUILT_S).num_waiting == 1
    assert len(prune(catalog, LATER_S).deleted) == 3


def test_a_forged_tombstone_deletes_nothing(catalog: Catalog, store: Store) -> None:
    published(catalog)
    good = json.loads(encode(ENVIRONMENTS.tombstone(document(), BUILT_S), TOMBSTONE_SCHEMA))
    forged = [
        {"objects": [[document_name(KEY), 5]]},
        {"objects": [["../x", 5]]},
        {"removed_s": float("nan")},
        {"key": OTHER_KEY},
        {"identity": "x"},
    ]
    name = TRASH + ENVIRONMENTS.tombstone(document(), BUILT_S).name
    for change in forged:
        put(store, name, json.dumps({**good, **change}).encode())
        done = prune(catalog, LATER_S)
        assert (len(done.deleted), len(done.problems)) == (0, 1)
    put(store, name, json.dumps(good).encode())
    assert len(prune(catalog, LATER_S).deleted) == 0  # the snapshot exists
    assert is_complete(catalog)
    assert catalog.find(KEY) == document()


@pytest.mark.parametrize("name_of", [hotset_name, process_name])
def test_what_starts_stored_goes_with_the_last_snapshot_of_their_content(
    catalog: Catalog, store: Store, name_of: Callable[[str, str], str]
) -> None:
    published(catalog)
    published(catalog, OTHER_KEY)
    name = name_of(document().digest, "train.py-0123456789ab")
    put(store, name, b"x")
    catalog.remove(KEY, BUILT_S)
    prune(catalog, LATER_S)
    assert store.stat(name)
    catalog.remove(OTHER_KEY, LATER_S)
    prune(catalog, LATER_S + GRACE_S + 1)
    assert list(store.list(name)) == []


def test_a_snapshot_that_was_built_anew_meanwhile_does_not_expire(catalog: Catalog, store: Store) -> None:
    published(catalog, max_age_s=10.0)
    store_objects(store, "new")
    new = replace(document(content="new", max_age_s=10.0), built_s=LATER_S)

    def plan(request: Request) -> Fault | None:
        if request.number == 2:  # the document has been listed and read
            catalog.publish(new, replace=True, now_s=LATER_S)
        return None

    assert prune(Catalog(FaultyStore(store, plan)), LATER_S).expired == []
    assert catalog.find(KEY) == new


class CrashedError(BaseException):
    """The process is killed before this request."""


def crashing(store: Store, at: int) -> FaultyStore:
    def plan(request: Request) -> Fault | None:
        if request.number == at:
            raise CrashedError
        return None

    return FaultyStore(store, plan)


def step_remove(catalog: Catalog) -> None:
    catalog.remove(KEY, BUILT_S)


def step_replace(catalog: Catalog) -> None:
    catalog.publish(document(content="new"), replace=True, now_s=BUILT_S)


def step_prune(catalog: Catalog) -> None:
    prune(catalog, LATER_S)


@pytest.mark.parametrize("step", [step_remove, step_replace, step_prune])
def test_a_crash_at_any_request_leaves_only_snapshots_that_are_whole(step: Callable[[Catalog], None]) -> None:
    """After an interruption at any request, all listed snapshots are complete, and a second run deletes the rest."""
    finished = False
    for at in itertools.count():
        store = MemoryStore(uuid.uuid4().hex)
        catalog = Catalog(store)
        published(catalog)
        published(catalog, OTHER_KEY, "other")
        store_objects(store, "new")
        if step is step_prune:
            catalog.remove(KEY, BUILT_S)
        try:
            step(Catalog(crashing(store, at)))
            finished = True
        except CrashedError:
            pass
        for found in catalog.all().documents:
            assert missing(catalog.store, found.objects) == []
        step(catalog)
        assert catalog.find(KEY) == (document(content="new") if step is step_replace else None)
        prune(catalog, LATER_S)
        assert (num_missing(catalog), trash(store)) == (3, [])
        assert is_complete(catalog, "other")
        if finished:
            assert at >= 3
            return


def test_a_store_that_deletes_nothing_is_said_and_asked_again_next_time(catalog: Catalog, store: Store) -> None:
    published(catalog)
    catalog.remove(KEY, BUILT_S)
    refusing = FaultyStore(store, lambda request: Fault(status=403) if request.verb == "delete" else None)
    done = prune(Catalog(refusing), LATER_S)
    assert len(done.deleted) == 0
    assert "403" in done.problems[0]
    assert len(trash(store)) == 1
    assert len(prune(catalog, LATER_S).deleted) == 3


def test_a_snapshot_that_is_published_while_its_objects_are_deleted_does_not_stay_without_them(
    catalog: Catalog, store: Store
) -> None:
    """At each request of the prune, another node publishes the same content again."""
    for at in itertools.count():
        published(catalog)
        catalog.remove(KEY, BUILT_S)
        met = []

        def plan(request: Request, at: int = at, met: list[int] = met) -> Fault | None:
            if request.number == at:
                met.append(at)
                with contextlib.suppress(PermanentError):
                    catalog.publish(document())  # its objects have been uploaded before
            return None

        prune(Catalog(FaultyStore(store, plan)), LATER_S)
        assert catalog.find(KEY) is None or is_complete(catalog)
        if not met:
            return
        catalog.remove(KEY, BUILT_S)
        prune(catalog, LATER_S)


def test_in_a_folder_the_bytes_are_freed(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("store")
    catalog = Catalog(FileStore(folder))
    published(catalog)
    catalog.remove(KEY, BUILT_S)
    prune(catalog, LATER_S)
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_marks_of_setups_go_when_they_do_not_count_any_more(catalog: Catalog, store: Store) -> None:
    write_mark(store, Mark(KEY, "it mounted tmpfs on /srv", "n1", BUILT_S), NoSecrets())
    write_mark(store, Mark(OTHER_KEY, "it mounted tmpfs on /srv", "n1", BUILT_S + MAX_AGE_S), NoSecrets())
    prune(catalog, BUILT_S + MAX_AGE_S + 1)
    assert [stored.name for stored in store.list("environments/")] == [mark_name(OTHER_KEY)]

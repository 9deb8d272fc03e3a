"""Snapshots in a store: found, published and removed, whatever the store contains and however it fails."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.artifact.catalog import Listing
from bootseer.artifact.document import OtherVersionError
from bootseer.artifact.kind import Tombstone
from bootseer.artifact.objects import missing, put, read_all
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.env.document import MAX_BYTES, document_name
from bootseer.env.life.catalog import ENVIRONMENTS, TRASH, Catalog, NodeCatalog
from bootseer.errors import CorruptError, NotFoundError, PermanentError, SignatureError, TransientError, UsageError
from bootseer.store.store import Store, Stored
from env.life.samples import BUILT_S, KEY, OTHER_KEY, document, store_objects
from signing_keys import make_key, trust
from store_doubles import Fault, FaultyStore, MemoryStore, Request


@pytest.fixture
def store() -> Store:
    return MemoryStore(uuid.uuid4().hex)


@pytest.fixture
def catalog(store: Store) -> Catalog:
    return Catalog(store)


def published(catalog: Catalog, key: str = KEY, content: str = "content") -> None:
    store_objects(catalog.store, content)
    assert catalog.publish(document(key, content), now_s=BUILT_S)


def tombstones(store: Store) -> list[Tombstone]:
    return [Catalog(store).read_tombstone(stored.name) for stored in store.list(TRASH)]


def test_what_was_published_is_found_by_its_key(catalog: Catalog) -> None:
    assert catalog.find(KEY) is None
    assert catalog.look(KEY).kind == "none"
    published(catalog)
    assert catalog.find(KEY) == document()
    assert (catalog.look(KEY).kind, catalog.look(KEY).document) == ("found", document())
    assert catalog.find(OTHER_KEY) is None


def test_the_first_publication_wins(catalog: Catalog, store: Store) -> None:
    published(catalog)
    store_objects(store, "other")
    assert not catalog.publish(document(content="other"), now_s=BUILT_S)
    assert catalog.find(KEY) == document()
    # No document names the second one's objects: they are recorded for the next prune.
    assert [grave.digest for grave in tombstones(store)] == [document(content="other").digest]


def test_the_same_snapshot_may_be_published_again(catalog: Catalog, store: Store) -> None:
    published(catalog)
    published(catalog)
    assert tombstones(store) == []


def test_a_snapshot_is_replaced_when_that_is_wanted_and_its_objects_are_remembered(
    catalog: Catalog, store: Store
) -> None:
    published(catalog)
    store_objects(store, "other")
    assert catalog.publish(document(content="other"), replace=True, now_s=BUILT_S + 5)
    assert catalog.find(KEY) == document(content="other")
    assert tombstones(store) == [ENVIRONMENTS.tombstone(document(), BUILT_S + 5)]


def test_a_snapshot_with_missing_objects_is_not_found(catalog: Catalog, store: Store) -> None:
    names = store_objects(store)
    store.delete(names[1])
    for again in (False, True):
        with pytest.raises(PermanentError, match=f"{names[1]} of the environment is not there"):
            catalog.publish(document(), replace=again)
        assert catalog.find(KEY) is None


def test_a_lost_response_does_not_make_a_publication_fail(catalog: Catalog, store: Store) -> None:
    store_objects(store)
    faulty = FaultyStore(store, [Fault(cut_after=0)])
    assert Catalog(faulty).publish(document())
    assert faulty.requests[document_name(KEY)] > 1
    assert tombstones(store) == []


def test_a_busy_store_is_asked_again(catalog: Catalog, store: Store) -> None:
    store_objects(store)
    busy = Fault(status=429, retry_after_s=0.01)
    assert Catalog(FaultyStore(store, [busy, None, busy])).publish(document())
    assert Catalog(FaultyStore(store, [busy])).find(KEY) == document()


DOWN = Fault(status=503, retry_after_s=3600)


def test_a_store_that_is_down_is_distinguished_from_a_snapshot_that_does_not_exist(store: Store) -> None:
    catalog = Catalog(FaultyStore(store, lambda request: DOWN))
    with pytest.raises(TransientError):
        catalog.find(KEY)
    found = catalog.look(KEY)
    assert (found.kind, found.document) == ("unreachable", None)
    assert "503" in found.why
    for call in (lambda: catalog.publish(document()), lambda: catalog.publish(document(), replace=True),
                 lambda: catalog.remove(KEY, 0), catalog.all):  # fmt: skip
        with pytest.raises(TransientError):
            call()


def test_a_hanging_store_is_waited_for_no_longer_than_was_asked(store: Store) -> None:
    waits: list[float] = []
    catalog = Catalog(FaultyStore(store, lambda request: Fault(delay_s=3600), sleep=waits.append))
    assert catalog.look(KEY, timeout_s=7.0).kind == "unreachable"
    assert waits
    assert max(waits) <= 7.0


def test_a_listing_waits_for_no_document_longer_than_a_minute(catalog: Catalog, store: Store) -> None:
    published(catalog)
    waits: list[float] = []
    plan = lambda request: Fault(delay_s=3600) if request.verb == "read" else None  # noqa: E731
    found = Catalog(FaultyStore(store, plan, sleep=waits.append)).all()
    assert (found.documents, len(found.unread)) == ((), 1)
    assert max(waits) <= 60.0


@pytest.mark.parametrize("status", [401, 403])
def test_a_store_that_refuses_is_unreachable(store: Store, status: int) -> None:
    catalog = Catalog(FaultyStore(store, lambda request: Fault(status=status)))
    assert catalog.look(KEY).kind == "unreachable"


@pytest.mark.parametrize(
    "data",
    [b"", b"{}x", document(OTHER_KEY).encode(), b" " * (MAX_BYTES + 1), document().encode()[:-10]],
    ids=["empty", "no JSON", "of another key", "huge", "cut"],
)
def test_what_is_no_document_of_the_key_is_broken(catalog: Catalog, store: Store, data: bytes) -> None:
    put(store, document_name(KEY), data)
    with pytest.raises(CorruptError, match=f"environments/{KEY}/document"):
        catalog.find(KEY)
    assert catalog.look(KEY).kind == "broken"


def test_a_damaged_byte_on_the_way_is_broken_and_never_used(catalog: Catalog, store: Store) -> None:
    published(catalog)
    at = document().encode().index(b'"observed"') + 2
    assert Catalog(FaultyStore(store, [Fault(corrupt_at=at)])).look(KEY).kind == "broken"


def test_another_version_is_left_alone(catalog: Catalog, store: Store) -> None:
    value = {**json.loads(document().encode()), "schema": "bootseer.environment/9"}
    put(store, document_name(KEY), json.dumps(value).encode())
    with pytest.raises(OtherVersionError):
        catalog.find(KEY)
    assert catalog.look(KEY).kind == "other-version"


@pytest.mark.parametrize("key", ["", "trash", "../x", "AB" * 32, KEY + "/x"])
def test_what_is_no_key_is_refused(catalog: Catalog, key: str) -> None:
    for call in (catalog.find, lambda bad: catalog.remove(bad, 0)):
        with pytest.raises(UsageError, match="not a request key"):
            call(key)


def test_one_that_cannot_be_read_does_not_hide_the_others(catalog: Catalog, store: Store) -> None:
    published(catalog)
    published(catalog, OTHER_KEY, "other")
    broken, newer, away = ("1" * 64, "2" * 64, "3" * 64)
    put(store, document_name(broken), b"{")
    put(store, document_name(newer), b'{"schema":"bootseer.environment/9"}')
    put(store, document_name(away), document(away).encode())
    put(store, f"environments/{'4' * 64}/lease", b"")
    put(store, "environments/strange/document", b"")

    def plan(request: Request) -> Fault | None:
        return DOWN if away in request.name else None

    found = Catalog(FaultyStore(store, plan)).all()
    assert [each.key for each in found.documents] == [KEY, OTHER_KEY]
    assert [line.partition(":")[0] for line in found.broken] == [broken[:12]]
    assert [line.partition(":")[0] for line in found.unread] == [newer[:12], away[:12]]


def test_any_number_of_snapshots_can_be_listed() -> None:
    class Full(MemoryStore):
        def list(self, prefix: str = "") -> Iterator[Stored]:
            yield from (Stored(document_name(f"{number:064x}"), 1) for number in range(10_001))

    assert Catalog(Full(uuid.uuid4().hex)).all() == Listing((), (), ())  # meanwhile removed by another node


def test_a_removed_snapshot_is_not_found_and_its_objects_stay_for_current_readers(
    catalog: Catalog, store: Store
) -> None:
    published(catalog)
    assert catalog.remove(KEY, BUILT_S + 9)
    assert catalog.find(KEY) is None
    assert tombstones(store) == [ENVIRONMENTS.tombstone(document(), BUILT_S + 9)]
    assert missing(catalog.store, document().objects) == []
    assert not catalog.remove(KEY, BUILT_S + 10)
    assert [grave.removed_s for grave in tombstones(store)] == [BUILT_S + 9]


def test_a_removal_that_was_interrupted_is_finished_by_the_next(catalog: Catalog, store: Store) -> None:
    published(catalog)
    with pytest.raises(TransientError):
        Catalog(FaultyStore(store, lambda request: DOWN if request.verb == "delete" else None)).remove(KEY, 1.0)
    assert catalog.find(KEY) == document()
    assert catalog.remove(KEY, 2.0)
    assert [grave.removed_s for grave in tombstones(store)] == [2.0]


def test_it_is_known_when_a_snapshot_of_a_key_was_removed(catalog: Catalog) -> None:
    published(catalog)
    assert not catalog.has_removed(KEY, 0.0)
    catalog.remove(KEY, BUILT_S + 9)
    published(catalog)
    assert catalog.has_removed(KEY, BUILT_S + 9)
    assert not catalog.has_removed(KEY, BUILT_S + 10)
    assert not catalog.has_removed(OTHER_KEY, 0.0)


def test_an_unreadable_document_can_be_removed(catalog: Catalog, store: Store) -> None:
    put(store, document_name(KEY), b"{")
    assert catalog.remove(KEY, 1.0)
    with pytest.raises(NotFoundError):
        store.stat(document_name(KEY))


class TestSigned:
    """Snapshots of which a signature is required."""

    @pytest.fixture
    def signs(self, tmp_path: Path) -> Signatures:
        key = make_key(tmp_path / "key")
        return Signatures((str(key),), trust(tmp_path / "trusted", key))

    def test_a_signed_snapshot_is_found_by_all(self, store: Store, signs: Signatures) -> None:
        published(Catalog(store, signatures=signs))
        for signatures in (signs, Signatures(trusted=signs.trusted), UNSIGNED):
            catalog = Catalog(store, signatures=signatures)
            assert catalog.find(KEY) == document()
            assert catalog.all().documents == (document(),)
        published(Catalog(store, signatures=signs))  # again, with the same content

    def test_a_snapshot_without_a_signature_is_found_where_none_is_required(
        self, store: Store, signs: Signatures
    ) -> None:
        published(Catalog(store))
        catalog = Catalog(store, signatures=signs)
        assert (catalog.look(KEY).kind, catalog.look(KEY).document) == ("unsigned", None)
        with pytest.raises(SignatureError, match="is not signed"):
            catalog.find(KEY)
        store_objects(store, "other")
        assert catalog.publish(document(content="other"), replace=True, now_s=BUILT_S)
        assert catalog.find(KEY) == document(content="other")

    def test_the_signed_snapshot_of_one_key_does_not_stand_for_another(self, store: Store, signs: Signatures) -> None:
        catalog = Catalog(store, signatures=signs)
        published(catalog)
        put(store, document_name(OTHER_KEY), read_all(store, document_name(KEY), 1 << 20))
        assert catalog.look(OTHER_KEY).kind == "unsigned"
        forged = signs.seal(document_name(OTHER_KEY), document().encode())  # only possible with the builder's key
        put(store, document_name(OTHER_KEY), forged)
        assert catalog.look(OTHER_KEY).kind == "broken"

    def test_an_envelope_that_is_too_large_or_none_is_broken(self, store: Store, signs: Signatures) -> None:
        catalog = Catalog(store, signatures=signs)
        for data in (b'{"payload":"' + b"A" * (2 << 20), b'{"payload":"', b'{"payload":""}'):
            put(store, document_name(KEY), data)
            assert catalog.look(KEY).kind == "broken"

    def test_a_document_that_is_too_large_with_its_signature_is_not_published(
        self, store: Store, signs: Signatures
    ) -> None:
        store_objects(store, "content")
        large = replace(document(), components={str(number): "x" * 60_000 for number in range(15)})
        with pytest.raises(PermanentError, match="too many"):
            Catalog(store, signatures=signs).publish(large)
        assert Catalog(store).publish(large)

    def test_what_the_node_knows_is_verified_when_the_store_is_away(
        self, store: Store, signs: Signatures, tmp_path: Path
    ) -> None:
        down = FaultyStore(store, lambda request: Fault(status=503, retry_after_s=3600))
        published(Catalog(store, signatures=signs))
        strict = Signatures(trusted=signs.trusted)
        local = NodeCatalog(tmp_path / "cache", print, strict)
        assert local.look_up(Catalog(store, signatures=strict), KEY).document == document()
        assert local.look_up(Catalog(down, signatures=strict), KEY).document == document()
        other = make_key(tmp_path / "other")
        changed = Signatures(trusted=trust(tmp_path / "changed", other))  # the key is no longer trusted
        assert (
            NodeCatalog(tmp_path / "cache", print, changed).look_up(Catalog(down, signatures=changed), KEY).document
            is None
        )

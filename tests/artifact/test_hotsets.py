"""Hot sets on the node and in the image's store: loaded from and saved to both, without making starts fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.artifact.hotsets import HotSets, hotset_name, merge_record
from bootseer.artifact.materialize import MountOptions
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.artifact.workload import is_publisher
from bootseer.errors import AccessError, TransientError
from bootseer.fetch import hotset
from bootseer.fetch.hotset import HotSet, Record, encode_hot_set
from bootseer.store.file import FileStore
from bootseer.store.store import Upload
from signing_keys import make_key, trust

DIGEST = "sha256:" + "ab" * 32
WORKLOAD = "train.py-0123456789ab"
FILE = "cd" * 32


def record(started_s: float, *blocks: int) -> Record:
    return Record(started_s, 1000, {(FILE, block): 10 * i for i, block in enumerate(blocks)})


class ReadOnly(FileStore):
    """A folder that refuses uploads, like a registry without credentials for them."""

    def upload(self) -> Upload:
        raise AccessError("the registry refuses to push")


class Away(FileStore):
    """An unreachable store."""

    def read(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        raise TransientError("no answer", retry_after_s=3600)


def sets(
    tmp_path: Path, store: FileStore | None, node: str = "n0", signatures: Signatures = UNSIGNED
) -> tuple[HotSets, list[str]]:
    said: list[str] = []
    return HotSets(tmp_path / node, DIGEST, store, said.append, signatures), said


def test_one_node_s_record_is_the_next_node_s_hot_set(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    first, said = sets(tmp_path, store)
    assert first.load(WORKLOAD) is None
    first.add_record(WORKLOAD, record(1, 7, 3), publish=True)
    other, _ = sets(tmp_path, store, "n1")
    found = other.load(WORKLOAD)
    assert found is not None
    assert found.plan() == [(FILE, 7), (FILE, 3)]
    assert said == []


def test_runs_of_both_places_count_once(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    for node, started in (("n0", 1), ("n1", 2)):
        known, _ = sets(tmp_path, store, node)
        known.add_record(WORKLOAD, record(started, 1, 2, 3), publish=True)
    known, _ = sets(tmp_path, store, "n0")
    found = known.load(WORKLOAD)
    assert found is not None
    assert [run.started_s for run in found.records] == [1, 2]


def test_without_write_access_the_set_stays_on_the_node_with_one_message(tmp_path: Path) -> None:
    known, said = sets(tmp_path, ReadOnly(tmp_path / "store"))
    known.add_record(WORKLOAD, record(1, 5), publish=True)
    assert len(said) == 1
    assert "kept on this node" in said[0]
    assert known.load(WORKLOAD) is not None


def test_without_the_option_nothing_is_published(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    known, _ = sets(tmp_path, store)
    known.add_record(WORKLOAD, record(1, 5), publish=False)
    assert list(store.list()) == []


def test_a_store_that_is_away_costs_the_set_and_nothing_else(tmp_path: Path) -> None:
    known, said = sets(tmp_path, Away(tmp_path / "store"))
    assert known.load(WORKLOAD) is None
    assert said == ["no hot set: no answer"]


def test_a_set_that_may_be_newer_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path / "store")
    monkeypatch.setattr(hotset, "SCHEMA", "bootseer.hotset/2")
    known, _ = sets(tmp_path, store)
    known.add_record(WORKLOAD, record(1, 5), publish=True)
    monkeypatch.undo()

    def stored() -> list[bytes]:
        return [path.read_bytes() for path in sorted(tmp_path.rglob(WORKLOAD))]

    newer = stored()
    known, said = sets(tmp_path, store)
    known.add_record(WORKLOAD, record(2, 6), publish=True)
    assert stored() == newer
    assert len(newer) == 2
    assert ["the one there, which may be newer, cannot be read" in line for line in said] == [True, True]
    known, said = sets(tmp_path, Away(tmp_path / "store"), "n1")
    known.add_record(WORKLOAD, record(2, 6), publish=True)
    assert set(newer) <= set(stored())
    assert len(said) == 1


@pytest.mark.parametrize(
    "data",
    [b"", b"nonsense", encode_hot_set(HotSet(DIGEST, "other")), encode_hot_set(HotSet("other", WORKLOAD))],
)
def test_invalid_and_foreign_sets_are_not_used(tmp_path: Path, data: bytes) -> None:
    store = FileStore(tmp_path / "store")
    upload = store.upload()
    upload.write(data)
    upload.commit(hotset_name(DIGEST, WORKLOAD))
    known, said = sets(tmp_path, store)
    assert known.load(WORKLOAD) is None
    assert len(said) == 1


def test_the_notes_of_a_merge_appear_as_a_whole(tmp_path: Path) -> None:
    """The start reads them as soon as the file exists; an empty one has no notes."""
    merged = tmp_path / "kept"
    merged.write_text("old")
    options = MountOptions(cache=tmp_path, runtime=tmp_path)
    with merged.open() as reader:
        merge_record(options, DIGEST, None, merged, Record(1.0, 1000, {}))
        assert (reader.read(), merged.read_text()) == ("old", "[]")


def test_a_few_nodes_of_a_large_job_publish_and_a_small_job_s_all() -> None:
    assert all(is_publisher(f"node{i}", count) for count in (None, 1, 2, 7) for i in range(7))
    publishers = sum(is_publisher(f"node{i}", 1440) for i in range(1440))
    assert 1 <= publishers <= 12


class TestSigned:
    """Hot sets with required signatures."""

    @pytest.fixture
    def signs(self, tmp_path: Path) -> Signatures:
        key = make_key(tmp_path / "key")
        return Signatures((str(key),), trust(tmp_path / "trusted", key))

    @pytest.fixture
    def strict(self, signs: Signatures) -> Signatures:
        return Signatures(trusted=signs.trusted)

    def test_a_set_that_a_trusted_key_signed_is_used(
        self, tmp_path: Path, signs: Signatures, strict: Signatures
    ) -> None:
        store = FileStore(tmp_path / "store")
        sets(tmp_path, store, "n0", signs)[0].add_record(WORKLOAD, record(1, 7), publish=True)
        for signatures in (signs, strict, UNSIGNED):
            known, said = sets(tmp_path, store, "n1", signatures)
            assert known.load(WORKLOAD) is not None
            assert said == []

    def test_a_set_without_a_signature_is_ignored_with_a_note(self, tmp_path: Path, strict: Signatures) -> None:
        store = FileStore(tmp_path / "store")
        sets(tmp_path, store)[0].add_record(WORKLOAD, record(1, 7), publish=True)
        known, said = sets(tmp_path, store, "n1", strict)
        known.copy_to_node(WORKLOAD)
        assert known.load(WORKLOAD) is None
        assert all(line.startswith("no hot set: ") and line.endswith("is not signed") for line in said)

    def test_the_signed_set_of_another_image_or_workload_is_ignored(
        self, tmp_path: Path, signs: Signatures, strict: Signatures
    ) -> None:
        store = FileStore(tmp_path / "store")
        other = "sha256:" + "cd" * 32
        HotSets(tmp_path / "n0", other, store, print, signs).add_record(WORKLOAD, record(1, 7), publish=True)
        sets(tmp_path, store, "n0", signs)[0].add_record("other", record(1, 7), publish=True)
        for name in (hotset_name(other, WORKLOAD), hotset_name(DIGEST, "other")):
            (tmp_path / "store" / hotset_name(DIGEST, WORKLOAD)).write_bytes((tmp_path / "store" / name).read_bytes())
            known, said = sets(tmp_path, store, "n1", strict)
            assert known.load(WORKLOAD) is None
            assert len(said) == 1
            assert "holds another signed object" in said[0]

    @pytest.mark.parametrize("required", [True, False])
    def test_a_signed_set_is_not_replaced_by_one_without_a_signature(
        self, tmp_path: Path, signs: Signatures, strict: Signatures, required: bool
    ) -> None:
        store = FileStore(tmp_path / "store")
        sets(tmp_path, store, "n0", signs)[0].add_record(WORKLOAD, record(1, 7), publish=True)
        known, said = sets(tmp_path, store, "n1", strict if required else UNSIGNED)
        known.add_record(WORKLOAD, record(2, 7), publish=True)
        assert [line for line in said if "no key; it is kept on this node" in line] == said != []
        assert sets(tmp_path, store, "n2", strict)[0].load(WORKLOAD) is not None
        found = known.load(WORKLOAD)
        assert found is not None
        assert len(found.records) == 2

    def test_runs_without_a_signature_are_not_signed_with_ours(
        self, tmp_path: Path, signs: Signatures, strict: Signatures
    ) -> None:
        """Otherwise a node that signs but requires no signature would sign what anyone has written into the store."""
        store = FileStore(tmp_path / "store")
        sets(tmp_path, store)[0].add_record(WORKLOAD, record(1, 7), publish=True)
        sets(tmp_path, store, "n1", Signatures(signs.signing))[0].add_record(WORKLOAD, record(2, 8), publish=True)
        found = sets(tmp_path, store, "n2", strict)[0].load(WORKLOAD)
        assert found is not None
        assert found.plan() == [(FILE, 8)]

    def test_a_key_that_cannot_be_used_costs_the_set_in_the_store_alone(
        self, tmp_path: Path, signs: Signatures
    ) -> None:
        (tmp_path / "key").chmod(0o644)
        known, said = sets(tmp_path, FileStore(tmp_path / "store"), "n0", signs)
        known.add_record(WORKLOAD, record(1, 7), publish=True)
        assert len(said) == 1
        assert "may be read by others" in said[0]
        assert known.load(WORKLOAD) is not None

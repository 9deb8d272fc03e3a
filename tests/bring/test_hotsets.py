"""Hot sets on the node and in the image's store: found in both, kept in both, and never a reason to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.bring.hotsets import HotSets, hotset_name
from bootseer.bring.publish import publishes
from bootseer.errors import AccessError, TransientError
from bootseer.fetch.hotset import HotSet, Record
from bootseer.fetch.hotset_format import encode
from bootseer.fetch.need import Found, Need
from bootseer.store.file import FileStore
from bootseer.store.store import Upload

DIGEST = "sha256:" + "ab" * 32
WORKLOAD = "train.py-0123456789ab"
FILE = "cd" * 32


def record(started_s: float, *blocks: int) -> Record:
    return Record(started_s, 1000, tuple(Need(FILE, block, 10 * i, Found.MISSING) for i, block in enumerate(blocks)))


class ReadOnly(FileStore):
    """A folder that refuses writers, as a registry does without the credentials for it."""

    def upload(self) -> Upload:
        raise AccessError("the registry refuses to push")


class Away(FileStore):
    """A store that cannot be reached."""

    def read(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        raise TransientError("no answer", retry_after_s=3600)


def sets(tmp_path: Path, store: FileStore | None, node: str = "n0") -> tuple[HotSets, list[str]]:
    said: list[str] = []
    return HotSets(tmp_path / node, DIGEST, store, said.append), said


def test_one_node_s_record_is_the_next_node_s_hot_set(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    first, said = sets(tmp_path, store)
    assert first.load(WORKLOAD) is None
    first.keep(WORKLOAD, record(1, 7, 3), publish=True)
    other, _ = sets(tmp_path, store, "n1")
    found = other.load(WORKLOAD)
    assert found is not None
    assert found.plan() == [(FILE, 7), (FILE, 3)]
    assert said == []


def test_runs_of_both_places_count_once(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    for node, started in (("n0", 1), ("n1", 2)):
        known, _ = sets(tmp_path, store, node)
        known.keep(WORKLOAD, record(started, 1, 2, 3), publish=True)
    known, _ = sets(tmp_path, store, "n0")
    found = known.load(WORKLOAD)
    assert found is not None
    assert [run.started_s for run in found.records] == [1, 2]


def test_who_may_only_read_keeps_the_set_on_the_node_and_says_so_once(tmp_path: Path) -> None:
    known, said = sets(tmp_path, ReadOnly(tmp_path / "store"))
    known.keep(WORKLOAD, record(1, 5), publish=True)
    assert len(said) == 1
    assert "kept on this node" in said[0]
    assert known.load(WORKLOAD) is not None


def test_without_the_word_nothing_is_published(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    known, _ = sets(tmp_path, store)
    known.keep(WORKLOAD, record(1, 5), publish=False)
    assert list(store.list()) == []


def test_a_store_that_is_away_costs_the_set_and_nothing_else(tmp_path: Path) -> None:
    known, said = sets(tmp_path, Away(tmp_path / "store"))
    assert known.load(WORKLOAD) is None
    assert said == ["no hot set: no answer"]


@pytest.mark.parametrize("data", [b"", b"nonsense", encode(HotSet(DIGEST, "other")), encode(HotSet("other", WORKLOAD))])
def test_a_set_that_is_none_or_another_s_is_not_used(tmp_path: Path, data: bytes) -> None:
    store = FileStore(tmp_path / "store")
    upload = store.upload()
    upload.write(data)
    upload.commit(hotset_name(DIGEST, WORKLOAD))
    known, said = sets(tmp_path, store)
    assert known.load(WORKLOAD) is None
    assert len(said) == 1


def test_a_few_nodes_of_a_large_job_publish_and_a_small_job_s_all() -> None:
    assert all(publishes(f"node{i}", count) for count in (None, 1, 2, 7) for i in range(7))
    publishers = sum(publishes(f"node{i}", 1440) for i in range(1440))
    assert 1 <= publishers <= 12

"""Raw lines: stored once, read back unchanged, damage is detected."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import CorruptError, PermanentError
from bootseer.service.raw import RawStore, parse_name
from bootseer.store.file import FileStore
from bootseer.store.open import open_store


def put(raw: RawStore, lines: bytes, *, job: str = "moe", attempt: int = 0, sender: str = "node-1", sequence: int = 1):
    return raw.put(lines, day=20_000, job=job, attempt=attempt, sender=sender, sequence=sequence)


def test_the_same_batch_is_one_object(tmp_path: Path) -> None:
    raw = RawStore(open_store(str(tmp_path)))
    first, again, other = put(raw, b"a\n"), put(raw, b"a\n"), put(raw, b"b\n")
    assert (first.is_new, again.is_new, other.is_new) == (True, False, True)
    assert sorted(raw.names(20_000)) == sorted({first.name, other.name})
    assert raw.read(first.name) == b"a\n"


def test_a_large_one_too(tmp_path: Path) -> None:
    raw = RawStore(open_store(str(tmp_path)))
    lines = os.urandom(3 << 20)
    assert raw.read(put(raw, lines).name) == lines
    with pytest.raises(PermanentError, match="too many"):
        put(raw, bytes((32 << 20) + 1))


@given(job=st.text(min_size=1), sender=st.text(), attempt=st.integers(0, 10**9))
def test_no_name_leads_elsewhere(job: str, sender: str, attempt: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("raw")
    raw = RawStore(open_store(str(folder)))
    kept = put(raw, b"a\n", job=job, sender=sender, attempt=attempt)
    key = parse_name(kept.name)
    assert key is not None
    assert (key.day, key.attempt, key.sequence) == (20_000, attempt, 1)
    assert list(raw.names(20_000)) == [kept.name]


def test_objects_of_a_bucket_are_read_in_parallel(tmp_path: Path) -> None:
    class Bucket(FileStore):
        """Answers a read only when another one is waiting, too."""

        def read(self, *of: Any, **more: Any) -> Any:
            both.wait(60)
            return super().read(*of, **more)

    both = threading.Barrier(2)
    raw = RawStore(Bucket(tmp_path))
    names = [put(raw, b"%d\n" % number).name for number in range(8)]
    raw._folder = None
    gone: set[str] = set()
    missing = names[0].replace("-node", "-none")
    found = dict(raw.of_attempt([*names[:7], missing], gone))
    assert found == {name: b"%d\n" % number for number, name in enumerate(names[:7])}
    assert gone == {missing}


def test_damage_is_noticed(tmp_path: Path) -> None:
    raw = RawStore(open_store(str(tmp_path)))
    kept = put(raw, b"one line\n" * 100)
    path = tmp_path / kept.name
    data = path.read_bytes()
    for damaged in (data[:-3], data[:20] + b"\0\0" + data[22:], b""):
        path.unlink()
        path.write_bytes(damaged)
        with pytest.raises(CorruptError, match=r"damaged"):
            raw.read(kept.name)

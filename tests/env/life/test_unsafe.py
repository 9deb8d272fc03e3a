"""Marks of setups that are not snapshot-safe."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.env.life.unsafe import MAX_AGE_S, Mark, mark_name, reason, write_mark
from bootseer.store.file import FileStore
from env.life.samples import KEY, OTHER_KEY, NoSecrets

NOW_S = 1_800_000_000.0
MARK = Mark(KEY, "it exports API_TOKEN, which looks like a secret", "node-1", NOW_S)
WORDS = (
    "this setup is not snapshot-safe, as node-1 found: it exports API_TOKEN, which looks like a secret"
    " (--env refresh tries again)"
)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path)


@pytest.mark.parametrize(
    ("age_s", "words"), [(0, WORDS), (MAX_AGE_S - 1, WORDS), (MAX_AGE_S + 1, ""), (-60, WORDS), (-86400, "")]
)
def test_a_mark_counts_for_a_week(store: FileStore, age_s: float, words: str) -> None:
    write_mark(store, MARK, NoSecrets())
    assert reason(store, KEY, NOW_S + age_s) == words
    assert reason(store, OTHER_KEY, NOW_S) == ""


def test_a_mark_that_is_none_or_of_another_key_counts_as_none(store: FileStore, tmp_path: Path) -> None:
    write_mark(store, replace(MARK, key=OTHER_KEY), NoSecrets())
    (tmp_path / mark_name(KEY)).parent.mkdir(parents=True)
    (tmp_path / mark_name(OTHER_KEY)).rename(tmp_path / mark_name(KEY))
    assert reason(store, KEY, NOW_S) == ""
    for text in ("", "{}", "[" * 100_000, '{"schema": "bootseer.environment-unsafe/2"}'):
        (tmp_path / mark_name(KEY)).write_text(text)
        assert reason(store, KEY, NOW_S) == ""


def test_conflicts_of_versions_do_not_count_where_they_are_accepted(store: FileStore) -> None:
    write_mark(store, replace(MARK, conflicts=True), NoSecrets())
    assert reason(store, KEY, NOW_S) == WORDS
    assert reason(store, KEY, NOW_S, accepts_conflicts=True) == ""
    write_mark(store, MARK, NoSecrets())
    assert reason(store, KEY, NOW_S, accepts_conflicts=True) == WORDS


def test_a_mark_is_short_and_without_secrets(store: FileStore) -> None:
    write_mark(store, replace(MARK, reason="é" * 9000, node="n" * 9000), NoSecrets())
    assert "é" * 1000 in reason(store, KEY, NOW_S)
    write_mark(store, replace(MARK, reason="it wrote hunter2"), NoSecrets())
    assert "found: see what that start printed" in reason(store, KEY, NOW_S)

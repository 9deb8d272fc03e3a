"""The rules of the quarantine, as a machine: suspected, built anew once, cleared, never a loop."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.life.quarantine import MAX_BYTES, State
from bootseer.errors import CorruptError
from env.life.samples import KEY, OTHER_KEY, digest_of

A, B = digest_of("a"), digest_of("b")
CLEAN = State(KEY)
SUSPECT = CLEAN.with_failure(A, "node-1", "ImportError: libcuda", 100)


def test_a_job_that_died_makes_its_snapshot_a_suspect_and_no_other() -> None:
    suspect = SUSPECT.suspect(A)
    assert suspect is not None
    assert (suspect.count, suspect.node, suspect.why) == (1, "node-1", "ImportError: libcuda")
    assert SUSPECT.suspect(B) is CLEAN.suspect(A) is None


def test_further_jobs_change_nothing() -> None:
    assert SUSPECT.with_failure(A, "node-2", "ImportError", 200) is SUSPECT


def test_a_newer_snapshot_that_fails_takes_the_place_of_an_older_one() -> None:
    state = SUSPECT.with_failure(B, "node-2", "ImportError", 200)
    assert state.suspect(A) is None
    assert state.suspect(B) is not None


def test_after_a_rebuild_nothing_of_the_key_is_suspect_any_more() -> None:
    state = SUSPECT.rebuilt(replaced=A)
    assert state.settled
    assert state.suspect(A) is None
    assert state.with_failure(B, "node-2", "ImportError", 200) is state


def test_a_rebuild_for_another_reason_changes_nothing() -> None:
    assert SUSPECT.rebuilt(replaced=B) is SUSPECT
    assert CLEAN.rebuilt(replaced=A) is CLEAN


def test_a_state_of_an_earlier_version_is_read() -> None:
    old = json.loads(SUSPECT.encode()) | {"cleared": [B], "rebuilds": 1, "suspects": [[A, 7, "n", "w", 1.0]]}
    state = State.parse(json.dumps(old).encode(), KEY)
    assert state.suspect(A) is not None
    assert state.suspect(B) is None
    assert State.parse(json.dumps(old | {"settled": True}).encode(), KEY).suspect(A) is None


@given(st.lists(st.sampled_from([A, B, *(digest_of(str(number)) for number in range(50))]), min_size=60, max_size=60))
def test_a_job_that_always_dies_costs_one_rebuild_whatever_it_gives(contents: list[str]) -> None:
    state, published, rebuilds = CLEAN, A, 0
    for number, content in enumerate(contents):
        if state.suspect(published) is not None:
            state, published, rebuilds = state.rebuilt(replaced=published), content, rebuilds + 1
        state = state.with_failure(published, "node", "ImportError", float(number))
        state = State.parse(state.encode(), KEY)
    assert rebuilds == 1


def test_a_state_stays_small_and_reads_back() -> None:
    state = CLEAN
    for number in range(500):
        state = state.with_failure(digest_of(str(number)), "n" * 10_000, "w\x1b" * 10_000, float(number))
    assert len(state.encode()) < MAX_BYTES
    assert State.parse(state.encode(), KEY) == state
    assert state.suspect(digest_of("499")) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "x"},
        {"key": OTHER_KEY},
        {"suspects": [["x", 1, "n", "w", 1]]},
        {"suspects": [[A, 1]]},
        {"suspects": [[A, 1, "n", "w" * 501, 1]]},
        {"suspects": [[A, 1, "n", "w", float("nan")]]},
        {"suspects": None},
        {"settled": 1},
    ],
    ids=str,
)
def test_what_is_no_state_of_this_key_is_corrupt(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptError):
        State.parse(json.dumps({**json.loads(SUSPECT.encode()), **change}).encode(), KEY)


@given(st.binary(max_size=100))
def test_any_bytes_are_refused_with_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(CorruptError):
        State.parse(data, KEY)

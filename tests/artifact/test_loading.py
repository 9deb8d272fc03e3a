"""Lazy or whole loading: the extremes, and the effect of each known fact on the decision."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.artifact.loading import LAZY, PULL, predict

MIB = 1 << 20
GIB = 1 << 30


def test_a_small_image_is_pulled() -> None:
    answer = predict(32 * MIB, None)
    assert answer.mode == PULL
    assert "32.0 MiB" in answer.reason


def test_a_large_image_with_a_small_hot_set_is_started_lazily() -> None:
    assert predict(10 * GIB, GIB).mode == LAZY


def test_a_hot_set_that_is_nearly_everything_is_pulled() -> None:
    assert predict(GIB, int(0.85 * GIB)).mode == PULL
    assert predict(GIB, int(0.5 * GIB)).mode == LAZY


def test_a_large_image_without_a_hot_set_is_started_lazily() -> None:
    assert predict(GIB, None).mode == LAZY


def test_nothing_to_fetch_is_no_reason_for_a_daemon() -> None:
    assert predict(0, None).mode == PULL


@given(st.integers(0, 1 << 40), st.none() | st.integers(0, 1 << 40))
def test_every_input_has_an_answer_with_a_reason(stored_bytes: int, hot_bytes: int | None) -> None:
    answer = predict(stored_bytes, hot_bytes)
    assert answer.mode in (LAZY, PULL)
    assert answer.reason

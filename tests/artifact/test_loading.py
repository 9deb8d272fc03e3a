"""Lazy or whole: the extremes, and which way each known fact moves the answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.artifact.loading import LAZY, PULL, Missing, Settings, predict

MIB = 1 << 20
GIB = 1 << 30


def blocks(size: int) -> int:
    return -(-size // (256 << 10))


def image(stored: int, hot: int | None = None) -> Missing:
    return Missing(stored, blocks(stored), hot)


def test_a_small_image_is_pulled() -> None:
    answer = predict(image(32 * MIB))
    assert answer.mode == PULL
    assert "32.0 MiB" in answer.reason


def test_a_large_image_with_a_small_hot_set_is_started_lazily() -> None:
    answer = predict(image(10 * GIB, GIB), Settings(bytes_per_s=1e9, latency_s=0.005))
    assert answer.mode == LAZY
    assert answer.lazy_s is not None
    assert answer.pull_s is not None
    assert answer.lazy_s < answer.pull_s / 5


def test_a_hot_set_that_is_nearly_everything_is_pulled() -> None:
    assert predict(image(GIB, int(0.85 * GIB))).mode == PULL
    assert predict(image(GIB, int(0.5 * GIB))).mode == LAZY


def test_slow_round_trips_without_a_hot_set_make_a_pull_the_better_way() -> None:
    assert predict(image(4 * GIB), Settings(bytes_per_s=1.2e9, latency_s=0.2)).mode == PULL
    assert predict(image(4 * GIB, GIB // 2), Settings(bytes_per_s=1.2e9, latency_s=0.2)).mode == LAZY


def test_a_large_image_without_a_hot_set_is_started_lazily_on_a_near_registry() -> None:
    assert predict(image(GIB)).mode == LAZY


def test_nothing_to_fetch_is_no_reason_for_a_daemon() -> None:
    assert predict(Missing(0, 0)).mode == PULL


@given(
    st.integers(1, 1 << 40),
    st.none() | st.integers(0, 1 << 40),
    st.floats(1, 1e12),
    st.floats(0, 100),
)
def test_every_input_has_an_answer_with_a_reason(stored: int, hot: int | None, rate: float, latency: float) -> None:
    answer = predict(image(stored, hot), Settings(bytes_per_s=rate, latency_s=latency))
    assert answer.mode in (LAZY, PULL)
    assert answer.reason

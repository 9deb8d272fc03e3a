"""Lazy or whole: the extremes, and which way each known fact moves the answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.bring.predict import LAZY, PULL, Image, Link, PastStart, predict

MIB = 1 << 20
GIB = 1 << 30


def blocks(size: int) -> int:
    return -(-size // (256 << 10))


def image(stored: int, hot: int | None = None) -> Image:
    return Image(stored, blocks(stored), hot)


def test_a_small_image_is_pulled() -> None:
    answer = predict(image(32 * MIB), Link())
    assert answer.mode == PULL
    assert "32.0 MiB" in answer.reason


def test_a_large_image_with_a_small_hot_set_is_started_lazily() -> None:
    answer = predict(image(10 * GIB, GIB), Link(1e9, 0.005))
    assert answer.mode == LAZY
    assert answer.lazy_s is not None
    assert answer.pull_s is not None
    assert answer.lazy_s < answer.pull_s / 5


def test_a_hot_set_that_is_nearly_everything_is_pulled() -> None:
    assert predict(image(GIB, int(0.85 * GIB)), Link()).mode == PULL
    assert predict(image(GIB, int(0.5 * GIB)), Link()).mode == LAZY


def test_slow_round_trips_without_a_hot_set_make_a_pull_the_better_way() -> None:
    assert predict(image(4 * GIB), Link(1.2e9, 0.2)).mode == PULL
    assert predict(image(4 * GIB, GIB // 2), Link(1.2e9, 0.2)).mode == LAZY


def test_earlier_starts_outrank_what_is_assumed() -> None:
    assert predict(image(GIB), Link()).mode == LAZY
    wasteful = [PastStart(demand_bytes=GIB, fetched_bytes=GIB)] * 3
    assert predict(image(GIB), Link(), wasteful).mode == PULL


def test_nothing_to_fetch_is_no_reason_for_a_daemon() -> None:
    assert predict(Image(0, 0), Link()).mode == PULL


@given(
    st.integers(1, 1 << 40),
    st.none() | st.integers(0, 1 << 40),
    st.none() | st.floats(1, 1e12),
    st.none() | st.floats(0, 100),
)
def test_every_input_has_an_answer_with_a_reason(
    stored: int, hot: int | None, rate: float | None, latency: float | None
) -> None:
    answer = predict(image(stored, hot), Link(rate, latency))
    assert answer.mode in (LAZY, PULL)
    assert answer.reason

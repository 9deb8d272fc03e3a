"""Times of a snapshot: the same in each run, and in the order that build tools need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.snapshot.bytecode import EARLIEST_S, NS, Times

BEGAN_S = 1_790_000_000.0
_BEGAN_NS = int(BEGAN_S - 1) * NS
_stamps = st.integers(0, 2 * _BEGAN_NS)


@given(st.lists(st.integers(0, _BEGAN_NS - 1)), st.lists(st.integers(0, 10**12)), st.integers(0, 10**6))
def test_when_the_setup_ran_does_not_matter(unpacked: list[int], after: list[int], later_s: int) -> None:
    def run(began_s: float) -> list[int]:
        stamps = unpacked + [int(began_s) * NS + delay for delay in after]
        times = Times(began_s, [(b"/f", stamp) for stamp in stamps])
        return [times.shown_ns(b"/f", stamp) for stamp in stamps]

    assert run(BEGAN_S) == run(BEGAN_S + later_s)
    assert run(BEGAN_S)[: len(unpacked)] == unpacked


@given(st.lists(_stamps, min_size=1))
def test_what_was_written_is_not_older_than_anything_that_was_there(stamps: list[int]) -> None:
    times = Times(BEGAN_S, [(b"/f", stamp) for stamp in stamps])
    shown = [times.shown_ns(b"/f", stamp) for stamp in stamps]
    assert all(found in {stamp, times.written_ns} for found, stamp in zip(shown, stamps, strict=True))
    assert max(shown) <= times.written_ns
    assert EARLIEST_S * NS <= times.written_ns <= int(BEGAN_S) * NS
    assert times.written_ns % NS == 0
    order = sorted(zip(stamps, shown, strict=True))
    assert [found for _, found in order] == sorted(shown)


def test_times_below_a_log_of_ninja_stay() -> None:
    now_ns = int(BEGAN_S + 5) * NS
    times = Times(BEGAN_S, [(b"/b/out/.ninja_log", now_ns), (b"/b/out/deep/x.o", now_ns)])
    assert times.shown_ns(b"/b/out/deep/x.o", now_ns) == now_ns
    assert times.shown_ns(b"/b/outside", now_ns) == times.shown_ns(b"/b/out", now_ns) == times.written_ns

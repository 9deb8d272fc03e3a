"""When a start counts as over, whatever was heard of it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bootseer.service.derive import AFTER_BEGAN_NS, CAP_NS, LOST_NS, QUIET_NS, Seen, closes_ns

NODES = st.integers(0, 2_000)


@st.composite
def seen(draw: st.DrawFn) -> Seen:
    first_ns = draw(st.integers(0, 2**62))
    heard = draw(NODES)
    return Seen(
        first_ns=first_ns,
        latest_ns=first_ns + draw(st.integers(0, 2 * CAP_NS)),
        nodes_expected=draw(st.none() | NODES),
        nodes_heard=heard,
        nodes_began=draw(st.integers(0, heard)),
        nodes_ended=draw(st.integers(0, heard)),
    )


@given(seen(), st.integers(0, CAP_NS))
def test_every_start_is_over_no_later_than_the_cap(one: Seen, more_ns: int) -> None:
    over_ns = closes_ns(one)
    assert over_ns <= one.first_ns + CAP_NS
    # A line that comes later never closes it earlier.
    assert closes_ns(replace(one, latest_ns=one.latest_ns + more_ns)) >= over_ns


@given(seen())
def test_a_quiet_start_waits_for_a_node_that_is_missing(one: Seen) -> None:
    """Below the cap three things end it: training began on all nodes, all commands that began have ended, or some have
    and the others send nothing for long."""
    began = one.nodes_began == one.nodes_heard > 0 and (one.nodes_expected or 0) <= one.nodes_heard
    ended = one.nodes_ended == one.nodes_heard > 0
    lost_ns = max(LOST_NS, (one.latest_ns - one.first_ns) // 4)
    left_ns = closes_ns(one) - one.latest_ns
    if closes_ns(one) < one.first_ns + CAP_NS:
        left_after_ns = QUIET_NS if ended else lost_ns
        assert (began and left_ns == AFTER_BEGAN_NS) or (one.nodes_ended and left_ns == left_after_ns)
    else:
        assert not began or left_ns <= AFTER_BEGAN_NS

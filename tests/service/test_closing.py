"""When a start counts as over, for any events of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.service import schema
from bootseer.service.derive import (
    AFTER_BEGAN_NS,
    CAP_NS,
    LOST_NS,
    QUIET_NS,
    Attempt,
    Seen,
    closes_ns,
    derive_attempt,
)
from bootseer.service.raw import LOG
from bootseer.trace.event import Event, encode
from bootseer.units import NS_PER_S
from service.test_derive import DAY, Place
from startups import EPOCH_S, moment, span

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
        nodes_commanded=draw(st.integers(0, heard)),
    )


@given(seen(), st.integers(0, CAP_NS))
def test_every_start_is_over_no_later_than_the_cap(one: Seen, more_ns: int) -> None:
    over_ns = closes_ns(one)
    assert over_ns <= one.first_ns + CAP_NS
    # Later lines never close it earlier.
    assert closes_ns(replace(one, latest_ns=one.latest_ns + more_ns)) >= over_ns


@given(seen())
def test_a_quiet_start_waits_for_a_node_that_is_missing(one: Seen) -> None:
    """Before the cap, three conditions end it: training began on all nodes; all commands that began have ended; or some
    have ended, or commands began on all nodes, and nothing has been sent for long."""
    began = one.nodes_began == one.nodes_heard > 0 and (one.nodes_expected or 0) <= one.nodes_heard
    ended = one.nodes_ended == one.nodes_heard > 0
    lost_ns = max(LOST_NS, (one.latest_ns - one.first_ns) // 4)
    left_ns = closes_ns(one) - one.latest_ns
    if closes_ns(one) < one.first_ns + CAP_NS:
        left_after_ns = QUIET_NS if ended else lost_ns
        can_end = one.nodes_ended or one.nodes_commanded == one.nodes_heard > 0
        assert (began and left_ns == AFTER_BEGAN_NS) or (can_end and left_ns == left_after_ns)
    else:
        assert not began or left_ns <= AFTER_BEGAN_NS


@pytest.fixture
def place(tmp_path: Path, database_url: str) -> Iterator[Place]:
    place = Place(tmp_path, database_url)
    yield place
    place.close()


def test_a_start_is_open_while_it_starts_whatever_the_attempt_did_before_and_does_afterwards(place: Place) -> None:
    arrived: list[tuple[str, int]] = []
    two_days_s = 2 * 86_400.0

    def states(now_s: float, *parts: Sequence[Event]) -> list[str]:
        """The states of the starts 3 s after these events, and so 2 s after their arrival."""
        if parts:
            place.put([encode(event) for part in parts for event in part], job="j")
            arrived.append((place.batches[-1][0], round((EPOCH_S + now_s - 2) * NS_PER_S)))
        now_ns = round((EPOCH_S + now_s) * NS_PER_S)
        derive_attempt(place.raw, place.database, Attempt("j", 0), arrived, now_ns)
        return [row.state for row in sorted(place.rows(schema.start), key=lambda row: row.restart)]

    def both(begin_s: float, end_s: float | None, stage: str, **more: Any) -> list[Event]:
        return span(begin_s, end_s, stage, node="n0", **more) + span(begin_s, end_s, stage, node="n1", **more)

    began = [
        both(-3600, 0, "queue"),
        both(0, None, "run", attrs={"gpus": 8, "num_nodes": 2}),
        both(0, 90, "environment_setup"),
        span(90, 100, "first_step", node="n0"),
    ]
    assert states(103, *began) == [schema.OPEN]
    assert states(113, span(90, 110, "first_step", node="n1")) == [schema.OPEN]
    assert states(203, [moment(200, "alive"), moment(200, "alive", node="n1")]) == [schema.CLOSED], "it trains"
    assert states(two_days_s, both(two_days_s - 3, None, "model_initialization.process_group", restart=1)) == [
        schema.CLOSED,
        schema.OPEN,
    ]
    again = span(two_days_s + 97, None, "model_initialization.process_group", restart=2, node="n0")
    assert states(two_days_s + 100, again) == [schema.CLOSED, schema.OPEN, schema.OPEN]
    assert states(two_days_s + 140) == [schema.CLOSED, schema.CLOSED, schema.OPEN], "n1 is gone"


def test_a_start_of_a_log_that_is_sent_later_is_not_in_progress(place: Place) -> None:
    data = (Path(__file__).parents[1] / "golden" / "torchelastic" / "restart.log").read_bytes()
    kept = place.raw.put(data, day=DAY, job="j", attempt=0, sender="n", sequence=0, suffix=LOG)
    written_ns = 1_795_198_660 * NS_PER_S  # 2026-11-20 18:17:40
    for later_s, state in ((60, schema.OPEN), (2 * 86_400, schema.CLOSED)):
        now_ns = written_ns + later_s * NS_PER_S
        derive_attempt(place.raw, place.database, Attempt("j", 0), [(kept.name, now_ns)], now_ns)
        assert {row.restart: row.state for row in place.rows(schema.start)} == {0: schema.CLOSED, 1: state}


def test_a_restart_is_over_with_the_command(place: Place) -> None:
    """Otherwise, without training, it would be in progress for a day."""
    waits = "model_initialization.process_group"
    parts = [span(0, 300, "run", outcome="failed"), span(1, 299, "command", outcome="failed"), span(9, 99, waits),
             span(200, 250, waits, restart=1, outcome="failed")]  # fmt: skip
    place.put([encode(event) for part in parts for event in part], job="j")
    later_ns = place.batches[0][1] + 60 * NS_PER_S
    derive_attempt(place.raw, place.database, Attempt("j", 0), place.batches, later_ns)
    assert [row.state for row in place.rows(schema.start)] == [schema.CLOSED] * 2


@pytest.mark.parametrize("all_died", [False, True])
def test_a_start_is_over_when_only_nodes_that_died_have_not_ended(place: Place, all_died: bool) -> None:
    """Otherwise it would be in progress, and its node late, for a day."""
    end_s = None if all_died else 300
    parts = [span(0, end_s, "run", node="n0", outcome="failed"), span(0, end_s, "command", node="n0", outcome="failed"),
             span(0, None, "run", node="n1"), span(10, None, "environment_setup", node="n1")]  # fmt: skip
    parts += [span(20, None, "command", node="n1")] * all_died
    place.put([encode(event) for part in parts for event in part], job="j")
    arrived_ns = place.batches[0][1]
    for after_s, state in ((500, schema.OPEN), (700, schema.CLOSED)):
        now_ns = arrived_ns + after_s * NS_PER_S
        derive_attempt(place.raw, place.database, Attempt("j", 0), place.batches, now_ns)
        assert [row.state for row in place.rows(schema.start)] == [state]

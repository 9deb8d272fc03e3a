"""Lateness is judged by earlier starts of the same kind, and not at all when there are too few."""

from __future__ import annotations

from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

import startups
from bootseer.report.analysis.compose import Analysis
from bootseer.report.analysis.live import Live
from bootseer.report.analysis.prepare import Options
from bootseer.service.deadlines import Day, Deadlines, words
from bootseer.service.histogram import CLASSES, class_of
from bootseer.service.ingest import Ingest
from startups import EPOCH_S, NS, began, span

INSTALL = "environment_setup.install"


def day(*seconds: float, bucket: int = 2, kind: str = "full", cache: str = "hit", stage: str = INSTALL) -> Day:
    hist = [0] * CLASSES
    for value in seconds:
        hist[class_of(value)] += 1
    return bucket, kind, cache, stage, hist


def moment(**of_nodes: float) -> dict[str, object]:
    one = {"rank": -1, "stage": INSTALL, "stack": ""}
    missing = [{**one, "node": node, "seconds": took_s} for node, took_s in of_nodes.items()]
    return {"barrier": "process_group", "arrived": 1438, "expected": 1440, "missing": missing}


def test_what_lasts_longer_than_it_did_is_late_the_latest_first() -> None:
    deadlines = Deadlines([day(*[10.0] * 9), day(*[10.0] * 9, 400.0)])
    late = deadlines.late(moment(a=9.0, b=60.0, c=30.0), 2, "full", "hit")
    assert [one["node"] for one in late] == ["b", "c"]
    assert words(moment(), late).startswith("1,438 of 1,440 at process_group; missing: b (environment_setup.install, 4")


def test_the_end_of_a_short_stage_may_be_under_way() -> None:
    """With a sender that sends every 1 to 3 s, a third of the healthy starts seemed to have a late node."""
    deadlines = Deadlines([day(*[0.2] * 20)])
    assert deadlines.late(moment(a=5.0), 2, "full", "hit") == []
    assert deadlines.late(moment(a=20.0), 2, "full", "hit")


def test_a_cold_start_is_not_judged_by_warm_ones_where_there_are_cold_ones() -> None:
    warm, cold = day(*[2.0] * 20), day(*[60.0] * 6, cache="miss")
    assert Deadlines([warm, cold]).late(moment(a=50.0), 2, "full", "miss") == []
    assert Deadlines([warm]).late(moment(a=50.0), 2, "full", "miss"), "the scale is all that is known"


def test_the_stack_of_a_replaced_node_is_asked_for_and_counted_in_the_restart_that_it_joined() -> None:
    """Not in the restart after that, where the report would lose all other events of the node."""
    first = [event for node in "ab" for event in began(60, node=node, rank="ab".index(node))]
    again = span(3700, 3740, "model_initialization", node="a", rank=0, restart=1)
    events = [*first, *again, *span(3710, None, "run", node="c"), *span(3711, None, INSTALL, node="c")]
    live = Live(None, None, None)
    live.feed(events)
    late = Deadlines([day(*[2.0] * 9)]).late(live.moment((EPOCH_S + 3800) * NS).to_json(), 2, "full", "hit")
    ingest = Ingest(Mock(), Mock())
    ingest.ask_stacks([{"job": "j", "attempt": 0, "restart": 1, "late": late}])
    (wanted,) = ingest._stacks({("j", 0): [b'"c"']})
    attrs = {"in_stage": INSTALL, "of_rank": -1, "stack": "here (x.py:1)"}
    stack = startups.moment(3801, "stack_sample", node="c", restart=wanted["restart"], attrs=attrs)
    live.feed([stack])
    assert live.moment((EPOCH_S + 3802) * NS).missing[0].stack == "here (x.py:1)"
    joined = Analysis([*events, stack, *began(3900, node="c", rank=1)], Options()).startups[1].nodes["c"]
    assert INSTALL in [each.stage for each in joined.spans]


def test_waiting_at_a_barrier_until_it_opened_makes_no_node_late() -> None:
    """The line in which it leaves the barrier is under way: nodes that had waited for a slow one seemed to be late."""
    group, collective = "model_initialization.process_group", "model_initialization.first_collective"
    left = span(0, 60, group, node="a", rank=0, attrs={"barrier": "process_group"})
    waits = span(60, None, collective, node="a", rank=0, attrs={"barrier": "first_collective"})
    live = Live(None, None, None)
    live.feed([*left, *waits, *span(0, None, group, node="b", rank=1, attrs={"barrier": "process_group"})])
    deadlines = Deadlines([day(*[0.1] * 9, stage=group)])
    for now_s, nodes in ((63, []), (90, ["b"])):
        late = deadlines.late(live.moment((EPOCH_S + now_s) * NS).to_json(), 2, "full", "hit")
        assert [one["node"] for one in late] == nodes


def test_a_stage_of_hours_is_not_late_before_its_usual_time() -> None:
    """Days summed by an earlier version of the service have shorter histograms."""
    short = (2, "full", "hit", INSTALL, [0] * 40 + [1] + [0] * 23)
    deadlines = Deadlines([day(*[7200.0] * 9), short])
    assert deadlines.late(moment(a=7000.0), 2, "full", "hit") == []
    assert [one["node"] for one in deadlines.late(moment(a=9000.0), 2, "full", "hit")] == ["a"]


def test_few_starts_prove_nothing() -> None:
    assert Deadlines([day(*[10.0] * 4)]).late(moment(a=1e6), 2, "full", "hit") == []
    assert Deadlines([]).limit_s(2, "full", "hit", INSTALL) is None
    assert Deadlines([day(*[10.0] * 9)]).late(moment(a=1e6), 3, "full", "hit") == []


@given(st.lists(st.floats(0.01, 2000), min_size=5, max_size=200))
def test_at_most_a_tenth_of_the_starts_it_was_learned_from_are_late(seconds: list[float]) -> None:
    limit_s = Deadlines([day(*seconds)]).limit_s(2, "full", "hit", INSTALL)
    assert limit_s is not None
    assert sum(value > limit_s for value in seconds) <= len(seconds) / 10

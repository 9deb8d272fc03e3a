"""How environments were provided, from `environment_start` events to rows and lines."""

from __future__ import annotations

from typing import Any

from bootseer.report.analysis.compose import analyse
from bootseer.report.analysis.prepare import Options
from bootseer.report.analysis.spans import startups
from bootseer.report.analysis.starts import environment_starts, environment_summary
from bootseer.report.model_starts import EnvironmentStart
from bootseer.trace.event import Event

RESTORED = {
    "mode": "restored",
    "code": "hit",
    "reason": "the store has it",
    "key": "ab" * 32,
    "builder": "node-1",
    "trust": "observed",
    "until": "training_began",
    "seconds": 0.25,
    "age_s": 10_800.0,
    "saved_s": 112.0,
    "num_files": 42_007,
    "size_bytes": 1_760 << 20,
    "stored_bytes": 540 << 20,
    "demand_bytes": 4 << 20,
    "hot_bytes": 90 << 20,
    "coverage": 0.96,
}
CAPTURED = {"mode": "captured", "code": "miss", "reason": "no snapshot has this key", "seconds": 115.0}
REFUSED = {"mode": "installed", "code": "driver", "reason": "refused: driver 535, the snapshot's 550", "seconds": 100.0}


def event(node: str, at_s: int = 1, stage: str = "environment_start", **attrs: Any) -> Event:
    return Event(at_s * 10**9, at_s * 10**9, "moe", node, stage, "instant", f"{node}{at_s}{stage}", attrs=attrs)


def rows(*events: Event) -> list[EnvironmentStart]:
    (startup,) = startups(list(events))
    return environment_starts(startup)


def test_each_node_s_last_event_is_its_row() -> None:
    events = [event("n1", **RESTORED), event("n0", 1, **REFUSED), event("n0", 2, **RESTORED)]
    found = rows(*events)
    assert [row.node for row in found] == ["n0", "n1"]
    assert (found[0].mode, found[0].demand_bytes, found[0].published) == ("restored", 4 << 20, None)
    assert analyse(events, Options()).to_json()["environments"][0]["code"] == "hit"


def test_what_became_of_the_snapshot_is_part_of_the_row() -> None:
    kept, lost = rows(
        event("n0", **CAPTURED),
        event("n0", 2, "environment_publish", published=True),
        event("n1", **CAPTURED),
        event("n1", 2, "environment_publish", published=False, why_not="the setup left a process behind"),
    )
    assert (kept.published, kept.why_not) == (True, "")
    assert (lost.published, lost.why_not) == (False, "the setup left a process behind")
    ran, who, why = environment_summary([kept, lost])
    assert ran == "2 nodes ran the setup in 115.0 s; no snapshot has this key"
    assert who == "n0 published a snapshot for the next start"
    assert why == "no snapshot was published: the setup left a process behind"


def test_facts_of_a_wrong_type_are_unknown() -> None:
    odd = {"seconds": -1, "age_s": "old", "num_files": True, "size_bytes": -5, "mode": None, "coverage": []}
    (row,) = rows(event("n0", **odd))
    assert (row.seconds, row.age_s, row.num_files, row.size_bytes, row.mode) == (None, None, 0, 0, "")
    assert environment_summary([row]) == ["n0 in an unknown way: no reason given"]


def test_a_restore_that_took_longer_than_the_setup_has_saved_less_than_nothing() -> None:
    (row,) = rows(event("n0", **RESTORED | {"saved_s": -1.5}))
    assert row.saved_s == -1.5
    assert rows(event("n0", **RESTORED | {"saved_s": 1e308}))[0].saved_s is None, "a sum of two is infinite"
    assert "(saved -1.50 s)" in environment_summary([row])[0]


def test_nodes_are_summed_up_by_the_way_in_which_their_environments_came() -> None:
    restored, installed = environment_summary(
        rows(*(event(f"n{i}", **RESTORED) for i in range(3)), event("n9", **REFUSED))
    )
    assert restored == (
        "3 nodes restored a snapshot made 3 h 00 min ago by node-1 in 0.25 s (saved 112.0 s each): 42,007 files, "
        "1.7 GiB, 94.0 MiB of 540.0 MiB fetched before training began; the hot set covered 96% of what was read"
    )
    assert installed == "n9 ran the setup without a snapshot in 100.0 s: refused: driver 535, the snapshot's 550"


def test_reasons_without_end_do_not_fill_the_report() -> None:
    many = environment_summary(rows(*(event(f"n{i}", **REFUSED | {"reason": f"reason {i}"}) for i in range(9))))
    assert len(many) == 4
    assert many[-1] == "6 more nodes for other reasons"


def test_without_environments_there_is_nothing_to_say() -> None:
    assert environment_summary([]) == []

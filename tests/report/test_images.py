"""How images were loaded, from `image_start` events to rows and lines."""

from __future__ import annotations

from typing import Any

from bootseer.report.analysis.compose import analyse
from bootseer.report.analysis.prepare import Options
from bootseer.report.analysis.spans import startups
from bootseer.report.analysis.starts import image_starts, image_summary
from bootseer.trace.event import Event

HOT = {
    "image": "registry.example/train:7",
    "digest": "sha256:ab",
    "mode": "hot",
    "reason": "predicted",
    "until": "training_began",
    "seconds": 0.5,
    "layers": 6,
    "stored_bytes": 400 << 20,
    "demand_bytes": 1 << 20,
    "hot_bytes": 95 << 20,
    "requests": 30,
    "coverage": 0.98,
    "late_blocks": 4,
}


def event(node: str, at_s: int = 1, **attrs: Any) -> Event:
    return Event(at_s * 10**9, at_s * 10**9, "moe", node, "image_start", "instant", f"{node}{at_s}", attrs=attrs)


def test_each_node_s_last_event_is_its_row() -> None:
    events = [event("n1", **HOT), event("n0", 1, **{**HOT, "demand_bytes": 7}), event("n0", 2, **HOT)]
    (startup,) = startups(events)
    rows = image_starts(startup)
    assert [row.node for row in rows] == ["n0", "n1"]
    assert (rows[0].demand_bytes, rows[0].coverage, rows[0].cold_bytes) == (1 << 20, 0.98, 0)
    assert analyse(events, Options()).to_json()["images"][0]["mode"] == "hot"


def test_facts_of_a_wrong_type_are_unknown() -> None:
    odd = {"coverage": "much", "seconds": -1, "layers": True, "stored_bytes": -5, "requests": 1.5, "mode": None}
    (startup,) = startups([event("n0", **odd)])
    (row,) = image_starts(startup)
    assert (row.coverage, row.seconds, row.layers, row.stored_bytes, row.requests, row.mode) == (
        None,
        None,
        0,
        0,
        0,
        "",
    )
    assert len(image_summary([row])) == 1


def test_nodes_are_summed_up_by_the_way_in_which_their_images_came() -> None:
    fallback = {**HOT, "mode": "fallback", "reason": "it is not converted", "coverage": None}
    (startup,) = startups([*(event(f"n{i}", **HOT) for i in range(3)), event("n9", **fallback)])
    hot, other, reason = image_summary(image_starts(startup))
    assert hot.startswith(
        "3 nodes loaded it lazily with a hot set in 0.50 s: 96.0 MiB of 400.0 MiB fetched before training began"
    )
    assert "demand 1.0 MiB, hot 95.0 MiB" in hot
    assert "the hot set covered 98% of what was read" in hot
    assert other.startswith("n9 pulled all of it first, as a fallback")
    assert reason == "fallback because it is not converted"


def test_without_images_there_is_nothing_to_say() -> None:
    assert image_summary([]) == []


def test_of_a_node_whose_daemon_died_no_amounts_are_shown() -> None:
    """As `MountHandle.end_startup` reports it. The line said that 0 bytes were fetched."""
    died = {name: HOT[name] for name in ("mode", "until", "seconds")} | {"stored_bytes": None, "local_bytes": 9}
    (startup,) = startups([event("n1", **died)])
    assert image_summary(image_starts(startup)) == ["n1 loaded it lazily with a hot set in 0.50 s"]

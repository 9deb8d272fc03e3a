"""The Chrome trace follows the format's rules: viewers silently drop events that break them."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from bootseer.report.model import Report
from bootseer.report.render import perfetto

_REQUIRED = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "b": {"name", "cat", "id", "ts", "pid"},
    "e": {"name", "cat", "id", "ts", "pid"},
    "i": {"name", "s", "ts", "pid", "tid"},
}


def events_of(report: Report, phase: str = "") -> list[dict[str, Any]]:
    events = json.loads(perfetto.render(report))["traceEvents"]
    return [event for event in events if not phase or event["ph"] == phase]


@pytest.mark.parametrize("name", ["small", "big", "empty", "hostile"])
def test_each_event_is_well_formed_and_in_order(name: str, request: pytest.FixtureRequest) -> None:
    events = events_of(request.getfixturevalue(name))
    for event in events:
        assert _REQUIRED[event["ph"]] <= event.keys()
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        assert event.get("dur", 1) > 0
        assert event["pid"] > 0
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)


@pytest.mark.parametrize("name", ["small", "big", "hostile"])
def test_slices_of_a_thread_nest(name: str, request: pytest.FixtureRequest) -> None:
    tracks = defaultdict(list)
    for event in events_of(request.getfixturevalue(name), "X"):
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(tracks) > 1
    for slices in tracks.values():
        stack: list[tuple[int, int]] = []
        for start, end in slices:
            while stack and stack[-1][1] <= start:
                stack.pop()
            if stack:
                assert end <= stack[-1][1], "a slice sticks out of the one around it"
            stack.append((start, end))


def test_times_are_microseconds_of_the_segments(small: Report) -> None:
    node = small.nodes[0]
    pid = next(
        e["pid"] for e in events_of(small, "M") if e["name"] == "process_name" and node.node in e["args"]["name"]
    )
    slices = {e["args"]["stage"]: e for e in events_of(small, "X") if e["pid"] == pid and "kind" in e["args"]}
    for seg in node.segments:
        if seg.stage != "first_step":  # its work and its wait have the same name
            event = slices[seg.stage]
            assert event["ts"] == round(seg.start_s * 1e6)
            assert event["ts"] + event["dur"] == round(seg.end_s * 1e6)
    whole = next(e for e in events_of(small, "X") if e["pid"] == pid and e["name"] == "environment_setup")
    inner = [seg for seg in node.segments if seg.stage.startswith("environment_setup.")]
    assert whole["dur"] == pytest.approx(1e6 * (inner[-1].end_s - inner[0].start_s), abs=2)


def test_negative_times_are_moved_to_zero(small: Report) -> None:
    node = small.nodes[0]
    early = [replace(seg, start_s=seg.start_s - 5, end_s=seg.end_s - 5) for seg in node.segments]
    shifted = replace(small, nodes=[replace(node, start_s=-5.0, segments=early)])
    assert min(event["ts"] for event in events_of(shifted, "X")) == 0


def test_background_is_async_and_closed(small: Report) -> None:
    begins = {(event["pid"], event["id"]): event["ts"] for event in events_of(small, "b")}
    ends = {(event["pid"], event["id"]): event["ts"] for event in events_of(small, "e")}
    assert len(begins) == sum(len(node.background) for node in small.nodes)
    assert begins.keys() == ends.keys()
    assert all(ends[key] >= begins[key] for key in begins)


def test_processes_have_names_and_an_order(small: Report) -> None:
    meta = events_of(small, "M")
    names = [event["args"]["name"] for event in meta if event["name"] == "process_name"]
    assert names == ["moe-8x128: critical chain", *(f"{node.node} rank {node.rank}" for node in small.nodes)]
    order = [event["args"]["sort_index"] for event in meta if event["name"] == "process_sort_index"]
    assert all(first < second for first, second in pairwise(order))


def test_a_big_startup_is_whole(big: Report) -> None:
    assert len({event["pid"] for event in events_of(big, "X")}) == 1 + len(big.nodes)


def test_facts_go_to_their_stage(small: Report) -> None:
    fetch = [e for e in events_of(small, "X") if e["args"].get("stage") == "image_loading.fetch"]
    assert {event["args"]["bytes"] for event in fetch} == {28_620_000_000}


def test_values_that_json_cannot_carry_become_text(small: Report) -> None:
    attrs = {"image_loading.fetch.who": "\ud800\x00"}
    odd = replace(small, nodes=[replace(small.nodes[0], attrs=attrs)])
    fetch = next(e for e in events_of(odd, "X") if e["args"].get("stage") == "image_loading.fetch")
    perfetto.render(odd).encode("utf-8")
    assert "\x00" not in fetch["args"]["who"]

"""Transfers between the nodes of a job, from events to rows and lines."""

from __future__ import annotations

from typing import Any

from bootseer.report.analysis.compose import analyse
from bootseer.report.analysis.prepare import Options
from bootseer.report.analysis.starts import peers_summary
from bootseer.trace.event import Event
from startups import moment, span

MIB = 1 << 20


def event(node: str, stage: str, **attrs: Any) -> Event:
    return Event(10**9, 10**9, "moe", node, stage, "instant", f"{node}{stage}", attrs=attrs)


def node(name: str, *, late: str = "", wrong: str = "", unreachable: int = 0) -> list[Event]:
    told = {"until": "training_began", "peers": 2, "sent_bytes": 60 * MIB, "filled_bytes": 4 * MIB}
    image = {"hot_bytes": 64 * MIB, "peer_bytes": 60 * MIB, "local_bytes": MIB, "late_requests": 3}
    return [
        event(name, "peers_start", **told, unreachable=unreachable, interfaces=f"eth0={40 * MIB} ib0={20 * MIB}"),
        event(name, "image_start", mode="hot", **image, late_peers=late, wrong_peers=wrong),
        event(name, "checkpoint_start", place_bytes=MIB, cache_bytes=2 * MIB, peer_bytes=5 * MIB),
    ]


def test_the_report_shows_the_sources_of_bytes_and_slow_peers() -> None:
    told = analyse([*node("n0", late="n1 n2"), *node("n1", late="n2", wrong="n3", unreachable=1)], Options())
    row = told.to_json()["peers"][0]
    assert (row["node"], row["cache_bytes"], row["peer_bytes"], row["origin_bytes"]) == (
        "n0",
        3 * MIB,
        65 * MIB,
        5 * MIB,
    )
    assert (row["late_requests"], row["late_peers"]) == (3, "n1 n2")
    assert peers_summary(told.peers) == [
        "2 nodes together got 130.0 MiB from other nodes, 18.0 MiB from the origin, 6.0 MiB from the nodes' own caches"
        " before training began",
        "sent over eth0 80.0 MiB, ib0 40.0 MiB",
        "late: n2 (to 2 nodes), n1 (to 1 node)",
        "excluded after sending wrong blocks: n3 (to 1 node)",
        "1 node did not answer n1 (ports, secrets: docs/peers.md)",
    ]


def test_what_was_pulled_before_the_start_is_split_by_its_source_too() -> None:
    events = [
        *span(1.0, 2.0, "image_loading.pull", attrs={"peer_bytes": 48 * MIB}),
        moment(3.0, "image_start", attrs={"mode": "pull", "cold_bytes": 64 * MIB}),
        moment(3.0, "peers_start", attrs={"until": "training_began", "peers": 2}),
    ]
    (row,) = analyse(events, Options()).peers
    assert (row.peer_bytes, row.origin_bytes) == (48 * MIB, 16 * MIB)


def test_without_peers_there_is_no_row() -> None:
    assert analyse([event("n0", "image_start", hot_bytes=5)], Options()).peers == []


def test_facts_of_a_wrong_type_are_ignored() -> None:
    marks = [event("n0", "peers_start", peers="x", interfaces="eth0 =7 a=b", sent_bytes=-1), event("n0", "x")]
    (row,) = analyse(marks, Options()).peers
    assert (row.peers, row.sent_bytes) == (0, 0)
    assert len(peers_summary([row])) == 2


def test_bytes_that_no_process_reports_as_received_are_not_reported_as_none() -> None:
    """Training code that loads its checkpoint without a mount has no figures of its own."""
    told = {"until": "end", "peers": 2, "interfaces": f"eth0={300 * MIB}"}
    nodes = [event(name, "peers_start", **told, sent_bytes=300 * MIB) for name in ("n0", "n1")]
    assert peers_summary(analyse(nodes, Options()).peers)[0] == (
        "2 nodes together sent 600.0 MiB to each other; what training code reads itself (StripedReader, safetensors,"
        " fsspec) is not counted as received"
    )
    mounted = [event(name, "checkpoint_start", place_bytes=MIB, peer_bytes=20 * MIB) for name in ("n0", "n1")]
    lines = peers_summary(analyse([*nodes, *mounted], Options()).peers)
    assert "got 40.0 MiB from other nodes, 2.0 MiB from the origin" in lines[0]
    assert "sent 600.0 MiB to each other" in lines[1]


def test_where_reports_of_nodes_are_missing_nothing_is_said_about_what_they_received() -> None:
    sent = event("n0", "peers_start", until="end", peers=3, sent_bytes=300 * MIB)
    assert [line.partition(" sent ")[0] for line in peers_summary(analyse([sent], Options()).peers)] == [
        "n0 got 0 B from other nodes, 0 B from the origin, 0 B from the nodes' own caches"
    ]

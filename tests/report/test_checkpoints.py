"""Reads of checkpoints, from events to rows and lines."""

from __future__ import annotations

from typing import Any

from bootseer.report.analysis.compose import analyse
from bootseer.report.analysis.prepare import Options
from bootseer.report.analysis.spans import startups
from bootseer.report.analysis.starts import CHECKPOINT_DATANODE, CHECKPOINT_START, checkpoint_starts, checkpoint_summary
from bootseer.trace.event import Event

READ = {
    "uri": "hdfs://cluster/jobs/moe",
    "until": "training_began",
    "seconds": 0.4,
    "read_bytes": 512 << 20,
    "place_bytes": 384 << 20,
    "cache_bytes": 128 << 20,
}


def event(node: str, stage: str = CHECKPOINT_START, at_s: int = 1, **attrs: Any) -> Event:
    return Event(
        at_s * 10**9, at_s * 10**9, "moe", node, stage, "instant", f"{node}{stage}{attrs.get('datanode')}", attrs=attrs
    )


def datanode(node: str, name: str, served: int, failures: int = 0) -> Event:
    return event(node, CHECKPOINT_DATANODE, datanode=name, bytes=served, seconds=1.5, failures=failures)


def starts(*events: Event) -> Any:
    (startup,) = startups(list(events))
    return checkpoint_starts(startup)


def test_each_node_has_a_row_with_those_that_served_it() -> None:
    events = [event("n1", **READ), event("n0", **READ), datanode("n0", "dn1:9866", 5), datanode("n0", "dn2:9866", 9, 2)]
    first, second = starts(*events)
    assert (first.node, second.node) == ("n0", "n1")
    assert [(one.name, one.bytes, one.failures) for one in first.datanodes] == [("dn2:9866", 9, 2), ("dn1:9866", 5, 0)]
    assert second.datanodes == []
    told = analyse(events, Options()).to_json()["checkpoints"][0]
    assert (told["place_bytes"], told["datanodes"][0]["name"]) == (384 << 20, "dn2:9866")


def test_facts_of_a_wrong_type_are_unknown() -> None:
    (row,) = starts(event("n0", read_bytes="much", retries=-1, hedges=True, seconds=-2, uri=None))
    assert (row.read_bytes, row.retries, row.hedges, row.seconds, row.uri) == (0, 0, 0, None, "")
    assert len(checkpoint_summary([row])) == 1


def test_what_was_read_and_from_where_is_one_line() -> None:
    (line,) = checkpoint_summary(starts(event("n0", **READ)))
    assert line == (
        "n0 read 512.0 MiB before training began; 384.0 MiB fetched from the file system, "
        "128.0 MiB from the node's cache"
    )


def test_datanodes_that_serve_more_than_their_share_are_named() -> None:
    even = checkpoint_summary(starts(event("n0", **READ), *(datanode("n0", f"dn{i}:1", 1 << 20) for i in range(4))))
    assert even[1] == "4 DataNodes served 4.0 MiB, evenly"
    sizes = {"dn0:1": 7 << 20, "dn1:1": 1 << 20, "dn2:1": 1 << 20}
    uneven = checkpoint_summary(
        starts(event("n0", **READ), *(datanode("n0", name, size) for name, size in sizes.items()))
    )
    assert uneven[1] == "3 DataNodes served 9.0 MiB; dn0:1 served 2.3 times the mean"
    few = checkpoint_summary(starts(event("n0", **READ), datanode("n0", "dn0:1", 15), datanode("n0", "dn1:1", 1)))
    assert few[1] == "2 DataNodes served 16 B", "there is no share of so little"
    alone = checkpoint_summary(starts(event("n0", **READ), datanode("n0", "dn0:1", 1 << 20)))
    assert alone[1] == "one DataNode served all of 1.0 MiB: dn0:1"


def test_failures_of_reads_are_reported() -> None:
    trouble = {**READ, "retries": 2, "hedges": 3, "rebuilt": 4, "refused": 1, "fallback": "it wants Kerberos"}
    lines = checkpoint_summary(starts(event("n0", **trouble), datanode("n0", "dn0:1", 9, failures=7)))
    assert (
        "reads retried after an error: 2; hedged because the first request was slow: 3; "
        "rebuilt from parity: 4; repeated elsewhere because of wrong bytes: 1" in lines
    )
    assert "DataNodes with failed reads: dn0:1 (7)" in lines
    assert lines[-1] == "fallback because it wants Kerberos"
    assert checkpoint_summary([]) == []


def test_nodes_that_read_plainly_and_those_that_mounted_are_distinguished_with_the_reason() -> None:
    rows = starts(
        event("n0", mode="plain", reason="it lies on this machine (ext4)"),
        event("n1", **READ, mode="mounted", reason="its file system (nfs4) may be far away"),
        datanode("n1", "", 5, failures=2),  # a folder and a bucket have no DataNodes
        event("n2", mode=7),
    )
    assert [row.mode for row in rows] == ["plain", "mounted", "mounted"]
    lines = checkpoint_summary(rows)
    assert lines[0].startswith("2 nodes (median) read 256.0 MiB")
    assert lines[1:] == [
        "mounted because its file system (nfs4) may be far away",
        "n0 read it directly from its folder: it lies on this machine (ext4)",
    ]

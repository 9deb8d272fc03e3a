"""Reads of a checkpoint from modelled DataNodes, compared with measurements on real ones (docs/benchmarks.md)."""

from __future__ import annotations

import pytest

from bootseer.checkpoint.layout import Policy
from bootseer.sim.checkpoint_reads import Cluster, Reads, Shared
from bootseer.sim.engine import Engine

MIB = 1 << 20


def rate(
    datanodes: int, *, stripes: int = 0, parity: bool = False, slow: float = 1.0, hangs_at_s: float = -1,
    in_order: bool = False,
) -> float:  # fmt: skip
    """MiB/s of one reader of 1 GiB from DataNodes with 400 Mbit/s, with one replica of each part. Without stripes:
    parts are read in sequence, like by the usual client."""
    engine = Engine()
    cluster = Cluster(engine, datanodes, 50e6 * 0.95, seed=0, replicas=1)  # goodput of TCP
    cluster.links["datanode1"].bytes_per_s *= slow
    if hangs_at_s >= 0:
        engine.at(hangs_at_s, lambda: cluster.hung.add("datanode1"))
    ends: list[float] = []

    def ended() -> None:
        ends.append(engine.now)
        engine.halt()

    if stripes:
        reads = Reads(cluster, lambda link: (link,), 1e9, Policy(stripes=stripes, parity=parity))
        reads.read(1 << 30, ended, in_order=in_order)
    else:
        cluster.plain(1 << 30, lambda link: (link,), engine.link(1e9), ended)
    engine.run(1e3)
    (seconds,) = ends
    for link in cluster.links.values():
        assert link.carried <= link.bytes_per_s * seconds * 1.001
    return 1024 / seconds


@pytest.mark.parametrize(
    ("datanodes", "stripes", "parity", "measured"),
    [(4, 0, False, 43), (4, 4, False, 182), (5, 4, True, 213)],
)
def test_what_was_measured_is_predicted(datanodes: int, stripes: int, parity: bool, measured: float) -> None:
    assert rate(datanodes, stripes=stripes, parity=parity) == pytest.approx(measured, rel=0.15 if parity else 0.1)


def test_parity_makes_up_for_a_slow_datanode() -> None:
    slow = rate(5, stripes=4, slow=0.05)
    assert rate(5, stripes=4, parity=True, slow=0.05) > 3 * slow


def test_a_datanode_that_hangs_costs_little_where_there_is_parity() -> None:
    assert rate(5, stripes=4, parity=True, hangs_at_s=1.0) > 0.7 * rate(5, stripes=4, parity=True)


def test_one_read_after_the_other_is_as_fast_by_what_is_read_ahead() -> None:
    assert rate(4, stripes=4, in_order=True) > 0.95 * rate(4, stripes=4)


@pytest.mark.parametrize(("peers", "measured_s"), [(False, 11.7), (True, 3.6)])
def test_what_four_nodes_read_of_the_same_checkpoint_is_predicted(peers: bool, measured_s: float) -> None:
    """64 MiB on four DataNodes with 50 Mbit/s each; nodes have unlimited links (ADR 37). Measured with peers, on two
    busy processors: 3.6, 3.6 and 4.3 s."""
    engine = Engine()
    cluster = Cluster(engine, 4, 50e6 / 8 * 0.95, seed=0, replicas=1)
    shared = Shared(engine, 64 * MIB, 0.0005)
    ends: list[float] = []

    def ended() -> None:
        ends.append(engine.now)

    for at in range(4):
        reads = Reads(cluster, lambda link: (link,), 1e9, Policy(stripes=4))
        up = engine.link(1e9)
        if peers:
            shared.read(f"node{at}", at / 4, 1, reads.read, lambda name, up=up: (up,), ended)  # type: ignore[misc]
        else:
            reads.read(64 * MIB, ended)
    engine.run(1e3)
    assert len(ends) == 4
    assert max(ends) == pytest.approx(measured_s, rel=0.25)
    copies = sum(link.carried for link in cluster.links.values()) / (64 * MIB)
    assert copies == pytest.approx(1 if peers else 4, rel=0.01)

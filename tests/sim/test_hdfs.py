"""Reads of a checkpoint on modelled DataNodes, against what was measured with real ones (docs/benchmarks.md)."""

from __future__ import annotations

import pytest

from bootseer.checkpoint.layout import Policy
from bootseer.sim.engine import Engine
from bootseer.sim.hdfs import Cluster, Reads

MIB = 1 << 20


def rate(datanodes: int, *, stripes: int = 0, parity: bool = False, slow: float = 1.0, hangs_at_s: float = -1) -> float:
    """MiB/s at which one reader gets 1 GiB from DataNodes with 400 Mbit/s, a copy of each part. No stripes: one after
    the other, as the usual client reads."""
    engine = Engine()
    cluster = Cluster(engine, datanodes, 50e6 * 0.95, seed=0, replicas=1)  # what TCP leaves of it
    cluster.links["datanode1"].bytes_per_s *= slow
    if hangs_at_s >= 0:
        engine.at(hangs_at_s, lambda: cluster.hung.add("datanode1"))
    ends: list[float] = []

    def ended() -> None:
        ends.append(engine.now)
        engine.halt()

    if stripes:
        reads = Reads(cluster, lambda link: (link,), 1e9, Policy(stripes=stripes, parity=parity))
        reads.read(1 << 30, ended)
    else:
        cluster.plain(1 << 30, lambda link: (link,), engine.link("stream", 1e9), ended)
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

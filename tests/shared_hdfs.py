"""Clusters shared by tests that do not break them: starting one takes 5 s, and 1.1 s of processor time per server.

Each test uses separate files. Tests that stop a server must continue it; tests that limit or cut a link must undo it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from hdfs_cluster import HdfsCluster

SHARES_HDFS = {
    "shared_hdfs": frozenset(
        f"tests/{name}.py"
        for name in (
            *(f"hdfs/test_{name}" for name in ("block_writer", "client", "hung_namenode", "lease")),
            *(f"hdfs/test_{name}" for name in ("long_writer", "namenode", "names", "native_reads", "placement")),
            *("hdfs/test_reads", "hdfs/test_writer", "store/test_hdfs", "places/test_hdfs", "docs/test_walks"),
            *("checkpoint/test_checkpoints_hdfs", "checkpoint/reading/test_hdfs", "checkpoint/test_soak"),
            *("checkpoint/dcp/test_on_hdfs", "checkpoint/reading/test_peer_chunks"),
        )
    ),
    "linked_hdfs": frozenset(("tests/hdfs/test_links.py", "tests/checkpoint/reading/test_hdfs_slow.py")),
}
"""Fixture to test files; in parallel runs, one worker runs all files of a fixture."""


_running = {name: contextlib.ExitStack() for name in SHARES_HDFS}


@pytest.fixture(scope="session")
def shared_hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    """Five DataNodes; one replica by default."""
    # A node that was stopped by a test is busier for a while, and would otherwise get no blocks.
    settings = {"dfs.namenode.redundancy.considerLoad": "false"}
    with _running["shared_hdfs"] as running:
        folder = tmp_path_factory.mktemp("shared")
        yield running.enter_context(HdfsCluster(folder, num_datanodes=5, settings=settings))


@pytest.fixture(scope="session")
def linked_hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    """Three DataNodes with links without limits; one replica by default."""
    # Idle connections stay open for ten minutes, and heartbeats soon report their number to the NameNode.
    settings = {"dfs.client.socket-timeout": "600000", "dfs.heartbeat.interval": "1"}
    with _running["linked_hdfs"] as running:
        folder = tmp_path_factory.mktemp("linked")
        yield running.enter_context(HdfsCluster(folder, num_datanodes=3, links=True, settings=settings))


def shared_fixture(nodeid: str) -> str | None:
    """The fixture of the cluster that a test's file shares with others; None without one."""
    file = nodeid.partition("::")[0]
    return next((name for name, files in SHARES_HDFS.items() if file in files), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fail if a file that uses a cluster is not listed: its worker may have ended the cluster after the listed ones."""
    for item in items:
        for name in SHARES_HDFS:
            if name in getattr(item, "fixturenames", ()) and shared_fixture(item.nodeid) != name:
                raise pytest.UsageError(f"{item.nodeid} uses {name}: add its file to SHARES_HDFS")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End a cluster after the worker's last test that uses it: six idle servers take 1 s of processor time in 30 s."""
    name = shared_fixture(item.nodeid)
    if hasattr(item.config, "workerinput") and name and not (nextitem and shared_fixture(nextitem.nodeid) == name):
        _running[name].close()

"""One HDFS for the tests that do not break it: starting one costs 5 s and 10 s of processor time.

Each test has files of its own. One that stops a server lets it go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from hdfs_cluster import HdfsCluster

SHARES_HDFS = frozenset(
    f"tests/{name}.py"
    for name in (
        *(f"hdfs/test_{name}" for name in ("bad_blocks", "block_writer", "client", "hung_namenode", "lease")),
        *(f"hdfs/test_{name}" for name in ("long_writer", "namenode", "names", "native_reads", "placement", "reads")),
        *("hdfs/test_writer", "store/test_hdfs"),
        *("checkpoint/test_checkpoints_hdfs", "checkpoint/reading/test_hdfs", "checkpoint/test_soak"),
        *("checkpoint/dcp/test_on_hdfs", "checkpoint/reading/test_peer_chunks", "places/test_hdfs"),
    )
)
"""Of tests that run side by side, one worker runs these."""


_running = contextlib.ExitStack()


@pytest.fixture(scope="session")
def shared_hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    """Five DataNodes, one replica unless a file wants more."""
    # A node that was hung for a test has more to do for a while, and would get no blocks.
    settings = {"dfs.namenode.redundancy.considerLoad": "false"}
    with _running:
        folder = tmp_path_factory.mktemp("shared")
        yield _running.enter_context(HdfsCluster(folder, num_datanodes=5, settings=settings))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file that is not in the list would find the cluster ended when its worker has run the others before it."""
    for item in items:
        if "shared_hdfs" in getattr(item, "fixturenames", ()) and not _shares(item):
            raise pytest.UsageError(f"{item.nodeid} uses shared_hdfs: add its file to SHARES_HDFS")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End it behind the last test of the worker that uses it: six idle servers take 1 s of processor time in 30."""
    if hasattr(item.config, "workerinput") and _shares(item) and not (nextitem and _shares(nextitem)):
        _running.close()


def _shares(item: pytest.Item) -> bool:
    return item.nodeid.partition("::")[0] in SHARES_HDFS

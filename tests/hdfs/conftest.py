"""A cluster that the tests of this folder share. Whoever stops one of its nodes lets it go on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing

import pytest

from hdfs_cluster import HdfsCluster

client_module = pytest.importorskip("bootseer.hdfs.client", reason="extra hdfs")

from bootseer.hdfs.client import HdfsClient  # noqa: E402 - needs what the line above has looked for

_numbers = itertools.count()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    """Four DataNodes, one replica unless a file wants more."""
    # A node that was hung for a test has more to do for a while, and would get no blocks.
    settings = {"dfs.namenode.redundancy.considerLoad": "false"}
    with HdfsCluster(tmp_path_factory.mktemp("shared"), num_datanodes=4, settings=settings) as running:
        yield running


@pytest.fixture
def client(cluster: HdfsCluster) -> Iterator[HdfsClient]:
    """A client of its own for each test."""
    with closing(HdfsClient(cluster.uri.removeprefix("hdfs://"))) as opened:
        yield opened


@pytest.fixture
def folder(client: HdfsClient) -> str:
    """A folder that no other test uses."""
    path = f"/tests/{next(_numbers)}"
    client.make_folder(path, parents=True)
    return path

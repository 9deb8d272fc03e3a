"""The cluster that tests share, and a client and a folder of their own."""

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
def cluster(shared_hdfs: HdfsCluster) -> HdfsCluster:
    return shared_hdfs


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

"""Fixtures: the shared cluster, and a client and a folder for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing

import pytest

from hdfs_cluster import HdfsCluster

client_module = pytest.importorskip("bootseer.hdfs.client", reason="extra hdfs")

from bootseer.hdfs.client import HdfsClient  # noqa: E402 - only if the line above has not skipped the tests

_numbers = itertools.count()


@pytest.fixture(scope="session")
def cluster(shared_hdfs: HdfsCluster) -> HdfsCluster:
    return shared_hdfs


@pytest.fixture
def client(cluster: HdfsCluster) -> Iterator[HdfsClient]:
    """A new client for each test."""
    with closing(HdfsClient(cluster.uri.removeprefix("hdfs://"))) as opened:
        yield opened


@pytest.fixture
def folder(client: HdfsClient) -> str:
    """A folder that no other test uses."""
    path = f"/tests/{next(_numbers)}"
    client.make_folder(path, parents=True)
    return path

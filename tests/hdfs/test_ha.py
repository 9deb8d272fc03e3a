"""A service of two NameNodes, of which the active one hangs, is killed or becomes a standby during use."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hdfs_cluster import needs_hdfs

pytest.importorskip("hdfs_native", reason="extra hdfs")

from bootseer.checkpoint.latest import read_latest
from bootseer.checkpoint.publish import put_checkpoint
from bootseer.checkpoint.reading.reading import Reading
from bootseer.hdfs.addresses import ClientSettings
from bootseer.hdfs.client import HdfsClient
from bootseer.places import open_place
from hdfs.ha_pair import DATA, Busy, HaPair
from hdfs.whole_files import read_all

pytestmark = needs_hdfs
_numbers = itertools.count()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HaPair]:
    with HaPair(tmp_path_factory.mktemp("ha")) as running:
        yield running


@pytest.fixture
def client(pair: HaPair) -> Iterator[HdfsClient]:
    with closing(HdfsClient(pair.service, ClientSettings(conf_dir=pair.conf_dir))) as opened:
        yield opened


@pytest.fixture
def folder(client: HdfsClient) -> str:
    path = f"/tests/{next(_numbers)}"
    client.make_folder(path, parents=True)
    return path


def test_reading_writing_and_listing_continue_after_a_failover(pair: HaPair, client: HdfsClient, folder: str) -> None:
    with Busy(client, folder) as busy:
        for _ in range(2):
            pair.stand_by(pair.active)
            pair.activate(1 - pair.active)
            busy.wait(2)


def test_reading_writing_and_listing_continue_when_the_active_one_is_killed(
    pair: HaPair, client: HdfsClient, folder: str
) -> None:
    with Busy(client, folder) as busy:
        killed = pair.active
        pair.kill(killed)
        pair.activate(1 - killed)
        busy.wait(2)
    pair.restart(killed)


def test_an_observer_is_skipped(pair: HaPair, client: HdfsClient, folder: str) -> None:
    # Without `dfs.namenode.state.context.enabled` it answers all reads, and is minutes behind here.
    observer = pair.active
    pair.stand_by(observer)
    pair.activate(1 - observer)
    pair.observe(observer)
    try:
        with Busy(client, folder) as busy:
            busy.wait(1)
        client.put(f"{folder}/written", DATA)
        for first in range(2):
            with closing(HdfsClient(pair.service, ClientSettings(conf_dir=pair.conf_dir))) as fresh:
                fresh._active = first
                assert read_all(fresh, f"{folder}/written") == DATA
    finally:
        pair.stand_by(observer)


def test_a_hung_namenode_is_skipped(pair: HaPair, client: HdfsClient, folder: str) -> None:
    client.put(f"{folder}/a", DATA)
    waiting = 1 - pair.active
    # New clients do not know which one is active, and try them in any order.
    for hung in (waiting, pair.active):
        pair.hang(hung)
        if hung == pair.active:
            pair.activate(1 - hung)
        try:
            with closing(HdfsClient(pair.service, ClientSettings(conf_dir=pair.conf_dir))) as fresh:
                assert read_all(fresh, f"{folder}/a") == DATA
                assert fresh.stat(f"{folder}/a").size_bytes == len(DATA)
                fresh.put(f"{folder}/{hung}", b"x")
        finally:
            if hung != waiting:
                pair.kill(hung)  # otherwise it would continue to consider itself active
                pair.restart(hung)
            else:
                pair.resume(hung)


def test_a_checkpoint_is_published_and_read_while_the_active_one_is_killed(
    pair: HaPair, client: HdfsClient, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The name of the service is resolved by Hadoop's configuration, like in `bootseer ckpt`.
    monkeypatch.setenv("HADOOP_CONF_DIR", pair.conf_dir)
    source = tmp_path / "step-1"
    source.mkdir()
    for number in range(3):
        (source / f"{number}.pt").write_bytes(DATA * 6)
    with closing(open_place(f"hdfs://{pair.service}{folder}")) as place:
        killed = pair.active
        is_killed = threading.Event()

        def fail_over() -> None:
            pair.kill(killed)
            pair.activate(1 - killed)

        thread = threading.Thread(target=fail_over)

        def progress(done: int, total: int) -> None:
            if done > total // 3 and not is_killed.is_set():
                is_killed.set()
                thread.start()

        put = put_checkpoint(place, source, "step-1", progress=progress)
        thread.join(60)
        assert is_killed.is_set()
        assert put.latest == read_latest(place, "") == "step-1"
        with closing(Reading(place)) as reading:
            for number in range(3):
                with closing(reading.open(f"step-1/{number}.pt")) as file:
                    assert file.read(0, 6 * len(DATA)) == DATA * 6
    pair.restart(killed)

"""A service of two NameNodes, of which the active one hangs, dies or hands over while checkpoints are used."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hdfs_cluster import needs_hdfs

pytest.importorskip("hdfs_native", reason="extra hdfs")

from bootseer.checkpoint.latest import read_latest
from bootseer.checkpoint.publish import put_checkpoint
from bootseer.checkpoint.reading.reading import Reading
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.native import NativeSettings
from bootseer.places import open_place
from hdfs.ha_pair import HaPair
from hdfs.whole_files import read_all

pytestmark = needs_hdfs
DATA = random.Random(11).randbytes(5_000_003)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HaPair]:
    with HaPair(tmp_path_factory.mktemp("ha")) as running:
        yield running


@pytest.fixture
def client(pair: HaPair) -> Iterator[HdfsClient]:
    with closing(HdfsClient(pair.service, NativeSettings(conf_dir=pair.conf_dir))) as opened:
        yield opened


@pytest.fixture
def folder(client: HdfsClient) -> str:
    path = f"/tests/{next(_numbers)}"
    client.make_folder(path, parents=True)
    return path


class Busy:
    """Uses a folder over and over, in a thread of its own, until the `with` block ends; an error ends it too."""

    def __init__(self, client: HdfsClient, folder: str) -> None:
        self._client = client
        self._folder = folder
        self._is_over = threading.Event()
        self.rounds = 0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Busy:
        self._thread.start()
        self.wait(2)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(120)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error

    def wait(self, rounds: int) -> None:
        """So many more rounds, each of which begins and ends."""
        wanted = self.rounds + rounds
        until = time.monotonic() + 90
        while self.rounds < wanted and self.error is None:
            assert time.monotonic() < until, "no answer"
            time.sleep(0.02)

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._round(f"{self._folder}/{self.rounds}")
                self.rounds += 1
        except BaseException as error:
            self.error = error

    def _round(self, path: str) -> None:
        client = self._client
        client.put(f"{path}.small", DATA[:1000])
        writer = client.create(f"{path}.long")
        writer.write(DATA)
        writer.close()
        (part,) = client.begin_apart([f"{path}.part"], block_size=8 << 20)
        part.write(DATA)
        part.close()
        found = {entry.path: entry.size_bytes for entry in client.list(self._folder)}
        assert (found[f"{path}.small"], found[f"{path}.long"], found[f"{path}.part"]) == (1000, len(DATA), len(DATA))
        assert read_all(client, f"{path}.long") == read_all(client, f"{path}.part") == DATA
        client.rename(f"{path}.part", f"{path}.renamed")
        assert client.stat(f"{path}.renamed").size_bytes == len(DATA)
        client.delete(f"{path}.long")


def test_reading_writing_and_listing_go_on_when_the_active_one_hands_over(
    pair: HaPair, client: HdfsClient, folder: str
) -> None:
    with Busy(client, folder) as busy:
        for _ in range(2):
            pair.stand_by(pair.active)
            pair.activate(1 - pair.active)
            busy.wait(2)


def test_reading_writing_and_listing_go_on_when_the_active_one_is_killed(
    pair: HaPair, client: HdfsClient, folder: str
) -> None:
    with Busy(client, folder) as busy:
        killed = pair.active
        pair.kill(killed)
        pair.activate(1 - killed)
        busy.wait(2)
    pair.restart(killed)


def test_one_that_hangs_is_passed_over(pair: HaPair, client: HdfsClient, folder: str) -> None:
    client.put(f"{folder}/a", DATA)
    waiting = 1 - pair.active
    # Fresh clients do not know which one is active, and ask in any order.
    for hung in (waiting, pair.active):
        pair.hang(hung)
        if hung == pair.active:
            pair.activate(1 - hung)
        try:
            with closing(HdfsClient(pair.service, NativeSettings(conf_dir=pair.conf_dir))) as fresh:
                assert read_all(fresh, f"{folder}/a") == DATA
                assert fresh.stat(f"{folder}/a").size_bytes == len(DATA)
                fresh.put(f"{folder}/{hung}", b"x")
        finally:
            if hung != waiting:
                pair.kill(hung)  # it would hold itself for active still
                pair.restart(hung)
            else:
                pair.resume(hung)


def test_a_checkpoint_is_published_and_read_while_the_active_one_is_killed(
    pair: HaPair, client: HdfsClient, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The name of the service leads through Hadoop's own configuration, as `bootseer ckpt` finds it.
    monkeypatch.setenv("HADOOP_CONF_DIR", pair.conf_dir)
    source = tmp_path / "step-1"
    source.mkdir()
    for number in range(3):
        (source / f"{number}.pt").write_bytes(DATA * 3)
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
                    assert file.read(0, 3 * len(DATA)) == DATA * 3
    pair.restart(killed)

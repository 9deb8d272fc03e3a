"""Operations on names: large folders, and lost answers. The rest is in `test_client`."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from hdfs_cluster import HdfsCluster, needs_hdfs

pytest.importorskip("hdfs_native", reason="extra hdfs")

from bootseer.hdfs.client import HdfsClient

pytestmark = needs_hdfs


class LosesAnswer:
    """A proxy to a server that loses the answer to one method, once, and closes the connection."""

    def __init__(self, server: str, method: bytes) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._method = method
        self.has_lost = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.authority = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> LosesAnswer:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                loses = threading.Event()
                self._start(self._pass_on, client, server, loses, True)
                self._start(self._pass_on, server, client, loses, False)

    def _pass_on(self, source: socket.socket, target: socket.socket, loses: threading.Event, is_client: bool) -> None:
        with source, contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                if is_client and self._method in data and not self.has_lost:
                    self.has_lost = True
                    loses.set()
                if not is_client and loses.is_set():
                    break
                target.sendall(data)
            for end in (source, target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server(cluster: HdfsCluster) -> Iterator[str]:
    yield cluster.uri.removeprefix("hdfs://")


def test_a_rename_whose_answer_was_lost_succeeds(client: HdfsClient, folder: str, server: str) -> None:
    client.put(f"{folder}/a", b"x")
    with LosesAnswer(server, b"rename2") as way, closing(HdfsClient(way.authority)) as other:
        other.rename(f"{folder}/a", f"{folder}/b")
        assert way.has_lost
        other.close()
    assert [entry.path for entry in client.list(folder)] == [f"{folder}/b"]


def test_a_removal_whose_answer_was_lost_succeeds(client: HdfsClient, folder: str, server: str) -> None:
    client.put(f"{folder}/a", b"x")
    with LosesAnswer(server, b"delete") as way, closing(HdfsClient(way.authority)) as other:
        other.delete(f"{folder}/a")
        assert way.has_lost
        other.close()
    assert list(client.list(folder)) == []


def test_a_folder_that_takes_several_answers_is_listed_completely(client: HdfsClient, folder: str) -> None:
    names = {f"{folder}/{number:05}" for number in range(1100)}  # one answer has 1,000
    for name in names:
        client.make_folder(name, parents=True)
    assert {entry.path for entry in client.list(folder)} == names
    assert {entry.path for entry in client.list(f"{folder}/00000")} == set()

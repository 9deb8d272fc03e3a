"""Nodes of a job that read the same checkpoints: processes, each with a cache and a peer server on two addresses."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from blake3 import blake3

from bootseer.cache.cache import Cache
from bootseer.checkpoint.reading.reading import Reading
from bootseer.peers import origins
from bootseer.peers.choice import Peer
from bootseer.peers.job import JobPeers
from bootseer.peers.readers import CachedContent, CachedFiles
from bootseer.peers.server import Server
from bootseer.places import open_place
from warm import CHECKPOINTS, context

SECRET = b"s" * 32
Ranges = Sequence[tuple[int, int]]
"""Pairs of offset and length."""


class Node:
    """The test's handle of a node."""

    def __init__(self, folder: Path, name: str, uri: str) -> None:
        self.folder = folder / name
        self.name = name
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=_be_node, args=(end, self.folder, name, uri), daemon=True)
        CHECKPOINTS.start(self._process)
        end.close()
        self.peer = Peer(name, tuple(self._pipe.recv()))

    def send(self, what: object) -> None:
        self._pipe.send(what)

    def begin(self, path: str, ranges: Ranges, *, step: int | None = None) -> None:
        """Let it read ranges of a file at once, or with `step` one after the other in reads of this size."""
        self.send((path, ranges, step))

    def ended(self, timeout_s: float = 120.0) -> dict[str, Any]:
        """The result of the read: `digest` of the data, or `error`; `seconds`; and the reading's facts so far."""
        assert self._pipe.poll(timeout_s), f"{self.name} does not answer"
        said = self._pipe.recv()
        assert isinstance(said, dict)
        return said

    def limit(self, max_rate: int) -> None:
        """Limit what it sends to others, in bytes per second."""
        self.send(max_rate)
        self.ended()

    def hang(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    @property
    def cached(self) -> list[Path]:
        """The files of its cache."""
        return sorted((self.folder / "cache" / "files").glob("*/data"))


def meet(nodes: Iterable[Node]) -> None:
    """Send each node the addresses of all."""
    nodes = list(nodes)
    for node in nodes:
        node.send([other.peer for other in nodes])
        node.ended()


def _be_node(pipe: Connection, folder: Path, name: str, uri: str) -> None:
    # A node that gets no processor time for longer than the usual second does not answer in time, and its chunks would
    # be read once more.
    origins.ANSWER_S = 5.0
    folder.mkdir()
    job = JobPeers.create(folder / "peers", SECRET)
    files = CachedFiles()
    listening = [socket.create_server((host, 0)) for host in ("127.0.0.1", "127.0.0.2")]
    contents: dict[str, CachedContent] = {}

    def find(identity: str) -> CachedContent | None:
        """Like the service: content that is not registered yet may be registered later."""
        if identity not in contents and (content := files.open(job, identity)) is not None:
            contents[identity] = content
        return contents.get(identity)

    server = Server(listening, SECRET, find, name=name)
    pipe.send([f"{host}:{port}" for host, port in (sock.getsockname() for sock in listening)])
    place = open_place(uri)
    reading = Reading(place, cache=Cache(folder / "cache"), job=job)
    while (told := pipe.recv()) is not None:
        answer: dict[str, Any] = {}
        if isinstance(told, list):
            job.write_members(name, told)
            time.sleep(0.6)  # the list of members is read twice a second
        elif isinstance(told, int):
            server.limit(told)
        else:
            began_s = time.monotonic()
            try:
                answer["digest"] = _read(reading, *told)
            except Exception as error:
                answer["error"] = f"{type(error).__name__}: {error}"
            answer["seconds"] = time.monotonic() - began_s
            reading.settle()
        pipe.send(
            answer
            | reading.facts()
            | {"sent_bytes": server.served.bytes_sent, "by_interface": dict(server.served.by_interface)}
        )
    reading.close()
    server.close()
    files.close()


def _read(reading: Reading, path: str, ranges: Ranges, step: int | None) -> str:
    """The digest of the ranges, one after the other."""
    memories = [bytearray(length) for _, length in ranges]
    with reading.open(path) as file:
        if step is None:
            file.read_ranges([(offset, memory) for (offset, _), memory in zip(ranges, memories, strict=True)])
        else:
            for (offset, length), memory in zip(ranges, memories, strict=True):
                for at in range(0, length, step):
                    memory[at : at + step] = file.read(offset + at, min(step, length - at))
    return blake3(b"".join(memories)).hexdigest()

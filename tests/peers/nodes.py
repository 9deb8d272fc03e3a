"""Nodes of one job in this process, each with its own cache, peers folder, service and connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from bootseer.blocks.index import Index
from bootseer.cache.cache import Cache
from bootseer.fetch.fetcher import Fetcher
from bootseer.peers.choice import Peer
from bootseer.peers.job import JobPeers
from bootseer.peers.origins import PeerGroup
from bootseer.peers.server import Content, Server
from bootseer.peers.service import BlockFiles
from bootseer.store.store import Store

SECRET = b"s" * 32


class Node:
    """One node. `peer` is its entry for other nodes; it has no members until `meet`."""

    def __init__(self, name: str, folder: Path, store: Store, index: Index) -> None:
        self.name = name
        self.job = JobPeers.create(folder / f"{name}-peers", SECRET)
        self.cache_root = folder / f"{name}-cache"
        self.cached = Cache(self.cache_root).open(index)
        self.group = PeerGroup(self.job)
        self.fetcher = Fetcher()
        self.fetcher.add(index, store, self.cached, peers=self.group.file(index, store.uri, False, self.cache_root))
        self.blocks = BlockFiles()
        self._contents: dict[str, Content | None] = {}
        self._opening = threading.Lock()
        listening = socket.create_server(("127.0.0.1", 0))
        self.peer = Peer(name, (f"127.0.0.1:{listening.getsockname()[1]}",))
        self.server = Server([listening], SECRET, self._find, name=name, on_unknown=self.job.note_ahead)
        self.uses_the_file = True

    def meet(self, peers: Iterable[Peer]) -> None:
        """Set the nodes of the job."""
        self.job.write_members(self.name, peers)

    def start(self, work: Callable[[Node], object]) -> threading.Thread:
        """Run `work` on this node in a new thread."""
        thread = threading.Thread(target=work, args=(self,))
        thread.start()
        return thread

    def kill(self) -> None:
        """End its service without notifying others."""
        self.server.close()

    def close(self) -> None:
        self.fetcher.close()
        self.group.close()
        self.server.close()
        self.blocks.close()
        self.cached.close()

    def _find(self, identity: str) -> Content | None:
        if not self.uses_the_file:
            return None
        with self._opening:
            if self._contents.get(identity) is None:
                self._contents[identity] = self.blocks.open(self.job, identity)
            return self._contents[identity]

"""Connections to DataNodes between two uses: few for each, none for longer than DataNodes keep them.

Used by `serving` from many threads. Connecting happens outside of its lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final

from bootseer.hdfs.datanode import DataNodeConnection
from bootseer.hdfs.located import Node

_IDLE_S: Final = 3.0
"""DataNodes close a connection after 4 s without a request, `dfs.datanode.socket.reuse.keepalive`."""
_MAX_IDLE: Final = 64


class Connections:
    """Idle connections. `by_hostname`: DataNodes are called by their names."""

    def __init__(self, *, silent_s: float, by_hostname: bool) -> None:
        self._silent_s = silent_s
        self._by_hostname = by_hostname
        self._lock = threading.Lock()
        self._idle: deque[tuple[str, DataNodeConnection]] = deque()

    def take(self, node: Node) -> DataNodeConnection | None:
        """One that was used a moment ago, if there is one."""
        self.expire()
        with self._lock:
            for entry in reversed(self._idle):
                if entry[0] == node.host_port:
                    self._idle.remove(entry)
                    return entry[1]
        return None

    def new(self, node: Node) -> DataNodeConnection:
        """One that is to be connected. Raises `DataNodeError` for a name that leads nowhere."""
        host, _, port = node.host_port.rpartition(":")
        address = (node.hostname if self._by_hostname else host.strip("[]"), int(port))
        return DataNodeConnection(address, silent_s=self._silent_s)

    def give(self, node: Node, connection: DataNodeConnection) -> None:
        """Keep one whose read has come to its end."""
        with self._lock:
            self._idle.append((node.host_port, connection))
            extra = self._idle.popleft()[1] if len(self._idle) > _MAX_IDLE else None
        if extra is not None:
            extra.close()

    def drop(self, node: Node) -> None:
        """Those to one DataNode are of no more use."""
        self._close([entry for entry in list(self._idle) if entry[0] == node.host_port])

    def expire(self) -> None:
        """Close those that their DataNodes are about to close."""
        oldest_s = time.monotonic() - _IDLE_S
        if self._idle:
            self._close([entry for entry in list(self._idle) if entry[1].last_used_s < oldest_s])

    def close(self) -> None:
        """Close all."""
        self._close(list(self._idle))

    def forget(self) -> None:
        """In the child of a fork: leave them to the parent."""
        self._lock = threading.Lock()
        self.close()

    def _close(self, entries: list[tuple[str, DataNodeConnection]]) -> None:
        for entry in entries:
            with self._lock:
                if entry not in self._idle:
                    continue  # somebody has taken it
                self._idle.remove(entry)
            entry[1].close()

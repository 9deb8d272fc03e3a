"""Files of HDFS, read straight from their DataNodes into the caller's memory.

    reads = HdfsReads(NameNode(Cluster.of("host:port")))
    file = reads.open("/folder/file")
    file.read_into(0, memoryview(buffer), done)

Any number of reads at a time, from any thread; each range is cut at blocks and asked of the DataNodes that have them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bootseer.errors import PermanentError
from bootseer.hdfs.located import LocatedFile
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.requests import HdfsSource, ReadOutcome, ReadSettings, Ticket
from bootseer.hdfs.rpc import UnsupportedError
from bootseer.hdfs.serving import Serving

_OPEN_S = 30.0
_CALLED_OFF = "the read was called off"


class HdfsReads:
    """Reads of one cluster: its connections, and what its DataNodes have shown, are shared by all its files."""

    def __init__(self, namenode: NameNode, settings: ReadSettings | None = None) -> None:
        self._namenode = namenode
        self._serving = Serving(namenode, settings or ReadSettings())

    def open(self, path: str, *, deadline_s: float = _OPEN_S) -> HdfsFile:
        """A file as it is now. Raises as `NameNode.locate`, and `UnsupportedError` when its bytes need another
        client."""
        located = self._namenode.locate(path, timeout_s=deadline_s)
        named = f"hdfs://{self._namenode.cluster.authority}{path}"
        if not located.readable:
            raise UnsupportedError(
                f"{named} is erasure-coded or encrypted, which BootSeer's HDFS client does not support"
            )
        return HdfsFile(self._serving, located, named)

    def delay_s(self, nodes: Sequence[str], length: int) -> float:
        """Seconds until so much would be here from one of these DataNodes, by estimate; as `HdfsFile.delay_s`."""
        with self._serving.estimates() as schedule:
            return schedule.node_delay_s(nodes, length, time.monotonic()) if nodes else 0.0

    def facts(self) -> dict[str, object]:
        """All reads so far: for each DataNode bytes, requests, seconds (of all its connections) and failures, then how
        often something was asked again, hedged, refreshed, refused for wrong bytes, or taken without checksums because
        no DataNode that can be asked has any."""
        with self._serving.estimates() as schedule:
            counts = schedule.counts
            return {
                "nodes": {
                    queue.name: {
                        "bytes": queue.bytes,
                        "requests": queue.requests,
                        "seconds": queue.seconds,
                        "failures": queue.failures,
                    }
                    for queue in schedule.queues.by_node.values()
                },
                **{
                    name: counts[name]
                    for name in ("retries", "hedges", "hedges_won", "refreshes", "wrong", "unchecked")
                },
                "fallback": "",
            }

    def close(self) -> None:
        """End all reads, with an error for those that have not ended, and give back threads and connections."""
        self._serving.close()


class HdfsFile:
    """One version of one file. Safe to use from many threads, and in a child of a fork."""

    def __init__(self, serving: Serving, located: LocatedFile, named: str) -> None:
        self._serving = serving
        self._source = HdfsSource(located, named)
        self.size_bytes = located.size_bytes
        self.version = located.version

    def nodes(self, offset: int) -> tuple[str, ...]:
        if not 0 <= offset < self.size_bytes:
            return ()
        return tuple(node.host_port for node in self._source.located.block_at(offset).nodes)

    def delay_s(self, offset: int, length: int) -> float:
        """Seconds until this range would be here if it was asked for now, by estimate; 0 where nothing is known, and
        infinity when no DataNode is expected to give it."""
        with self._serving.estimates() as schedule:
            return schedule.delay_s(self._source, offset, length, time.monotonic())

    def read_into(
        self,
        offset: int,
        into: memoryview,
        done: Callable[[ReadOutcome], None],
        *,
        check: bool = True,
        urgent: bool = True,
        avoid: frozenset[str] = frozenset(),
        deadline_s: float = 60.0,
        here: bool = False,
    ) -> ReadTicket:
        """Fill `into` with the bytes from `offset` on.

        `done` is called once, from a thread of these reads, and must return soon; from then on no thread writes to
        `into`. Raises `TransientError` or `PermanentError` when the read cannot be begun; then `done` is not called.
        `check`: compare with HDFS's own checksums. `urgent`: a reader waits. `avoid`: DataNodes that gave wrong bytes,
        which are asked when there is no other. Safe to call from `done`, unless `here`: then this thread, which holds
        no lock, may receive the bytes itself and call `done`, which for a few of them takes less than waking another
        one.
        """
        if into.readonly:
            raise ValueError("a read needs memory that can be written to")
        into = into.cast("B")
        ticket = Ticket(self._source, offset, into, done, check, urgent, avoid, deadline_s)
        if not 0 <= offset <= offset + len(into) <= self.size_bytes:
            ticket.error = PermanentError(
                f"{self._source.named} has {self.size_bytes} bytes, not {len(into)} from {offset} on"
            )
        if not here or ticket.error is not None or not len(into) or not self._serving.read_now(ticket):
            self._serving.submit(ticket)
        return ReadTicket(self._serving, ticket)

    def close(self) -> None:
        """Not read any more. What is underway goes on; nothing is held."""


class ReadTicket:
    """A read on its way."""

    def __init__(self, serving: Serving, ticket: Ticket) -> None:
        self._serving = serving
        self._ticket = ticket

    def cancel(self) -> None:
        with self._serving.schedule() as schedule:
            ticket = self._ticket
            error = PermanentError(f"{ticket.source.named}: {_CALLED_OFF}")
            schedule.cancel(ticket, error, time.monotonic())

    def hurry(self) -> None:
        with self._serving.schedule() as schedule:
            schedule.hurry(self._ticket)

    def left_s(self) -> float:
        with self._serving.estimates() as schedule:
            return schedule.left_s(self._ticket, time.monotonic())

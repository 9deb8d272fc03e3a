"""Files of HDFS, read straight from their DataNodes into the caller's memory.

    reads = HdfsReads(NameNode(Cluster.of("host:port")))
    file = reads.open("/folder/file")
    file.read_into(0, memoryview(buffer), done)

Any number of reads at a time, from any thread; each range is cut at block boundaries, and each piece is requested from
a DataNode that has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from bootseer.errors import PermanentError
from bootseer.hdfs.block_locations import LocatedFile
from bootseer.hdfs.errors import UnsupportedError
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.read_threads import ReadThreads
from bootseer.hdfs.requests import HdfsSource, ReadSettings, Ticket
from bootseer.io.pooled_reads import DEADLINE_S, ReadOptions, ReadOutcome
from bootseer.logs import logger

if TYPE_CHECKING:
    from bootseer.hdfs.native import NativeFile, NativeReads

_LOG = logger(__name__)

_OPEN_S = 30.0


class HdfsReads:
    """Reads of one cluster. All files share connections and statistics of DataNodes."""

    def __init__(
        self,
        namenode: NameNode,
        settings: ReadSettings | None = None,
        *,
        fallback: NativeReads | None = None,
    ) -> None:
        """`fallback` reads files that need hdfs-native; None: these are refused."""
        self._namenode = namenode
        self._threads = ReadThreads(namenode, settings or ReadSettings())
        self._fallback = fallback
        self._reason = ""

    def open(self, path: str, *, deadline_s: float = _OPEN_S) -> HdfsFile | NativeFile:
        """Open a file's current version. Raises as `NameNode.locate`, and `UnsupportedError` without a fallback."""
        located = self._namenode.locate(path, timeout_s=deadline_s)
        self._namenode.protection.check_key()
        uri = f"hdfs://{self._namenode.cluster.authority}{path}"
        if located.readable:
            return HdfsFile(self._threads, located, uri)
        reason = f"{uri} is erasure-coded or encrypted, which BootSeer's HDFS client does not support"
        if self._fallback is None:
            raise UnsupportedError(reason)
        if not self._reason:
            _LOG.info("read through hdfs-native: %s", reason)
        self._reason = reason
        return self._fallback.open(path, deadline_s=deadline_s)

    def delay_s(self, nodes: Sequence[str], length: int) -> float:
        """Estimated seconds for a read of this size from one of these DataNodes; as `HdfsFile.delay_s`."""
        with self._threads.estimates() as schedule:
            return schedule.node_delay_s(nodes, length, time.monotonic()) if nodes else 0.0

    def facts(self) -> dict[str, Any]:
        """Statistics of all reads: for each DataNode bytes, requests, seconds (of all its connections) and failures;
        then numbers of retries, hedges, location refreshes, corrupt pieces, and pieces read without checksums because
        no available DataNode has them. `fallback` says why hdfs-native was used, "" if it was not."""
        native = self._fallback if self._reason else None
        with self._threads.estimates() as schedule:
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
                }
                | (native.nodes() if native is not None else {}),
                "retries": counts["retries"] + (native.num_retries if native is not None else 0),
                **{name: counts[name] for name in ("hedges", "hedges_won", "refreshes", "wrong", "unchecked")},
                "fallback": self._reason,
            }

    def close(self) -> None:
        """End all reads, unfinished ones with an error, and release threads and connections."""
        self._threads.close()
        if self._fallback is not None:
            self._fallback.close()


class HdfsFile:
    """One version of one file. Safe to use from many threads, and in a child of a fork."""

    def __init__(self, threads: ReadThreads, located: LocatedFile, uri: str) -> None:
        self._threads = threads
        self._source = HdfsSource(located, uri)
        self.size_bytes = located.size_bytes
        self.version = located.version

    def nodes(self, offset: int) -> tuple[str, ...]:
        if not 0 <= offset < self.size_bytes:
            return ()
        return tuple(node.host_port for node in self._source.located.block_at(offset).nodes)

    def delay_s(self, offset: int, length: int) -> float:
        """Estimated seconds for a read of this range; 0 if unknown, infinity if no DataNode is expected to serve it."""
        with self._threads.estimates() as schedule:
            return schedule.delay_s(self._source, offset, length, time.monotonic())

    def read_into(
        self, offset: int, into: memoryview, done: Callable[[ReadOutcome], None], **options: Unpack[ReadOptions]
    ) -> ReadTicket:
        """Fill `into` with the bytes from `offset` on.

        `done` is called once, from a thread of these reads, and must return quickly; from then on no thread writes to
        `into`. Raises `TransientError` or `PermanentError` if the read cannot be started; then `done` is not called.
        """
        if into.readonly:
            raise ValueError("a read needs memory that can be written to")
        into = into.cast("B")
        if not 0 <= offset <= offset + len(into) <= self.size_bytes:
            raise PermanentError(f"{self._source.uri} has {self.size_bytes} bytes, not {len(into)} from {offset} on")
        ticket = Ticket(
            self._source, offset, into, done, options.get("check", True), options.get("urgent", True),
            options.get("avoid", frozenset()), options.get("deadline_s", DEADLINE_S),
        )  # fmt: skip
        if not options.get("inline") or not len(into) or not self._threads.read_inline(ticket):
            self._threads.submit(ticket)
        return ReadTicket(self._threads, ticket)

    def close(self) -> None:
        """Reads in flight still end; nothing else is held."""


class ReadTicket:
    """A read in flight."""

    def __init__(self, threads: ReadThreads, ticket: Ticket) -> None:
        self._threads = threads
        self._ticket = ticket

    def cancel(self) -> None:
        with self._threads.schedule() as schedule:
            ticket = self._ticket
            error = PermanentError(f"{ticket.source.uri}: the read was cancelled")
            schedule.cancel(ticket, error, time.monotonic())

    def prioritize(self) -> None:
        with self._threads.schedule() as schedule:
            schedule.prioritize(self._ticket)

    def remaining_s(self) -> float:
        with self._threads.estimates() as schedule:
            return schedule.remaining_s(self._ticket, time.monotonic())

"""Reports corrupt replicas to the NameNode, so that it replaces them; until then every reader gets them.

DataNodes check their blocks every three weeks only, and do not pass on a reader's complaint. The rules are those of
Hadoop's own client: report if another replica may be right, or if there is no other. A client that finds all of several
replicas corrupt more likely has bad memory itself, and reports none.

Safe to use from many threads, and in the child of a fork.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from bootseer.errors import BootseerError
from bootseer.hdfs.block_locations import Block, Node
from bootseer.hdfs.lease import identity
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.protobuf import field
from bootseer.io.fork import in_each_process
from bootseer.logs import logger

_LOG = logger(__name__)

_MAX_KNOWN: Final = 4096
_REPORT_S: Final = 10.0


class BadBlockReports:
    """Reports that were sent, and how to send others."""

    def __init__(self, namenode: NameNode) -> None:
        self._namenode = namenode
        self._known: set[tuple[str, int, int, str]] = set()
        in_each_process(self._begin)

    def _begin(self) -> None:
        self._sending = threading.Lock()

    def report(self, block: Block, wrong: Iterable[str]) -> None:
        """These nodes (`host:port`) returned bytes of the block that do not match HDFS's checksums. Never raises.

        To be called when all nodes that will be tried were tried. One thread at a time waits for the NameNode; what
        others have to report meanwhile is dropped, and left to the next reader.
        """
        named = frozenset(wrong)
        bad = [node for node in block.nodes if node.host_port in named]
        keys = {(block.pool, block.id, block.generation, node.host_port) for node in bad}
        if len(bad) == len(block.nodes) > 1 or keys <= self._known or not self._sending.acquire(blocking=False):
            return
        try:
            _LOG.info("%s is corrupt on %s: reported to the NameNode", block, ", ".join(node.host_port for node in bad))
            if len(self._known) > _MAX_KNOWN:
                self._known.clear()
            self._known |= keys
            with suppress(BootseerError):  # another reader will report it
                self._namenode.ask("reportBadBlocks", field(1, _located(block, bad)), "/", _REPORT_S)
        finally:
            self._sending.release()


def _located(block: Block, nodes: Iterable[Node]) -> bytes:
    nodes_field = b"".join(field(3, field(1, _node(node))) for node in nodes)
    return field(1, identity(block)) + field(2, block.start) + nodes_field + field(4, True) + field(5, block.token)


def _node(node: Node) -> bytes:
    """A `DatanodeIDProto`. The NameNode identifies nodes by uuid and port; the info port is not used."""
    address, _, port = node.host_port.rpartition(":")
    name = field(1, address.strip("[]")) + field(2, node.hostname) + field(3, node.uuid)
    return name + field(4, int(port)) + field(5, 0) + field(6, node.ipc_port)

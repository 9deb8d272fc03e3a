"""DataNodes that failed to take a block lately, and beginning a block on others. Called by `placing` and `long_writer`.

A node that hangs or is dead counts as live with the NameNode for minutes, which sends writers to it as to all others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from bootseer.errors import TransientError
from bootseer.hdfs.block_writer import BlockWriter, PipelineError
from bootseer.hdfs.lease import Lease, NewBlock, WriteDefaults
from bootseer.hdfs.namenode import NameNode

Nodes = frozenset[str]

SETUP_S: Final = 3.0
STALL_S: Final = 8.0
"""Longer than disks that are busy writing back, which make their readers wait for seconds."""
MAX_FAILURES: Final = 4
"""Blocks that may find no node in a row before the cluster counts as unable to write."""
_BAD_S = 60.0
_MAX_KNOWN = 10_000


class BadNodes:
    """The DataNodes that failed to take a block lately, and what the NameNode calls the nodes. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bad: dict[str, float] = {}
        self._known: dict[str, bytes] = {}
        self._in_vain_until_s = 0.0

    @property
    def may_wait(self) -> bool:
        """Whether nobody has waited in vain lately for nodes that the NameNode does not choose."""
        return time.monotonic() >= self._in_vain_until_s

    def waited_in_vain(self) -> None:
        """Such nodes, as full ones, are not waited for again for a while."""
        self._in_vain_until_s = time.monotonic() + _BAD_S

    def met(self, new: NewBlock) -> None:
        """The NameNode has named these nodes."""
        with self._lock:
            if len(self._known) > _MAX_KNOWN:
                self._known.clear()
            self._known.update(zip((node.host_port for node in new.block.nodes), new.told, strict=True))

    def failed(self, node: str) -> None:
        """This one did not take a block; "" is nobody."""
        if node:
            with self._lock:
                self._bad[node] = time.monotonic() + _BAD_S

    def names(self) -> Nodes:
        """Those that failed within the last minute."""
        with self._lock:
            now_s = time.monotonic()
            self._bad = {node: until_s for node, until_s in self._bad.items() if until_s > now_s}
            return frozenset(self._bad)

    def known(self, names: Iterable[str]) -> list[bytes]:
        """What the NameNode calls these nodes; those that it has not named yet cannot be excluded."""
        with self._lock:
            return [self._known[name] for name in names if name in self._known]


def begin_block(
    namenode: NameNode, lease: Lease, defaults: WriteDefaults, bad: BadNodes, draw: Callable[[Nodes], NewBlock]
) -> tuple[NewBlock, BlockWriter]:
    """A block on nodes that take it. `draw` gets one from the NameNode, if it can on none of the nodes that failed."""
    failed: set[str] = set()
    failures = 0
    while True:
        new = draw(frozenset(failed))
        try:
            by_hostname = namenode.cluster.by_hostname
            return new, BlockWriter(
                new, defaults, lease.holder, by_hostname=by_hostname, setup_s=SETUP_S, stall_s=STALL_S
            )
        except PipelineError as error:
            bad.failed(error.node)
            failed.add(error.node)
            failures += 1
            lease.abandon(new.block)
            if failures == MAX_FAILURES:
                said = f"hdfs://{namenode.cluster.authority}{lease.path}: no DataNode takes it: {error}"
                raise TransientError(said) from error

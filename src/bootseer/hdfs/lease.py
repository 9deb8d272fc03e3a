"""The NameNode's side of a file that is being written: created, given blocks, completed.

Writing requires a lease, which belongs to a named holder. Here each file has its own holder, so that a file whose
writer has died is closed by the NameNode alone: after 20 minutes without a renewal
(`dfs.namenode.lease-hard-limit-sec`; an hour before Hadoop 3.3). After 60 s another writer may take over the name. It
is enough to renew the lease while sending: DataNodes drop idle writers after 60 s anyway.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from bootseer.errors import (
    AccessError,
    AlreadyExistsError,
    BootseerError,
    NoSpaceError,
    NoSpaceNowError,
    NotFoundError,
    PermanentError,
    TransientError,
)
from bootseer.hdfs.block_locations import Block, FileStatus, parse_block, parse_status
from bootseer.hdfs.checksums import CRC32, CRC32C
from bootseer.hdfs.errors import UnsupportedError
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.protobuf import Message, field
from bootseer.hdfs.rpc import RemoteError
from bootseer.units import format_bytes

_CREATE = 1
_RENEW_S: Final = 20.0
_RENEW_CALL_S: Final = 5.0
_REMOVE_S: Final = 10.0
_REPORTED_S: Final = 60.0
"""How long DataNodes may take to report a block to the NameNode that they have acknowledged to its writer."""
_FIRST_PAUSE_S: Final = 0.002
_MAX_PAUSE_S: Final = 0.2
_MAX_CHUNK_BYTES: Final = 64 * 1024
_NO_NODES = ("could only be written to", "could only be replicated to", "is out of space")
_MANY_BLOCKS: Final = 20
"""The NameNode subtracts the space of blocks in flight, and of failed ones for 20 minutes."""
_MAX_SHOWN: Final = 4
_RUNNING = re.compile(r"There are (\d{1,9}) datanode\(s\) running")
_LEAST_BLOCK = re.compile(r"minimum value.*: \d+ < (\d{1,15})\b")
"""A NameNode's message about too small blocks, `dfs.namenode.fs-limits.min-block-size`."""
_OWN_ALREADY = ("is already the current lease holder", "current leaseholder is trying to recreate")


class NoNodesError(TransientError):
    """The NameNode finds no DataNode for a block, or none that is not excluded."""


class _NotReplicatedYetError(TransientError):
    """The DataNodes of an earlier block of the file have not reported to the NameNode yet."""


@dataclass(frozen=True, slots=True)
class WriteDefaults:
    """The cluster's defaults for new files."""

    block_size: int
    replication: int
    checksum_kind: int
    chunk_bytes: int
    """Bytes per checksum."""


@dataclass(frozen=True, slots=True)
class NewBlock:
    """An allocated block that is to be written."""

    block: Block
    node_ids: tuple[bytes, ...]
    """Its nodes as encoded by the NameNode, to be passed to DataNodes and back to it."""
    storage_kinds: tuple[int, ...]
    """Kind of disk of each of its nodes."""
    storage_ids: tuple[str, ...]


def ask_defaults(namenode: NameNode) -> WriteDefaults:
    """Ask the NameNode for its defaults for new files; the client's `dfs.replication` takes precedence."""
    with namenode.parsing("/"):
        answer = namenode.ask("getServerDefaults").message(1)
        wanted = namenode.cluster.settings.get("dfs.replication", "")
        found = WriteDefaults(
            block_size=answer.number(1),
            replication=int(wanted) if wanted.isdecimal() else answer.number(4),
            checksum_kind=answer.number(8, CRC32),
            chunk_bytes=answer.number(2),
        )
    if not 0 < found.chunk_bytes <= _MAX_CHUNK_BYTES or found.chunk_bytes & (found.chunk_bytes - 1):
        # Packets must end at checksum boundaries.
        raise UnsupportedError(f"checksums of {found.chunk_bytes} bytes are not supported by BootSeer's HDFS client")
    # This package always writes checksums.
    return found if found.checksum_kind in (CRC32, CRC32C) else replace(found, checksum_kind=CRC32C)


_BAD_S = 60.0
_MAX_KNOWN = 10_000


class ExcludedDataNodes:
    """DataNodes that recently failed to take a block. Without a lock, which a fork could leave held: single operations
    on a dictionary are safe from many threads."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._ids: dict[str, bytes] = {}

    def exclude(self, nodes: Iterable[str]) -> None:
        """Exclude these nodes for a minute; "" has no effect."""
        until_s = time.monotonic() + _BAD_S
        self._until.update({node: until_s for node in nodes if node})

    def names(self) -> frozenset[str]:
        now_s = time.monotonic()
        return frozenset(node for node, until_s in self._until.copy().items() if until_s > now_s)

    def remember(self, new: NewBlock) -> None:
        """Remember the NameNode's ids of the block's nodes."""
        if len(self._ids) > _MAX_KNOWN:
            self._ids = {}
        self._ids.update(zip((node.host_port for node in new.block.nodes), new.node_ids, strict=True))

    def ids_of(self, names: Iterable[str]) -> list[bytes]:
        """The NameNode's ids of these nodes. Nodes that it has never named cannot be excluded."""
        ids = self._ids
        return [ids[name] for name in names if name in ids]


@dataclass(frozen=True, slots=True)
class FileSettings:
    """How a new file is written."""

    block_size: int
    """Bytes."""
    replication: int
    mode: int
    parents: bool
    """Whether to create a missing folder."""
    defaults: WriteDefaults
    excluded: ExcludedDataNodes
    close_s: float
    """Timeout for the end of a file: the last bytes, all acknowledgements, and the reports to the NameNode."""


class Lease:
    """The right to write one file. Used by one thread at a time."""

    def __init__(self, namenode: NameNode, path: str, settings: FileSettings) -> None:
        """Create the file. Raises `AlreadyExistsError`, and `UnsupportedError` for an erasure-coded or encrypted file,
        after removing it."""
        self.path = path
        self.holder = f"bootseer-{secrets.token_hex(12)}"
        self.block_size = max(settings.block_size, namenode.least_block_bytes)
        """That of the settings, or the least that the NameNode accepts."""
        self._namenode = namenode
        self._file_id = 0
        self._renewed_s = time.monotonic()
        request = (
            field(1, path)
            + field(2, field(1, settings.mode))
            + field(3, self.holder)
            + field(4, _CREATE)
            + field(5, settings.parents)
            + field(6, settings.replication)
        )
        with namenode.parsing(path):
            status = self._create(request).message(1)
            self._file_id = status.number(13, 0)
        if 15 in status or 17 in status:
            namenode.ask("delete", field(1, path) + field(2, False), path)
            raise UnsupportedError(
                f"{path}: its bytes would be erasure-coded or encrypted, which BootSeer's HDFS client does not support"
            )

    def add_block(self, exclude: Iterable[bytes], previous: Block | None = None) -> NewBlock:
        """Allocate the block after `previous`, which must be acknowledged, or the first one, on none of the nodes
        `exclude`. Raises `NoNodesError` if there are no others, `NoSpaceError` or `NoSpaceNowError` if no node has
        space.

        Waits while DataNodes have not reported earlier blocks to the NameNode: busy ones are seconds late.
        """
        request = field(1, self.path) + field(2, self.holder) + field(5, self._file_id)
        if previous is not None:
            request += field(3, identity(previous))
        excluded = b"".join(field(4, node) for node in exclude)
        request += excluded
        until = time.monotonic() + _REPORTED_S
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return self._added(request)
            except NoNodesError as error:
                if excluded:
                    raise
                raise self._explain(error) from error
            except _NotReplicatedYetError:
                if time.monotonic() + pause_s >= until:
                    raise
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                self.renew()

    def _added(self, request: bytes) -> NewBlock:
        with self._namenode.parsing(self.path):
            answer = self._ask("addBlock", request)
            data = answer.data(1)
            located = Message(data)
            block = parse_block(data, {})
            node_ids = tuple(located.every(3))
            kinds = tuple(located.numbers(7))
            ids = tuple(storage.decode("ascii", "replace") for storage in located.every(8))
        if not block.nodes:
            raise NoNodesError(f"{self.path}: the NameNode gives a block without a DataNode")
        return NewBlock(block, node_ids, kinds, ids)

    def _explain(self, error: NoNodesError) -> BootseerError:
        """Why the NameNode has no node: `NoSpaceError` when all are full, `NoSpaceNowError` when blocks in flight may
        need what is left, `error` itself when space is not the reason.
        """
        count = _RUNNING.search(str(error))
        num_live = int(count[1]) if count is not None else 0
        try:
            rooms = self._namenode.free_bytes_by_node()
            most = max(rooms.values(), default=1 << 63)  # without nodes in service, space is not the reason
        except AccessError:  # only the sum is known: use the average
            rooms, most = {}, self._namenode.space()[1] // max(num_live, 1)
        except BootseerError:
            return error
        if not num_live or most >= _MANY_BLOCKS * self.block_size:
            return error
        shown = [f"{node} {format_bytes(rooms[node])}" for node in sorted(rooms, key=rooms.__getitem__, reverse=True)]
        more = [f"{len(shown) - _MAX_SHOWN} others less"] if len(shown) > _MAX_SHOWN else []
        where = ", ".join(shown[:_MAX_SHOWN] + more) if rooms else f"{format_bytes(most)} on each DataNode"
        full = f"no space on hdfs://{self._namenode.cluster.authority} for a block of {format_bytes(self.block_size)}"
        if most < self.block_size:
            return NoSpaceError(f"{full}; free: {where}")
        return NoSpaceNowError(f"{full} beside those that are being written; free: {where}")

    def abandon(self, block: Block) -> None:
        """Give back a block without data."""
        self._ask("abandonBlock", field(1, identity(block)) + field(2, self.path) + field(3, self.holder))

    def renew(self) -> None:
        """Renew the lease if it is due."""
        now_s = time.monotonic()
        if now_s - self._renewed_s >= _RENEW_S:
            self._renewed_s = now_s
            # A restarting NameNode must not fail a block that DataNodes accept; later renewals are in time.
            with contextlib.suppress(TransientError):
                self._namenode.ask("renewLease", field(1, self.holder), self.path, _RENEW_CALL_S)

    def complete(self, block: Block | None, size_bytes: int, timeout_s: float) -> FileStatus:
        """Complete the file, of `size_bytes`; `block` is its last one. Waits until DataNodes have reported its blocks
        to the NameNode. Returns the file's status."""
        request = field(1, self.path) + field(2, self.holder) + field(4, self._file_id)
        if block is not None:
            request += field(3, identity(block))
        until = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        with self._namenode.parsing(self.path):
            # A restarting NameNode may use all of the time, as DataNodes may.
            while not self._ask("complete", request, max(until - time.monotonic(), _FIRST_PAUSE_S)).number(1):
                if time.monotonic() + pause_s >= until:
                    raise TransientError(f"{self.path}: no DataNode confirmed its block within {timeout_s:.0f} s")
                # The DataNode's report usually takes a millisecond.
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                self.renew()
            status = parse_status(self.path, self._ask("getFileInfo", field(1, self.path)).message(1))
        if status.size_bytes != size_bytes:
            raise TransientError(f"{self.path} has {status.size_bytes} bytes after {size_bytes} were written")
        return status

    def remove(self) -> None:
        """Remove the file, if it exists and the NameNode answers in time."""
        self._ask("delete", field(1, self.path) + field(2, False), _REMOVE_S)

    def _create(self, request: bytes) -> Message:
        try:
            return self._ask("create", request + field(7, self.block_size))
        except AlreadyExistsError as error:
            if not any(text in str(error) for text in _OWN_ALREADY):
                raise
            # No other writer has this holder's name: the answer was lost, and the request repeated.
            return self._ask("getFileInfo", field(1, self.path))
        except PermanentError as error:
            least = _LEAST_BLOCK.search(str(error))
            if least is None or int(least[1]) <= self.block_size:
                raise
            self._namenode.least_block_bytes = self.block_size = int(least[1])
            return self._create(request)

    def _ask(self, method: str, request: bytes, timeout_s: float | None = None) -> Message:
        try:
            return self._namenode.ask(method, request, self.path, timeout_s)
        except BootseerError as error:
            if isinstance(error, NotFoundError) and method != "create":
                raise NotFoundError(f"{error}: it was removed while it was written, or its folder was") from error
            # Errors that only concern writers.
            kind = _kind(error.__cause__)
            if kind is None:
                raise
            raise kind(str(error)) from error


def identity(block: Block) -> bytes:
    return field(1, block.pool) + field(2, block.id) + field(3, block.generation) + field(4, block.length)


def _kind(cause: BaseException | None) -> type[BootseerError] | None:
    """The error class of a NameNode's answer to a writer; None for ordinary ones."""
    if not isinstance(cause, RemoteError):
        return None
    if any(text in str(cause) for text in _NO_NODES):
        return NoNodesError
    if cause.kind == "NotReplicatedYetException":
        return _NotReplicatedYetError
    if cause.kind == "UnknownCryptoProtocolVersionException":
        return UnsupportedError  # a folder with client-side encryption
    return None

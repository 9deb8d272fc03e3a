"""The blocks of a file and their locations, parsed from a NameNode's answer to `getBlockLocations`.

Complete blocks never change, and their ids are never reused: so block ids identify a version of a file. Decides and
touches nothing.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from msgspec import Struct

from bootseer.hdfs.protobuf import MalformedError, Message, read_delimited

MAX_BLOCKS: Final = 1 << 20
"""The NameNode's limit was once this, `dfs.namenode.fs-limits.max-blocks-per-file`."""
MAX_BLOCK_BYTES: Final = 1 << 50
MAX_REPLICAS: Final = 512
_FIRST_MESSAGE: Final = b"\x0a"
"""The tag of field 1 with a message."""


class Node(Struct, frozen=True):
    """A DataNode."""

    host_port: str
    """Address and port of its data transfer: its name everywhere in this package."""
    hostname: str
    """The hostname that it reports, which may not resolve here."""

    def address(self, *, by_hostname: bool) -> tuple[str, int]:
        """Host and port to connect to."""
        host, _, port = self.host_port.rpartition(":")
        return self.hostname if by_hostname else host.strip("[]"), int(port)


class Block(Struct, frozen=True):
    """A block of a file, and the DataNodes that store it."""

    start: int
    """Offset in the file."""
    length: int
    pool: str
    id: int
    generation: int
    """Generation stamp: incremented when the block's writer changes."""
    token: bytes
    """The block token from the NameNode, which is passed to DataNodes unparsed."""
    nodes: tuple[Node, ...]

    @property
    def end(self) -> int:
        return self.start + self.length

    def __str__(self) -> str:
        return f"blk_{self.id}"


class LocatedFile(Struct, frozen=True):
    """A file at the time of the NameNode's answer."""

    path: str
    size_bytes: int
    blocks: tuple[Block, ...]
    """In order and contiguous; of a file that is being written, the complete ones."""
    version: str
    readable: bool
    """False if the bytes need a decoding that is not supported here: erasure coding, encryption."""

    def block_at(self, offset: int) -> Block:
        """The block with the byte at `offset`, inside the file."""
        return self.blocks[bisect_right(self.blocks, offset, key=lambda block: block.start) - 1]

    def continues(self, other: LocatedFile) -> bool:
        """Whether this is the same file as `other`, possibly with other locations, or longer."""
        if len(self.blocks) < len(other.blocks) or self.size_bytes < other.size_bytes:
            return False
        # Another generation of a complete block means that it was changed.
        return all(
            (own.start, own.pool, own.id, own.generation, own.length)
            == (other_block.start, other_block.pool, other_block.id, other_block.generation, other_block.length)
            for own, other_block in zip(self.blocks, other.blocks, strict=False)
        )


def parse_located(path: str, answer: bytes, known_nodes: dict[bytes, Node]) -> LocatedFile:
    message = Message(answer)
    size_bytes = message.number(1)
    readable = 6 not in message and 7 not in message
    blocks = [parse_block(data, known_nodes) for data in message.every(2)]
    if message.number(3) and not message.number(5, 1) and 4 in message:
        open_block = parse_block(message.data(4), known_nodes)
        blocks = [block for block in blocks if block.id != open_block.id]
    blocks.sort(key=lambda block: block.start)
    if len(blocks) > MAX_BLOCKS or not 0 <= size_bytes <= 1 << 62:
        raise MalformedError(f"a file of {size_bytes} bytes in {len(blocks)} blocks")
    end = blocks[-1].end if blocks else 0
    # A block of an erasure-coded file is a group: its locations hold other bytes than the file, in another order.
    if readable and (end < size_bytes or any(before.end != after.start for before, after in pairwise(blocks))):
        raise MalformedError("blocks do not follow each other up to the end of the file")
    size_bytes = max(size_bytes, end)
    digest = hashlib.sha256(
        repr([(block.pool, block.id, block.generation, block.length) for block in blocks]).encode()
    ).hexdigest()
    return LocatedFile(path, size_bytes, tuple(blocks), f"{size_bytes}-{digest[:32]}", readable)


def parse_block(data: bytes, known_nodes: dict[bytes, Node]) -> Block:
    """Parse a `LocatedBlockProto`. `known_nodes`: a cache, because the same few nodes are named again and again."""
    message = Message(data)
    block = message.message(1)
    nodes = []
    replicas = message.every(3)
    if len(replicas) > MAX_REPLICAS:
        raise MalformedError(f"a block with {len(replicas)} replicas")
    for replica in replicas:
        # In a `DatanodeInfoProto` the identity comes first; what follows changes every few seconds.
        node_id = read_delimited(replica, 1)[0] if replica[:1] == _FIRST_MESSAGE else Message(replica).data(1)
        node = known_nodes.get(node_id)
        if node is None:
            node = known_nodes[node_id] = parse_node(Message(node_id))
        nodes.append(node)
    start, length = message.number(2), block.number(4, 0)
    if start > 1 << 62 or length > MAX_BLOCK_BYTES:
        raise MalformedError(f"a block of {length} bytes at {start}")
    return Block(start, length, block.text(1), block.number(2), block.number(3), message.data(5), tuple(nodes))


def parse_node(message: Message) -> Node:
    port = message.number(4)
    if not 0 < port < 1 << 16:
        raise MalformedError(f"a DataNode at port {port}")
    address = message.text(1)
    # IPv6 addresses contain colons.
    shown = f"[{address}]" if ":" in address else address
    return Node(f"{shown}:{port}", message.text(2))


_FOLDER: Final = 1


class FileStatus(Struct, frozen=True):
    """A file or folder as the NameNode reports it."""

    path: str
    """Absolute path in the file system."""
    is_folder: bool
    size_bytes: int
    """0 for folders. Of a file that is being written: its complete blocks."""
    mtime_ms: int
    mode: int
    """Permission bits."""
    owner: str
    group: str
    block_size: int
    """0 for folders."""


def parse_status(path: str, message: Message) -> FileStatus:
    return FileStatus(
        path=path,
        is_folder=message.number(1) == _FOLDER,
        size_bytes=message.number(3),
        mtime_ms=message.number(7),
        mode=message.message(4).number(1) & 0o7777,
        owner=message.text(5),
        group=message.text(6),
        block_size=message.number(11, 0),
    )


def has_distinct_nodes(files: Sequence[frozenset[str]], share: int) -> bool:
    """Whether each file can be assigned one of its nodes, with at most `share` files per node: a bipartite matching."""
    held: dict[str, list[int]] = defaultdict(list)

    def settle(file: int, seen: set[str]) -> bool:
        for node in files[file] - seen:
            seen.add(node)
            holders = held[node]
            if len(holders) < share:
                holders.append(file)
                return True
            for place, holder in enumerate(holders):
                if settle(holder, seen):
                    holders[place] = file
                    return True
        return False

    return all(settle(file, set()) for file in range(len(files)))

"""Creates striped files in a place, without the code that writes them for users."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable

from blake3 import blake3

from bootseer.checkpoint.head import Head, Part, Segment, encode_head, make_segment, part_path
from bootseer.checkpoint.layout import CHUNK_BYTES, num_chunks, parity_chunk, row_of
from bootseer.places.place import Place


def content_of(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes in which all chunks differ: the same noise, which begins at another place in each."""
    noise = random.Random(seed).randbytes(min(CHUNK_BYTES, size_bytes)) * 2
    starts = (number * 7919 % CHUNK_BYTES for number in range(num_chunks(size_bytes)))
    return b"".join(noise[start : start + CHUNK_BYTES] for start in starts)[:size_bytes]


def in_memory(data: bytes | bytearray) -> tuple[int, Callable[[int, int], bytes]]:
    """Size and content, as arguments for `Writing.write_file`."""
    return len(data), lambda offset, length: bytes(data[offset : offset + length])


def put_striped(
    place: Place,
    path: str,
    content: bytes,
    *,
    stripes: int = 4,
    parity: bool = False,
    segment_rows: int = 64,
    replication: int | None = None,
) -> Head:
    """Write the parts on different nodes, then the head. A segment has up to `segment_rows` rows."""
    head_id = hashlib.md5(path.encode() + content[:64], usedforsecurity=False).hexdigest()
    segment_bytes = segment_rows * stripes * CHUNK_BYTES
    segments = [
        _put_segment(place, path, head_id, start, content[start : start + segment_bytes], stripes, parity, replication)
        for start in range(0, len(content), segment_bytes)
    ]
    head = Head(head_id, len(content), tuple(segments))
    place.write_bytes(path, encode_head(head))
    return head


def part_paths(path: str, head: Head) -> list[str]:
    """The paths of all parts, segment by segment, with the parity last in each."""
    return [part_path(path, head.id, part.name) for segment in head.segments for part in segment.all_parts]


def _put_segment(
    place: Place, path: str, head_id: str, start: int, content: bytes, stripes: int, parity: bool,
    replication: int | None,
) -> Segment:  # fmt: skip
    chunks = [content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES)]
    stripes = min(stripes, len(chunks))
    datas = [b"".join(chunks[stripe::stripes]) for stripe in range(stripes)]
    if parity:
        rows = [row_of(first, num_chunks(len(content)), stripes) for first in range(0, len(chunks), stripes)]
        datas.append(b"".join(parity_chunk((chunks[chunk] for chunk in row), len(chunks[row[0]])) for row in rows))
    names = [f"{start}-{number}" for number in range(len(datas))]
    nodes = _put_parts(place, [part_path(path, head_id, name) for name in names], datas, replication)
    parts = [
        Part(name, len(data), hashlib.sha256(data).hexdigest(), part_nodes)
        for name, data, part_nodes in zip(names, datas, nodes, strict=True)
    ]
    digests = b"".join(blake3(chunk).digest() for chunk in chunks)
    return make_segment(start, len(content), digests, tuple(parts[:stripes]), parts[stripes] if parity else None)


def _put_parts(
    place: Place, paths: list[str], datas: Iterable[bytes], replication: int | None
) -> list[tuple[str, ...]]:
    # The part size is a multiple of HDFS's checksum chunks, and not less than its smallest block.
    writers = place.begin_parts(paths, part_bytes=64 << 20, replication=replication)
    for writer, data in zip(writers, datas, strict=True):
        for at in range(0, len(data), CHUNK_BYTES):
            writer.write(data[at : at + CHUNK_BYTES])
    return [writer.close() for writer in writers]

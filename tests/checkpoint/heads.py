"""Heads of striped files without parts, for tests that only need the heads' bytes."""

from __future__ import annotations

from random import Random

from bootseer.checkpoint.head import Head, Part, Segment, make_segment
from bootseer.checkpoint.layout import num_chunks, part_size


def some_segment(rng: Random, start: int, size_bytes: int, stripes: int, *, parity: bool) -> Segment:
    parts = tuple(
        Part(
            name=f"{start:x}.{number}.{rng.randbytes(4).hex()}",
            size_bytes=part_size(size_bytes, stripes, number % stripes),
            sha256=rng.randbytes(32).hex(),
            nodes=tuple(f"10.0.0.{rng.randrange(256)}:9866" for _ in range(rng.randrange(3))),
        )
        for number in range(stripes + parity)
    )
    digests = rng.randbytes(32 * num_chunks(size_bytes))
    return make_segment(start, size_bytes, digests, parts[:stripes], parts[stripes] if parity else None)


def some_head(size_bytes: int, segment_bytes: int, *, stripes: int = 4, parity: bool = True, seed: int = 0) -> Head:
    rng = Random(seed)
    segments = []
    for start in range(0, size_bytes, segment_bytes):
        length = min(segment_bytes, size_bytes - start)
        segments.append(some_segment(rng, start, length, min(stripes, num_chunks(length)), parity=parity))
    return Head(rng.randbytes(16).hex(), size_bytes, tuple(segments))

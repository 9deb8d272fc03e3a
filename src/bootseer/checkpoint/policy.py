"""How the files of a folder are striped: set for a folder by `bootseer ckpt policy`, and for all folders below it.

It decides about files that are written from then on; those that are there stay as they are. Kept as JSON in the
folder's `.stripes/policy.json`; `files` finds the one that holds. Decides and touches nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.errors import CorruptError, PermanentError, UsageError

SCHEMA = "bootseer.stripes/1"
MAX_POLICY_BYTES = 1 << 16
MAX_STRIPES = 64
MAX_PART_BYTES = 1 << 40
MAX_REPLICATION = 32


@dataclass(frozen=True, slots=True)
class Policy:
    """Raises `UsageError` for values that cannot be."""

    stripes: int = 4
    """Most parts per segment: the nodes that one file is read from at once. 1 stripes nothing."""
    parity: bool = False
    """One more part per segment, so that any part may be missing or slow."""
    replication: int | None = None
    """Copies that the place keeps of each part; None for as many as it always keeps."""
    part_bytes: int = 64 << 20
    """Most bytes of a part: a segment has up to `stripes` times as many. A multiple of a chunk."""
    min_bytes_per_stripe: int = 4 << 20
    """A smaller file has fewer stripes: opening one more part must pay."""

    def __post_init__(self) -> None:
        if not 1 <= self.stripes <= MAX_STRIPES:
            raise UsageError(f"{self.stripes} stripes", hint=f"1 to {MAX_STRIPES} are possible")
        if not CHUNK_BYTES <= self.part_bytes <= MAX_PART_BYTES or self.part_bytes % CHUNK_BYTES:
            raise UsageError(f"parts of {self.part_bytes} bytes", hint="parts have a whole number of MiB")
        if self.replication is not None and not 1 <= self.replication <= MAX_REPLICATION:
            raise UsageError(f"replication {self.replication}", hint=f"1 to {MAX_REPLICATION} are possible")
        if self.min_bytes_per_stripe < CHUNK_BYTES:
            raise UsageError(f"{self.min_bytes_per_stripe} bytes per stripe", hint="at least one chunk of 1 MiB")

    @property
    def segment_bytes(self) -> int:
        """Most bytes of a segment."""
        return self.stripes * self.part_bytes

    def stripes_for(self, size_bytes: int) -> int:
        """Parts of a segment of so many bytes."""
        needed = -(-size_bytes // self.part_bytes)
        return min(self.stripes, max(1, needed, size_bytes // self.min_bytes_per_stripe))

    def segments_of(self, size_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Start, bytes and stripes of each segment of a file whose size is known before it is written."""
        for start in range(0, size_bytes, self.segment_bytes):
            length = min(self.segment_bytes, size_bytes - start)
            yield start, length, self.stripes_for(length)

    def is_striped(self, size_bytes: int) -> bool:
        """Whether a file of this size becomes parts: one chunk, or one part without parity, would gain nothing."""
        stripes = self.stripes_for(min(size_bytes, self.segment_bytes))
        return size_bytes > CHUNK_BYTES and (stripes > 1 or self.parity)


def encode_policy(policy: Policy) -> bytes:
    """A policy as a file."""
    return json.dumps({"schema": SCHEMA, **asdict(policy)}, indent=1).encode() + b"\n"


def parse_policy(data: bytes) -> Policy:
    """Read a policy. Raises `CorruptError`, or `PermanentError` for a schema that this program does not know."""
    try:
        values: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise CorruptError("the stripe policy is not JSON") from None
    if not isinstance(values, dict) or not str(values.get("schema")).startswith("bootseer.stripes/"):
        raise CorruptError("malformed stripe policy")
    if values["schema"] != SCHEMA:
        raise PermanentError(f"a stripe policy of {str(values['schema'])[:40]!r}; this BootSeer knows {SCHEMA}")
    found = {field.name: values[field.name] for field in fields(Policy) if field.name in values}
    for name, value in found.items():
        wanted = (bool,) if name == "parity" else (int,)
        if type(value) not in wanted and not (name == "replication" and value is None):
            raise CorruptError(f"the stripe policy says {str(value)[:40]!r} for {name}")
    try:
        return Policy(**found)
    except UsageError as error:
        raise CorruptError(f"the stripe policy: {error}; {error.hint}") from error

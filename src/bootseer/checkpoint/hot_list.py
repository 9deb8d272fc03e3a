"""The hot list of a checkpoint: what a node read until training began, for its next start.

The next start reads another checkpoint of the same job, whose files have the same names. So ranges are kept by names
within the checkpoint, separately for each position of a node in the job, because each reads its own share. Without a
hot list, a single node needs everything; one of many needs the small files first, and the rest on demand.

Decides and touches nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from bootseer.errors import CorruptError

SCHEMA = "bootseer.checkpoint-hot/1"
SMALL_BYTES = 1 << 20
"""Files up to this size are metadata: small, and needed first."""
MAX_RANGES = 100_000
MAX_BYTES = 16 << 20
_MAX_PATH = 4096


class Range(NamedTuple):
    """A range of a file; `path` is relative to the mount."""

    path: str
    offset: int
    length: int


class Recorder:
    """Records reads in the order of first use. Not safe for threads."""

    def __init__(self, piece_bytes: int = 1 << 20) -> None:
        """Reads are recorded as whole pieces of this size."""
        self._piece = piece_bytes
        self._seen: set[tuple[str, int]] = set()
        self._ranges: list[Range] = []

    def read(self, path: str, offset: int, length: int) -> None:
        """A reader has requested this range."""
        for number in range(offset // self._piece, -(-(offset + length) // self._piece)):
            if (path, number) in self._seen or len(self._seen) >= MAX_RANGES:
                continue
            self._seen.add((path, number))
            start = number * self._piece
            last = self._ranges[-1] if self._ranges else None
            if last is not None and last.path == path and last.offset + last.length == start:
                self._ranges[-1] = last._replace(length=last.length + self._piece)
            else:
                self._ranges.append(Range(path, start, self._piece))

    def ranges(self) -> list[Range]:
        """The ranges read so far, in order of first use."""
        return list(self._ranges)


def encode(ranges: Iterable[Range], checkpoint: str) -> bytes:
    """Encode a hot list. Files in the folder `checkpoint` will have the same names in the next checkpoint."""
    prefix = f"{checkpoint}/" if checkpoint else ""
    rows = [
        [one.path.removeprefix(prefix), one.path.startswith(prefix), one.offset, one.length]
        for one in list(ranges)[:MAX_RANGES]
    ]
    return json.dumps({"schema": SCHEMA, "ranges": rows}, separators=(",", ":")).encode()


def decode(data: bytes, checkpoint: str) -> list[Range]:
    """Decode a hot list for another checkpoint. Raises `CorruptError`."""
    try:
        value = json.loads(data) if len(data) <= MAX_BYTES else None
        if not isinstance(value, dict) or value.get("schema") != SCHEMA or len(value["ranges"]) > MAX_RANGES:
            raise ValueError
        return [_range(row, checkpoint) for row in value["ranges"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError("malformed hot list of a checkpoint") from error


def _range(row: Any, checkpoint: str) -> Range:
    path, inside, offset, length = row
    fits = isinstance(path, str) and 0 < len(path) <= _MAX_PATH and not {"", ".", ".."}.intersection(path.split("/"))
    numbers = all(type(number) is int and 0 <= number < 1 << 62 for number in (offset, length))
    if not (fits and numbers and isinstance(inside, bool)):
        raise ValueError
    return Range(f"{checkpoint}/{path}" if inside and checkpoint else path, offset, length)


def plan(files: Sequence[tuple[str, int]], hot: Sequence[Range], *, alone: bool, budget_bytes: int) -> list[Range]:
    """The ranges to prefetch, in order: of `files` (path, size), at most `budget_bytes`.

    Small files come first: they determine what readers request next. Then the hot list; without one, everything if this
    node is `alone`.
    """
    sizes = dict(files)
    wanted = [Range(path, 0, size) for path, size in files if 0 < size <= SMALL_BYTES]
    known = [one for one in hot if sizes.get(one.path, 0) > one.offset]
    if known:
        wanted += [
            one._replace(length=min(one.length, sizes[one.path] - one.offset))
            for one in known
            if sizes[one.path] > SMALL_BYTES
        ]
    elif alone:
        wanted += [Range(path, 0, size) for path, size in files if size > SMALL_BYTES]
    fitting = []
    left = budget_bytes
    for one in wanted:
        if left <= 0:
            break
        fitting.append(one._replace(length=min(one.length, left)))
        left -= fitting[-1].length
    return fitting

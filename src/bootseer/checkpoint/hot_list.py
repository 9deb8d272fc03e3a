"""The hot list of a checkpoint: what a node read until training began, for its next start.

The next start reads another checkpoint of the same job, whose files have the same names. So ranges are kept by names
within the checkpoint, separately for each position of a node in the job, because each reads its own share. A position
without a list uses what two others have in common. Without any list, a single node needs everything; one of many needs
the small files first, and the rest on demand.

Decides and touches nothing.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from bootseer.checkpoint.ranges import Ranges
from bootseer.errors import CorruptError, PermanentError

SCHEMA = "bootseer.checkpoint-hot/1"
SMALL_BYTES = 1 << 20
"""Files up to this size are metadata: small, and needed first."""
PIECE_BYTES = 1 << 20
"""The unit of records and of the prefetch."""
MAX_RANGES = 100_000
MAX_BYTES = 16 << 20
_MAX_PATH = 4096
_TARGET_S = 0.1
_SHORT_BYTES = 64 << 10
"""A read of so few bytes takes as long as the server needs to answer, on every usual link."""
_CACHED_S = 0.0005
"""What ends sooner was not transferred, and says nothing about the link."""
_MAX_WINDOW = 32
_MAX_PAUSE_S = 2.0


class Range(NamedTuple):
    """A range of a file; `path` is relative to the mount."""

    path: str
    offset: int
    length: int


class Recorder:
    """Records reads in the order of first use. Not safe for threads."""

    def __init__(self, piece_bytes: int = PIECE_BYTES) -> None:
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
    """Decode a hot list for another checkpoint. Raises `CorruptError`, or `PermanentError` for an unknown version."""
    try:
        value: Any = json.loads(data) if len(data) <= MAX_BYTES else None
        schema = value["schema"]
        if schema != SCHEMA and schema.startswith("bootseer.checkpoint-hot/"):
            raise PermanentError(f"a hot list of the version {schema[:64]!r}; this BootSeer supports {SCHEMA}")
        if schema != SCHEMA or len(value["ranges"]) > MAX_RANGES:
            raise ValueError
        return [_range(row, checkpoint) for row in value["ranges"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError("malformed hot list of a checkpoint") from error


def _range(row: Any, checkpoint: str) -> Range:
    path, inside, offset, length = row
    fits = isinstance(path, str) and 0 < len(path) <= _MAX_PATH and not {"", ".", ".."}.intersection(path.split("/"))
    numbers = all(type(number) is int and 0 <= number < 1 << 62 for number in (offset, length))
    if not (fits and numbers and isinstance(inside, bool)):
        raise ValueError
    return Range(f"{checkpoint}/{path}" if inside and checkpoint else path, offset, length)


def common(first: Iterable[Range], second: Iterable[Range]) -> list[Range]:
    """What both lists name, in the order of the first."""
    others: defaultdict[str, Ranges] = defaultdict(Ranges)
    for path, offset, length in sorted(second):
        others[path].add(offset, offset + length)
    found = (
        Range(path, start, end - start)
        for path, offset, length in first
        for start, end in others[path].within(offset, offset + length)
    )
    return list(islice(found, MAX_RANGES))  # forged lists could name each other's ranges again and again


class PrefetchWindow:
    """How many pieces to prefetch at once: so many that each arrives within `_TARGET_S` after the time in which the
    server answers at all, which is 0.1 s for a bucket.

    On a link that others use, or a slow one, pieces take longer, and one remains in flight: one connection, which gets
    a small share of a busy link and nearly all of an idle one. Not safe for threads.
    """

    def __init__(self) -> None:
        self.size = 1
        self.pause_s = 0.0
        """How long to wait before the next request: as long as the last piece was later than the fastest one, because
        others wanted the link meanwhile. So at least half of an idle link is used."""
        self._fastest_s = math.inf
        self._reduced_s = -math.inf
        self._latency_s = math.inf
        """The shortest time of a short read."""

    @property
    def step(self) -> int:
        """How many pieces to request together."""
        return max(self.size // 4, 1)

    def note_end(self, num_bytes: int, began_s: float, ended_s: float) -> None:
        """So many bytes that were requested together arrived, or failed. 0: none was requested."""
        seconds = ended_s - began_s
        if not num_bytes or seconds <= _CACHED_S:
            return
        if num_bytes <= _SHORT_BYTES:
            self._latency_s = min(self._latency_s, seconds)
        if num_bytes < PIECE_BYTES:
            return
        self._fastest_s = min(self._fastest_s, seconds)
        # Each piece includes it. Without a short read it is unknown: a slow piece may as well mean a busy link.
        latency_s = min(self._latency_s, self._fastest_s) if math.isfinite(self._latency_s) else 0.0
        if seconds <= latency_s + _TARGET_S:
            self.size = min(self.size + 1, _MAX_WINDOW)
        elif began_s >= self._reduced_s:  # not for each of those that one moment without a processor has delayed
            self.size = max(self.size // 2, 1)
            self._reduced_s = ended_s
        self.pause_s = min(seconds - self._fastest_s, _MAX_PAUSE_S) if self.size == 1 else 0.0


def plan(
    files: Sequence[tuple[str, int]],
    hot: Sequence[Range],
    *,
    alone: bool,
    budget_bytes: int,
    position: float = 0.0,
) -> list[Range]:
    """The ranges to prefetch, in order: of `files` (path, size), at most `budget_bytes`.

    Small files come first: they determine what readers request next. Then the hot list; without one, everything if this
    node is `alone`. `position`: the fraction of the large files at which this node begins, so that each of several
    nodes brings another part for all of them.
    """
    sizes = dict(files)
    small = [Range(path, 0, size) for path, size in files if 0 < size <= SMALL_BYTES]
    large: list[Range] = []
    known = [one for one in hot if sizes.get(one.path, 0) > one.offset]
    if known:
        large = [
            one._replace(length=min(one.length, sizes[one.path] - one.offset))
            for one in known
            if sizes[one.path] > SMALL_BYTES
        ]
    elif alone:
        large = [Range(path, 0, size) for path, size in files if size > SMALL_BYTES]
    fitting = []
    left = budget_bytes
    for one in [*small, *_rotated(large, position)]:
        if left <= 0:
            break
        fitting.append(one._replace(length=min(one.length, left)))
        left -= fitting[-1].length
    return fitting


def _rotated(ranges: Sequence[Range], position: float) -> list[Range]:
    """The ranges from this fraction of their bytes on, and then those before it."""
    skip = int(sum(one.length for one in ranges) * position)
    for number, (path, offset, length) in enumerate(ranges):
        if skip < length:
            skip -= skip % PIECE_BYTES
            before = [Range(path, offset, skip)] if skip else []
            return [Range(path, offset + skip, length - skip), *ranges[number + 1 :], *ranges[:number], *before]
        skip -= length
    return list(ranges)

"""Which blocks a startup will need, and when: learned from several startups of the same workload.

A single startup's record is misleading: it contains blocks that only a crash, a debugging session or one rank read. So
the last few records are kept, a block is hot if at least half of the runs needed it, and blocks are ordered by an early
quantile of the times at which they were needed. Blocks that no run needs any more disappear with the old records. Runs
that have little in common with the newest ones are dropped.

The key is (image identity, workload key). The format is bounded JSON in a zstd frame, docs/formats/hotset.md. Hot sets
come from stores with other writers, so they are untrusted: sizes are bounded before anything is allocated, and every
number is checked. A wrong set costs bandwidth, never a wrong byte. Decides and touches nothing.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import accumulate, pairwise
from typing import Annotated

import msgspec
import zstandard
from msgspec import Struct
from msgspec.structs import replace

from bootseer.errors import CorruptError, PermanentError
from bootseer.fetch.fetch_settings import FetchSettings

Block = tuple[str, int]
"""Identity of a block file, and block number."""

MAX_RUNS = 8
MAX_NEEDS = 1 << 17
"""Per run: 32 GiB in blocks of 256 KiB. A start that reads more should not be lazy."""
MAX_BLOCK = 1 << 26
MAX_MS = 1 << 40
SCHEMA = "bootseer.hotset/1"
MAX_STORED_BYTES = 16 << 20
# Parsed JSON takes up to fifty times the size of its text.
MAX_JSON_BYTES = 16 << 20
MAX_FILES = 4096
MAX_KEY = 512
MAX_IMPORTS = 1 << 20
"""Characters."""
_LEVEL = 9
# The two newest runs decide which older ones to keep, so that a single odd run does not remove all others.
_NUM_NEWEST = 2
_MIN_OVERLAP = 0.3
# With one or two runs, this makes every block hot that any of them needed.
_MIN_CONFIDENCE = 0.5
_EARLY = 0.25


class Record(Struct, frozen=True):
    """The needs of one startup."""

    started_s: float
    """Start time in seconds since 1970; orders the runs."""
    duration_ms: int
    """How long needs were recorded; nothing is known about later ones."""
    needs: dict[Block, int]
    """When readers first needed each block, in milliseconds since the record began; in this order."""


class HotSet(Struct, frozen=True):
    """The newest records of one image with one workload, the oldest first."""

    image: str
    workload: str
    records: tuple[Record, ...] = ()
    imports: str = ""
    """The modules imported by a recent run, as opaque text, for nodes that start warm."""

    def merge(self, record: Record) -> HotSet:
        return self.union(replace(self, records=(record,)))

    def union(self, other: HotSet) -> HotSet:
        """The runs of both sets, each once: the newest few, without those of an apparently different workload."""
        runs = {(run.started_s, run.duration_ms, len(run.needs)): run for run in (*self.records, *other.records)}
        records = sorted(runs.values(), key=lambda run: run.started_s)[-MAX_RUNS:]
        newer = max(self, other, key=lambda one: one.records[-1].started_s if one.records else 0.0)
        imports = newer.imports or self.imports or other.imports
        older, newest = records[:-_NUM_NEWEST], records[-_NUM_NEWEST:]
        kept = [each for each in older if any(_overlap(each, one) >= _MIN_OVERLAP for one in newest)]
        return replace(self, records=(*kept, *newest), imports=imports)

    def of_files(self, files: Collection[str]) -> HotSet:
        """Only the runs that needed a block of these files: after a new conversion the same image has other files."""
        known = frozenset(files)
        records = tuple(run for run in self.records if any(file in known for file, _ in run.needs))
        return replace(self, records=records)

    def plan(self) -> list[Block]:
        """The hot blocks, those needed earliest first. Deterministic."""
        known = self.statistics()
        hot = [block for block, (_, confidence) in known.items() if confidence >= _MIN_CONFIDENCE]
        return sorted(hot, key=lambda block: (known[block][0], block))

    def statistics(self) -> dict[Block, tuple[int, float]]:
        """For each needed block: the early quantile of the times at which runs needed it, in ms, which is soon enough
        for most runs, but not determined by a single fast one; and the share of the runs that needed it, without those
        that ended before that time."""
        times: dict[Block, list[int]] = {}
        for record in self.records:
            for block, t_ms in record.needs.items():
                times.setdefault(block, []).append(t_ms)
        known, durations = {}, sorted(record.duration_ms for record in self.records)
        for block, at in times.items():
            early_ms = sorted(at)[int(_EARLY * (len(at) - 1))]
            num_runs = len(durations) - bisect_left(durations, early_ms)
            known[block] = early_ms, len(at) / max(len(at), num_runs)
        return known


def _overlap(one: Record, other: Record) -> float:
    """The overlap of two runs: 1 if one is a subset of the other."""
    common = one.needs.keys() & other.needs.keys()
    return len(common) / max(min(len(one.needs), len(other.needs)), 1)


class HotSetTrust:
    """Judges whether a hot set is worth its bandwidth, by the share of the readers' needs that it covers.

    Why trust is earned step by step: a hot set recorded from another workload is worse than none, as it takes bandwidth
    and CPU time from readers, and whether it fits is known only from their needs. So a set starts on probation, with a
    small window; each covered need doubles the window, each uncovered one halves it. With far more hits than misses it
    gets full speed; with more misses than hits it is suspended, until recent needs justify it again. Several misses
    in a row put it back on probation, however well it did before.

    After such a failure a covered need justifies only what was recorded shortly after it, and only until the readers
    leave the recorded path again: workloads that diverge still share libraries that they load later, and blocks of
    small files side by side. Each of those would justify a wrong set, however far apart they were recorded.
    """

    def __init__(self, settings: FetchSettings) -> None:
        self._settings = settings
        self._numbers: dict[tuple[int, int], int] = {}
        """For each block, its number in the recorded order."""
        self._keys: list[tuple[int, int]] = []
        """The block of each number."""
        self._ends: list[int] = []
        """For each number, the bytes of the set up to the end of that block."""
        self._reached: int | None = None
        """The number of the block that a reader needed last; None when the readers have left the recorded path."""
        self._first = 0
        """The blocks from `_reached` up to this number are here."""
        self.was_wrong = False
        """Whether it was suspended, or back on probation, at some time."""
        self._latest: deque[bool] = deque(maxlen=settings.judged_window)
        self._score = 0
        self._missed_in_row = 0
        self.needs = 0
        """Blocks needed by readers since there is a hot set."""
        self.covered = 0
        """Those of them that are in the hot set."""
        self.suspended = False
        self.suspensions = 0

    def add_block(self, key: tuple[int, int], size_bytes: int) -> None:
        if key not in self._numbers:
            self._numbers[key] = len(self._ends)
            self._keys.append(key)
            self._ends.append(size_bytes + (self._ends[-1] if self._ends else 0))

    def __contains__(self, key: tuple[int, int]) -> bool:
        """Whether a block is in the hot set."""
        return key in self._numbers

    def note_need(self, key: tuple[int, int]) -> None:
        """A reader needed a block for the first time. Needs before there is a hot set do not count."""
        if not self._keys:
            return
        number = self._numbers.get(key)
        covered = number is not None
        if number is not None:
            if self._reached is None or not self._reached <= number <= self._first:
                self._first = number
            self._reached = number
        self.needs += 1
        self.covered += covered
        self._missed_in_row = 0 if covered else self._missed_in_row + 1
        has_diverged = self._missed_in_row >= self._settings.diverged_needs
        if has_diverged:
            self._reached = None
        if has_diverged and self._score > 0:
            # The workload has left the recorded path: what it needed before says nothing about what comes.
            self._latest.clear()
            self._score = 0
            self.was_wrong = True
        if len(self._latest) == self._settings.judged_window:
            self._score -= 1 if self._latest[0] else -1
        self._latest.append(covered)
        self._score += 1 if covered else -1
        if self._score >= self._settings.trust_score:
            self.suspended = False
        elif not self.suspended and (
            self._score <= self._settings.suspend_score
            or (len(self._latest) >= self._settings.judged_needs and self._score < 0)
        ):
            self.suspended = self.was_wrong = True
            self.suspensions += 1

    @property
    def proven(self) -> bool:
        """Whether the set may use all bandwidth that readers leave."""
        return self._score >= self._settings.trust_score

    def near(self, ahead_bytes: int, is_missing: Callable[[tuple[int, int]], bool]) -> Iterator[tuple[int, int]]:
        """The missing blocks that may be fetched of a set that was wrong before: those that begin less than
        `ahead_bytes` after the end of the block that was needed last."""
        if self._reached is None:
            return
        end = self._ends[self._reached] + ahead_bytes
        for number in range(self._first, len(self._keys)):
            if number > self._reached and self._ends[number - 1] >= end:
                return
            if is_missing(self._keys[number]):
                yield self._keys[number]
            elif number == self._first:  # the next call begins behind it
                self._first += 1

    def allowance(self, window_bytes: int) -> int:
        """The share of a full window, in bytes, that the set may have in flight."""
        if self.suspended:
            return 0
        if self.proven:
            return window_bytes
        first = self._settings.min_window_bytes
        return min(window_bytes, first << self._score if self._score >= 0 else first >> -self._score)


_Column = Annotated[list[int], msgspec.Meta(max_length=MAX_NEEDS)]
_Key = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY)]
_Identity = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class _Run(msgspec.Struct):
    """One record, as columns."""

    started_s: Annotated[float, msgspec.Meta(ge=0)]
    duration_ms: Annotated[float, msgspec.Meta(ge=0, le=MAX_MS)]
    file: _Column
    block: _Column
    t_ms: _Column


class _Versioned(msgspec.Struct):
    schema: str


class _Document(_Versioned):
    image: _Key
    workload: _Key
    files: Annotated[list[_Identity], msgspec.Meta(max_length=MAX_FILES)]
    runs: Annotated[list[_Run], msgspec.Meta(max_length=MAX_RUNS)]
    imports: Annotated[str, msgspec.Meta(max_length=MAX_IMPORTS)] = ""


# Made at the import, because msgspec crashes the process if threads do so at the same time (`artifact.document`).
_DOCUMENT, _VERSION = msgspec.json.Decoder(_Document), msgspec.json.Decoder(_Versioned)


def encode_hot_set(hot_set: HotSet) -> bytes:
    """Deterministic bytes of a set. The oldest runs are omitted if they do not fit."""
    for start in range(len(hot_set.records) + 1):
        text = _text(hot_set, hot_set.records[start:])
        if len(text) <= MAX_JSON_BYTES:
            break
    return zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(text)


def _text(hot_set: HotSet, records: tuple[Record, ...]) -> bytes:
    files: dict[str, int] = {}
    runs = [
        {
            "started_s": record.started_s,
            "duration_ms": record.duration_ms,
            "file": _deltas([files.setdefault(file, len(files)) for file, _ in record.needs]),
            "block": _deltas([block for _, block in record.needs]),
            "t_ms": _deltas(list(record.needs.values())),
            "found": [0] * len(record.needs),  # version 0.2 reads no set without it
        }
        for record in records
    ]
    document: dict[str, object] = {"schema": SCHEMA, "image": hot_set.image, "workload": hot_set.workload}
    document |= {"files": list(files), "runs": runs}
    if hot_set.imports:
        document["imports"] = hot_set.imports
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def parse_hot_set(data: bytes) -> HotSet:
    """Parse a set. Raises `CorruptError`, or `PermanentError` for an unknown version."""
    if len(data) > MAX_STORED_BYTES:
        raise CorruptError(f"a hot set of {len(data)} bytes is too large")
    try:
        # The declared size determines the allocation, so it is checked first.
        size = zstandard.get_frame_parameters(data).content_size
        if not 0 < size <= MAX_JSON_BYTES:
            raise CorruptError("a hot set's frame announces an impossible size")
        text = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
        schema = _VERSION.decode(text).schema
        if schema != SCHEMA:
            if schema.startswith("bootseer.hotset/"):
                raise PermanentError(f"a hot set of the version {schema[:64]!r}; this BootSeer supports {SCHEMA}")
            raise CorruptError("this is not a hot set")
        document = _DOCUMENT.decode(text)
    except (zstandard.ZstdError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptError(f"a hot set cannot be read: {error}") from error
    if len(set(document.files)) != len(document.files):
        raise CorruptError("a hot set names a file twice")
    records = tuple(_record(run, document.files) for run in document.runs)
    if any(later.started_s < earlier.started_s for earlier, later in pairwise(records)):
        raise CorruptError("a hot set has runs that are not in order")
    return HotSet(document.image, document.workload, records, document.imports)


def _record(run: _Run, files: list[str]) -> Record:
    numbers, blocks = _numbers(run.file, len(files)), _numbers(run.block, MAX_BLOCK)
    times = _numbers(run.t_ms, MAX_MS)
    if not len(numbers) == len(blocks) == len(times):
        raise CorruptError("a hot set has columns of different lengths")
    if any(later < earlier for earlier, later in pairwise(times)):
        raise CorruptError("a hot set has needs that are not in order")
    needs = dict(zip(zip(map(files.__getitem__, numbers), blocks, strict=True), times, strict=True))
    if len(needs) < len(times):
        raise CorruptError("a hot set names a block twice in one run")
    return Record(run.started_s, int(run.duration_ms), needs)


def _deltas(values: list[int]) -> list[int]:
    """Differences between neighbours: mostly small, so they take few digits and compress well."""
    return [later - earlier for earlier, later in pairwise([0, *values])]


def _numbers(deltas: list[int], limit: int) -> list[int]:
    """Decode a column of `_deltas`; each number must be at least 0 and less than `limit`."""
    numbers = list(accumulate(deltas))
    if numbers and not 0 <= min(numbers) <= max(numbers) < limit:
        raise CorruptError("a hot set has a column of impossible numbers")
    return numbers

"""Which blocks a startup will need, and when: learned from several startups of the same workload.

One startup's record lies: it holds blocks that only a crash, a debugging session or one rank read. So the last few
records are kept, a block is hot when at least half of the runs needed it, and its turn comes by the early quantile of
the times at which it was needed. What no run needs any more disappears by itself; runs that have nothing in common
with the newest ones are dropped, and a set that has stopped to cover what is needed starts over.

The key is (image identity, workload key). As bytes a set is bounded JSON in a zstd frame, docs/formats/hotset.md. Hot
sets lie in stores that others write to, so nothing in them is believed: sizes are bounded before anything is allocated,
and numbers are checked one by one. A wrong set costs bandwidth, never a wrong byte.
Decides and touches nothing.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Annotated

import msgspec
import zstandard

from bootseer.errors import CorruptError, PermanentError
from bootseer.fetch.settings import FetchSettings

Block = tuple[str, int]
"""Identity of a block file, number of a block."""

MAX_RUNS = 8
MAX_NEEDS = 1 << 17
"""Of one run: 32 GiB in blocks of 256 KiB. A start that reads more than that should not be lazy."""
MAX_BLOCK = 1 << 26
MAX_MS = 1 << 40
SCHEMA = "bootseer.hotset/1"
MAX_STORED_BYTES = 16 << 20
# A parsed JSON text takes up to fifty times its own size.
MAX_JSON_BYTES = 16 << 20
MAX_FILES = 4096
MAX_KEY = 512
MAX_IMPORTS = 1 << 20
"""Characters."""
_LEVEL = 9
# The two newest runs decide which others belong to them, so that one odd run does not wipe out the others.
_JUDGES = 2
_MIN_AGREEMENT = 0.3
# With one or two runs that is all that any of them needed.
_MIN_CONFIDENCE = 0.5
_EARLY = 0.25
_STALE_COVERAGE = 0.6
# Too short to speak for or against anything.
_MIN_NEEDS = 24


class Found(IntEnum):
    """Where a reader found the block that it needed."""

    READY = 0
    """In the cache."""
    IN_FLIGHT = 1
    """On its way: a prefetch that was late, or another reader's."""
    MISSING = 2


@dataclass(frozen=True, slots=True)
class Need:
    """A reader needed a block for the first time."""

    file: str
    """Identity of the block file."""
    block: int
    t_ms: int
    """Milliseconds since the record began."""
    found: Found


@dataclass(frozen=True, slots=True)
class Record:
    """The needs of one startup, in the order of their time, each block once."""

    started_s: float
    """When it began, seconds since 1970: orders the runs."""
    duration_ms: int
    """How long needs were recorded: this run says nothing about what comes later."""
    needs: tuple[Need, ...]
    coverage: float | None = None
    """What part of the needs the plan of that time covered; None when there was none."""

    @property
    def blocks(self) -> frozenset[Block]:
        return frozenset((need.file, need.block) for need in self.needs)


@dataclass(frozen=True, slots=True)
class HotSet:
    """What is known of one image with one workload: the newest records, oldest first."""

    image: str
    workload: str
    records: tuple[Record, ...] = ()
    imports: str = ""
    """What the programs of a recent run imported, for a node that is to start them warm: a text that is not looked into
    here."""

    def merge(self, record: Record) -> HotSet:
        return self.union(replace(self, records=(record,)))

    def union(self, other: HotSet) -> HotSet:
        """With the runs of both, each once; gone are those beyond the newest few, and those of another workload."""
        runs = {(run.started_s, run.duration_ms, len(run.needs)): run for run in (*self.records, *other.records)}
        records = sorted(runs.values(), key=lambda run: run.started_s)[-MAX_RUNS:]
        newer = max(self, other, key=lambda one: one.records[-1].started_s if one.records else 0.0)
        imports = newer.imports or self.imports or other.imports
        merged = replace(self, records=tuple(records), imports=imports)
        if merged.stale:
            return replace(merged, records=tuple(records[-_JUDGES:]))
        judges = [each.blocks for each in records[-_JUDGES:]]
        kept = [
            each
            for each in records[:-_JUDGES]
            if any(_agreement(each.blocks, judge) >= _MIN_AGREEMENT for judge in judges)
        ]
        return replace(merged, records=(*kept, *records[-_JUDGES:]))

    def of_files(self, files: Collection[str]) -> HotSet:
        """With the runs alone that needed some block of these files: the same image in other blocks has other files."""
        known = frozenset(files)
        records = tuple(run for run in self.records if any(need.file in known for need in run.needs))
        return replace(self, records=records)

    @property
    def stale(self) -> bool:
        """Whether the plans have missed the newest runs, all of them: the workload or its code has changed."""
        newest = [each for each in self.records if len(each.needs) >= _MIN_NEEDS][-_JUDGES:]
        return len(newest) == _JUDGES and all(
            each.coverage is not None and each.coverage < _STALE_COVERAGE for each in newest
        )

    def plan(self) -> list[Block]:
        """The hot blocks, those that are needed early first. The same for equal sets."""
        early = {block: _early(at) for block, at in self._times().items()}
        hot = [block for block, share in self.confidence().items() if share >= _MIN_CONFIDENCE]
        return sorted(hot, key=lambda block: (early[block], block))

    def confidence(self) -> Mapping[Block, float]:
        """For each block that any run needed, the part of the runs that needed it."""
        durations = [record.duration_ms for record in self.records]
        return {block: _confidence(len(at), _early(at), durations) for block, at in self._times().items()}

    def _times(self) -> dict[Block, list[int]]:
        """When each block was needed, in milliseconds, once for each run that needed it."""
        times: dict[Block, list[int]] = {}
        for record in self.records:
            for need in record.needs:
                times.setdefault((need.file, need.block), []).append(need.t_ms)
        return times


def coverage(plan: Sequence[Block], record: Record) -> float:
    """What part of the needs of one startup a plan covered; 1 when nothing was needed."""
    planned = frozenset(plan)
    covered = sum((need.file, need.block) in planned for need in record.needs)
    return covered / len(record.needs) if record.needs else 1.0


def _early(times: list[int]) -> int:
    """The early quantile: soon enough for most runs, and one run that was in a hurry does not decide."""
    return sorted(times)[int(_EARLY * (len(times) - 1))]


def _confidence(num_needed: int, early_ms: int, durations: Sequence[int]) -> float:
    """Part of the runs that needed a block. A run that ended before its time has come has no say."""
    return num_needed / max(num_needed, sum(duration >= early_ms for duration in durations))


def _agreement(one: frozenset[Block], other: frozenset[Block]) -> float:
    """Common part of two runs: 1 when one of them is the beginning of the other."""
    return len(one & other) / max(min(len(one), len(other)), 1)


class HotSetTrust:
    """Is a hot set worth its bandwidth? Judged by how many of the readers' needs it covers.

    A hot set recorded from another workload is worse than none: it takes bandwidth and processor time from the readers.
    So a set starts on probation, with little in flight; each need that it covers doubles that, each need that it does
    not cover halves it. Far more hits than misses: full speed. More misses than hits: suspended, until the latest needs
    speak for it again. Several misses in a row put it back on probation, however well it did before.
    From then on what it covers speaks for what was recorded shortly behind that, and no longer for all the rest:
    workloads that part share libraries that they load later, and each would bring the whole of a wrong set.
    """

    def __init__(self, settings: FetchSettings) -> None:
        self._settings = settings
        self._places: dict[tuple[int, int], int] = {}
        """Bytes of the set that were recorded before each block."""
        self._planned_bytes = 0
        self._reached = 0
        """The furthest place that a reader has come to."""
        self.doubted = False
        """Whether it was wrong for a while."""
        self._latest: deque[bool] = deque(maxlen=settings.judged_window)
        self._score = 0
        self._missed_in_row = 0
        self.needs = 0
        """Blocks that readers needed since there is a hot set."""
        self.covered = 0
        """Those of them that are in the hot set."""
        self.suspended = False
        self.suspensions = 0

    def planned(self, key: tuple[int, int], size_bytes: int) -> None:
        """The next block of the set."""
        if key not in self._places:
            self._places[key] = self._planned_bytes
            self._planned_bytes += size_bytes

    def needed(self, covered: bool, key: tuple[int, int] | None = None) -> None:
        """A reader needed the block `key` for the first time; `covered`: the hot set has it."""
        if key is not None:
            self._reached = max(self._reached, self._places.get(key, 0))
        self.needs += 1
        self.covered += covered
        self._missed_in_row = 0 if covered else self._missed_in_row + 1
        if self._missed_in_row >= self._settings.parted_needs and self._score > 0:
            # The workload has left the path of the record: what it needed before says nothing about what comes.
            self._latest.clear()
            self._score = 0
            self.doubted = True
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
            self.suspended = self.doubted = True
            self.suspensions += 1

    @property
    def proven(self) -> bool:
        """Whether the set may use all the bandwidth that readers leave."""
        return self._score >= self._settings.trust_score

    def is_near(self, key: tuple[int, int], ahead_bytes: int) -> bool:
        """Whether the block may be fetched now: of a set that was wrong before, no more than so many bytes ahead."""
        return not self.doubted or self._places.get(key, 0) <= self._reached + ahead_bytes

    def allowance(self, window_bytes: int) -> int:
        """How much of a full window the set may have in flight."""
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
    """One record, in columns."""

    started_s: Annotated[float, msgspec.Meta(ge=0)]
    duration_ms: Annotated[float, msgspec.Meta(ge=0, le=MAX_MS)]
    file: _Column
    block: _Column
    t_ms: _Column
    found: _Column
    coverage: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None


class _Versioned(msgspec.Struct):
    schema: str


class _Document(msgspec.Struct):
    image: _Key
    workload: _Key
    files: Annotated[list[_Identity], msgspec.Meta(max_length=MAX_FILES)]
    runs: Annotated[list[_Run], msgspec.Meta(max_length=MAX_RUNS)]
    imports: Annotated[str, msgspec.Meta(max_length=MAX_IMPORTS)] = ""


def encode_hot_set(hot_set: HotSet) -> bytes:
    """The bytes of a set, the same for equal sets. The oldest runs are left out when they do not fit."""
    for start in range(len(hot_set.records) + 1):
        text = _text(hot_set, hot_set.records[start:])
        if len(text) <= MAX_JSON_BYTES:
            break
    return zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(text)


def _text(hot_set: HotSet, records: tuple[Record, ...]) -> bytes:
    files: dict[str, int] = {}
    runs = []
    for record in records:
        numbers = [files.setdefault(need.file, len(files)) for need in record.needs]
        runs.append(
            {
                "started_s": record.started_s,
                "duration_ms": record.duration_ms,
                "coverage": record.coverage,
                "file": _deltas(numbers),
                "block": _deltas([need.block for need in record.needs]),
                "t_ms": _deltas([need.t_ms for need in record.needs]),
                "found": _deltas([need.found for need in record.needs]),
            }
        )
    document = {
        "schema": SCHEMA,
        "image": hot_set.image,
        "workload": hot_set.workload,
        "files": list(files),
        "runs": runs,
    }
    if hot_set.imports:
        document["imports"] = hot_set.imports
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def parse_hot_set(data: bytes) -> HotSet:
    """Read a set. Raises `CorruptError`, or `PermanentError` for a version that this program does not know."""
    if len(data) > MAX_STORED_BYTES:
        raise CorruptError(f"a hot set of {len(data)} bytes is too large")
    try:
        # The frame's own word on its size decides what is allocated, so it is read first.
        size = zstandard.get_frame_parameters(data).content_size
        if not 0 < size <= MAX_JSON_BYTES:
            raise CorruptError("a hot set's frame announces an impossible size")
        text = zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
        schema = msgspec.json.decode(text, type=_Versioned).schema
        if schema != SCHEMA:
            if schema.startswith("bootseer.hotset/"):
                raise PermanentError(f"a hot set of the version {schema[:64]!r}; this BootSeer knows {SCHEMA}")
            raise CorruptError("this is not a hot set")
        document = msgspec.json.decode(text, type=_Document)
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
    times, found = _numbers(run.t_ms, MAX_MS), _numbers(run.found, len(Found))
    if not len(numbers) == len(blocks) == len(times) == len(found):
        raise CorruptError("a hot set has columns of different lengths")
    if len(set(zip(numbers, blocks, strict=True))) != len(numbers):
        raise CorruptError("a hot set names a block twice in one run")
    if any(later < earlier for earlier, later in pairwise(times)):
        raise CorruptError("a hot set has needs that are not in order")
    columns = zip(numbers, blocks, times, found, strict=True)
    needs = tuple(Need(files[number], block, t_ms, Found(how)) for number, block, t_ms, how in columns)
    return Record(run.started_s, int(run.duration_ms), needs, run.coverage)


def _deltas(values: list[int]) -> list[int]:
    """Differences to the value before: most are small, so that they take few digits and compress well."""
    return [later - earlier for earlier, later in pairwise([0, *values])]


def _numbers(deltas: list[int], limit: int) -> list[int]:
    """A column that `_deltas` wrote, each number at least 0 and less than `limit`."""
    numbers = list(accumulate(deltas))
    if numbers and not 0 <= min(numbers) <= max(numbers) < limit:
        raise CorruptError("a hot set has a column of impossible numbers")
    return numbers

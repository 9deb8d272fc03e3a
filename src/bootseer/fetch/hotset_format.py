"""A hot set as bytes: bounded JSON in a zstd frame, docs/formats/hotset.md.

Hot sets lie in stores that others write to, so that nothing here is believed: sizes are bounded before anything is
allocated, numbers checked one by one. Called by whoever keeps hot sets. Decides and touches nothing.
"""

from __future__ import annotations

import json
import math
import re
from itertools import accumulate, pairwise

import zstandard

from bootseer.errors import CorruptError, PermanentError
from bootseer.fetch.hotset import MAX_RUNS, HotSet, Record
from bootseer.fetch.need import MAX_BLOCK, MAX_MS, MAX_NEEDS, Found, Need

SCHEMA = "bootseer.hotset/1"
MAX_STORED_BYTES = 16 << 20
# A parsed JSON text takes up to fifty times its own size.
MAX_JSON_BYTES = 16 << 20
MAX_FILES = 4096
MAX_KEY = 512
_IDENTITY = re.compile(r"[0-9a-f]{64}")
_LEVEL = 9


def encode(hot_set: HotSet) -> bytes:
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
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def parse(data: bytes) -> HotSet:
    """Read a set. Raises `CorruptError`, or `PermanentError` for a version that this program does not know."""
    document = _object(_json(data))
    schema = document.get("schema")
    if schema != SCHEMA:
        if isinstance(schema, str) and schema.startswith("bootseer.hotset/"):
            raise PermanentError(f"a hot set of the version {schema[:64]!r}; this BootSeer knows {SCHEMA}")
        raise CorruptError("this is not a hot set")
    files = [_identity(file) for file in _list(document.get("files"), MAX_FILES)]
    if len(set(files)) != len(files):
        raise CorruptError("a hot set names a file twice")
    records = tuple(_record(_object(run), files) for run in _list(document.get("runs"), MAX_RUNS))
    if any(later.started_s < earlier.started_s for earlier, later in pairwise(records)):
        raise CorruptError("a hot set has runs that are not in order")
    return HotSet(_key(document.get("image")), _key(document.get("workload")), records)


def _record(run: dict[str, object], files: list[str]) -> Record:
    numbers = _numbers(run.get("file"), len(files))
    blocks = _numbers(run.get("block"), MAX_BLOCK)
    times = _numbers(run.get("t_ms"), MAX_MS)
    found = _numbers(run.get("found"), len(Found))
    if not len(numbers) == len(blocks) == len(times) == len(found):
        raise CorruptError("a hot set has columns of different lengths")
    if len(set(zip(numbers, blocks, strict=True))) != len(numbers):
        raise CorruptError("a hot set names a block twice in one run")
    if any(later < earlier for earlier, later in pairwise(times)):
        raise CorruptError("a hot set has needs that are not in order")
    coverage = run.get("coverage")
    return Record(
        started_s=_number(run.get("started_s"), float("inf")),
        duration_ms=int(_number(run.get("duration_ms"), MAX_MS)),
        needs=tuple(
            Need(files[number], block, t_ms, Found(how))
            for number, block, t_ms, how in zip(numbers, blocks, times, found, strict=True)
        ),
        coverage=None if coverage is None else _number(coverage, 1.0),
    )


def _json(data: bytes) -> object:
    if len(data) > MAX_STORED_BYTES:
        raise CorruptError(f"a hot set of {len(data)} bytes is too large")
    try:
        # The frame's own word on its size decides what is allocated, so it is read first.
        size = zstandard.get_frame_parameters(data).content_size
        if not 0 < size <= MAX_JSON_BYTES:
            raise CorruptError("a hot set's frame announces an impossible size")
        return json.loads(zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False))
    except (zstandard.ZstdError, ValueError, RecursionError) as error:
        raise CorruptError(f"a hot set cannot be read: {error}") from error


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise CorruptError("a hot set has something else where an object belongs")
    return value


def _list(value: object, limit: int) -> list[object]:
    if not isinstance(value, list) or len(value) > limit:
        raise CorruptError(f"a hot set has no list, or more than {limit} entries, where a list belongs")
    return value


def _key(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_KEY:
        raise CorruptError("a hot set has no key")
    return value


def _identity(value: object) -> str:
    if not isinstance(value, str) or not _IDENTITY.fullmatch(value):
        raise CorruptError("a hot set names a file that cannot be")
    return value


def _number(value: object, limit: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit:
        raise CorruptError("a hot set has an impossible number")
    number = float(value) if abs(value) < 2**63 else math.inf
    if not math.isfinite(number):
        raise CorruptError("a hot set has an impossible number")
    return number


def _deltas(values: list[int]) -> list[int]:
    """Differences to the value before: most are small, so that they take few digits and compress well."""
    return [later - earlier for earlier, later in pairwise([0, *values])]


def _numbers(value: object, limit: int) -> list[int]:
    """A column that `_deltas` wrote, each number at least 0 and less than `limit`."""
    deltas = _list(value, MAX_NEEDS)
    if not all(type(delta) is int and -limit < delta < limit for delta in deltas):
        raise CorruptError("a hot set has a column of impossible numbers")
    numbers = list(accumulate(delta for delta in deltas if isinstance(delta, int)))
    if numbers and not 0 <= min(numbers) <= max(numbers) < limit:
        raise CorruptError("a hot set has a column of impossible numbers")
    return numbers

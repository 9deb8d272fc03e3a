"""The event line: one moment of a startup in a log.

    @bootseer1 {"wall_ns":1,"mono_ns":2,"job":"moe","attempt":0,...}

The tag may be anywhere in a line, because launchers and log collectors add prefixes. The format is specified in
docs/formats/event.md; change both or neither.

No I/O: callers read the clocks, `trace.sinks` writes the lines, and `report.log_scan` finds them.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

VERSION: Final = 1
TAG_STEM: Final = b"@bootseer"
MAX_LINE_BYTES: Final = 4095
"""Limit for writers: up to PIPE_BUF a write to a pipe is atomic, and container runtimes do not split the log line."""
MAX_READ_BYTES: Final = 65_536
"""A reader skips an event that does not end within this many bytes."""

BEGIN: Final = "begin"
END: Final = "end"
INSTANT: Final = "instant"
PHASES: Final = frozenset({BEGIN, END, INSTANT})

OK: Final = "ok"
FAILED: Final = "failed"
OUTCOMES: Final = frozenset({"", OK, FAILED})

KINDS: Final = ("full", "hot_update", "restart")
NO_RANK: Final = -1
ALIVE: Final = "alive"
"""Instant written by `bootseer run` periodically while its command runs."""
STACK: Final = "stack_sample"
"""Instant with the stack of a late process."""

_INT64 = 2**63
_MAX_NAME = 256
_NAME_BYTES = 96 * 12
"""Of a job's or node's name in a line: with two of them, the fixed keys always fit. 12 bytes escape an emoji."""
_PRIME = (1 << 127) - 1
_SPREAD = 0x2545F4914F6CDD1D9E3779B97F4A7C15
_MAX_STAGE = 8 * 65  # the longest match of `_STAGE`: a truncated name would be another stage
_MAX_VALUE = 1024
_JSON_KEYS = ("log", "message", "MESSAGE", "msg")
"""Keys under which docker, fluentd, the journal and JSON loggers store the line."""
_STAGE = r"[a-z0-9_]{1,64}(\.[a-z0-9_]{1,64}){0,7}"
_TAG = rb"@bootseer(\d{1,4}) (?=\{)"
# Patterns are compiled at their first use, because a job that only writes events needs only one of them.


class Event(NamedTuple):
    """One event. (job, attempt, restart) identify a startup, (node, rank) a place in it."""

    wall_ns: int
    """CLOCK_REALTIME of the node, ns since 1970. With estimated clock offsets it orders the events of several nodes."""
    mono_ns: int
    """CLOCK_MONOTONIC of the node, ns. Durations use only this clock."""
    job: str
    node: str
    """Unique name of the machine or pod within the attempt."""
    stage: str
    """Dotted name, `environment_setup.install`; `docs/glossary.md` lists the known ones."""
    phase: str
    """`begin`, `end` or `instant`."""
    span: str
    """16 hex digits, equal for begin and end of a span."""
    attempt: int = 0
    """Counts the scheduler's starts of the job: 0, 1, ..."""
    restart: int = 0
    """Counts restarts of the processes inside one attempt (torchrun's restart count)."""
    kind: str = KINDS[0]
    rank: int = NO_RANK
    """Global rank; -1 for events of a whole node."""
    parent: str = ""
    """Span id of the enclosing span, empty at the root."""
    outcome: str = ""
    """`ok` or `failed` on an end, else empty."""
    pid: int = 0
    trace: str = ""
    """32 hex digits, the W3C trace id; one for all nodes of an attempt."""
    attrs: Mapping[str, Any] = {}
    """Flat map of facts: bytes, hits, barrier, ... Values are str, int, float, bool or None."""


_REQUIRED: Final = ("wall_ns", "mono_ns", "job", "node", "stage", "phase", "span")
_DEFAULTS: Final = Event._field_defaults


class Malformed(ValueError):  # noqa: N818 - a property of a text, always caught by readers
    """The text after a tag is not an event. `reason` is a stable keyword, for statistics."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@functools.cache
def _tag() -> re.Pattern[bytes]:
    return re.compile(_TAG)


@functools.lru_cache(maxsize=4096)
def _valid_stage(text: str) -> bool:
    return re.fullmatch(_STAGE, text) is not None


def stage_name(text: str) -> str:
    """A valid stage name derived from `text`, because an invalid name must not stop a job."""
    if _valid_stage(text):
        return text
    parts = [re.sub(r"[^a-z0-9_]+", "_", part.lower())[:64].strip("_") for part in text.split(".")[:8]]
    return ".".join(part for part in parts if part) or "unnamed"


def encode(event: Event) -> bytes:
    """One line with its newline, at most `MAX_LINE_BYTES`. `attrs_cut` records that long attributes were truncated."""
    line = _encode(event, event.attrs)
    if len(line) <= MAX_LINE_BYTES:
        return line
    attrs = {str(key)[:64]: _shortened(value) for key, value in list(event.attrs.items())[:24]}
    short = event._replace(stage=event.stage[:_MAX_STAGE])
    while True:
        line = _encode(short, {**attrs, "attrs_cut": True})
        if len(line) <= MAX_LINE_BYTES or not attrs:
            return line
        del attrs[max(attrs, key=lambda key: len(json.dumps(attrs[key])))]


def fingerprint(text: str) -> str:
    """32 hex digits for a text, equal on every node. Not cryptographic: importing hashlib takes 3 ms."""
    number = int.from_bytes(text.encode("utf-8", "surrogateescape") + b"\1", "big")
    return f"{(number * _SPREAD % _PRIME * _SPREAD + 1) % _PRIME:032x}"


@functools.lru_cache(maxsize=64)
def written_name(text: str) -> str:
    """A job's or node's name, the same in all lines. A long one is cut and ends with a digest: names often differ only
    at their ends (`NAME-4711`)."""
    if len(text) <= _MAX_NAME and len(json.dumps(text)) <= _NAME_BYTES:
        return text
    cut = text[: _MAX_NAME - 9]
    return f"{cut if len(json.dumps(cut)) <= _NAME_BYTES - 9 else text[:87]}-{fingerprint(json.dumps(text))[:8]}"


def _encode(event: Event, attrs: Mapping[str, Any]) -> bytes:
    record: dict[str, Any] = {name: getattr(event, name) for name in _REQUIRED}
    for name, default in _DEFAULTS.items():
        value = getattr(event, name)
        if name != "attrs" and value != default:
            record[name] = value
    for name in ("job", "node"):
        record[name] = written_name(record[name])
    if attrs:
        record["attrs"] = {str(key): _plain(value) for key, value in attrs.items()}
    text = json.dumps(record, separators=(",", ":"), default=str)
    # A value may contain an event line. Escape its tag, or readers would find a second event.
    text = text.replace("@bootseer", "\\u0040bootseer")
    return b"@bootseer%d %s\n" % (VERSION, text.encode("ascii"))


def _plain(value: object) -> object:
    if isinstance(value, float) and not -1e308 < value < 1e308:
        return str(value)
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        return _huge(value)  # Python refuses to format longer integers
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    try:
        return str(value)
    except Exception:  # an exception in a user's __str__ must not stop a job
        return f"<{type(value).__name__}>"


def _huge(value: int) -> float:
    return float(min(max(value, -(2**1000)), 2**1000))


def _shortened(value: object) -> object:
    plain = _plain(value)
    return plain[:96] + "…" if isinstance(plain, str) and len(plain) > 96 else plain


def _finite(text: str) -> float | str:
    """Parse a float. `1e999` is valid JSON but not a finite float: it stays text, like NaN and Infinity."""
    value = float(text)
    return value if -math.inf < value < math.inf else text


_decoder = json.JSONDecoder(parse_constant=lambda name: name, parse_float=_finite)


def decode(text: bytes) -> Event:
    """The first event in a text that may have more around it.

    Raises `Malformed`; its reasons are `no_tag`, `version`, `truncated`, `oversized`, `not_json`, `bad_field`.
    """
    tag = _tag().search(text)
    if tag is None:
        raise Malformed("no_tag")
    if int(tag[1]) != VERSION:
        raise Malformed("version")
    line = text[tag.end() : tag.end() + MAX_READ_BYTES].partition(b"\n")[0]
    try:
        record, _ = _decoder.raw_decode(line.decode("utf-8", "surrogateescape"))
    except json.JSONDecodeError:
        if len(line) == MAX_READ_BYTES:
            raise Malformed("oversized") from None
        raise Malformed("not_json" if line.rstrip().endswith(b"}") else "truncated") from None
    except (RecursionError, ValueError):  # nested too deeply, or a number of thousands of digits
        raise Malformed("not_json") from None
    try:
        return _event(record)
    except RecursionError:  # nested deeply enough to be parsed but not to be encoded again
        raise Malformed("not_json") from None


def from_json(line: bytes) -> bytes:
    """The line that a collector wrapped in JSON; unchanged if it is not such a record."""
    if not line.startswith(b'{"'):
        return line
    try:
        record = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return line
    log = next((log for key in _JSON_KEYS if isinstance(log := record.get(key), str)), None)
    if log is None:
        return line
    time = record.get("time")
    return f"{time} {log}".encode("utf-8", "replace") if isinstance(time, str) else log.encode("utf-8", "replace")


def _event(record: dict[str, Any]) -> Event:
    attrs = record.pop("attrs", None) or {}
    if not isinstance(attrs, dict):
        raise Malformed("bad_field")
    fields: dict[str, Any] = {}
    for key, value in record.items():
        if key not in _TYPES:
            continue  # of a later version
        if type(value) is not _TYPES[key]:
            raise Malformed("bad_field")
        if type(value) is str:
            limit = _MAX_STAGE if key == "stage" else _MAX_NAME
            fields[key] = value if len(value) <= limit and value.isascii() else encodable(value[:limit])
        elif -_INT64 <= value < _INT64:
            fields[key] = value
        else:
            raise Malformed("bad_field")
    try:
        event = Event(**fields, attrs={encodable(k[:64]): _read_value(v) for k, v in attrs.items()} if attrs else {})
    except TypeError:
        raise Malformed("bad_field") from None
    if event.phase not in PHASES or event.outcome not in OUTCOMES or not _valid_stage(event.stage):
        raise Malformed("bad_field")
    if not event.span or not event.job or not event.node or event.attempt < 0 or event.restart < 0:
        raise Malformed("bad_field")
    return event


_TYPES: Final[Mapping[str, type[Any]]] = {
    name: int if name in ("wall_ns", "mono_ns", "attempt", "restart", "rank", "pid") else str for name in Event._fields
}


def encodable(text: str) -> str:
    """The text without lone surrogates, which are valid in JSON and file names, but not in our outputs."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def visible(text: str) -> str:
    """The text with escapes in place of what a terminal would obey; messages may quote a job, a store or a service."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text)


def _read_value(value: Any) -> Any:
    if type(value) is str:
        return encodable(value[:_MAX_VALUE])
    if type(value) is int:
        return value if -_INT64 <= value < _INT64 else _huge(value)
    if value is None or type(value) in (bool, float):
        return value
    return encodable(json.dumps(value)[:_MAX_VALUE])

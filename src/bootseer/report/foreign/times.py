"""The wall time at the start of a log line, in the forms that launchers, runtimes and loggers write; and durations as
Go and Rust programs print them: `796ms`, `1m2.3s`, `1h2m3s`, `1.5µs`, uv's `1m 02s`.

Text before the time is skipped: colours, `[rank0]:`, `[default0]:`, `0: ` of `srun --label`, `[1,0]<stdout>:` of
mpirun, `[pod/name/container]`, a level word, a progress bar, and text that a carriage return overwrites. Known forms:

    2026-11-20T17:54:26.123456789Z stdout F ...      CRI; any ISO 8601, with T or blank, fraction, offset
    2026-11-20 17:54:26,123 ...                      Python logging; in brackets: Slurm, NCCL, torch before 2.3,
                                                     Go's logrus on a terminal (INFO[2026-11-20T...])
    W1120 17:54:26.123000 12345 torch/...]           glog as torch writes it, klog; in brackets: torch's C++ side
    time="2026-11-20T17:54:26.123Z" level=info ...   logfmt: containerd
    Nov 20 17:54:26 host prog[1]: ...                syslog RFC 3164; RFC 5424 with its header

Times without a zone are in this machine's zone at that date: a log of the summer may be read in winter. The caller
provides a missing year.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Final

from bootseer.units import NS_PER_S

EARLIEST_NS: Final = 946_684_800 * NS_PER_S
"""2000-01-01: an earlier time is a clock that was never set."""
LATEST_NS: Final = 4_102_444_800 * NS_PER_S
"""2100-01-01: a later one is a misread number."""
_UNITS = (1_000, 1_000_000, NS_PER_S)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_OFFSET_MINUTES = 14 * 60
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_Clock = tuple[int, int, int, int, int]
"""Month, day, hour, minute, second."""
_LABELS = re.compile(
    r"""(?:
      \s+
    | \x1b\[[0-9;?]*[A-Za-z]                               # colour
    | \[\d+,\d+\]<std(?:out|err)>:                         # mpirun --tag-output
    | \[[A-Za-z][^\]\s]{0,120}\]:?                         # [rank0]: [pod/name/container] [INFO|trainer.py:1]
    | \([A-Za-z_][^()\n]{0,120}\)                          # Ray: (RayWorkerWrapper pid=927)
    | \d{1,6}:(?=\s)                                       # srun --label
    | (?:TRACE|DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|CRITICAL|FATAL)(?::|\||(?=[\s\[]))
    ){0,16}""",
    re.VERBOSE | re.ASCII,
)
_BAR = re.compile(r"[^\r\n%|]{0,60}\d{1,3}%\|[^|\r\n]{0,200}\|[^\[\r\n]{0,40}\[[^\]\r\n]{0,80}\]", re.ASCII)
"""A progress bar of tqdm, which the next line follows without a newline."""
_ISO = (
    r"(\d{4})[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9})\d*)?(?:\s?(Z\b|UTC\b|[+-]\d\d:?\d\d(?!\d)))?"
)
_ISO_LINE = re.compile(rf"(?:<\d{{1,3}}>1[ ])?\[?{_ISO}", re.ASCII)
_LOGFMT = re.compile(rf'(?:time|ts|t)="?{_ISO}"?', re.ASCII)
_GLOG = re.compile(r"\[?[IWEFDV](\d{4})?(\d\d)(\d\d)\s+(\d\d):(\d\d):(\d\d)\.(\d{1,9})\d*(?=\s)", re.ASCII)
_SYSLOG = re.compile(
    rf"(?:<\d{{1,3}}>)?({'|'.join(_MONTHS)})\s+(\d{{1,2}})\s(\d\d):(\d\d):(\d\d)\s+(\S+\s+[^\s:]{{1,128}}:\s?)?",
    re.ASCII,
)
MAX_DURATION_NS: Final = 7 * 86_400 * NS_PER_S
"""No stage of a startup lasts a week: a longer duration is a misread or broken number."""
DURATION: Final = r"(?:\d{1,9}(?:\.\d{1,9})?(?:h|ms|m|s|µs|μs|us|ns) ?){1,6}(?![\w.])"
"""Matches what `parse_duration` may understand; to be built into the parsers' expressions."""
_PART = re.compile(r"(\d+)(?:\.(\d+))?(h|ms|m|s|µs|μs|us|ns) ?", re.ASCII)
_UNIT_NS = {"h": 3600 * NS_PER_S, "m": 60 * NS_PER_S, "s": NS_PER_S, "ms": 10**6, "us": 10**3, "ns": 1}


def plausible(wall_ns: int) -> bool:
    """Whether a job can have run then."""
    return EARLIEST_NS <= wall_ns < LATEST_NS


def other_unit(wall_ns: int, mono_ns: int) -> bool:
    """Whether an event gives its times in µs, ms or s: a clock that was never set shows about the monotonic time."""
    return (
        not plausible(wall_ns)
        and any(plausible(wall_ns * unit) for unit in _UNITS)
        and (mono_ns == wall_ns or mono_ns * 100 < wall_ns)
    )


def line_time(text: str, *, reference_ns: int) -> int | None:
    """The time at the start of `text`, ns since 1970, when a form above matches and the date exists and is plausible.

    `reference_ns` is any moment near the log's own (its modification time): where a form has no year, the year that
    comes nearest to it is taken. Never raises.
    """
    wall_ns = _time_at(text, 0, reference_ns)
    if wall_ns is None:
        place = text.rstrip().rfind("\r") + 1
        bar = _BAR.match(text, place)
        place = bar.end() if bar else place
        wall_ns = _time_at(text, place, reference_ns) if place else None
    return wall_ns


def _time_at(text: str, begin: int, reference_ns: int) -> int | None:
    labels = _LABELS.match(text, begin)
    start = labels.end() if labels else begin
    if found := _ISO_LINE.match(text, start) or _LOGFMT.match(text, start):
        return _if_plausible(_from_iso(found))
    if found := _GLOG.match(text, start):
        return _if_plausible(_from_glog(found, reference_ns))
    if found := _SYSLOG.match(text, start):
        return _behind_syslog(text, found, reference_ns)
    return None


def _if_plausible(wall_ns: int | None) -> int | None:
    return wall_ns if wall_ns is not None and plausible(wall_ns) else None


def _from_iso(found: re.Match[str]) -> int | None:
    year, month, day, hour, minute, second, fraction, offset = found.groups()
    zone: tzinfo | None = None
    if offset in ("Z", "UTC"):
        zone = UTC
    elif offset:
        minutes = int(offset[1:3]) * 60 + int(offset[-2:])
        if minutes > _MAX_OFFSET_MINUTES or int(offset[-2:]) > 59:
            return None
        zone = timezone(timedelta(minutes=-minutes if offset[0] == "-" else minutes))
    return _wall_ns(int(year), (int(month), int(day), int(hour), int(minute), int(second)), fraction, zone)


def _from_glog(found: re.Match[str], reference_ns: int) -> int | None:
    year, month, day, hour, minute, second, fraction = found.groups()
    clock = (int(month), int(day), int(hour), int(minute), int(second))
    if year:
        return _wall_ns(int(year), clock, fraction)
    return _nearest_year(clock, fraction, reference_ns)


def _behind_syslog(text: str, found: re.Match[str], reference_ns: int) -> int | None:
    """Syslog has whole seconds; the time of klog or containerd after it is more precise."""
    month, day, hour, minute, second, _ = found.groups()
    clock = (_MONTHS.index(month) + 1, int(day), int(hour), int(minute), int(second))
    outer_ns = _if_plausible(_nearest_year(clock, None, reference_ns))
    wall_ns = None
    if outer_ns is not None and (inner := _GLOG.match(text, found.end())):
        wall_ns = _if_plausible(_from_glog(inner, outer_ns))
    elif outer_ns is not None and (inner := _LOGFMT.match(text, found.end())):
        wall_ns = _if_plausible(_from_iso(inner))
    return outer_ns if wall_ns is None else wall_ns


def _wall_ns(year: int, clock: _Clock, fraction: str | None, zone: tzinfo | None = None) -> int | None:
    try:
        since = datetime(year, *clock, tzinfo=zone).astimezone(UTC) - _EPOCH
    except (ValueError, OverflowError, OSError):
        return None
    return (since.days * 86_400 + since.seconds) * NS_PER_S + int((fraction or "").ljust(9, "0"))


def _nearest_year(clock: _Clock, fraction: str | None, reference_ns: int) -> int | None:
    if not plausible(reference_ns):
        return None
    near = (_EPOCH + timedelta(seconds=reference_ns // NS_PER_S)).year
    # 29 February exists in one year of four, and in none of eight around most centuries.
    years = range(near - 8, near + 9) if clock[:2] == (2, 29) else (near - 1, near, near + 1)
    walls = (_wall_ns(year, clock, fraction) for year in years)
    return min((wall for wall in walls if wall is not None), key=lambda wall: abs(wall - reference_ns), default=None)


def parse_duration(text: str) -> int | None:
    """ns, or None when the text is not a duration or not a plausible one."""
    total = end = 0
    for part in _PART.finditer(text):
        if part.start() != end:
            return None
        whole, fraction, unit = part.groups()
        unit_ns = _UNIT_NS[unit.replace("µ", "u").replace("μ", "u")]
        total += int(whole) * unit_ns
        if fraction:
            total += int(fraction) * unit_ns // 10 ** len(fraction)
        end = part.end()
    return total if end == len(text) and end and total <= MAX_DURATION_NS else None

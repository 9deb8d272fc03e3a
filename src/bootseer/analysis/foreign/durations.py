"""Durations as Go and Rust programs print them: `796ms`, `1m2.3s`, `1h2m3s`, `1.5µs`, uv's `1m 02s`.

Used by the parsers of kubelet, containerd and uv lines. Decides and touches nothing.
"""

from __future__ import annotations

import re
from typing import Final

from bootseer.units import NS_PER_S

MAX_NS: Final = 7 * 86_400 * NS_PER_S
"""No stage of a startup lasts a week: a longer duration is a misread or broken number."""

PATTERN: Final = r"(?:\d{1,9}(?:\.\d{1,9})?(?:h|ms|m|s|µs|μs|us|ns) ?){1,6}(?![\w.])"
"""Matches what `parse` may understand; to be built into the parsers' expressions."""

_PART = re.compile(r"(\d+)(?:\.(\d+))?(h|ms|m|s|µs|μs|us|ns) ?", re.ASCII)
_UNIT_NS = {"h": 3600 * NS_PER_S, "m": 60 * NS_PER_S, "s": NS_PER_S, "ms": 10**6, "us": 10**3, "ns": 1}


def parse(text: str) -> int | None:
    """ns, or None when the text is no duration or not a plausible one."""
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
    return total if end == len(text) and end and total <= MAX_NS else None


def from_seconds(text: str) -> int | None:
    """ns of a plain decimal number of seconds, None when it is not plausible."""
    return parse(text + "s")


def from_milliseconds(value: object) -> int | None:
    """ns of a JSON number of milliseconds, None when it is no number, negative, NaN or not plausible."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value * 1e6) if 0 <= value <= MAX_NS / 1e6 else None

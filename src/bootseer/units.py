"""Units and their words: one place that turns nanoseconds and bytes into text."""

from __future__ import annotations

NS_PER_S = 1_000_000_000
S_PER_H = 3600


def seconds(ns: int | float) -> float:
    """Nanoseconds to seconds."""
    return ns / NS_PER_S


def format_seconds(value_s: float) -> str:
    """A duration as people read it: `0.42 s`, `41.3 s`, `12 min 04 s`, `3 h 36 min`."""
    sign, value = ("-", -value_s) if value_s < 0 else ("", value_s)
    if value < 10:
        return f"{sign}{value:.2f} s"
    if value < 119.95:
        return f"{sign}{value:.1f} s"
    whole = round(value)
    if whole < 7200:
        return f"{sign}{whole // 60} min {whole % 60:02d} s"
    return f"{sign}{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_bytes(count: int | float) -> str:
    """A byte count in binary units: `512 B`, `1.5 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"

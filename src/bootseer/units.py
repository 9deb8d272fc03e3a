"""Units as text: durations, bytes, GPU-hours, money, counted nouns; and metrics in Prometheus' text format."""

from __future__ import annotations

import math
from collections.abc import Sequence

NS_PER_S = 1_000_000_000
S_PER_H = 3600


def seconds(ns: int | float) -> float:
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


def format_hours(value: float) -> str:
    """GPU-hours with at least two significant digits, never as an exponent: a small cost must not look like none."""
    if abs(value) >= 100:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}"
    return f"{value:.2f}" if not 0 < abs(value) < 1 else _small(value)


def format_money(value: float, currency: str = "") -> str:
    """An amount; a sign stands in front of it, a code behind: `$1,259.31`, `1,259.31 EUR`."""
    text = f"{value:,.0f}" if abs(value) >= 10_000 else _small(value) if 0 < abs(value) < 0.1 else f"{value:,.2f}"
    return f"{text} {currency}".rstrip() if not currency or currency[0].isalpha() else currency + text


def _small(value: float) -> str:
    """Two significant digits."""
    return "< 0.0001" if abs(value) < 0.0001 else f"{value:.{1 - math.floor(math.log10(abs(value)))}f}"


def format_bytes(count: int | float) -> str:
    """A byte count in binary units: `512 B`, `1.5 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def plural(number: int, noun: str) -> str:
    """`1 node`, `1,440 nodes`, `2 processes`."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith(('s', 'ch')) else 's'}"


def listed(items: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 2 more`."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return f"{', '.join(items[:most])}{more}"


PROMETHEUS = "text/plain; version=0.0.4"
"""The media type of `Figures`."""


class Figures:
    """Metrics in Prometheus' text format, which is too simple to be worth its client library."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, name: str, kind: str, about: str) -> None:
        """Begin a metric of the kind `counter`, `gauge` or `histogram`."""
        self._lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]

    def value(self, name: str, value: float, **labels: str) -> None:
        """A value of the family that was begun last."""
        pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        self._lines.append(f"{name}{{{pairs}}} {value:.15g}" if pairs else f"{name} {value:.15g}")

    def histogram(
        self, name: str, bounds: Sequence[float], counts: Sequence[int], sum_: float | None, **labels: str
    ) -> None:
        """`counts`: one for each bound, and one for values above all bounds."""
        total = 0
        for bound, count in zip(bounds, counts, strict=False):
            total += count
            self.value(f"{name}_bucket", total, **labels, le=f"{bound:.6g}")
        total = sum(counts)
        self.value(f"{name}_bucket", total, **labels, le="+Inf")
        self.value(f"{name}_count", total, **labels)
        if sum_ is not None:
            self.value(f"{name}_sum", sum_, **labels)

    def text(self) -> str:
        """All metrics, as a response to Prometheus."""
        return "\n".join([*self._lines, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

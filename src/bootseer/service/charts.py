"""Charts as inline SVG: no script, no style attribute, readable by screen readers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from bootseer.report.render.html_svg import swatch

_WIDTH, _HEIGHT, _LEFT, _BELOW = 640, 190, 52, 24
_MOST_PX = 34
"""Maximum width of a bar."""
_COLOURS = 8
"""Classes from `c2` of the report's style."""


def bars(rows: Sequence[tuple[str, Mapping[str, float]]], label: str) -> str:
    """A stacked bar per row, with a legend if there are several parts; `label` is the name of the unit."""
    if not rows:
        return '<p class="empty">No data in this period.</p>'
    names = sorted({name for _, parts in rows for name in parts})
    css = {name: f"c{2 + number % _COLOURS}" for number, name in enumerate(names)}
    sums = [sum(parts.values()) for _, parts in rows]
    most = _top(max(sums), counts=all(value == int(value) for value in sums))
    width = min((_WIDTH - _LEFT) / len(rows), _MOST_PX)
    drawn = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT + _BELOW}" role="img" aria-label="{escape(label)} by day">'
    ]
    for share in (0.0, 0.5, 1.0):
        y = _HEIGHT - share * (_HEIGHT - 12)
        drawn.append(f'<line class="hair" x1="{_LEFT}" y1="{y:g}" x2="{_WIDTH}" y2="{y:g}"/>')
        drawn.append(f'<text x="{_LEFT - 8}" y="{y + 4:g}" text-anchor="end">{_short(share * most)}</text>')
    for number, (name, parts) in enumerate(rows):
        y = float(_HEIGHT)
        for part in (one for one in names if parts.get(one)):
            high = parts[part] / most * (_HEIGHT - 12)
            y -= high
            of = f" {part}" if part else ""
            drawn.append(
                f'<rect class="{css[part]}" x="{_LEFT + number * width:.1f}" y="{y:.1f}" '
                f'width="{max(width * 0.82, 0.5):.1f}" height="{high:.1f}">'
                f"<title>{escape(name)}{escape(of)}: {_short(parts[part])} {escape(label)}</title></rect>"
            )
    for number in sorted({0, len(rows) // 2, len(rows) - 1}) if len(rows) > 8 else [0]:
        x = _LEFT + (number + 0.41) * width
        anchor = "middle" if number else "start"
        anchor = "end" if number and x > _WIDTH - 40 else anchor
        drawn.append(f'<text x="{x:.0f}" y="{_HEIGHT + 17}" text-anchor="{anchor}">{escape(rows[number][0])}</text>')
    legend = "".join(f"<li>{swatch(css[name])}{escape(name)}</li>" for name in names)
    return "".join(drawn) + "</svg>" + (f'<ul class="legend">{legend}</ul>' if len(names) > 1 else "")


def _top(most: float, *, counts: bool) -> float:
    """The end of the axis, of which half is a round number too; even for counts."""
    if most <= 0:
        return 2.0
    power = 10.0 ** math.floor(math.log10(most))
    top = next(power * one for one in (1, 2, 4, 6, 8, 10) if power * one >= most)
    return max(top, 2.0) if counts else top


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.3g}"

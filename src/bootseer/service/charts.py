"""Charts as SVG, in the page's own text: no script, no style attribute, readable by screen readers."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BELOW = 1352, 180, 72, 24
_MOST_PX = 60
"""A bar is no wider, however few there are."""


def bars(rows: Sequence[tuple[str, float]], label: str) -> str:
    """One bar for each row, with its name and value as a tooltip; `label` is the unit's name."""
    if not rows:
        return '<p class="none">nothing in these days</p>'
    most = max(value for _, value in rows) or 1.0
    width = min((_WIDTH - _LEFT) / len(rows), _MOST_PX)
    right = _LEFT + width * len(rows)
    parts = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT + _BELOW}" role="img" aria-label="{escape(label)} by day">',
        f'<line class="axis" x1="{_LEFT}" y1="{_HEIGHT}" x2="{_WIDTH}" y2="{_HEIGHT}"/>',
        f'<text x="{_LEFT - 6}" y="14" text-anchor="end">{most:,.4g}</text>',
        f'<text x="{_LEFT - 6}" y="{_HEIGHT}" text-anchor="end">0</text>',
    ]
    for number, (name, value) in enumerate(rows):
        high = value / most * (_HEIGHT - 10)
        parts.append(
            f'<rect x="{_LEFT + number * width:.1f}" y="{_HEIGHT - high:.1f}" width="{max(width - 1, 0.5):.1f}" '
            f'height="{high:.1f}"><title>{escape(name)}: {value:,.4g} {escape(label)}</title></rect>'
        )
    first, last = escape(rows[0][0]), escape(rows[-1][0])
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT + 16}">{first}</text>')
    if len(rows) > 4:
        parts.append(f'<text x="{right:.0f}" y="{_HEIGHT + 16}" text-anchor="end">{last}</text>')
    return "".join(parts) + "</svg>"

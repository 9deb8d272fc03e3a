"""Figures of simulated starts as a self-contained HTML page with SVG, for light and dark screens.

The input are documents of `bootseer simulate --json`, so figures can be drawn again from saved results. Each figure
states that it is simulated, with seeds, parameters and their digest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any, Final

Series = Mapping[str, Sequence[tuple[float, Sequence[float]]]]
"""By name: x, and the values of all seeds at x."""
Document = Mapping[str, Any]
"""Output of `bootseer simulate --json`."""

_WIDTH: Final = 860.0
_LEFT: Final = 64.0
_RIGHT: Final = 190.0
"""For the names of the lines."""
_TOP: Final = 30.0
_HEIGHT: Final = 300.0
_ROW: Final = 24.0
_NAME_STEP: Final = 15.0
STAGES: Final = {
    "allocation": "allocation",
    "image_loading": "image",
    "environment_setup": "environment",
    "model_initialization.imports": "imports",
    "model_initialization.checkpoint": "checkpoint",
    "wait": "wait for the last node",
    "connection_setup": "connections",
}
_CSS: Final = """
:root{--bg:#fff;--ink:#16202b;--soft:#55616e;--line:#dfe4e9;--c0:#2f6fb2;--c1:#d5702f;--c2:#21937a;--c3:#b07aa1;
--c4:#8c6d31;--c5:#6b5aa6;--c6:#b9475f;--c7:#7d8f1f}
@media(prefers-color-scheme:dark){:root{--bg:#11161c;--ink:#e4e9ee;--soft:#a3afbb;--line:#2a343f;--c0:#6aa6e6;
--c1:#e38348;--c2:#3fbf9f;--c3:#c99bbd;--c4:#bd9d5c;--c5:#a293e0;--c6:#e07d92;--c7:#b0c24e}}
body{margin:0 auto;max-width:920px;padding:16px;background:var(--bg);color:var(--ink);
font:14px/1.45 system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:21px;margin:8px 0}figure{margin:0 0 28px;padding:8px;background:var(--bg)}h2{font-size:16px;margin:0 0 6px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font-size:12px}svg .name{font-weight:600}
svg .in{fill:var(--bg);font-size:11px}figcaption{color:var(--soft);font-size:13px}figcaption b{color:var(--ink)}
.grid{stroke:var(--line)}.none{fill:none}details{margin-top:8px}pre{overflow-x:auto;font-size:12px;color:var(--soft)}
"""
_COLOURS: Final = 8
_CSS_COLOURS: Final = "".join(
    f".s{at}{{stroke:var(--c{at})}}.f{at}{{fill:var(--c{at})}}svg text.f{at}{{fill:var(--c{at})}}"
    for at in range(_COLOURS)
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with its caption."""

    name: str
    """Name of its file, and its anchor."""
    title: str
    svg: str
    note: str
    """Description of the content."""
    origin: str
    """Scenario, digest of its parameters, seeds: see `origin_of`."""


def origin_of(*documents: Document) -> str:
    """The origin of figures of these documents."""
    seeds = sorted({start["seed"] for document in documents for start in document["starts"]})
    text = ", ".join(dict.fromkeys(f"{one['scenario']} ({one['parameters']})" for one in documents))
    drawn = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}, median and range"
    return f"parameters {text}; {drawn}"


def page(title: str, figures: Iterable[Figure], parameters: Mapping[str, str]) -> str:
    """The HTML page. `parameters`: the parameters of each scenario, by name and digest."""
    parts = [
        f'<figure id="{escape(one.name)}"><h2>{escape(one.title)}</h2>{one.svg}<figcaption><b>Simulated.</b> '
        f"{escape(one.note)} <i>{escape(one.origin[:1].upper() + one.origin[1:])}.</i></figcaption></figure>"
        for one in figures
    ]
    parts += [
        f"<details><summary>Parameters: {escape(name)}</summary><pre>{escape(text)}</pre></details>"
        for name, text in parameters.items()
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>{_CSS}{_CSS_COLOURS}'
        f"</style><h1>{escape(title)}</h1>{''.join(parts)}\n"
    )


def by_nodes(starts: Iterable[Mapping[str, Any]], *path: str) -> dict[str, list[tuple[float, list[float]]]]:
    """A value of starts by arm and number of nodes, for `lines`; `path`: the keys that lead to it."""
    found: dict[str, dict[float, list[float]]] = {}
    for start in starts:
        value: Any = start
        for key in path:
            value = value[key]
        found.setdefault(start["arm"], {}).setdefault(start["nodes"], []).append(float(value))
    return {arm: sorted(points.items()) for arm, points in found.items()}


def figures_of(document: Document) -> list[Figure]:
    """The figures for any simulation of starts."""
    starts = document["starts"]
    origin, name = origin_of(document), document["scenario"]
    ended = "From the allocation until all nodes are ready and connected."
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for start in sorted(starts, key=lambda start: int(start["nodes"])):
        rows.setdefault(f"{start['nodes']:,} nodes, {start['arm']}", []).append(start)
    return [
        Figure("startup", f"{name}: seconds until training begins", lines(by_nodes(starts, "startup_s"), y="s"), ended,
               origin),
        Figure("stages", f"{name}: where the time goes", stages(rows),
               "The median node's stages, and its wait for the last one.", origin),
        Figure("registry", f"{name}: sent by the registry", lines(by_nodes(starts, "registry_gb"), y="GB"),
               "Image and environment, to all nodes together.", origin),
    ]  # fmt: skip


def stages(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A stacked bar per row of starts: medians over seeds."""
    drawn = {}
    for row, starts in rows.items():
        parts = {
            text: median(start["stages"].get(stage, {}).get("median_s", 0.0) for start in starts)
            for stage, text in STAGES.items()
        }
        parts[STAGES["wait"]] = max(median(start["startup_s"] for start in starts) - sum(parts.values()), 0.0)
        drawn[row] = parts
    return bars(drawn, "s")


def lines(series: Series, *, y: str, x: str = "nodes", log: bool | None = None, text: Sequence[str] = ()) -> str:
    """A line of medians for each name, with the range over seeds. `log`: a logarithmic scale; None: by the range of
    values. `text`: labels of x instead of numbers."""
    places = sorted({at for points in series.values() for at, _ in points})
    values = [value for points in series.values() for _, several in points for value in several]
    top, low = max(values, default=1.0) or 1.0, min((value for value in values if value > 0), default=1.0)
    log = top / low > 30 if log is None else log
    ticks, share = _logarithmic(low, top) if log else _linear(top)
    right, bottom = _WIDTH - _RIGHT, _TOP + _HEIGHT
    step = (right - _LEFT) / max(len(places) - 1, 1)

    def at_x(place: float) -> float:
        return (_LEFT + right) / 2 if len(places) == 1 else _LEFT + places.index(place) * step

    def at_y(value: float) -> float:
        return bottom - _HEIGHT * share(value)

    parts = [f'<text x="{_LEFT}" y="16">{escape(y)}{" (logarithmic)" if log else ""}</text>']
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at_y(tick):.1f}" y2="{at_y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at_y(tick) + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    every = -(-len(places) // 16)
    for index, place in enumerate(places):
        if index % every == 0:
            name = text[index] if text else number(place)
            parts.append(f'<text x="{at_x(place):.1f}" y="{bottom + 18}" text-anchor="middle">{escape(name)}</text>')
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{bottom + 36}" text-anchor="middle">{escape(x)}</text>')
    ends = []
    for index, (name, points) in enumerate(series.items()):
        colour = index % _COLOURS
        band = [(at_x(place), at_y(max(several))) for place, several in points]
        band += [(at_x(place), at_y(min(several))) for place, several in reversed(points)]
        middle = [(at_x(place), at_y(median(several))) for place, several in points]
        drawn = " ".join(f"{one:.1f},{other:.1f}" for one, other in band)
        parts.append(f'<polygon class="f{colour}" fill-opacity=".18" points="{drawn}"/>')
        drawn = " ".join(f"{one:.1f},{other:.1f}" for one, other in middle)
        dash = ' stroke-dasharray="6 4"' if index >= _COLOURS // 2 else ""
        parts.append(f'<polyline class="none s{colour}" stroke-width="2"{dash} points="{drawn}"/>')
        for (one, other), (place, several) in zip(middle, points, strict=True):
            text = f"{name}, {number(place)} {x}: {number(median(several))} {y}"
            if len(several) > 1:
                text += f" ({number(min(several))} to {number(max(several))})"
            parts.append(f'<circle class="f{colour}" cx="{one:.1f}" cy="{other:.1f}" r="3.5">')
            parts.append(f"<title>{escape(text)}</title></circle>")
        if middle:
            ends.append((middle[-1][1], colour, f"{name} {number(median(points[-1][1]))}", middle[-1][0]))
    parts += _names(ends, right)
    text = f"{', '.join(series)}: {y} by {x}"
    return _svg(bottom + 44, text, parts)


def bars(rows: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """A horizontal stacked bar per row."""
    most = max((sum(parts.values()) for parts in rows.values()), default=1.0) or 1.0
    names = list(dict.fromkeys(name for parts in rows.values() for name, value in parts.items() if value > most * 5e-4))
    left = 20 + 7.0 * max((len(row) for row in rows), default=0)
    right, top = _WIDTH - 80, _TOP + 6
    drawn, at = [], left
    for index, name in enumerate(names):
        drawn.append(f'<rect class="f{index % _COLOURS}" x="{at:.0f}" y="6" width="12" height="12" rx="2"/>')
        drawn.append(f'<text x="{at + 17:.0f}" y="16">{escape(name)}</text>')
        at += 34 + 6.6 * len(name)
    for line, (row, parts) in enumerate(rows.items()):
        y, x = top + line * _ROW, left
        drawn.append(f'<text x="{left - 8:.0f}" y="{y + 13}" text-anchor="end">{escape(row)}</text>')
        for index, name in enumerate(names):
            value = parts.get(name, 0.0)
            wide = (right - left) * value / most
            text = f"{row}, {name}: {number(value)} {unit}"
            drawn.append(f'<rect class="f{index % _COLOURS}" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="18">')
            drawn.append(f"<title>{escape(text)}</title></rect>")
            if wide > 12 + 7 * len(number(value)):
                drawn.append(f'<text class="in" x="{x + 5:.1f}" y="{y + 13}">{number(value)}</text>')
            x += wide
        drawn.append(f'<text class="name" x="{x + 6:.1f}" y="{y + 13}">{number(sum(parts.values()))} {unit}</text>')
    return _svg(top + len(rows) * _ROW + 4, f"{', '.join(rows)} by {', '.join(names)}, {unit}", drawn)


def number(value: float) -> str:
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    text = f"{value:,.{min(max(digits, 0), 9)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _linear(top: float) -> tuple[list[float], Callable[[float], float]]:
    """The ticks of a scale from 0, and the function that returns the share of it at which a value is."""
    power = 10.0 ** math.floor(math.log10(top / 4))
    step = next(power * one for one in (1, 2, 2.5, 5, 10) if top / (power * one) <= 6)
    num = math.ceil(top / step * (1 - 1e-9))
    return [step * at for at in range(num + 1)], lambda value: value / (step * num)


def _logarithmic(low: float, top: float) -> tuple[list[float], Callable[[float], float]]:
    """The same for a logarithmic scale."""
    marks = [power * one for exponent in range(-9, 13) for power in [10.0**exponent] for one in (1, 2, 5)]
    first = max(mark for mark in marks if mark <= low * (1 + 1e-9))
    last = min(mark for mark in marks if mark >= top * (1 - 1e-9) and mark > first)
    ticks = [mark for mark in marks if first <= mark <= last]
    if math.log10(last / first) > 3:  # only decades
        ticks = [mark for mark in ticks if f"{mark:e}".startswith("1.0")]
    return ticks, lambda value: math.log(max(value, first) / first) / math.log(last / first)


def _names(ends: Iterable[tuple[float, int, str, float]], right: float) -> list[str]:
    """The names of the lines at their right ends, without overlaps."""
    parts, free = [], 0.0
    wanted = sorted(ends)
    space = _TOP + _HEIGHT + 8 - _NAME_STEP * len(wanted)
    for index, (end, colour, name, x) in enumerate(wanted):
        y = min(max(end + 4, free), space + _NAME_STEP * (index + 1))
        free = y + _NAME_STEP
        parts.append(f'<text class="name f{colour}" x="{max(x, right) + 10:.1f}" y="{y:.1f}">{escape(name)}</text>')
    return parts


def _svg(height: float, text: str, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" role="img" '
        f'aria-label="{escape(text)}">{"".join(parts)}</svg>'
    )

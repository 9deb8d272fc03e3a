"""The drawings of the HTML report: timeline rows, time axis, distributions, legend swatches.

Timeline rows use percent for time and pixels for height, so that one drawing fits every width, text is never stretched,
and zoom is one CSS variable (`assets/report.js` draws the same rows for nodes found by the search). Colours are CSS
classes: c0-c9 for stages, cu for untracked, h0-h9 for waiting in a stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bootseer.report.analysis.stages import STAGES
from bootseer.report.model import UNTRACKED, WAIT, WORK, Overview, Report, Segment, Stage
from bootseer.report.render.fold import clean, coalesced, shared_links, time_range, top
from bootseer.report.render.html_text import esc, ratio, seconds

NUM_COLOURS = 10
NUM_SHADES = 6
ROW_HEIGHT = 22
_MAX_BARRIER_NAME = 24
_BAD = ("failed", "truncated")
_CHARACTER = 0.0082
"""Width of a character as a share of the plot, on the smallest screen that shows all names."""
MAX_SEGMENTS = 400
"""More segments in a row cannot be distinguished on a screen; such a row shows only top-level stages."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The time axis, s."""

    low: float
    high: float
    barriers: tuple[tuple[str, float], ...]
    """Name and release of each barrier of the critical chain."""

    def x(self, moment: float) -> str:
        """A position in percent of the axis."""
        return f"{min(max(100 * (moment - self.low) / (self.high - self.low), 0), 100):.3f}".rstrip("0").rstrip(".")


def scale_of(report: Report) -> Scale:
    low, high = time_range(report.nodes)
    bound = min((node.start_s for node in report.nodes), default=0.0)
    # A queue of hours must not shrink the startup to a line: only the end of the queue is drawn.
    low = max(low, bound - (high - bound) / 3) if bound < high else low
    slack = 1e-3 * (high - low)
    inside = [(c.barrier, c.release_s) for _, c in shared_links(report) if low - slack <= c.release_s <= high + slack]
    return Scale(low, high, tuple(inside))


class Palette:
    """One colour for each top-level stage, the same everywhere on the page, and a shade of it for each sub-stage."""

    def __init__(self, report: Report) -> None:
        seen = {top(stage.stage) for stage in report.stages}
        seen.update(top(seg.stage) for node in report.nodes for seg in node.segments)
        seen.update(seg.stage for seg in report.scheduler)
        seen.discard(UNTRACKED)
        self.inner: dict[str, list[str]] = {}
        """The sub-stages with own time, by top-level stage, those with most work first, in the strongest shades."""
        drawn = {seg.stage for node in report.nodes for seg in node.segments if seg.kind != UNTRACKED}
        work = {stage.stage: stage.work_s for stage in report.stages}
        for name in sorted(drawn, key=lambda name: (-work.get(name, 0.0), name)):
            if name != top(name):
                self.inner.setdefault(top(name), []).append(name)
        others = sorted(seen - set(STAGES))
        self._index = {stage: i for i, stage in enumerate(STAGES)}
        first = len(STAGES)
        self._index |= {stage: first + i % (NUM_COLOURS - first) for i, stage in enumerate(others)}
        self.stages = [stage for stage in STAGES if stage in seen] + others
        self._waiting = {s.stage for s in report.stages if s.work_s == 0 and s.wait_s > 0}

    def css(self, stage: str, kind: str) -> str:
        """Class of a segment."""
        index = self._index.get(top(stage))
        if index is None or kind == UNTRACKED:
            return "cu"
        if kind == WAIT:
            return f"h{index}"
        inner = self.inner.get(top(stage), [])
        shade = inner.index(stage) % NUM_SHADES if stage in inner else 0
        return f"c{index}" + (f" v{shade}" if shade else "")

    def order(self, stage: str) -> int:
        """Position of a top-level stage among the others; stages without a colour are last."""
        return self._index.get(stage, len(self._index))

    def sign(self, stage: str) -> str:
        """Class of the stage's sign in legends and tables: hatched if it is only waiting."""
        return self.css(stage, WAIT if stage in self._waiting else WORK)


def patterns() -> str:
    """Hatching for waiting, once per page."""
    hatch = "".join(
        f'<pattern id="w{i}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect class="c{i} pale" width="6" height="6"/><rect class="c{i}" width="1.6" height="6"/></pattern>'
        for i in range(NUM_COLOURS)
    )
    return f'<svg class="defs" width="0" height="0" aria-hidden="true"><defs>{hatch}</defs></svg>'


def describe(seg: Segment) -> str:
    """One segment in words; the text of its tooltip."""
    outcome = f", {seg.outcome}" if seg.outcome in _BAD else ""
    kind = "" if seg.kind == UNTRACKED else f", {seg.kind}"
    span = f"{seconds(seg.end_s - seg.start_s)} ({seconds(seg.start_s)} to {seconds(seg.end_s)})"
    return f"{seg.stage}{kind}{outcome}: {span}"


def bar(segments: list[Segment], scale: Scale, palette: Palette, label: str, background: Iterable[Segment] = ()) -> str:
    """One row of the timeline. `label` is the text for screen readers."""
    shown = segments if len(segments) <= MAX_SEGMENTS else coalesced(segments)
    parts = []
    for seg in (seg for seg in shown if seg.end_s > seg.start_s):
        mark = " bad" if seg.outcome in _BAD else ""
        parts.append(
            f'<rect class="{palette.css(seg.stage, seg.kind)}{mark}" x="{scale.x(seg.start_s)}%" y="4" '
            f'width="{_width(seg, scale)}%" height="14"><title>{esc(describe(seg))}</title></rect>'
        )
        name = seg.kind if seg.kind != WORK else seg.stage.rpartition(".")[2]
        begin = max(seg.start_s, scale.low)
        if (seg.end_s - begin) / (scale.high - scale.low) > _CHARACTER * (len(name) + 2):
            css = "in on-hatch" if seg.kind == WAIT else "in"
            parts.append(f'<text class="{css}" x="{scale.x(begin)}%" dx="5" y="14.5">{esc(name)}</text>')
    # Also of a stage of which nothing but its begin is known, and which is therefore not drawn.
    parts += (end_mark(scale.x(seg.end_s), seg.outcome) for seg in shown if seg.outcome in _BAD)
    parts += (
        f'<rect class="{palette.css(seg.stage, seg.kind)}" x="{scale.x(seg.start_s)}%" y="19" '
        f'width="{_width(seg, scale)}%" height="3"><title>{esc("background " + describe(seg))}</title></rect>'
        for seg in background
        if seg.end_s > seg.start_s
    )
    parts.append(barrier_lines(scale))
    return f'<svg class="bar" height="{ROW_HEIGHT}" role="img" aria-label="{esc(label)}">{"".join(parts)}</svg>'


def attempts(startups: Sequence[Overview], palette: Palette) -> str:
    """A column for each startup: how long it took and in which stages. `startups` are not empty."""
    most = max((sum(one.stages.values()) or one.startup_s for one in startups), default=0.0) or 1.0
    height, step = 150.0, 100 / len(startups)
    parts = []
    for at in tick_times(0.0, most)[1:]:
        level = f"{height - height * at / most:.1f}"
        parts.append(f'<line class="hair" x1="0" x2="100%" y1="{level}" y2="{level}"/>')
        parts.append(f'<text class="t" x="0" y="{level}" dy="-3">{clock(at)}</text>')
    for number, one in enumerate(startups):
        x, y = 6 + 0.94 * step * number, height
        attempt = (
            f"attempt {one.attempt}"
            + f" restart {one.restart}" * bool(one.restart)
            + f", {one.outcome.replace('_', ' ')}"
        )
        for stage, took in sorted(
            (one.stages or {"startup": one.startup_s}).items(), key=lambda item: palette.order(item[0])
        ):
            tall = height * took / most
            y -= tall
            css = "pale cu" if stage == WAIT else palette.css(stage, WORK)
            label = f"{attempt}: {stage} {seconds(took)} of {seconds(one.startup_s)}"
            parts.append(
                f'<rect class="{css}" x="{x:.2f}%" width="{0.94 * step * 0.8:.2f}%" y="{y:.1f}" height="{tall:.1f}">'
                f"<title>{esc(label)}</title></rect>"
            )
        middle = x + 0.94 * step * 0.4
        if one.outcome != "training_began":
            parts.append(end_mark(f"{middle:.2f}", attempt, max(round(y - 8, 1), 6)))
        if number % max(1, len(startups) // 26) == 0:
            name = f"{one.attempt}.{one.restart}" if one.restart else str(one.attempt)
            parts.append(f'<text class="t" x="{middle:.2f}%" y="{height + 14:g}" text-anchor="middle">{name}</text>')
    label = "startup time of each attempt, by stage"
    return f'<svg class="axis columns" height="{height + 20:g}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _width(seg: Segment, scale: Scale) -> str:
    width = 100 * (seg.end_s - max(seg.start_s, scale.low)) / (scale.high - scale.low)
    return f"{min(max(width, 0.03), 100):.3f}".rstrip("0").rstrip(".")


def end_mark(x: str, outcome: str, y: float = 11.0) -> str:
    """A cross where a node's events end, or where a stage failed."""
    return (
        f'<svg x="{x}%" y="{y:g}" overflow="visible"><path class="x" d="M-4-4L4 4M4-4L-4 4">'
        f"<title>{esc(outcome)}</title></path></svg>"
    )


def barrier_lines(scale: Scale) -> str:
    return "".join(
        f'<line class="bl" x1="{scale.x(at)}%" x2="{scale.x(at)}%" y1="0" y2="{ROW_HEIGHT}"/>'
        for _, at in scale.barriers
    )


def axis(scale: Scale) -> str:
    """Time marks and the barriers' names above the rows."""
    ticks = "".join(
        f'<line class="tick" x1="{scale.x(t)}%" x2="{scale.x(t)}%" y1="30" y2="36"/>'
        f'<text class="t" x="{scale.x(t)}%" y="27" text-anchor="{_anchor(scale, t)}">{clock(t)}</text>'
        for t in tick_times(scale.low, scale.high)
    )
    names = "".join(
        f'<line class="bl" x1="{scale.x(at)}%" x2="{scale.x(at)}%" y1="14" y2="36"/>'
        f'<text class="b" x="{scale.x(at)}%" y="11" text-anchor="{"end" if number > 1 or shown else "middle"}">'
        f'<tspan class="minor">{esc(shown)} </tspan>{number}</text>'
        for number, shown, at in _labels(scale)
    )
    return (
        f'<svg class="bar axis" height="36" role="img" aria-label="time axis"><g class="ticks">{ticks}</g>{names}</svg>'
    )


def _labels(scale: Scale) -> list[tuple[int, str, float]]:
    """Number, name and position of each barrier; the name is empty if it would overlap the previous barrier."""
    labels = []
    free = scale.low
    for number, (name, at) in enumerate(scale.barriers, 1):
        shown = clean(name)[:_MAX_BARRIER_NAME]
        room = (at - free) / (scale.high - scale.low)
        if room > _CHARACTER * 2 or number == len(scale.barriers):
            labels.append((number, shown if room > _CHARACTER * (len(shown) + 3) else "", at))
            free = at
    return labels


def _anchor(scale: Scale, at: float) -> str:
    share = (at - scale.low) / (scale.high - scale.low)
    return "start" if share < 0.04 else "end" if share > 0.9 else "middle"


def tick_times(low: float, high: float) -> list[float]:
    """At most eight round moments between `low` and `high`."""
    steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400]
    span = high - low
    if span < 6:
        power = 10.0 ** math.floor(math.log10(span / 6))
        step = next(power * k for k in (1, 2, 5, 10) if span / (power * k) <= 7)
    else:
        step = next((s for s in steps if span / s <= 7), 86400 * math.ceil(span / 86400 / 7))
    first = math.ceil(low / step)
    return [round(i * step, 9) for i in range(first, math.floor(high / step) + 1)]


def clock(value: float) -> str:
    """A moment on the axis: `12 s`, `1:30`, `2:05:00`."""
    if abs(value) < 60 or value != round(value):
        return f"{value:g} s"
    sign, whole = ("−", -int(value)) if value < 0 else ("", int(value))
    hours, rest = divmod(whole, 3600)
    return f"{sign}{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{sign}{rest // 60}:{rest % 60:02d}"


def cdf(stage: Stage, css: str) -> str:
    """The share of nodes that had completed a stage over time."""
    width, height = 224.0, 84.0
    most = max((x for x, _ in stage.cdf), default=0.0) or 1.0

    def x_of(value: float) -> str:
        return f"{4 + (width - 8) * value / most:.1f}"

    path = f"M{x_of(0)} {height - 4:g}"
    for x, y in stage.cdf:
        path += f"H{x_of(x)}V{height - 4 - (height - 8) * y:.1f}"
    marks = ""
    for value, name in ((stage.median_s, "median"), (stage.max_s, "max")):
        if value is not None and value <= most * 1.0001:
            place = f'x1="{x_of(value)}" x2="{x_of(value)}" y1="4" y2="{height - 4:g}"'
            marks += f'<line class="{name}" {place}><title>{name} {seconds(value)}</title></line>'
    label = f"{stage.stage}: share of nodes done over time"
    if stage.max_over_median is not None:
        label += f"; Max/Median {ratio(stage.max_over_median)}"
    return (
        f'<svg class="cdf {css}" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{esc(label)}">'
        f'<path class="area" d="{path}V{height - 4:g}Z"/>{marks}<path class="curve" d="{path}"/></svg>'
    )


def swatch(css: str) -> str:
    """A small square in a stage's colour."""
    return icon(f'<rect class="{css}" width="14" height="14" rx="2"/>')


def icon(shapes: str) -> str:
    """A sign of 14 by 14 pixels for legends and tables."""
    return f'<svg class="sw" width="14" height="14" aria-hidden="true">{shapes}</svg>'


def stacked(work: float, wait: float, *, most: float, css: str, hatch: str, label: str) -> str:
    """A bar of work and wait next to each other; `most` fills the width."""
    most = most if most > 0 else 1.0
    first, second = 100 * work / most, 100 * wait / most
    return (
        f'<svg class="stack" height="14" width="100%" role="img" aria-label="{esc(label)}">'
        f'<rect class="{css}" width="{first:.2f}%" height="14"/>'
        f'<rect class="{hatch}" x="{first:.2f}%" width="{second:.2f}%" height="14"/></svg>'
    )

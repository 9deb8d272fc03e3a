"""What the templates of the HTML report show and a report does not have: facts in words, shares, the script's data."""

from __future__ import annotations

import math
from typing import Any

from bootseer.report.analysis.stragglers import MIN_NODES
from bootseer.report.model import WORK, Node, Report, Segment, Stage, Startup, Straggler
from bootseer.report.render.fold import FOLD_ABOVE, clean, coalesced
from bootseer.report.render.html_svg import Palette, Scale, swatch
from bootseer.report.render.html_text import esc, moment, seconds, signed
from bootseer.units import listed, plural

MAX_LISTED = 60
_MAX_SHADES = 8
_MIN_RATIO = 1.1
_MIN_SPREAD_S = 0.5
_OUTCOMES = {
    "training_began": ("ok", "training began"),
    "truncated": ("warn", "abandoned startup, or still running"),
    "failed": ("bad", "failed startup"),
    "unobserved": ("warn", "beginning of training not observed"),
}
_ENDS = {
    "first_step": "ends with the first optimizer step",
    "training_began": "ends when training was marked as begun",
    "last_event": "ends with the last event seen",
    "command": "ends with the command",
    "restart": "ends with the next restart",
}


def outcome_words(outcome: str) -> tuple[str, str]:
    """CSS class and words of a startup's outcome."""
    return _OUTCOMES.get(outcome, ("warn", outcome))


def startup_facts(startup: Startup) -> list[str]:
    """The line below the verdict."""
    size = [plural(startup.num_nodes, "node"), *([plural(startup.num_ranks, "rank")] if startup.num_ranks else [])]
    size.append("GPUs unobserved" if startup.num_gpus is None else plural(startup.num_gpus, "GPU"))
    facts = [
        f"attempt {startup.attempt}",
        f"restart {startup.restart}" if startup.restart else "",
        f"{startup.kind} startup",
        ", ".join(size),
        f"scale {startup.scale} GPUs" if startup.scale else "",
        f"began {moment(startup.zero_ns)}" if startup.zero_ns > 0 else "",
        _ENDS.get(startup.ended_by, startup.ended_by),
    ]
    return [fact for fact in facts if fact]


def spread_stages(stages: list[Stage]) -> list[Stage]:
    """The stages in which the nodes differ visibly; if a sub-stage has the same times, only that is drawn."""

    def spreads(stage: Stage) -> bool:
        if len(stage.cdf) < MIN_NODES or (stage.max_over_median or math.inf) < _MIN_RATIO:
            return False
        inner = [other for other in stages if other.stage.startswith(stage.stage + ".") and other.cdf == stage.cdf]
        return not inner and stage.cdf[-1][0] - stage.cdf[0][0] >= _MIN_SPREAD_S

    return [stage for stage in stages if spreads(stage)]


def looks(report: Report) -> set[str]:
    """The kinds and outcomes of the segments drawn, for the legend."""
    return {look for node in report.nodes for seg in node.segments for look in (seg.kind, seg.outcome)}


def shades(stage: str, palette: Palette) -> str:
    """A stage in the legend, with the colours of its sub-stages, as HTML."""
    inner = palette.inner.get(stage, [])
    names = [f"{swatch(palette.css(name, WORK))} {esc(name.partition('.')[2])}" for name in inner]
    return f"<span>{esc(stage)}: <i>{listed(names, _MAX_SHADES)}</i></span>" if len(inner) > 1 else esc(stage)


def node_facts(node: Node, slow: list[Straggler]) -> list[str]:
    """What is known of a node besides its segments. `slow`: where it is a straggler."""
    lines = [f"own first step ended at {seconds(node.own_end_s)}", f"{seconds(node.untracked_s)} untracked"]
    if node.gpus is not None:
        lines.append(plural(node.gpus, "GPU"))
    error = "unknown" if node.clock_error_s is None else f"at most {node.clock_error_s:.3f} s"
    lines.append(f"clock corrected by {signed(node.clock_offset_s)}, error {error}")
    if node.outcome != "ok":
        lines.append(f"{node.outcome}: its events end in {node.last_stage or 'no stage'}")
    return lines + [f"straggler in {s.stage}: {seconds(s.delay_s)} late at {s.barrier}" for s in slow]


def listed_segments(node: Node) -> list[Segment]:
    """The segments of a node for a table; if they are many, the first of its top-level stages."""
    return node.segments if len(node.segments) <= MAX_LISTED else coalesced(node.segments)[:MAX_LISTED]


def payload(report: Report, scale: Scale, palette: Palette) -> dict[str, Any]:
    """All nodes for the script: `looks` are [class, text]; a node is [name, rank, work, wait, outcome, start, cuts].

    `cuts` is flat: look, end in ms, look, end in ms, ...; a segment begins where the one before it ends.
    """
    known: dict[tuple[str, str], int] = {}
    nodes = []
    for node in report.nodes if len(report.nodes) > FOLD_ABOVE else []:
        cuts: list[int] = []
        shown = node.segments if len(node.segments) <= MAX_LISTED else coalesced(node.segments)
        for seg in shown:
            bad = " bad" if seg.outcome in ("failed", "truncated") else ""
            words = [clean(seg.stage), seg.kind, *([seg.outcome] if bad else [])]
            look = (palette.css(seg.stage, seg.kind) + bad, ", ".join(words))
            cuts += (known.setdefault(look, len(known)), round(seg.end_s * 1000))
        figures = [seconds(node.work_s), seconds(node.wait_s)]
        nodes.append([clean(node.node), node.rank, *figures, node.outcome, round(node.start_s * 1000), cuts])
    barriers = [round(at * 1000) for _, at in scale.barriers]
    span = [round(scale.low * 1000), round(scale.high * 1000)]
    return {"span": span, "barriers": barriers, "looks": list(known), "nodes": nodes}

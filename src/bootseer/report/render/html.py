"""The HTML report: one self-contained file for a browser, a mail or a printer.

The page is complete without JavaScript; the script adds zoom, search, sorting and tooltips. A log is hostile input: the
templates escape each text, and a content security policy allows only the page's own style and script, by hash, so that
anything that escapes the escaping can neither run nor send data.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bootseer import __version__
from bootseer.report.analysis.starts import RESTORED, SUMMARIES
from bootseer.report.analysis.stragglers import MIN_NODES, host_list
from bootseer.report.analysis.verdict import is_about_clocks, located
from bootseer.report.model import WORK, Node, Report, Segment, Stage, Startup, Straggler
from bootseer.report.model_starts import CheckpointStart, DataNode
from bootseer.report.render import fold, html_svg, html_text
from bootseer.report.render.fold import FOLD_ABOVE, clean, coalesced
from bootseer.report.render.html_svg import Palette, Scale, patterns, scale_of, swatch
from bootseer.report.render.html_text import (
    GLOSSARY,
    cell,
    count,
    data_block,
    esc,
    moment,
    percent,
    seconds,
    signed,
    size,
    table,
    word_cell,
)
from bootseer.units import listed, plural

_SECTIONS = (
    ("timeline", "Timeline"),
    ("chain", "Critical chain"),
    ("stragglers", "Stragglers"),
    ("stages", "Stages"),
    ("spread", "Spread"),
    ("coverage", "Evidence"),
    ("images", "Images"),
    ("environments", "Environments"),
    ("checkpoints", "Checkpoints"),
    ("restarts", "Restarts"),
    ("facts", "Other logs"),
    ("startups", "Startups"),
    ("nodes", "Nodes"),
    ("words", "Glossary"),
)
_ALWAYS = ("startup", "stage")
_MAX_LISTED = 60
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
_LIMITS = {"max_facts": 500, "max_startups": 500, "max_columns": 120, "max_listed": _MAX_LISTED, "min_nodes": MIN_NODES,
           "fold_above": FOLD_ABOVE}  # fmt: skip


def _shown(value: object) -> object:
    """Text of a log without control characters and direction marks; the template engine then escapes it."""
    return value if isinstance(value, Markup) else clean(value)


def _html(function: Callable[..., str]) -> Callable[..., Markup]:
    """A function whose result is HTML."""
    return lambda *args, **more: Markup(function(*args, **more))  # noqa: S704 - these escape what they are given


def templates_of(package: str) -> Environment:
    """The templates of a package. They escape what they show; a misspelled field is an error."""
    return Environment(
        loader=PackageLoader(package), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        auto_reload=False, finalize=_shown,
    )  # fmt: skip


@cache
def _templates() -> Environment:
    made = templates_of("bootseer.report.render")
    made.filters |= {"count": count, "median": median}
    made.tests["about_clocks"] = is_about_clocks
    html: tuple[Callable[..., str], ...] = (
        html_text.num, cell, html_text.rank_cell, table, html_text.term, html_text.dotted,
        html_svg.stacked, html_svg.swatch, html_svg.icon, html_svg.cdf, html_svg.bar, html_svg.attempts,
        html_svg.axis, patterns, shades,
    )  # fmt: skip
    text: tuple[Callable[..., Any], ...] = (
        percent, html_text.ratio, moment, count, signed,
        plural, host_list, located, listed_segments, node_facts, outcome_words, spread_stages,
        startup_facts, fold.own_s, fold.top, fold.outliers, fold.in_order,
    )  # fmt: skip
    made.globals |= {function.__name__: _html(function) for function in html}
    made.globals |= {function.__name__: function for function in text}
    made.globals |= _LIMITS | {
        "seconds": seconds,
        "hours": html_text.hours,
        "money": html_text.money,
        "size": size,
        "bands_of": fold.bands,
        "tenths": lambda value: f"{value:.1f}",
        "precise": lambda value: f"{value * 1000:.1f} ms" if abs(value) < 1 else f"{value:.3f} s",
        "of_scheduler": lambda value: "job",
        "nodes_in_words": lambda value: plural(int(value), "node"),
    }
    return made


def render(report: Report, *, above: str = "", refresh_s: int | None = None) -> str:
    """The report as one self-contained HTML document. `above`: HTML that the service shows before it; `refresh_s`:
    reload interval for the browser."""
    scale, palette, links = scale_of(report), Palette(report), fold.shared_links(report)
    common: dict[str, Any] = {"report": report, "scale": scale, "palette": palette, "links": links}
    body = _templates().get_template("body.html")
    content = body.render(
        **common,
        starts=starts_parts(report),
        domain=fold.domain(report.nodes),
        critical={(link.node, link.rank) for _, link in links},
        looks=looks(report),
        took=", ".join(f"{seg.stage} {seconds(seg.end_s - seg.start_s)}" for seg in report.scheduler),
    )
    page = _templates().get_template("page.html")
    return page.render(
        **common,
        body=Markup(content),  # noqa: S704 - escaped by its template
        sections=[one for one in _SECTIONS if one[0] == "words" or f'<section id="{one[0]}"' in content],
        glossary=[(key, words) for key, words in GLOSSARY.items() if f'"#g-{key}"' in content or key in _ALWAYS],
        policy=policy(),
        style=_asset("report.css"),
        script=_asset("report.js"),
        above=above,
        refresh_s=refresh_s,
        data=data_block(payload(report, scale, palette)),
        version=__version__,
    )


def policy() -> str:
    """The content security policy of the document, for a server that also sends it as a header."""
    style, script = _digest(_asset("report.css")), _digest(_asset("report.js"))
    return f"default-src 'none'; style-src '{style}'; script-src '{script}'; base-uri 'none'; form-action 'none'"


def _asset(name: str) -> str:
    return (files("bootseer.report.render") / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


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
    return node.segments if len(node.segments) <= _MAX_LISTED else coalesced(node.segments)[:_MAX_LISTED]


def payload(report: Report, scale: Scale, palette: Palette) -> dict[str, Any]:
    """All nodes for the script: `looks` are [class, text]; a node is [name, rank, work, wait, outcome, start, cuts].

    `cuts` is flat: look, end in ms, look, end in ms, ...; a segment begins where the one before it ends.
    """
    known: dict[tuple[str, str], int] = {}
    nodes = []
    for node in report.nodes if len(report.nodes) > FOLD_ABOVE else []:
        cuts: list[int] = []
        shown = node.segments if len(node.segments) <= _MAX_LISTED else coalesced(node.segments)
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


_MAX_ROWS = 200
Column = tuple[str, Any, Any]
"""Head; the field, or a function of the row; and the format of a number, or the CSS class of a text and, after a colon,
the field that is its tooltip."""


_FETCHED: tuple[Column, ...] = (
    (">of", "stored_bytes", size),
    (">demand", "demand_bytes", size),
    (">hot", "hot_bytes", size),
)
_IMAGE: tuple[Column, ...] = (
    *(("node", "node", "id"), ("way", "mode", ":image"), (">took", "seconds", seconds), *_FETCHED),
    *((">cold", "cold_bytes", size), (">requests", "requests", count), (">coverage", "coverage", percent)),
    *((">late", "late_blocks", count), ("why", "reason", "text")),
)
_ENVIRONMENT: tuple[Column, ...] = (
    *(("node", "node", "id"), ("way", "mode", ":way"), (">took", "seconds", seconds), (">age", "age_s", seconds)),
    *((">saved", "saved_s", seconds), (">files", "num_files", count), (">size", "size_bytes", size), *_FETCHED),
    *((">coverage", "coverage", percent), ("built by", "builder", "id")),
    ("snapshot", lambda one: one.key[:12], "id:key"),
    ("why", lambda one: f"{one.reason}; not published: {one.why_not}" if one.why_not else one.reason, "text"),
)
_CHECKPOINT: tuple[Column, ...] = (
    *(("node", "node", "id:uri"), (">mounted in", "seconds", seconds), (">read", "read_bytes", size)),
    *((">fetched", "place_bytes", size), (">from nodes", "peer_bytes", size), (">cached", "cache_bytes", size)),
    *((">same", "same_bytes", size), (">retries", "retries", count), (">hedges", "hedges", count)),
    *((">won", "hedges_won", count), (">rebuilt", "rebuilt", count), (">refused", "refused", count)),
    ("why", lambda one: one.fallback or one.reason, "text"),
)
_DATANODE: tuple[Column, ...] = (
    *(("DataNode", "name", "id"), (">served", "bytes", size), (">read time", "seconds", seconds)),
    (">failures", "failures", count),
)
_PEERS: tuple[Column, ...] = (
    *(("node", "node", "id:interfaces"), (">peers", "peers", count), (">from peers", "peer_bytes", size)),
    *((">origin", "origin_bytes", size), (">cache", "cache_bytes", size), (">sent", "sent_bytes", size)),
    *((">fetched for others", "filled_bytes", size), (">late requests", "late_requests", count)),
    (">refused", "refused", count),
    ("late or wrong", lambda one: " ".join(filter(None, (one.late_peers, one.wrong_peers))), "text"),
)
_NOTES = {
    "images": "Demand: fetched while a reader waited. Hot: prefetched because earlier starts needed it.",
    "environments": "A restored environment is a mounted snapshot of an earlier setup's result.",
    "checkpoints": "Reads from the kernel's page cache are not counted.",
    "peers": "Each run of blocks has an owner among the nodes, the only one that fetches it from the origin.",
    "restarts": "Image, environment and mounts are kept; see docs/restarts.md.",
    "warm": "A warm parent has already imported the modules of earlier starts; see docs/process.md.",
    "unused-imports": "Time of each module's own code. Functions in C or traced by torch.compile are not detected.",
    "stacks": "Taken by the service while the processes were late, innermost frame first; see docs/service.md.",
    "connections": "Ranks connect to a store, then form groups; see docs/peers.md, Names of the nodes.",
}


class Part(NamedTuple):
    """A section of the page; `tables` is HTML."""

    ident: str
    title: str
    note: str
    lines: Sequence[str]
    tables: Markup


def starts_parts(report: Report) -> list[Part]:
    """The parts that have lines, each with a table of the nodes if they reported numbers."""
    found = []
    for ident, title, lines_of in SUMMARIES:
        if lines := lines_of(report):
            tables, more = "", ""
            if ident in _TABLES:
                label, order, columns = _TABLES[ident]
                rows = sorted(getattr(report, ident), key=order)
                tables = _table(label, rows, columns) + (_datanodes(rows) if ident == "checkpoints" else "")
                left = len(rows) - _MAX_ROWS
                more = f" {_MAX_ROWS} nodes are shown; {left:,} more are in the JSON report." if left > 0 else ""
            found.append(Part(ident, title, _NOTES[ident] + more, lines, Markup(tables)))  # noqa: S704 - by `_table`
    return found


_TABLES: dict[str, tuple[str, Callable[[Any], Any], tuple[Column, ...]]] = {
    # Worst first: fallbacks, then those that waited for most bytes.
    "images": ("Images by node", lambda one: (one.mode != "fallback", -one.demand_bytes, one.node), _IMAGE),
    # Setups that ran, then those that took longest.
    "environments": (
        "Environments by node",
        lambda one: (one.mode == RESTORED, -(one.seconds or 0.0), one.node),
        _ENVIRONMENT,
    ),
    # Those that fetched most.
    "checkpoints": ("Checkpoints by node", lambda one: (-one.place_bytes, one.node), _CHECKPOINT),
    "peers": ("Peers by node", lambda one: (-one.origin_bytes, one.node), _PEERS),
}


def _datanodes(checkpoints: Sequence[CheckpointStart]) -> str:
    """What each DataNode served to all nodes."""
    totals: dict[str, DataNode] = {}
    for one in (datanode for node in checkpoints for datanode in node.datanodes):
        so_far = totals.get(one.name, DataNode(one.name, 0, 0.0, 0))
        took_s = (so_far.seconds or 0.0) + (one.seconds or 0.0)
        totals[one.name] = DataNode(one.name, so_far.bytes + one.bytes, took_s, so_far.failures + one.failures)
    datanodes = sorted(totals.values(), key=lambda one: -one.bytes)
    return _table("DataNodes", datanodes, _DATANODE) if datanodes else ""


def _table(label: str, rows: Sequence[object], columns: Sequence[Column]) -> str:
    body = "".join(f"<tr>{''.join(_cell(one, *column[1:]) for column in columns)}</tr>" for one in rows[:_MAX_ROWS])
    return table([name for name, *_ in columns], body, label, "sortable")


def _cell(one: object, of: str | Callable[[Any], object], form: Callable[[float], str] | str) -> str:
    value: Any = getattr(one, of) if isinstance(of, str) else of(one)
    if not isinstance(form, str):
        return cell(value, form)
    css, _, title = form.partition(":")
    return word_cell(value, css=css, title=str(getattr(one, title)) if title else "")

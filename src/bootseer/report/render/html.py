"""The HTML report: one self-contained file for a browser, a mail or a printer.

The page is complete without JavaScript; the script adds zoom, search, sorting and tooltips. A log is hostile input: the
templates escape each text, and a content security policy allows only the page's own style and script, by hash, so that
anything that escapes the escaping can neither run nor send data.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bootseer import __version__
from bootseer.report.analysis.stragglers import MIN_NODES, host_list
from bootseer.report.analysis.verdict import is_about_clocks, located
from bootseer.report.model import Report
from bootseer.report.render import fold, html_svg, html_text
from bootseer.report.render.html_starts import starts_parts
from bootseer.report.render.html_svg import Palette, patterns, scale_of
from bootseer.report.render.html_text import GLOSSARY, count, data_block, signed
from bootseer.report.render.html_values import (
    MAX_LISTED,
    listed_segments,
    looks,
    node_facts,
    outcome_words,
    payload,
    shades,
    spread_stages,
    startup_facts,
)
from bootseer.units import format_seconds, plural

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
_LIMITS = {"max_facts": 500, "max_startups": 500, "max_columns": 120, "max_listed": MAX_LISTED, "min_nodes": MIN_NODES,
           "fold_above": fold.FOLD_ABOVE}  # fmt: skip


def shown(value: object) -> object:
    """Text of a log without control characters and direction marks; the template engine then escapes it."""
    return value if isinstance(value, Markup) else fold.clean(value)


def _html(function: Callable[..., str]) -> Callable[..., Markup]:
    """A function whose result is HTML."""
    return lambda *args, **more: Markup(function(*args, **more))  # noqa: S704 - these escape what they are given


@cache
def _templates() -> Environment:
    made = Environment(
        loader=PackageLoader("bootseer.report.render"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, auto_reload=False, finalize=shown,
    )  # fmt: skip
    made.filters |= {"count": count, "median": median}
    made.tests |= {"about_clocks": is_about_clocks, "a_line": lambda text: " " in text}
    html: tuple[Callable[..., str], ...] = (
        html_text.num, html_text.cell, html_text.rank_cell, html_text.table, html_text.term, html_text.dotted,
        html_svg.stacked, html_svg.swatch, html_svg.icon, html_svg.cdf, html_svg.bar, html_svg.attempts,
        html_svg.axis, patterns, shades,
    )  # fmt: skip
    text: tuple[Callable[..., Any], ...] = (
        html_text.percent, html_text.ratio, html_text.moment, count, signed,
        plural, host_list, located, listed_segments, node_facts, outcome_words, spread_stages,
        startup_facts, fold.own_s, fold.top, fold.outliers, fold.in_order,
    )  # fmt: skip
    made.globals |= {function.__name__: _html(function) for function in html}
    made.globals |= {function.__name__: function for function in text}
    made.globals |= _LIMITS | {
        "seconds": html_text.seconds,
        "hours": html_text.hours,
        "money": html_text.money,
        "size": html_text.size,
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
        took=", ".join(f"{seg.stage} {format_seconds(seg.end_s - seg.start_s)}" for seg in report.scheduler),
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

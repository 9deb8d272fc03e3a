"""The HTML report: one self-contained file for a browser, a mail or a printer.

The page is complete without JavaScript; the script adds zoom, search, sorting and tooltips. A log is hostile input:
each text is escaped, and a content security policy allows only the page's own style and script, by hash, so that
anything that escapes the escaping can neither run nor send data.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from bootseer import __version__
from bootseer.report.model import Report
from bootseer.report.render import html_lower as lower
from bootseer.report.render import html_upper as upper
from bootseer.report.render.html_gantt import nodes_section, payload, timeline
from bootseer.report.render.html_starts import starts_sections
from bootseer.report.render.html_svg import Palette, patterns, scale_of
from bootseer.report.render.html_text import data_block, esc

_LINKS = (
    ("timeline", "Timeline"),
    ("chain", "Critical chain"),
    ("stragglers", "Stragglers"),
    ("stages", "Stages"),
    ("spread", "Spread"),
    ("ledger", "Cost"),
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


def render(report: Report, *, above: str = "", refresh_s: int | None = None) -> str:
    """The report as one self-contained HTML document. `above`: HTML that the service shows before it; `refresh_s`:
    reload interval for the browser."""
    scale, palette = scale_of(report), Palette(report)
    body = "".join(
        (
            upper.figures(report),
            timeline(report, scale, palette),
            upper.chain(report, palette),
            upper.stragglers(report),
            upper.stages(report, palette),
            lower.distributions(report, palette),
            lower.ledger(report, palette),
            lower.evidence(report),
            starts_sections(report),
            lower.facts(report),
            lower.startups(report, palette),
            nodes_section(report),
        )
    )
    body += lower.glossary(body)
    style, script = _asset("report.css"), _asset("report.js")
    links = "".join(
        f'<li><a href="#{ident}">{name}</a></li>' for ident, name in _LINKS if f'<section id="{ident}"' in body
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">'
        + (f'<meta http-equiv="refresh" content="{refresh_s:d}">' if refresh_s else "")
        + '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light dark">'
        f"<title>{esc(report.startup.job)}: startup report</title><style>{style}</style></head>\n<body>"
        f'<a class="skip" href="#timeline">Skip to the timeline</a>{above}{patterns()}'
        f'{upper.header(report)}<nav aria-label="Sections"><ul>{links}</ul></nav>\n<main>{body}</main>\n'
        f"<footer>BootSeer {esc(__version__)}. This page loads nothing and sends nothing.</footer>"
        f'<div id="tip" role="tooltip" hidden></div>'
        f'<script type="application/json" id="data">{data_block(payload(report, scale, palette))}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def policy() -> str:
    """The content security policy of the document, for a server that also sends it as a header."""
    return _policy(_asset("report.css"), _asset("report.js"))


def _asset(name: str) -> str:
    return (files("bootseer.report.render") / "assets" / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

"""Text for the HTML report: escaping, numbers with their raw values, tables, and the glossary.

Every text that may come from a log passes through `esc`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape

from bootseer.report.render.fold import clean
from bootseer.units import format_bytes, format_hours, format_money, format_seconds

UNOBSERVED = "unobserved"

GLOSSARY = {
    "startup": (
        "Startup",
        "From the submission of one attempt of a job to the end of its first optimizer step. Kinds: full, hot_update "
        "(same containers, new code: no image stage), restart (same node, new process).",
    ),
    "stage": (
        "Stage",
        "A named part of a startup; sub-stages are dotted. The scheduler phase is queue and allocation, the worker "
        "phase image_loading, environment_setup and model_initialization; first_step ends it.",
    ),
    "job": ("Job-level overhead", "From submission to the end of the first step, including time in the queue."),
    "node": (
        "Node-level overhead",
        "From the moment that this node was bound to the job to the end of the first step: work, wait and untracked.",
    ),
    "work": ("Work", "Time in which a node was busy with its own startup."),
    "wait": ("Wait", "Time in which a node waited at a barrier for the last node."),
    "untracked": ("Untracked", "Time that no event covers: something ran that sent no events."),
    "truncated": (
        "Truncated",
        "No end was seen: the process died or the log ends. Counted, but excluded from medians.",
    ),
    "barrier": ("Barrier", "A point that no node passes before all have reached it: rendezvous, first step."),
    "chain": (
        "Critical chain",
        "For each barrier the node that arrived last, and the stage in which it lost time. Only time on this chain "
        "delays the job.",
    ),
    "straggler": (
        "Straggler",
        "A node whose work set a barrier later than the others' median, beyond clock error and noise.",
    ),
    "savings": (
        "Savings",
        "How much sooner training would have begun without these nodes, computed from the barriers. Leaving out only "
        "one of several stragglers, or groups of them, saves little: the next one is as late.",
    ),
    "ratio": ("Max/Median", "Slowest node over the median node in one stage. 1.0 means that all are equally fast."),
    "gpuh": ("GPU-hours", "GPUs of a node times the hours that they were held during the startup."),
    "coverage": ("Coverage", "Nodes seen over nodes expected. A missing node may be the straggler."),
    "clock": (
        "Clock offset",
        "Difference of a node's clock from the median of all. Times are corrected by it; durations come from each "
        "node's monotonic clock and need no correction.",
    ),
    "unobserved": ("Unobserved", "The input does not contain this number. It is not zero."),
}


def esc(text: object) -> str:
    """`text` as HTML, safe in elements and in double-quoted attributes."""
    return escape(clean(text), quote=True)


def dotted(stage: str) -> str:
    """A stage name as HTML that may be wrapped after its dots."""
    return esc(stage).replace(".", ".<wbr>")


def data_block(value: object) -> str:
    """JSON for a script element, escaped so that it can neither end the element nor begin a comment."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return clean(text).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def raw(value: float | None) -> str:
    """The number as in `Report.to_json`; `null` if there is none."""
    return json.dumps(round(value, 6) if isinstance(value, float) else value)


def num(value: float | None, form: Callable[[float], str], key: str = "") -> str:
    """A formatted number, with the raw one in `data-value` and its path in the JSON in `data-key`."""
    where = f' data-key="{esc(key)}" data-value="{raw(value)}"' if key else ""
    if value is None:
        return f'<span class="na"{where}>{UNOBSERVED}</span>'
    return f"<span{where}>{esc(form(value))}</span>"


def cell(value: float | None, form: Callable[[float], str], key: str = "") -> str:
    """A table cell with a number; it sorts by the raw value."""
    return f'<td class="r" data-sort="{raw(value)}">{num(value, form, key)}</td>'


def word_cell(text: object, *, title: str = "", css: str = "") -> str:
    """A table cell with text from a log."""
    return f"<td{_attr('class', css)}{_attr('title', title)}>{esc(text)}</td>"


def rank_cell(rank: int) -> str:
    """A rank; empty for a node as a whole."""
    return f'<td class="r" data-sort="{rank}">{rank if rank >= 0 else ""}</td>'


def _attr(name: str, value: str) -> str:
    return f' {name}="{esc(value)}"' if value else ""


_CELL = re.compile(r"<t[dh][ >].*?</t[dh]>", re.DOTALL)
_EMPTY_CELL = re.compile(r'<td[^>]* data-sort="(null|0|0\.0)"|<td[^>]*></td>')
_ROW = re.compile(r"(<tr[^>]*>)(.*?)</tr>", re.DOTALL)


def table(columns: Sequence[str], rows: str, label: str, css: str = "") -> str:
    """A table in a box of its own that scrolls sideways, so that the page does not.

    columns: heads; one that begins with `>` is aligned right, as its numbers are, and `@KEY` is a term.
    rows: the `tr` elements as HTML. Columns in which every cell is empty, 0 or unobserved are left out, but the first.
    """
    found = [(begin, _CELL.findall(cells)) for begin, cells in _ROW.findall(rows)]
    kept = [
        at
        for at in range(len(columns))
        if not (at and found) or not all(_EMPTY_CELL.match(own[at]) for _, own in found)
    ]
    body = "".join(f"{begin}{''.join(own[at] for at in kept)}</tr>" for begin, own in found)
    name = esc(label)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table{_attr("class", css)}>'
        f'<caption class="sr">{name}</caption><thead><tr>{"".join(_head(columns[at]) for at in kept)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _head(column: str) -> str:
    name = column.removeprefix(">")
    shown = term(name[1:]) if name.startswith("@") else esc(name)
    return f'<th scope="col"{_attr("class", "r" if column.startswith(">") else "")}>{shown}</th>'


def term(key: str, text: str = "") -> str:
    """A term with its explanation as a tooltip, linked to the glossary at the foot of the page."""
    title, meaning = GLOSSARY[key]
    return f'<a class="term" href="#g-{key}" title="{esc(meaning)}">{esc(text or title)}</a>'


def moment(unix_ns: int, form: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    return datetime.fromtimestamp(unix_ns / 1e9, tz=UTC).strftime(form)


seconds, hours, money, size = format_seconds, format_hours, format_money, format_bytes


def signed(value: float) -> str:
    return f"{value:+.3f} s"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def count(value: float) -> str:
    return f"{value:,.0f}"


def ratio(value: float) -> str:
    return f"{value:.2f}×"

"""Parses a page like a browser, for the tests with and without one."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from bootseer.report.model import Report
from bootseer.report.render import html

_VOID = {"meta", "input", "br", "wbr", "img"}


class Page(HTMLParser):
    """Elements with attributes and text, and whether the tags match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self._parts: dict[int, list[str]] = {}
        self.open: list[tuple[str, int]] = []
        self.feed(text)
        self.close()
        self.text = {index: "".join(parts) for index, parts in self._parts.items()}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in _VOID and not self.get_starttag_text().endswith("/>"):  # type: ignore[union-attr]
            self.open.append((tag, len(self.elements) - 1))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, index in self.open:
            self._parts.setdefault(index, []).append(data)

    def with_key(self) -> list[tuple[str, str, str]]:
        """Key, raw value and text of each number with a `data-key`, its place in the JSON."""
        return [
            (attrs["data-key"], attrs["data-value"], self.text.get(i, ""))
            for i, (_, attrs) in enumerate(self.elements)
            if "data-key" in attrs
        ]


def look_up(document: Any, key: str) -> Any:
    """The number at `a.0.b` in the JSON; `length` is the length of a list."""
    for part in key.split("."):
        if part == "length":
            document = len(document)
        elif isinstance(document, list):
            document = document[int(part)]
        else:
            document = document[part]
    return document


_rendered: list[tuple[Report, str]] = []
_read: list[tuple[Report, Page]] = []


def rendered(report: Report) -> str:
    """The page of a report, rendered once per session."""
    for known, text in _rendered:
        if known is report:
            return text
    _rendered.append((report, html.render(report)))
    return _rendered[-1][1]


def page_of(report: Report) -> Page:
    """The same, parsed once per session; not to be changed."""
    for known, page in _read:
        if known is report:
            return page
    _read.append((report, Page(rendered(report))))
    return _read[-1][1]

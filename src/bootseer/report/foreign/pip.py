"""pip: the duration of a burst of installation, and its number of packages.

pip prints no durations. If its lines have times (`pip --log`, or a log collector), the burst from the first
`Collecting` to `Successfully installed` is a span; otherwise the number is a fact. `Requirement already satisfied`,
`Downloading` and `Using cached` are not searched: a log may have thousands of them, and they add nothing. So a burst
that begins with installed packages or local files begins late here, at its first `Collecting` or `... collected
packages`. When pip builds a package, an inner pip prints the same words indented by two blanks: these may begin a
burst, but not end it.

Package names and URLs are never shown: a requirement may contain a token.
"""

from __future__ import annotations

import re

from bootseer.report.foreign.parser import Findings, Line, Parser, plain
from bootseer.report.search import Clue
from bootseer.units import NS_PER_S, plural

STAGE = "environment_setup.install"

_LONE_NS = 600 * NS_PER_S

# What may stand before pip's words: nothing, or the end of a label or of a time.
_START = r"(?:^|[\]:|>)]|[.,:]\d{2,9}Z?|[+-]\d{4}|std(?:out|err) [FP])"
_BEGINS = re.compile(
    _START + r"([ \t]*)(?:(Collecting) \S+(?:\s*$|\s*@ \S| \(from )"
    r"|(Building wheels for|Installing) collected packages: \S)",
    re.MULTILINE | re.ASCII,
)
_INSTALLED = re.compile(_START + r"([ \t]*)Successfully installed (\S+(?: \S+)*)\s*$", re.MULTILINE | re.ASCII)


class PipParser(Parser):
    """pip's installations in one log."""

    name = "pip"
    clues = (
        Clue(b"Collecting ", rb"""[^\s\\"]+(?:[ \t\f\v]*(?:[\r\n\\"]|\Z)|[ \t\f\v]*@ \S| \(from )"""),
        Clue(b"Installing collected packages: ", rb"\S"),
        Clue(b"Building wheels for collected packages: ", rb"\S"),
        Clue(b"Successfully installed ", rb"[^\s-]*-"),
    )

    def __init__(self) -> None:
        self._findings = Findings(self.name)
        self._first: Line | None = None
        self._collected = 0
        self._sure = False
        self._installing = False

    def feed(self, line: Line) -> None:
        # Progress bars draw over themselves: each stretch between carriage returns is a line.
        text = plain(line.text).replace("\r", "\n")
        if begins := _BEGINS.search(text):
            self._begins(line, nested=len(begins[1]) > 1, words=begins[2] or begins[3])
        elif (installed := _INSTALLED.search(text)) and len(installed[1]) < 2:
            packages = installed[2].split(" ")
            if all("-" in package for package in packages):  # name-version; else another program's sentence
                self._installed(line, len(packages))

    def _begins(self, line: Line, *, nested: bool, words: str) -> None:
        if (self._installing and not nested and words != "Building wheels for") or self._lone(line):
            self._close()  # a successful burst has an end before the next begins
        self._first = self._first or line
        self._collected += words == "Collecting"
        self._sure |= self._collected > 1 or words != "Collecting"
        self._installing |= words == "Installing" and not nested

    def _lone(self, line: Line) -> bool:
        """Whether all so far is one `Collecting` of long ago: another program's word."""
        if self._first is None or self._first.wall_ns is None or line.wall_ns is None:
            return False
        return not self._sure and line.wall_ns - self._first.wall_ns > _LONE_NS

    def _installed(self, line: Line, count: int) -> None:
        first = None if self._lone(line) else self._first
        begin_ns = first.wall_ns if first is not None else None
        attrs = {"packages": count}
        if line.wall_ns is None or not self._findings.span(first or line, STAGE, begin_ns, line.wall_ns, attrs=attrs):
            self._findings.fact(line, STAGE, f"pip installed {plural(count, 'package')}", None)
        self._reset()

    def _close(self) -> None:
        """A burst whose end is not in the log."""
        if self._first is not None and self._sure:
            self._findings.span(self._first, STAGE, self._first.wall_ns, None)
        self._reset()

    def _reset(self) -> None:
        self._first, self._collected, self._sure, self._installing = None, 0, False, False

    def finish(self) -> Findings:
        self._close()
        return self._findings

"""All parsers of foreign logs, fresh for one file, and the search for the lines that they want.

Called by `analysis.scan`. Decides and touches nothing. Another clue costs the search nearly nothing, a line that holds
one costs as much as a thousand others: clues are to be as strict as they can without losing a line.
"""

from __future__ import annotations

from functools import cache

from bootseer.analysis.foreign.installers import PipParser, UvParser
from bootseer.analysis.foreign.kubernetes import ContainerdParser, KubernetesParser
from bootseer.analysis.foreign.nccl import NcclParser
from bootseer.analysis.foreign.parser import Parser
from bootseer.analysis.foreign.programs import PROGRAMS
from bootseer.analysis.foreign.rules import TableParser
from bootseer.analysis.foreign.torchelastic import TorchElasticParser
from bootseer.analysis.search import Clue, Search


def parsers() -> list[Parser]:
    """One new parser of each kind."""
    return [
        TorchElasticParser(),
        NcclParser(),
        KubernetesParser(),
        ContainerdParser(),
        PipParser(),
        UvParser(),
        *(TableParser(name, rules) for name, rules in PROGRAMS.items()),
    ]


@cache
def search(done: frozenset[int] = frozenset()) -> tuple[Search, list[list[int]]]:
    """The search for the clues of all parsers but those that are done, told by their places in `parsers`; and for each
    of its numbers the places of the parsers that want such lines."""
    behind: dict[bytes, list[bytes]] = {}
    wanting: dict[bytes, list[int]] = {}
    for index, parser in enumerate(parsers()):
        for literal, then in parser.clues if index not in done else ():
            behind.setdefault(literal, []).append(then)
            wanting.setdefault(literal, []).append(index)
    clues = [Clue(literal, b"(?:" + b"|".join(dict.fromkeys(then)) + b")") for literal, then in behind.items()]
    # Where one literal begins with another one, a place is told once, for either.
    return Search(clues), [
        sorted({index for other, indices in wanting.items() if _alike(literal, other) for index in indices})
        for literal in wanting
    ]


def _alike(one: bytes, other: bytes) -> bool:
    return one.startswith(other) or other.startswith(one)

"""One lane's time, cut into pieces that belong to one stage each.

A lane is one rank on one node, with the node's own stages in front. At each moment the innermost running span owns the
time, so that the pieces add up to the lane's wall time exactly; what no span covers is `untracked`. At a barrier the
time until the last participant's arrival is waiting, the rest is work. Decides and touches nothing.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bootseer.analysis.model import UNTRACKED, UNTRACKED_STAGE, WAIT, WORK, Kind
from bootseer.analysis.spans import Span


@dataclass(frozen=True, slots=True)
class Piece:
    """Time from `begin_ns` to `end_ns` that one stage owns."""

    stage: str
    begin_ns: int
    end_ns: int
    kind: Kind
    outcome: str

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.begin_ns


def cut(spans: Sequence[Span], begin_ns: int, end_ns: int, last_arrival_ns: dict[int, int]) -> list[Piece]:
    """The pieces of `[begin_ns, end_ns]`, in order, without overlap or hole.

    `last_arrival_ns` holds, by `id(span)`, when the last participant came to the barrier that the span waits at.
    """
    inside = [span for span in spans if span.end_ns > begin_ns and span.begin_ns < end_ns]
    # Parents first among spans that begin together: the longer one encloses the shorter one.
    inside.sort(key=lambda span: (span.begin_ns, -span.end_ns, len(span.stage)))
    parents = {stage.rpartition(".")[0] for stage in {span.stage for span in inside}}
    edges = {begin_ns, end_ns}
    for span in inside:
        edges.update((max(span.begin_ns, begin_ns), min(span.end_ns, end_ns)))
        arrival = last_arrival_ns.get(id(span))
        if arrival is not None and max(span.begin_ns, begin_ns) < arrival < min(span.end_ns, end_ns):
            edges.add(arrival)
    pieces: list[Piece] = []
    running: list[tuple[int, Span]] = []  # heap, the innermost first
    coming = 0
    marks = sorted(edges)
    for left, right in pairwise(marks):
        while coming < len(inside) and inside[coming].begin_ns <= left:
            heapq.heappush(running, (-coming, inside[coming]))
            coming += 1
        while running and running[0][1].end_ns <= left:
            heapq.heappop(running)
        owner = running[0][1] if running else None
        _append(pieces, _piece(owner, left, right, parents, last_arrival_ns))
    return pieces


def _piece(owner: Span | None, left: int, right: int, parents: set[str], last_arrival_ns: dict[int, int]) -> Piece:
    if owner is None:
        return Piece(UNTRACKED_STAGE, left, right, UNTRACKED, "")
    arrival = last_arrival_ns.get(id(owner))
    if arrival is not None and right <= arrival:
        return Piece(owner.stage, left, right, WAIT, owner.outcome)
    if owner.stage in parents:
        return Piece(f"{owner.stage}.{UNTRACKED_STAGE}", left, right, UNTRACKED, owner.outcome)
    return Piece(owner.stage, left, right, WORK, owner.outcome)


def _append(pieces: list[Piece], piece: Piece) -> None:
    last = pieces[-1] if pieces else None
    if last is not None and (last.stage, last.kind, last.outcome) == (piece.stage, piece.kind, piece.outcome):
        pieces[-1] = Piece(last.stage, last.begin_ns, piece.end_ns, last.kind, last.outcome)
    else:
        pieces.append(piece)


def time_by_stage(pieces: Sequence[Piece], begin_ns: int, end_ns: int) -> dict[str, int]:
    """Work and untracked time of each stage within a window, ns; waiting is left out. The pieces are those of `cut`."""
    totals: dict[str, int] = {}
    for index in range(bisect_right(pieces, begin_ns, key=lambda piece: piece.end_ns), len(pieces)):
        piece = pieces[index]
        if piece.begin_ns >= end_ns:
            break
        if piece.kind != WAIT:
            length = min(piece.end_ns, end_ns) - max(piece.begin_ns, begin_ns)
            totals[piece.stage] = totals.get(piece.stage, 0) + length
    return totals


def enclosing(stage: str) -> list[str]:
    """The stage and the stages around it, outermost first: `a.b.c` gives `a`, `a.b`, `a.b.c`."""
    parts = stage.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]

"""What is queued for one DataNode, and what its next request is. Called by `schedule`, under its lock.

A piece stands in the line of each DataNode that has it, and whoever is free first takes it: so nobody has to foretell
who will be. Of the next few it takes the one that others would come to last. What was taken elsewhere stays in a line
as a leftover, which is skipped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from bootseer.hdfs.located import Block, Node
from bootseer.hdfs.pieces import Piece, State

if TYPE_CHECKING:
    from bootseer.hdfs.runs import Run

_LOOK: Final = 16
"""Pieces that are looked at for one that is not left to others."""
_LEFTOVERS: Final = 64
_SHOWS_S: Final = 0.05
"""A request that is younger says nothing yet of its node's rate."""
_MAX_PIECES: Final = 256
"""In one request: the kernel takes 1,024 pieces of memory at once."""


class Line:
    """The line of one DataNode."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.runs: list[Run] = []
        """Requests that it serves now."""
        self.is_ready = False
        """Whether it waits for a thread."""
        self.uneven = False
        """Its packets cannot be foretold."""
        self.num_queued = 0
        self.queued_bytes = 0
        self.running_bytes = 0
        self._added_bytes = self._gone_bytes = 0
        self.sample: Block | None = None
        """A block that it has, to probe it with."""
        self.bytes = self.requests = self.failures = 0
        self.seconds = 0.0
        self._urgent: deque[Piece] = deque()
        self._later: deque[Piece] = deque()
        self._by_start: dict[tuple[int, int, bool, bool], Piece] = {}

    @property
    def name(self) -> str:
        """What the node is called."""
        return self.node.host_port

    def note_read(self, block: Block, length: int, seconds: float) -> None:
        """The node has served a read that was never queued."""
        self.sample = block
        self.requests += 1
        self.bytes += length
        self.seconds += seconds

    def has_urgent(self) -> bool:
        """Whether a piece waits here that a reader waits for."""
        while self._urgent and not self._is_here(self._urgent[0]):
            self._urgent.popleft()
        return bool(self._urgent)

    def add(self, piece: Piece, *, first: bool = False) -> None:
        """Queue a piece; `first`: before all others."""
        if not piece.lines:
            piece.mark = self._gone_bytes if first else self._added_bytes
        piece.lines.append(self)
        self._added_bytes += piece.length
        self.num_queued += 1
        self.queued_bytes += piece.length
        self._by_start[piece.key] = piece
        waiting = self._urgent if piece.ticket.urgent else self._later
        if first:
            waiting.appendleft(piece)
        else:
            waiting.append(piece)

    def hurry(self, piece: Piece) -> None:
        """A reader waits for a piece that is queued here."""
        self._urgent.append(piece)

    def remove(self, piece: Piece) -> None:
        """A piece is not queued here any more."""
        piece.lines.remove(self)
        self._gone_bytes += piece.length
        self.num_queued -= 1
        self.queued_bytes -= piece.length
        if self._by_start.get(piece.key) is piece:
            del self._by_start[piece.key]
        if len(self._urgent) + len(self._later) > 2 * self.num_queued + _LEFTOVERS:
            self._urgent = deque(piece for piece in self._urgent if self._is_here(piece))
            self._later = deque(piece for piece in self._later if self._is_here(piece))

    def ahead_bytes(self, piece: Piece) -> int:
        """About how much is served here before a piece that is queued in this line alone."""
        return max(piece.mark - self._gone_bytes, 0) + self.running_bytes

    def at_most(self, now_s: float) -> float:
        """Bytes in a second that the node gives at most, as what is underway shows; infinity while it shows nothing."""
        if not self.runs:
            return math.inf
        oldest = self.runs[0]
        elapsed_s = now_s - oldest.began_s
        if elapsed_s < _SHOWS_S:
            return math.inf
        # What is being received may be here but for its last byte.
        return (self.bytes - oldest.bytes_before + sum(run.claimed for run in self.runs) + 1) / elapsed_s

    def silent_s(self, now_s: float) -> float:
        """For how long nothing has come, on any connection, of what it was asked for."""
        return min((now_s - run.progress_s for run in self.runs), default=0.0)

    def pieces(self) -> list[Piece]:
        """All that are queued here."""
        return list({id(piece): piece for piece in (*self._urgent, *self._later) if self._is_here(piece)}.values())

    def next_pieces(self, most_bytes: int, waits_s: Callable[[Piece], float]) -> list[Piece]:
        """The pieces of the next request: one, and those that follow it in its block. Still queued; none when all are
        left to others. `waits_s`: when others would begin with a piece; below zero, it is left to them."""
        piece = self._pop(self._urgent, waits_s) or self._pop(self._later, waits_s)
        if piece is None:
            return []
        found, num_bytes = [piece], piece.length
        only_urgent = self.has_urgent()
        while num_bytes < most_bytes and len(found) < _MAX_PIECES:
            end = piece.offset + piece.length
            following = self._by_start.get((piece.block.id, end, piece.ticket.check, piece.strict))
            if following is None or not self._is_here(following) or (only_urgent and not following.ticket.urgent):
                break
            if num_bytes + following.length > most_bytes:
                break
            found.append(following)
            num_bytes += following.length
            piece = following
        return found

    def _pop(self, waiting: deque[Piece], waits_s: Callable[[Piece], float]) -> Piece | None:
        """Of the next ones the piece that would wait longest for others: so those who could do little else keep it."""
        seen: list[Piece] = []
        found, found_s = None, 0.0
        while waiting and len(seen) < _LOOK and found_s < math.inf:
            piece = waiting.popleft()
            if not self._is_here(piece):
                continue
            seen.append(piece)
            piece_s = waits_s(piece)
            if piece_s >= 0.0 and (found is None or piece_s > found_s):
                found, found_s = piece, piece_s
        waiting.extendleft(piece for piece in reversed(seen) if piece is not found)
        return found

    def _is_here(self, piece: Piece) -> bool:
        return piece.state is State.QUEUED and self in piece.lines

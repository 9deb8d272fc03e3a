"""What is queued for one DataNode, and what its next request is. Called by `schedule`, under its lock.

A piece stands in the line of each DataNode that has it, and whoever is free first takes it: so nobody has to foretell
who will be. What was taken elsewhere stays in a line as a leftover, which is skipped.
"""

from __future__ import annotations

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
        self.sample: Block | None = None
        """A block that it has, to probe it with."""
        self.bytes = self.requests = self.failures = 0
        self.seconds = 0.0
        self._urgent: deque[Piece] = deque()
        self._later: deque[Piece] = deque()
        self._by_start: dict[tuple[int, int, bool], Piece] = {}

    @property
    def name(self) -> str:
        """What the node is called."""
        return self.node.host_port

    def has_urgent(self) -> bool:
        """Whether a piece waits here that a reader waits for."""
        while self._urgent and not self._is_here(self._urgent[0]):
            self._urgent.popleft()
        return bool(self._urgent)

    def add(self, piece: Piece, *, first: bool = False) -> None:
        """Queue a piece; `first`: before all others."""
        piece.lines.append(self)
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
        self.num_queued -= 1
        self.queued_bytes -= piece.length
        if self._by_start.get(piece.key) is piece:
            del self._by_start[piece.key]
        if len(self._urgent) + len(self._later) > 2 * self.num_queued + _LEFTOVERS:
            self._urgent = deque(piece for piece in self._urgent if self._is_here(piece))
            self._later = deque(piece for piece in self._later if self._is_here(piece))

    def pieces(self) -> list[Piece]:
        """All that are queued here."""
        return list({id(piece): piece for piece in (*self._urgent, *self._later) if self._is_here(piece)}.values())

    def next_pieces(self, most_bytes: int, leaves: Callable[[Piece], bool]) -> list[Piece]:
        """The pieces of the next request: one, and those that follow it in its block. Still queued; none when all are
        left to others."""
        piece = self._pop(self._urgent, leaves) or self._pop(self._later, leaves)
        if piece is None:
            return []
        found, num_bytes = [piece], piece.length
        only_urgent = self.has_urgent()
        while num_bytes < most_bytes and len(found) < _MAX_PIECES:
            end = piece.offset + piece.length
            following = self._by_start.get((piece.block.id, end, piece.ticket.check))
            if following is None or not self._is_here(following) or (only_urgent and not following.ticket.urgent):
                break
            if num_bytes + following.length > most_bytes:
                break
            found.append(following)
            num_bytes += following.length
            piece = following
        return found

    def _pop(self, waiting: deque[Piece], leaves: Callable[[Piece], bool]) -> Piece | None:
        left: list[Piece] = []
        found = None
        while waiting and len(left) < _LOOK:
            piece = waiting.popleft()
            if not self._is_here(piece):
                continue
            if not leaves(piece):
                found = piece
                break
            left.append(piece)
        waiting.extendleft(reversed(left))
        return found

    def _is_here(self, piece: Piece) -> bool:
        return piece.state is State.QUEUED and self in piece.lines

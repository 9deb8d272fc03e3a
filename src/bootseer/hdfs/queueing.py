"""In whose lines the pieces wait, and which line a free thread turns to. Used by `schedule`, under its lock.

A piece stands in the lines of all DataNodes that may give it. Lines take turns, so that no DataNode waits for a thread
while another one has two.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

from bootseer.hdfs.choice import NodeChoice
from bootseer.hdfs.lines import Line
from bootseer.hdfs.located import Node
from bootseer.hdfs.pieces import Piece, State

_MAX_REPLICAS: Final = 4
"""A piece stands in the lines of so many DataNodes at once."""


class Queueing:
    """The lines of all DataNodes. `connections_per_node` and `max_run_bytes`: see `ReadSettings`."""

    def __init__(self, choice: NodeChoice, *, connections_per_node: int, max_run_bytes: int) -> None:
        self.lines: dict[str, Line] = {}
        self._choice = choice
        choice.at_most = self._at_most
        self._connections_per_node = connections_per_node
        self._max_run_bytes = max_run_bytes
        self._waiting: dict[Line, None] = {}
        self._ready: deque[Line] = deque()

    @property
    def num_ready(self) -> int:
        """How many threads could take something. A piece that was taken from one line is removed from the lines of all
        other DataNodes that have it."""
        return sum(line in self._waiting for line in self._ready)

    def add(self, piece: Piece, nodes: Sequence[Node], now_s: float, *, first: bool = False) -> None:
        """Queue a piece for these DataNodes; `first`: before all others."""
        if len(nodes) > _MAX_REPLICAS:
            names = [node.host_port for node in nodes]
            best = self._choice.order(names, piece.length, self.backlog_bytes, now_s)[:_MAX_REPLICAS]
            nodes = [node for node in nodes if node.host_port in best]
        piece.state = State.QUEUED
        for node in nodes:
            line = self.line(node)
            line.add(piece, first=first)
            self._waiting[line] = None
            self.poke(line)

    def line(self, node: Node) -> Line:
        """The line of a DataNode."""
        line = self.lines.get(node.host_port)
        if line is None:
            line = self.lines[node.host_port] = Line(node)
        return line

    def remove(self, piece: Piece, line: Line | None = None) -> None:
        """It does not wait any more: in this line, or in any."""
        for one in list(piece.lines) if line is None else [line]:
            one.remove(piece)
            if not one.num_queued:
                self._waiting.pop(one, None)

    def take(self, now_s: float) -> tuple[Line, list[Piece]] | None:
        """The pieces that a free thread is to read now, which do not wait any more."""
        for _ in range(len(self._ready)):
            line = self._ready.popleft()
            line.is_ready = False
            if not self._has_room(line):
                continue
            # Near the end, a long request would leave the other connection and the other nodes without work.
            most = min(self._max_run_bytes, line.queued_bytes // 3)
            pieces = line.next_pieces(
                self._choice.run_bytes(line.name, most, now_s),
                lambda piece, line=line: self._waits_s(piece, line, now_s),  # type: ignore[misc]
            )
            if pieces:  # else `poke_all` looks again
                for piece in pieces:
                    self.remove(piece)
                return line, pieces
        return None

    def poke(self, line: Line) -> None:
        """It may have become possible to serve this line."""
        if not line.is_ready and self._has_room(line):
            line.is_ready = True
            self._ready.append(line)

    def poke_all(self) -> None:
        """Look at all lines again: what a slow DataNode has left to a fast one may be for it after all."""
        for line in self._waiting:
            self.poke(line)

    def is_full(self, line: Line) -> bool:
        """Whether as many threads talk to this DataNode as may: one, when it hangs, so that many of them leave some."""
        return len(line.runs) >= (1 if self._choice.is_open(line.name) else self._connections_per_node)

    def backlog_bytes(self, node: str) -> int:
        """What a DataNode has to send before it could begin with another request."""
        line = self.lines.get(node)
        return line.queued_bytes + line.running_bytes if line else 0

    def expected_s(self, node: str, num_bytes: int, now_s: float) -> float:
        """Seconds until a DataNode would have sent so much more; infinity while it is left alone."""
        if self._choice.is_open(node):
            return math.inf
        return self._choice.expected_s(node, self.backlog_bytes(node) + num_bytes, now_s)

    def left_s(self, piece: Piece, now_s: float) -> float:
        """Seconds until a piece will be there, by estimate; 0 where nothing is known."""
        run = piece.run
        if run is not None and piece.state in (State.TAKEN, State.HELD):
            line, num_bytes = run.line, piece.offset + piece.length - run.pieces[0].offset - run.received
            # Its other connections have their share of the node.
            num_bytes *= len(line.runs)
            if self._choice.is_open(line.name):
                return math.inf
            return self._choice.expected_s(line.name, num_bytes, now_s)
        if piece.state is not State.QUEUED:
            return 0.0
        if len(piece.lines) > 1:
            return min(self.expected_s(line.name, 0, now_s) for line in piece.lines)
        (line,) = piece.lines
        if self._choice.is_open(line.name):
            return math.inf
        return self._choice.expected_s(line.name, line.ahead_bytes(piece) + piece.length, now_s)

    def _at_most(self, node: str, now_s: float) -> float:
        line = self.lines.get(node)
        return math.inf if line is None else line.at_most(now_s)

    def _has_room(self, line: Line) -> bool:
        return line.num_queued > 0 and not self.is_full(line)

    def _waits_s(self, piece: Piece, line: Line, now_s: float) -> float:
        """When another DataNode would begin with a piece; below zero, when it is better left to that one."""
        others = [other.name for other in piece.lines if other is not line]
        if not others:
            return math.inf
        if self._choice.leaves(line.name, line.running_bytes + piece.length, others, self.backlog_bytes, now_s):
            return -1.0
        return min(self.expected_s(other, 0, now_s) for other in others)

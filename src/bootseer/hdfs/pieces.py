"""What is asked for: a ticket for each read, cut into pieces that a connection can receive at once.

A piece lies in one block and is small, so that a late one can be asked elsewhere without much loss.
Its state says who may write to its memory: nobody but the run that holds it. Used by `schedule` and `reads`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from bootseer.errors import BootseerError, CorruptError, PermanentError, TransientError
from bootseer.hdfs.located import Block, LocatedFile
from bootseer.hdfs.outcome import ReadOutcome

if TYPE_CHECKING:
    from bootseer.hdfs.lines import Line
    from bootseer.hdfs.runs import Run

NOTHING: Final = memoryview(b"")
MAX_PACKETS: Final = 16
"""Received by one system call: 1 MiB."""


class State(Enum):
    """Where a piece is on its way."""

    QUEUED = auto()
    """In the line of one or more DataNodes; the first that is free takes it."""
    TAKEN = auto()
    """In a run, which has not come to it."""
    HELD = auto()
    """Its memory is being written."""
    PARKED = auto()
    """It waits for the NameNode, or for its hedge."""
    ENDED = auto()


@dataclass(eq=False, slots=True)
class Source:
    """A file that is read, and where it lies by the latest answer of the NameNode."""

    located: LocatedFile
    named: str
    """As errors name it."""
    num_answers: int = 1
    answered_s: float = -math.inf
    """When it was asked again last."""
    gone: PermanentError | None = None
    """What it said of a file that is not there any more."""
    unchecked: set[int] = field(default_factory=set)
    """Blocks of which no DataNode has checksums."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One read. `done` is called once, when nobody writes to its memory any more."""

    source: Source
    offset: int
    into: memoryview
    done: Callable[[ReadOutcome], None]
    check: bool
    urgent: bool
    avoid: frozenset[str]
    deadline_s: float
    pieces: list[Piece] = field(default_factory=list)
    num_left: int = 0
    error: BootseerError | None = None
    node: str = ""
    """Who served its latest piece."""

    def cut(self, piece_bytes: int) -> None:
        """Make its pieces."""
        located, at, end = self.source.located, self.offset, self.offset + len(self.into)
        while at < end:
            block = located.block_at(at)
            # At the same places for everyone, so that the pieces of neighbours meet.
            offset = at - block.start
            length = min(piece_bytes - offset % piece_bytes, block.length - offset, end - at)
            view = self.into[at - self.offset : at - self.offset + length]
            strict = self.check and block.id not in self.source.unchecked
            self.pieces.append(Piece(self, block, offset, length, view, strict, self.source.num_answers))
            at += length
        self.num_left = len(self.pieces)


@dataclass(eq=False, slots=True)
class Piece:
    """A range of one block. Changed by `schedule` alone, under its lock."""

    ticket: Ticket
    block: Block
    offset: int
    """In the block."""
    length: int
    view: memoryview
    """Where its bytes go; `NOTHING` when it has ended, so that what remembers the piece keeps no memory."""
    strict: bool
    """Taken only from those who have checksums of it."""
    num_answers: int
    """Which of the NameNode's answers `block` is from."""
    state: State = State.PARKED
    run: Run | None = None
    """That has taken it."""
    lines: list[Line] = field(default_factory=list)
    """Where it is queued."""
    mark: int = 0
    """What had been queued in the first of these lines before it, see `Line.ahead_bytes`."""
    tried: dict[str, str] = field(default_factory=dict)
    """DataNodes that failed to give it since the NameNode was asked, and why."""
    reasons: dict[str, str] = field(default_factory=dict)
    """The same, since the beginning."""
    wrong: set[str] = field(default_factory=set)
    """DataNodes that gave wrong bytes."""
    unchecked: set[str] = field(default_factory=set)
    """DataNodes that have it without checksums."""
    refreshed: bool = False
    """The NameNode was asked again because of it."""
    hedge: Piece | None = None
    """The same range, asked of another DataNode into memory of its own."""
    original: Piece | None = None
    """Of a hedge: what it stands in for."""
    won: memoryview | None = None
    """What its hedge has read, to be copied when nobody writes to `view`."""
    won_by: str = ""

    @property
    def key(self) -> tuple[int, int, bool, bool]:
        """What the piece before it calls its successor."""
        return (self.block.id, self.offset, self.ticket.check, self.strict)


def hopeless(piece: Piece) -> BootseerError:
    """Why no DataNode has given a piece."""
    said = "; ".join(f"{node}: {reason}" for node, reason in sorted(piece.reasons.items()))
    where = f"{piece.ticket.source.named}: {piece.block}"
    if piece.reasons and piece.wrong == piece.reasons.keys():
        return CorruptError(f"{where} has wrong bytes on every DataNode that has it: {said}")
    return TransientError(f"{where} cannot be read: {said or 'no DataNode has it'}")


def overrun(ticket: Ticket) -> TransientError:
    """That a ticket has not ended in time."""
    missing = next(piece for piece in ticket.pieces if piece.state is not State.ENDED)
    nodes = [node.host_port for node in missing.block.nodes]
    lies = f"; its only copy is on {nodes[0]}" if len(nodes) == 1 else f" from {', '.join(nodes) or 'any DataNode'}"
    said = [f"{node}: {reason}" for node, reason in sorted(missing.reasons.items())]
    if missing.run is not None:
        said.append(f"{missing.run.line.name} has sent {missing.run.received} of {missing.run.length} bytes")
    return TransientError(
        f"{ticket.source.named}: {missing.block} was not read within {ticket.deadline_s:.1f} s{lies}"
        f" ({'; '.join(said) or 'it was not asked yet: others are read before'})"
    )

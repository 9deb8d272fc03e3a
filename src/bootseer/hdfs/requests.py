"""What is asked for: a ticket for each read, cut into pieces that wait in a queue per DataNode until a run takes them.

A piece lies in one block and is small, so that a late one can be asked elsewhere without much loss. It waits in the
queue of each DataNode that has it, and the first node with a free connection takes it: which one that will be need not
be predicted. Of the next few it takes the piece that the other nodes would come to last. A piece that was taken
elsewhere stays in a queue as a leftover, which is skipped. A piece's state says which thread may write to its memory:
only that of the run that holds it.

Everything here is changed by `schedule` alone, under its lock. Decides and touches nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple, Protocol

from bootseer.errors import BootseerError, CorruptError, PermanentError, TransientError
from bootseer.hdfs.located import Block, LocatedFile, Node


class ReadOutcome(NamedTuple):
    """How one read ended."""

    error: BootseerError | None
    node: str
    """`host:port` of the DataNode that served it, or the last of several; "" where none did."""


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """Of one `HdfsReads`."""

    silent_s: float = 1.0
    """A DataNode that says nothing for so long is late: its pieces go elsewhere, where there is one."""
    reconnect_s: float = 5.0
    """Where there is no other, a silent connection is given up for a new one."""
    least_late_s: float = 0.25
    """No request counts as late before."""
    connections_per_node: int = 2
    max_threads: int = 64
    piece_bytes: int = 1 << 20
    """What is begun again elsewhere when it is late."""
    max_run_bytes: int = 8 << 20
    """Asked of a DataNode at once."""
    max_hedges: int = 16
    """At a time; each has memory for one piece."""
    max_pieces: int = 1 << 17
    """That wait or are on their way: more are refused."""


NOTHING: Final = memoryview(b"")
MAX_PACKETS: Final = 16
"""Received by one system call: 1 MiB."""


class State(Enum):
    """Where a piece is on its way."""

    QUEUED = auto()
    """In the queue of one or more DataNodes; the first that is free takes it."""
    TAKEN = auto()
    """In a run, which has not come to it."""
    HELD = auto()
    """Its memory is being written."""
    PARKED = auto()
    """It waits for the NameNode, or for its hedge."""
    ENDED = auto()


@dataclass(eq=False, slots=True)
class HdfsSource:
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


_MAX_EXTENSIONS: Final = 4
"""A read that waits for a slow link, not for a silent DataNode, has so many times its deadline more: 64 MiB under way
at 400 KB/s, a small share of an origin's link, take three minutes."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One read. `done` is called once, when no thread writes to its memory any more."""

    source: HdfsSource
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
    """The DataNode that served its latest piece."""
    until_s: float = math.inf
    """When it is over."""
    extensions: int = 0
    """How often that was put off, because what is read before it came."""

    def extended(self, now_s: float, since_s: float) -> bool:
        """Give it its time once more, if all that it lacks is on DataNodes that have sent since."""
        if self.extensions >= _MAX_EXTENSIONS:
            return False
        for piece in self.pieces:
            queues = [piece.run.queue] if piece.run is not None else piece.queues
            if piece.state is not State.ENDED and not any(queue.served_s >= since_s for queue in queues):
                return False
        self.extensions += 1
        self.until_s = now_s + self.deadline_s
        return True

    def cut(self, piece_bytes: int) -> None:
        located, at, end = self.source.located, self.offset, self.offset + len(self.into)
        while at < end:
            block = located.block_at(at)
            # At the same places for every reader, so that the pieces of neighbouring ranges meet.
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
    """Taken only from DataNodes that have checksums of it."""
    num_answers: int
    """Which of the NameNode's answers `block` is from."""
    state: State = State.PARKED
    run: Run | None = None
    """That has taken it."""
    queues: list[NodeQueue] = field(default_factory=list)
    """Where it is queued."""
    mark: int = 0
    """What had been queued in the first of these queues before it, see `NodeQueue.ahead_bytes`."""
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
    """What its hedge has read, to be copied when no thread writes to `view`."""
    won_by: str = ""

    @property
    def key(self) -> tuple[int, int, bool, bool]:
        """What the piece before it calls its successor."""
        return (self.block.id, self.offset, self.ticket.check, self.strict)


def read_error(piece: Piece) -> BootseerError:
    """Why no DataNode has given a piece."""
    reasons = "; ".join(f"{node}: {reason}" for node, reason in sorted(piece.reasons.items()))
    subject = f"{piece.ticket.source.named}: {piece.block}"
    if piece.reasons and piece.wrong == piece.reasons.keys():
        return CorruptError(f"{subject} has wrong bytes on every DataNode that has it: {reasons}")
    return TransientError(f"{subject} cannot be read: {reasons or 'no DataNode has it'}")


def overrun(ticket: Ticket) -> TransientError:
    """That a ticket has not ended in time."""
    missing = next(piece for piece in ticket.pieces if piece.state is not State.ENDED)
    nodes = [node.host_port for node in missing.block.nodes]
    source = f"; its only copy is on {nodes[0]}" if len(nodes) == 1 else f" from {', '.join(nodes) or 'any DataNode'}"
    reasons = [f"{node}: {reason}" for node, reason in sorted(missing.reasons.items())]
    if missing.run is not None:
        reasons.append(f"{missing.run.queue.name} has sent {missing.run.received} of {missing.run.length} bytes")
    return TransientError(
        f"{ticket.source.named}: {missing.block} was not read within {ticket.deadline_s:.1f} s{source}"
        f" ({'; '.join(reasons) or 'it was not asked yet: others are read before'})"
    )


class Stoppable(Protocol):
    """A connection, as far as a run needs it; that of the simulator is another one."""

    def stop(self) -> None:
        """What waits for it fails at once."""

    def close(self) -> None:
        """End it for this process."""


@dataclass(eq=False, slots=True)
class Run:
    """A request on its way."""

    queue: NodeQueue
    pieces: list[Piece]
    length: int
    """Of all its pieces, in bytes."""
    began_s: float
    progress_s: float
    """When bytes came last, or when it began."""
    bytes_before: int
    """What the queue had served when it began."""
    packets: int = 1
    """So many are received at once."""
    claimed: int = 0
    """Bytes that are being received."""
    index: int = 0
    """The piece that the next byte belongs to."""
    filled: int = 0
    """Bytes of that piece that are there."""
    received: int = 0
    stopped: bool = False
    is_late: bool = False
    """Others were asked for what it has."""
    connection: Stoppable | None = None
    """That its thread may wait for; None while it does not."""

    def owns(self, piece: Piece) -> bool:
        """Whether it is to fill this piece still."""
        return piece.run is self and piece.state in (State.TAKEN, State.HELD)

    def live(self) -> list[Piece]:
        """The pieces that it is to fill still."""
        return [piece for piece in self.pieces[self.index :] if self.owns(piece)]

    def halt(self) -> None:
        """End it now. Its thread notices and gives back the pieces."""
        self.stopped = True
        if self.connection is not None:
            self.connection.stop()


_LOOK: Final = 16
"""Pieces that are looked at for one that is not left to others."""
_LEFTOVERS: Final = 64
_SHOWS_S: Final = 0.05
"""A request that is younger says nothing yet of its node's rate."""
_MAX_PIECES: Final = 256
"""In one request: the kernel takes 1,024 pieces of memory at once."""


class NodeQueue:
    """The queue of one DataNode."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.runs: list[Run] = []
        """Requests that it serves now."""
        self.is_ready = False
        """Whether it waits for a thread."""
        self.uneven = False
        """Its packets cannot be predicted."""
        self.num_queued = 0
        self.queued_bytes = 0
        self.running_bytes = 0
        self._added_bytes = self._gone_bytes = 0
        self.sample: Block | None = None
        """A block that it has, to probe it with."""
        self.bytes = self.requests = self.failures = 0
        self.seconds = 0.0
        self.served_s = -math.inf
        """When bytes came last."""
        self._urgent: deque[Piece] = deque()
        self._later: deque[Piece] = deque()
        self._by_start: dict[tuple[int, int, bool, bool], Piece] = {}

    @property
    def name(self) -> str:
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
        if not piece.queues:
            piece.mark = self._gone_bytes if first else self._added_bytes
        piece.queues.append(self)
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
        piece.queues.remove(self)
        self._gone_bytes += piece.length
        self.num_queued -= 1
        self.queued_bytes -= piece.length
        if self._by_start.get(piece.key) is piece:
            del self._by_start[piece.key]
        if len(self._urgent) + len(self._later) > 2 * self.num_queued + _LEFTOVERS:
            self._urgent = deque(piece for piece in self._urgent if self._is_here(piece))
            self._later = deque(piece for piece in self._later if self._is_here(piece))

    def ahead_bytes(self, piece: Piece) -> int:
        """About how much is served here before a piece that is queued in this queue alone."""
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
        """Of the next ones the piece that would wait longest for others: nodes that could do little else keep it."""
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
        return piece.state is State.QUEUED and self in piece.queues

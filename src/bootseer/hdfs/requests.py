"""The data structures of reads: a ticket per read, split into pieces, which wait in queues per DataNode until a run
takes them.

A piece lies in one block, and is small, so that a late one can be requested elsewhere without much loss. It waits in
the queue of each DataNode that stores the block, and the first node with a free connection takes it: which one need not
be predicted. Among the next few, a node takes the piece that the other nodes would reach last. A piece that was taken
from one queue stays in others as a stale entry, which is skipped. A piece's state determines which thread may write to
its memory: only that of the run that holds it.

Everything here is changed by `schedule` alone, under its lock. Decides and touches nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct, field

from bootseer.errors import BootseerError, CorruptError, PermanentError, TransientError
from bootseer.hdfs.block_locations import Block, LocatedFile, Node

if TYPE_CHECKING:
    from bootseer.io.pooled_reads import ReadOutcome


class ReadSettings(Struct, frozen=True):
    """Settings of one `HdfsReads`."""

    silent_s: float = 1.0
    """A DataNode is late after so much silence: its pieces are requested from others, if there are any."""
    reconnect_s: float = 5.0
    """If there are no others, a silent connection is replaced by a new one after this."""
    min_late_s: float = 0.25
    """No request counts as late before this."""
    connections_per_node: int = 2
    max_threads: int = 64
    piece_bytes: int = 1 << 20
    """The unit of retries and hedges."""
    max_run_bytes: int = 8 << 20
    """The largest request to a DataNode."""
    max_hedges: int = 16
    """Concurrent hedges; each has memory for one piece."""
    retry_s: tuple[float, ...] = (1.0, 3.0, 6.0, 10.0)
    """Pauses before a piece is requested again that no DataNode has, or whose DataNodes have all failed, if any may
    recover."""


NOTHING: Final = memoryview(b"")
NO_CHECKSUMS: Final = "it has no checksums of the block"
MAX_PACKETS: Final = 16
"""Received by one system call: 1 MiB."""


class State(Enum):
    """The state of a piece."""

    QUEUED = auto()
    """In the queues of one or more DataNodes; the first free one takes it."""
    TAKEN = auto()
    """In a run that has not reached it."""
    HELD = auto()
    """A thread is writing to its memory."""
    PARKED = auto()
    """Waiting for the NameNode, or for its hedge."""
    ENDED = auto()


class HdfsSource(Struct, eq=False):
    """A file that is being read, with its latest known locations."""

    located: LocatedFile
    uri: str
    """Its address, for messages."""
    location_version: int = 1
    located_s: float = -math.inf
    """Time of the latest refresh."""
    gone: PermanentError | None = None
    """The error of the latest refresh, if the file is gone."""
    unchecked: set[int] = field(default_factory=set)
    """Blocks of which no DataNode has checksums."""


_MAX_EXTENSIONS: Final = 4
"""How often the deadline of a read is extended while its DataNodes send: 64 MiB in flight over a slow link of 400 KB/s
take three minutes."""


class Ticket(Struct, eq=False):
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
    """Its deadline."""
    extensions: int = 0
    """How often its deadline was extended."""

    def try_extend(self, now_s: float, since_s: float) -> bool:
        """Extend the deadline if all DataNodes of unfinished pieces have sent bytes since `since_s`; whether it was."""
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
            # At the same offsets for every reader, so that pieces of adjacent ranges are adjacent.
            offset = at - block.start
            length = min(piece_bytes - offset % piece_bytes, block.length - offset, end - at)
            view = self.into[at - self.offset : at - self.offset + length]
            check = self.check and block.id not in self.source.unchecked
            self.pieces.append(Piece(self, block, offset, length, view, check, self.source.location_version))
            at += length
        self.num_left = len(self.pieces)


class Piece(Struct, eq=False):
    """A range of one block."""

    ticket: Ticket
    block: Block
    offset: int
    """Offset in the block."""
    length: int
    view: memoryview
    """Its destination; `NOTHING` after its end, so that references to the piece do not keep memory."""
    check: bool
    """Read it from DataNodes that have checksums of it, and compare it with them."""
    location_version: int
    """The refresh of locations that `block` comes from."""
    state: State = State.PARKED
    run: Run | None = None
    """The run that has taken it."""
    queues: list[NodeQueue] = field(default_factory=list)
    """The queues it waits in."""
    queued_after_bytes: int = 0
    """Bytes queued before it in the first of these queues, see `NodeQueue.ahead_bytes`."""
    tried: dict[str, str] = field(default_factory=dict)
    """DataNodes that failed to deliver it since the latest refresh, with reasons."""
    reasons: dict[str, str] = field(default_factory=dict)
    """As `tried`, since the beginning."""
    wrong: set[str] = field(default_factory=set)
    """DataNodes that delivered wrong bytes."""
    may_recover: bool = False
    """Whether a DataNode that has it has lost the connection since the latest pause, or none is known yet."""
    num_pauses: int = 0
    refreshed: bool = False
    """Whether locations were refreshed because of it."""
    hedge: Piece | None = None
    """The same range, requested from another DataNode into other memory."""
    original: Piece | None = None
    """The piece that this one is a hedge of."""
    hedge_bytes: memoryview | None = None
    """Bytes of its hedge, to be copied when no thread writes to `view`."""
    hedge_node: str = ""

    @property
    def key(self) -> tuple[int, int, bool]:
        """The key by which its predecessor finds it."""
        return (self.block.id, self.offset, self.check)


_LOST_S: Final = 300.0


class PausedPieces:
    """Pieces whose DataNodes have all failed, or of which the NameNode knows no DataNode. They are requested again
    after pauses: a DataNode may recover, or report its blocks to a NameNode that has just become active."""

    def __init__(self, pauses_s: Sequence[float]) -> None:
        self._pauses_s = pauses_s
        self._until: list[tuple[float, Piece]] = []
        self._lost_until_s = -math.inf
        """Until then blocks without a DataNode count as lost, because a wait for one has failed: a checkpoint may have
        thousands of them."""

    def try_add(self, piece: Piece, now_s: float) -> bool:
        """Pause a piece, unless no DataNode is expected to recover in time; returns whether it is paused."""
        is_last = piece.num_pauses == len(self._pauses_s)
        if not piece.block.nodes:
            if is_last:
                self._lost_until_s = now_s + _LOST_S
            piece.may_recover = now_s >= self._lost_until_s
        if not piece.may_recover or is_last:
            return False
        until_s = now_s + self._pauses_s[piece.num_pauses]
        if until_s >= piece.ticket.until_s:
            return False
        self._until.append((until_s, piece))
        piece.num_pauses, piece.may_recover = piece.num_pauses + 1, False
        return True

    def take_due(self, now_s: float) -> list[Piece]:
        """The pieces whose pause is over, to be queued as if they had not been requested yet."""
        due = [piece for until_s, piece in self._until if until_s <= now_s and piece.state is State.PARKED]
        self._until = [entry for entry in self._until if entry[0] > now_s]
        for piece in due:
            piece.tried, piece.refreshed, piece.check = {}, False, piece.ticket.check
        return due


def read_error(piece: Piece) -> BootseerError:
    """The error of a piece that no DataNode has delivered."""
    reasons = "; ".join(f"{node}: {reason}" for node, reason in sorted(piece.reasons.items()))
    subject = f"{piece.ticket.source.uri}: {piece.block}"
    if piece.reasons and piece.wrong == piece.reasons.keys():
        return CorruptError(f"{subject} has wrong bytes on every DataNode that has it: {reasons}")
    return TransientError(f"{subject} cannot be read: {reasons or 'no DataNode has it'}")


def overrun(ticket: Ticket) -> TransientError:
    """The error of a ticket whose deadline is over."""
    missing = next(piece for piece in ticket.pieces if piece.state is not State.ENDED)
    nodes = [node.host_port for node in missing.block.nodes]
    source = f"; its only copy is on {nodes[0]}" if len(nodes) == 1 else f" from {', '.join(nodes) or 'any DataNode'}"
    reasons = [f"{node}: {reason}" for node, reason in sorted(missing.reasons.items())]
    if missing.run is not None:
        reasons.append(f"{missing.run.queue.name} has sent {missing.run.received} of {missing.run.length} bytes")
    return TransientError(
        f"{ticket.source.uri}: {missing.block} was not read within {ticket.deadline_s:.1f} s{source}"
        f" ({'; '.join(reasons) or 'it was not requested yet: others are read first'})"
    )


class Stoppable(Protocol):
    """The part of a connection that runs use; the simulator has its own."""

    def stop(self) -> None:
        """Fail all waits on it."""

    def close(self) -> None:
        """Close it for this process."""


class Run(Struct, eq=False):
    """A request to a DataNode for consecutive pieces."""

    queue: NodeQueue
    pieces: list[Piece]
    length: int
    """Bytes of all its pieces."""
    began_s: float
    progress_s: float
    """When bytes last arrived, or when it began."""
    bytes_before: int
    """Bytes that the queue had served when it began."""
    packets: int = 1
    """How many packets are received at once."""
    claimed: int = 0
    """Bytes that are being received."""
    index: int = 0
    """The piece that the next byte belongs to."""
    filled: int = 0
    """Received bytes of that piece."""
    received: int = 0
    stopped: bool = False
    is_late: bool = False
    """Whether its pieces were requested from others too."""
    connection: Stoppable | None = None
    """The connection on which its thread may be waiting; None while it is not."""

    def owns(self, piece: Piece) -> bool:
        """Whether it is still to fill this piece."""
        return piece.run is self and piece.state in (State.TAKEN, State.HELD)

    def live(self) -> list[Piece]:
        """The pieces that it is still to fill."""
        return [piece for piece in self.pieces[self.index :] if self.owns(piece)]

    def halt(self) -> None:
        """End it now: its thread notices, and returns the pieces."""
        self.stopped = True
        if self.connection is not None:
            self.connection.stop()


_LOOKAHEAD_PIECES: Final = 16
"""How many pieces are examined for one that is not left to other nodes."""
_MAX_STALE_ENTRIES: Final = 64
_MIN_SAMPLE_S: Final = 0.05
"""Younger requests do not show the node's rate yet."""
_MAX_PIECES: Final = 256
"""In one request: Linux accepts 1,024 iovecs."""


class NodeQueue:
    """The queue and the statistics of one DataNode."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.runs: list[Run] = []
        """Requests in flight."""
        self.is_ready = False
        """Whether it is waiting for a thread."""
        self.uneven = False
        """Whether its packets cannot be predicted."""
        self.num_queued = 0
        self.queued_bytes = 0
        self.running_bytes = 0
        self._added_bytes = self._removed_bytes = 0
        self.sample: Block | None = None
        """A block that it stores, for probes."""
        self.bytes = self.requests = self.failures = 0
        self.seconds = 0.0
        self.served_s = -math.inf
        """When bytes last arrived."""
        self._urgent: deque[Piece] = deque()
        self._later: deque[Piece] = deque()
        self._by_start: dict[tuple[int, int, bool], Piece] = {}

    @property
    def name(self) -> str:
        return self.node.host_port

    def note_read(self, block: Block, length: int, seconds: float) -> None:
        """The node has served a read that was not queued."""
        self.sample = block
        self.requests += 1
        self.bytes += length
        self.seconds += seconds

    def add(self, piece: Piece, *, first: bool = False) -> None:
        """Queue a piece; `first`: before all others."""
        if not piece.queues:
            piece.queued_after_bytes = self._removed_bytes if first else self._added_bytes
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

    def prioritize(self, piece: Piece) -> None:
        """Move a queued piece to the urgent ones."""
        self._urgent.append(piece)

    def remove(self, piece: Piece) -> None:
        piece.queues.remove(self)
        self._removed_bytes += piece.length
        self.num_queued -= 1
        self.queued_bytes -= piece.length
        if self._by_start.get(piece.key) is piece:
            del self._by_start[piece.key]
        if len(self._urgent) + len(self._later) > 2 * self.num_queued + _MAX_STALE_ENTRIES:
            self._urgent = deque(piece for piece in self._urgent if self._is_queued(piece))
            self._later = deque(piece for piece in self._later if self._is_queued(piece))

    def ahead_bytes(self, piece: Piece) -> int:
        """Approximate bytes served here before a piece that is queued in this queue alone."""
        return max(piece.queued_after_bytes - self._removed_bytes, 0) + self.running_bytes

    def rate_limit(self, now_s: float) -> float:
        """Upper bound of the node's bytes per second, by its requests in flight; infinity if they show nothing yet."""
        if not self.runs:
            return math.inf
        oldest = self.runs[0]
        elapsed_s = now_s - oldest.began_s
        if elapsed_s < _MIN_SAMPLE_S:
            return math.inf
        # What is being received may have arrived except for its last byte.
        return (self.bytes - oldest.bytes_before + sum(run.claimed for run in self.runs) + 1) / elapsed_s

    def silent_s(self, now_s: float) -> float:
        """How long no requested byte has arrived, on any connection."""
        return min((now_s - run.progress_s for run in self.runs), default=0.0)

    def pieces(self) -> list[Piece]:
        return list({id(piece): piece for piece in (*self._urgent, *self._later) if self._is_queued(piece)}.values())

    def next_pieces(self, most_bytes: int, waits_s: Callable[[Piece], float]) -> list[Piece]:
        """The pieces of the next request: one, and its successors in the block; they stay queued. Empty if all are left
        to other nodes. `waits_s`: when others would begin a piece; negative if it is left to them."""
        piece = self._pop(self._urgent, waits_s) or self._pop(self._later, waits_s)
        if piece is None:
            return []
        found, num_bytes = [piece], piece.length
        only_urgent = any(map(self._is_queued, self._urgent))
        while num_bytes < most_bytes and len(found) < _MAX_PIECES:
            end = piece.offset + piece.length
            following = self._by_start.get((piece.block.id, end, piece.check))
            if following is None or not self._is_queued(following) or (only_urgent and not following.ticket.urgent):
                break
            if num_bytes + following.length > most_bytes:
                break
            found.append(following)
            num_bytes += following.length
            piece = following
        return found

    def _pop(self, waiting: deque[Piece], waits_s: Callable[[Piece], float]) -> Piece | None:
        """Among the next pieces, the one that others would begin last: they keep those that only they can serve."""
        seen: list[Piece] = []
        found, found_s = None, 0.0
        while waiting and len(seen) < _LOOKAHEAD_PIECES and found_s < math.inf:
            piece = waiting.popleft()
            if not self._is_queued(piece):
                continue
            seen.append(piece)
            piece_s = waits_s(piece)
            if piece_s >= 0.0 and (found is None or piece_s > found_s):
                found, found_s = piece, piece_s
        waiting.extendleft(piece for piece in reversed(seen) if piece is not found)
        return found

    def _is_queued(self, piece: Piece) -> bool:
        return piece.state is State.QUEUED and self in piece.queues

"""The scheduler of reads: which DataNode is asked for which pieces, and what happens when it does not deliver.

Pieces wait in the queues of all DataNodes that store them; each free thread takes the next run of pieces from a queue.
A piece whose DataNode fails goes to the others; when none is left, the NameNode is asked once for the block's current
locations. If connections were lost, it is requested again after pauses: a DataNode may be restarting, or too busy.

Hedging. A run without progress is late. Its pieces that have not begun are queued at other DataNodes. The piece that
has begun cannot simply be moved: the late run's thread may still write to its memory. So it is requested from another
DataNode into memory of its own (a hedge). If the hedge arrives first, it is copied when the late thread has released
the memory; if the original arrives first, the hedge is dropped.

Nothing here waits, reads a clock or knows sockets: `read_threads` calls it under one lock, with the time. The simulator
runs the same code.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import Final

from bootseer.errors import BootseerError, PermanentError, TransientError
from bootseer.hdfs.block_locations import LocatedFile, Node
from bootseer.hdfs.choice import NodeChoice, NodeQueues
from bootseer.hdfs.errors import (
    DataNodeError,
    LostConnectionError,
    RefusedError,
    SilentError,
    UnevenError,
    WrongBytesError,
)
from bootseer.hdfs.requests import (
    MAX_PACKETS,
    NO_CHECKSUMS,
    NOTHING,
    HdfsSource,
    NodeQueue,
    PausedPieces,
    Piece,
    ReadSettings,
    Run,
    State,
    Ticket,
    overrun,
    read_error,
)

_NO_REPLICA_S: Final = 10.0
"""How long a block without replicas, by the NameNode's answer, is expected to stay so."""
_WORTH_S: Final = 0.1
"""A request is only moved to another DataNode if that is this much earlier."""
_LOCATION_FRESH_S: Final = 1.0
"""How long a NameNode's answer for a file is fresh."""


class Schedule:
    """All unfinished pieces. `ended` are tickets whose callers must be notified, `to_locate` files whose blocks must be
    located again; `read_threads` empties both."""

    def __init__(self, settings: ReadSettings) -> None:
        self._settings = settings
        self.choice = NodeChoice(min_late_s=settings.min_late_s, max_late_s=settings.silent_s)
        self.queues = NodeQueues(self.choice, settings)
        self.ended: deque[Ticket] = deque()
        self.to_locate: deque[HdfsSource] = deque()
        self.runs: dict[Run, None] = {}
        self.counts: Counter[str] = Counter()
        self.num_pieces = 0
        self._open: dict[Ticket, None] = {}
        self._num_hedges = 0
        self._parked: dict[HdfsSource, list[Piece]] = {}
        self._paused = PausedPieces(settings.retry_s)

    # Called for readers

    def submit(self, ticket: Ticket, now_s: float) -> None:
        ticket.cut(self._settings.piece_bytes)
        self.num_pieces += ticket.num_left
        if not ticket.num_left:
            self.ended.append(ticket)
            return
        ticket.until_s = now_s + ticket.deadline_s
        self._open[ticket] = None
        for piece in ticket.pieces:
            if ticket.error is None:
                self._queue(piece, now_s)

    def prioritize(self, ticket: Ticket) -> None:
        if ticket.urgent:
            return
        ticket.urgent = True
        for piece in ticket.pieces:
            for queue in piece.queues if piece.state is State.QUEUED else ():
                queue.prioritize(piece)

    def fail(self, ticket: Ticket, error: BootseerError, *, at_once: bool) -> None:
        """Fail a read; its callback is called when no thread writes to its memory any more. `at_once`: stop those."""
        if ticket.num_left == 0:
            return
        ticket.error = ticket.error or error
        for piece in ticket.pieces:
            self._drop_hedge(piece)
            if piece.state is State.HELD:
                if at_once and piece.run is not None:
                    piece.run.halt()
            elif piece.state is not State.ENDED:
                self._end(piece)

    def cancel(self, ticket: Ticket, error: BootseerError, now_s: float) -> None:
        """Cancel a read. It ends soon, even if its DataNode hangs. A DataNode that has been silent is excluded at once:
        it may be the reason for the cancellation, and must not delay the next read too."""
        if ticket.num_left == 0:
            return
        late_s = self.choice.late_s()
        queues: dict[NodeQueue, None] = {}
        for piece in ticket.pieces:
            for queue in [piece.run.queue] if piece.run is not None else piece.queues:
                if queue.silent_s(now_s) >= late_s:
                    queues[queue] = None
        self.fail(ticket, error, at_once=False)
        for queue in queues:
            queue.failures += 1
            for run in queue.runs:
                if not run.live() or any(piece.ticket is ticket for piece in run.live()):
                    run.halt()
            if self.choice.note_failure(queue.name, now_s, at_once=True):
                self._open_circuit(queue, now_s)

    def tickets(self) -> list[Ticket]:
        return list(self._open)

    # Called by threads

    @property
    def num_ready(self) -> int:
        """How many threads have something to do."""
        return self.queues.num_ready + len(self.to_locate) + len(self.ended)

    def take(self, now_s: float) -> Run | None:
        """The next request for a free thread."""
        taken = self.queues.take(now_s)
        if taken is None:
            return None
        queue, pieces = taken
        packets = 1
        if not queue.uneven:
            packets = self.choice.packets(queue.name, self._settings.connections_per_node, MAX_PACKETS, now_s)
        length = sum(piece.length for piece in pieces)
        run = Run(queue, pieces, length, now_s, now_s, queue.bytes, packets)
        for piece in pieces:
            piece.state, piece.run = State.TAKEN, run
        queue.runs.append(run)
        queue.running_bytes += run.length
        queue.requests += 1
        queue.sample = pieces[0].block
        self.runs[run] = None
        self.queues.notify(queue)
        return run

    def claim(self, run: Run, length: int) -> list[memoryview] | None:
        """Memory for the next `length` bytes of a run, to which the caller may write until it calls `received` or
        `finished`. None if the run is to end here."""
        if run.stopped:
            return None
        run.claimed = length
        views: list[memoryview] = []
        index, filled, left = run.index, run.filled, length
        while left:
            piece = run.pieces[index]
            take = min(piece.length - filled, left)
            if run.owns(piece) and piece.ticket.error is not None:
                self._end(piece)
            if run.owns(piece):
                piece.state = State.HELD
                views.append(piece.view[filled : filled + take])
            else:
                # No reader needs these bytes any more, but checksums cover them.
                views.append(memoryview(bytearray(take)))
            left -= take
            filled += take
            if filled == piece.length:
                index, filled = index + 1, 0
        return views if run.live() else None

    def received(self, run: Run, length: int, now_s: float) -> None:
        """The bytes of the latest `claim` have arrived, and are right."""
        self.choice.note_latency(now_s - run.progress_s)
        run.progress_s = now_s
        run.claimed = 0
        run.received += length
        run.queue.bytes += length
        run.queue.served_s = now_s
        run.queue.running_bytes -= length
        while length:
            piece = run.pieces[run.index]
            take = min(piece.length - run.filled, length)
            length -= take
            run.filled += take
            if run.filled == piece.length:
                run.index, run.filled = run.index + 1, 0
                if run.owns(piece):
                    self._finish(piece, run.queue.name)

    def should_give_up(self, run: Run, silent_s: float) -> bool:
        """Nothing has arrived for `silent_s`: whether the thread is to give up the run."""
        live = [piece for piece in run.live() if piece.ticket.error is None]
        if run.stopped or not live or silent_s >= self._settings.reconnect_s:
            return True
        return any(self._alternatives(piece, run.queue) for piece in live)

    def finished(self, run: Run, error: DataNodeError | None, now_s: float) -> None:
        """A thread has released a run and its memory. Its unread pieces are queued again; `error` is the reason."""
        queue = run.queue
        queue.runs.remove(run)
        del self.runs[run]
        queue.running_bytes -= run.length - run.received
        queue.seconds += now_s - run.began_s
        lost = [piece for piece in run.pieces[run.index :] if run.owns(piece)]
        opened = False
        if error is not None and not run.stopped:
            opened = self._record_failure(run, lost, error, now_s)
        elif run.stopped and run.is_late:
            queue.failures += 1
            opened = self.choice.note_failure(queue.name, now_s, at_once=False)
        elif run.received:
            self.choice.note_served(queue.name, run.length, queue.bytes - run.bytes_before, now_s - run.began_s, now_s)
        for piece in reversed(lost):
            if not run.owns(piece):
                continue  # its ticket failed with another piece
            piece.run = None
            piece.state = State.PARKED
            if piece.hedge_bytes is not None:
                piece.view[:] = piece.hedge_bytes
                self._finish(piece, piece.hedge_node)
            elif piece.ticket.error is not None:
                self._end(piece)
            elif piece.hedge is None:
                self._queue(piece, now_s, first=True)
        if opened:
            self._open_circuit(queue, now_s)
        self.queues.notify(queue)

    def located(self, source: HdfsSource, answer: LocatedFile | BootseerError, now_s: float) -> None:
        """The NameNode's new answer for a file, for the pieces that wait for it."""
        source.located_s = now_s
        self.counts["refreshes"] += 1
        parked = self._parked.pop(source, [])
        if isinstance(answer, LocatedFile) and not answer.continues(source.located):
            answer = PermanentError(f"{source.uri} was replaced while it was read; open it again")
        source.gone = answer if isinstance(answer, PermanentError) else None
        if isinstance(answer, LocatedFile):
            source.located = answer
            source.location_version += 1
            source.unchecked.clear()
        for piece in parked:
            if piece.state is not State.PARKED:
                continue
            has_untried = any(node.host_port not in piece.tried for node in piece.block.nodes)
            if isinstance(answer, LocatedFile) or (isinstance(answer, TransientError) and has_untried):
                self._queue(piece, now_s)
            else:
                self.fail(piece.ticket, answer, at_once=False)

    def tick(self, now_s: float) -> None:
        """Deadlines and late requests. To be called ten times per second while there are pieces."""
        for ticket in [ticket for ticket in self._open if ticket.until_s <= now_s]:
            if not ticket.try_extend(now_s, now_s - self._settings.reconnect_s):
                ticket.until_s = math.inf
                self.fail(ticket, overrun(ticket), at_once=True)
        for piece in self._paused.take_due(now_s):
            self._queue(piece, now_s)
        self.queues.poke_all()
        for run in list(self.runs):
            if now_s - run.began_s >= self._settings.min_late_s and not run.stopped:
                self._reassign_late(run, now_s)

    def delay_s(self, source: HdfsSource, offset: int, length: int, now_s: float) -> float:
        """Estimated seconds for a read of a range; infinity if no DataNode is expected to serve it."""
        if not 0 <= offset < source.located.size_bytes:
            return 0.0
        nodes = source.located.block_at(offset).nodes
        if not nodes and now_s >= source.located_s + _NO_REPLICA_S:
            return 0.0  # a read would find out its current locations
        return self.node_delay_s([node.host_port for node in nodes], length, now_s)

    def node_delay_s(self, nodes: Iterable[str], length: int, now_s: float) -> float:
        """Estimated seconds for a read from the fastest of these DataNodes."""
        return min((self.queues.expected_s(node, length, now_s) for node in nodes), default=math.inf)

    def remaining_s(self, ticket: Ticket, now_s: float) -> float:
        """Estimated seconds until a read ends; 0 if unknown."""
        return max((self.queues.remaining_s(piece, now_s) for piece in ticket.pieces), default=0.0)

    # Queues

    def _queue(self, piece: Piece, now_s: float, *, first: bool = False) -> None:
        """Queue a piece at its DataNodes, or refresh its locations, or fail its ticket."""
        piece.state = State.PARKED
        ticket = piece.ticket
        if piece.location_version < ticket.source.location_version:
            located = ticket.source.located
            piece.block = located.block_at(piece.block.start + piece.offset)
            piece.location_version = ticket.source.location_version
            piece.check, piece.tried = ticket.check, {}
        nodes = [node for node in piece.block.nodes if node.host_port not in piece.tried]
        busy = piece.original.run if piece.original is not None else None
        nodes = [node for node in nodes if busy is None or node.host_port != busy.queue.name]
        if not nodes:
            self._no_replica_left(piece, now_s)
            return
        trusted = [node for node in nodes if node.host_port not in ticket.avoid] or nodes
        healthy = [node for node in trusted if not self.choice.is_open(node.host_port)]
        if not healthy and piece.reasons and piece.original is None and self._may_relocate(piece, now_s):
            # Its DataNodes are excluded, and it might wait in vain: there may be a new replica.
            self._relocate(piece)
        elif not healthy and piece.check and NO_CHECKSUMS in piece.tried.values():
            self._read_unchecked(piece, now_s)
        else:
            self.queues.add(piece, healthy or trusted, first=first)

    def _alternatives(self, piece: Piece, queue: NodeQueue) -> list[Node]:
        """Other DataNodes for a late piece. Never the DataNode of a hedge's original: the hedge would wait behind the
        very request that is late, and the read until its deadline."""
        avoided = piece.ticket.avoid
        busy = piece.original.run if piece.original is not None else None
        late = {queue.name, busy.queue.name if busy is not None else ""}
        return [
            node
            for node in piece.block.nodes
            if node.host_port not in late
            and node.host_port not in piece.tried
            and node.host_port not in avoided
            and not self.choice.is_open(node.host_port)
        ]

    def _open_circuit(self, queue: NodeQueue, now_s: float) -> None:
        """A DataNode is excluded from now on: its queued pieces move to other DataNodes if there are any."""
        for piece in queue.pieces():
            if queue not in piece.queues:
                continue  # its ticket failed with another piece
            self.queues.remove(piece, queue)
            if not piece.queues:
                self._queue(piece, now_s)

    # Ends of pieces

    def _finish(self, piece: Piece, node: str) -> None:
        original = piece.original
        if original is None:
            piece.ticket.node = node
            self._drop_hedge(piece)
            self._end(piece)
            return
        hedge_bytes = piece.view
        self._drop_hedge(original)
        self.counts["hedges_won"] += 1
        if original.state is State.HELD and original.run is not None:
            original.hedge_bytes, original.hedge_node = hedge_bytes, node
            original.run.halt()
        elif original.state is not State.ENDED:
            original.view[:] = hedge_bytes
            self._finish(original, node)

    def _end(self, piece: Piece) -> None:
        if piece.state is State.QUEUED:
            self.queues.remove(piece)
        piece.state, piece.run, piece.hedge_bytes = State.ENDED, None, None
        piece.view = NOTHING
        if piece.original is not None:
            return
        ticket = piece.ticket
        ticket.num_left -= 1
        self.num_pieces -= 1
        if ticket.num_left == 0:
            self._open.pop(ticket, None)
            ticket.into = NOTHING
            ticket.pieces = []
            self.ended.append(ticket)

    def _no_replica_left(self, piece: Piece, now_s: float) -> None:
        original = piece.original
        if original is not None:
            self._drop_hedge(original)
            if original.state is State.PARKED:
                self._queue(original, now_s)
        elif self._may_relocate(piece, now_s):
            self._relocate(piece)
        elif piece.check and NO_CHECKSUMS in piece.tried.values():
            self._read_unchecked(piece, now_s)
        elif not self._paused.try_add(piece, now_s):
            self.fail(piece.ticket, piece.ticket.source.gone or read_error(piece), at_once=False)

    def _read_unchecked(self, piece: Piece, now_s: float) -> None:
        """Read a piece from the DataNodes without checksums, as Hadoop's clients do: no other one can be read."""
        self.counts["unchecked"] += 1
        piece.check = False
        nodes = [node.host_port for node in piece.block.nodes]
        piece.tried = {node: "" for node in nodes if piece.tried.get(node) != NO_CHECKSUMS}
        if not piece.tried:
            piece.ticket.source.unchecked.add(piece.block.id)
        self._queue(piece, now_s)

    def _may_relocate(self, piece: Piece, now_s: float) -> bool:
        return not piece.refreshed and now_s >= piece.ticket.source.located_s + _LOCATION_FRESH_S

    def _relocate(self, piece: Piece) -> None:
        source = piece.ticket.source
        piece.refreshed = True
        if source not in self._parked:
            self._parked[source] = []
            self.to_locate.append(source)
        self._parked[source].append(piece)

    def _record_failure(self, run: Run, lost: list[Piece], error: DataNodeError, now_s: float) -> bool:
        """Record a DataNode's failure. Returns whether its circuit opens."""
        queue = run.queue
        if isinstance(error, UnevenError):
            queue.uneven = True
            return False
        queue.failures += 1
        self.counts["retries"] += 1
        concerned = [piece for piece in lost if piece.state is State.HELD] or lost[:1]
        if isinstance(error, RefusedError):
            concerned = lost
        for piece in concerned:
            piece.reasons[queue.name] = str(error)
            if isinstance(error, RefusedError) and error.token and self._may_relocate(piece, now_s):
                # No other DataNode would accept the token either.
                piece.tried.update(dict.fromkeys((node.host_port for node in piece.block.nodes), str(error)))
            elif not isinstance(error, SilentError):
                piece.tried[queue.name] = str(error)
            piece.may_recover |= isinstance(error, LostConnectionError)
            if isinstance(error, WrongBytesError):
                piece.wrong.add(queue.name)
        if isinstance(error, WrongBytesError):
            self.counts["wrong"] += 1
        if isinstance(error, (WrongBytesError, RefusedError)):
            return False
        return self.choice.note_failure(queue.name, now_s, at_once=isinstance(error, SilentError))

    def _reassign_late(self, run: Run, now_s: float) -> None:
        """Request a late run's pieces from other DataNodes: hedge what has begun, move what has not."""
        live = [piece for piece in run.live() if piece.ticket.error is None]
        is_silent = now_s - run.progress_s >= self._settings.min_late_s
        if not live and is_silent:  # no reader needs its bytes: end it to free their memory
            run.is_late = True
            run.halt()
        for piece in live:
            others = self._faster_alternatives(piece, run, now_s)
            run.is_late = run.is_late or (is_silent and bool(others))
            if others and piece.state is State.TAKEN:
                piece.state, piece.run = State.PARKED, None
                self.queues.add(piece, others)
            elif others and piece.hedge is None and piece.original is None:
                self._hedge(piece, others)

    def _faster_alternatives(self, piece: Piece, run: Run, now_s: float) -> list[Node]:
        """DataNodes that would probably deliver a piece before its run does."""
        others = self._alternatives(piece, run.queue)
        if now_s - run.progress_s >= self.choice.late_s() or not others:
            return others
        left_s, expected_s = self.queues.remaining_s(piece, now_s), self.queues.expected_s
        return [node for node in others if left_s > 2 * expected_s(node.host_port, piece.length, now_s) + _WORTH_S]

    def _hedge(self, piece: Piece, others: list[Node]) -> None:
        if self._num_hedges >= self._settings.max_hedges:
            return
        self._num_hedges += 1
        self.counts["hedges"] += 1
        view = memoryview(bytearray(piece.length))
        hedge = Piece(piece.ticket, piece.block, piece.offset, piece.length, view, piece.check, piece.location_version)
        hedge.original, hedge.tried, piece.hedge = piece, dict(piece.tried), hedge
        self.queues.add(hedge, others, first=True)

    def _drop_hedge(self, piece: Piece) -> None:
        hedge, piece.hedge = piece.hedge, None
        if hedge is not None and hedge.state is not State.ENDED:
            self._num_hedges -= 1
            self._end(hedge)

"""One chunk of a striped file: read from this node's cache, from another node, from its part, from another replica of
its part, or rebuilt from parity.

The bytes are compared with the chunk's digest before any reader gets them. Wrong ones are requested again from other
replicas. If none is right, the read ends with an error that names file, chunk, part and nodes, or the chunk is rebuilt
if its row has parity: `row` derives from `ChunkRead` for that, and reads the parity by `ParityRead`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial

from bootseer.blocks.codec import digest_of
from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.checkpoint.reading.context import LazyPart, OpenSegment, ReadContext, reworded
from bootseer.checkpoint.reading.peer_chunks import PeerRead, Unit
from bootseer.checkpoint.reading.transfer import RangeRequest, failure
from bootseer.errors import BootseerError, CorruptError, TransientError
from bootseer.io.executor import report_exception
from bootseer.io.pooled_reads import ReadOutcome
from bootseer.logs import logger
from bootseer.places.place import OpenFile, Ticket

_LOG = logger(__name__)

_POLL_S = 0.01
_MAX_WRONG = 4
"""Wrong bytes may be due to the network or one disk; so many times in a row, the part itself is damaged."""


class ChunkRead:
    """A `Job`. While its own read is in flight, no other thread writes into `into`."""

    _is_chunk = True

    def __init__(self, context: ReadContext, request: RangeRequest, stripe: int, *, shared: bool = True) -> None:
        """`shared`: wait for another process of this node that is already fetching the chunk."""
        self.lane: Hashable = stripe
        self.num_bytes = len(request.into)
        self.chunk = request.start // CHUNK_BYTES
        self.into = request.into
        self.started_s: float | None = None
        """When its own part was requested; None: not yet."""
        self.expected_s = 0.0
        """Estimated duration of that read."""
        self.problem: BootseerError = TransientError("it was not read")
        """The error of its own part."""
        self.urgent = False
        """Whether a reader waits for it."""
        self.is_cancelled = False
        """Whether it was cancelled."""
        self.unit: Unit | None = None
        """The group of chunks that are requested together from other nodes of the job; None without peers."""
        self._context = context
        self._request: RangeRequest | None = request
        """None when the read has ended: it may refer to this, and to memory."""
        self._shared = shared
        self._stopped = self._own_is_over = False
        self._opened: OpenSegment | None = None
        self._claimed = False
        self._waits_until: float | None = None
        self._wrong: list[str] = []
        self._ticket: Ticket | None = None

    @property
    def segment(self) -> OpenSegment:
        """Its segment, which is open from `start` on."""
        if self._opened is None:
            raise RuntimeError("this read was not started")
        return self._opened

    def _place(self) -> tuple[LazyPart, int]:
        """The part to read from, and the offset in it."""
        return self.segment.place_of(self.chunk)

    @property
    def where(self) -> str:
        start = self.chunk * CHUNK_BYTES
        part, _ = self._place()
        return f"{self._context.path}: bytes {start} to {start + self.num_bytes} (chunk {self.chunk}, part {part.path})"

    def start(self, *, urgent: bool) -> None:
        self.urgent = self.urgent or urgent
        self._guard(self._begin)

    def prioritize(self) -> None:
        self.urgent = True
        if (ticket := self._ticket) is not None:
            ticket.prioritize()

    def cancel(self) -> None:
        self.is_cancelled = True
        self.stop()

    def stop(self) -> None:
        """End its own read soon: it was cancelled, or rebuilt by its row."""
        self._stopped = True
        if (ticket := self._ticket) is not None:
            ticket.cancel()

    def remaining_s(self) -> float:
        """Estimated seconds until its own part arrives; 0 if unknown."""
        ticket = self._ticket
        return 0.0 if ticket is None else ticket.remaining_s()

    def read_own(self) -> None:
        self._guard(self._read_own)

    def _ready(self) -> None:
        """The chunk must be read now: its segment is open, and no other process of this node fetches it."""
        self.read_own()

    def _own_read_ended(self, error: BootseerError | None, *, keep: bool) -> None:
        """The read of its own part has ended. Called once."""
        self.finish(error, keep=keep)

    def is_right(self, data: memoryview) -> bool:
        return digest_of(data) == self.segment.digest(self.chunk)

    def finish(self, error: BootseerError | None, *, keep: bool = True) -> None:
        """End the read; later calls have no effect. Without an error, `into` holds verified bytes."""
        request, self._request = self._request, None
        if request is None:
            return
        segment = self._opened
        try:
            if segment is not None:
                self._release_segment(segment, request, keep=error is None and keep)
        except Exception:  # the cache is an optimisation: reads do not fail with it
            report_exception()
        finally:
            request.done(error)

    def _release_segment(self, segment: OpenSegment, request: RangeRequest, *, keep: bool) -> None:
        try:
            if keep:
                self._context.keep(segment, self.chunk, self.into, request.hold)
            elif self._claimed:
                segment.release_claim(self.chunk)
        finally:
            self._context.release(segment)

    def _guard(self, step: Callable[[], None]) -> None:
        """Run a step. Any exception ends the read of its own part, because readers wait for that."""
        try:
            step()
        except BaseException as error:
            problem = failure(error, f"{self._context.path}: chunk {self.chunk}")
            if self._opened is None:
                self.finish(problem)
            else:
                self._own_ended(problem)
            if not isinstance(error, Exception):
                raise

    def _begin(self) -> None:
        self._opened = self._context.acquire(self.chunk)
        self._claim()

    def _read_own(self) -> None:
        part, offset = self._place()
        self.expected_s = part.delay_s(offset, self.num_bytes)
        self.started_s = self._context.timer.now_s()
        part.when_open(self._part_opened)

    def _claim(self) -> None:
        """Wait a moment for another process of this node that is already fetching the chunk."""
        context, segment = self._context, self.segment
        self._claimed = self._shared and segment.claim(self.chunk)
        if self._shared and segment.cached is not None and not self._claimed and not self._stopped:
            if segment.is_cached(self.chunk):
                if segment.read_cached(self.chunk, 0, self.into):
                    context.facts.add("cache_bytes", self.num_bytes)
                    self._own_ended(None, keep=False)
                    return
            else:
                now = context.timer.now_s()
                if self._waits_until is None:
                    self._waits_until = now + context.settings.claim_s
                if now < self._waits_until:
                    with suppress(TransientError):  # no thread can be started: the chunk may be read twice
                        context.timer.after(_POLL_S, partial(self._guard, self._claim))
                        return
        self._ask_peers()

    def _ask_peers(self) -> None:
        unit, segment = self.unit, self.segment
        if unit is None or self._stopped:
            self._ready()
            return
        read = PeerRead(
            segment.block(self.chunk), self.into, self.is_right, lambda: self._stopped, self._peers_answered
        )
        unit.read(read, shareable=segment.cached is not None and self._context.will_keep(self.num_bytes))

    def _peers_answered(self, was_received: bool) -> None:
        self._guard(partial(self._own_ended, None) if was_received else self._ready)

    def _part_opened(self, file: OpenFile | None, error: BootseerError | None) -> None:
        if file is not None:
            self._guard(partial(self._ask, file, frozenset(), check=False))
        elif error is not None:
            self._own_ended(self._named(error))

    def _ask(self, file: OpenFile, avoid: frozenset[str], *, check: bool) -> None:
        """`check`: verify HDFS's checksums. Normally omitted: the digest checks the same at lower cost."""
        if self._stopped:
            self._own_ended(TransientError(f"{self.where}: the read was cancelled"))
            return
        _, offset = self._place()

        def arrived(outcome: ReadOutcome) -> None:
            self._guard(partial(self._arrived, file, outcome))

        try:
            ticket = file.read_into(
                offset, self.into, arrived,
                check=check, urgent=self.urgent, avoid=avoid, deadline_s=self._context.settings.deadline_s,
            )  # fmt: skip
        except BootseerError as error:
            self._own_ended(self._named(error))
            return
        self._ticket = ticket
        if self._stopped:
            ticket.cancel()

    def _arrived(self, file: OpenFile, outcome: ReadOutcome) -> None:
        facts = self._context.facts
        if outcome.error is not None:
            self._own_ended(self._wrong_error() if self._wrong else self._named(outcome.error))
            return
        facts.add("place_bytes", self.num_bytes)
        if self.unit is not None and self.started_s is not None:
            self.unit.peers.place_sent(self.num_bytes, self._context.timer.now_s() - self.started_s)
        if self.is_right(self.into):
            if self._is_chunk:
                facts.add("chunks")
            self._own_ended(None)
            return
        facts.add("wrong_chunks")
        _LOG.warning("%s came with wrong bytes from %s", self.where, outcome.node or "the disk")
        self._wrong.append(outcome.node)
        _, offset = self._place()
        bad = frozenset(self._wrong) - {""}
        others = [node for node in file.nodes(offset) if node not in bad]
        if len(self._wrong) < _MAX_WRONG and (others or len(self._wrong) == 1):
            # The same node gets a second chance with the place's own checksums: if these fail too, the place turns to
            # other replicas by itself.
            again = len(self._wrong) == 1
            self._ask(file, frozenset(others) if again else bad, check=again)
        else:
            self._own_ended(self._wrong_error())

    def _wrong_error(self) -> CorruptError:
        nodes = sorted({node for node in self._wrong if node})
        return CorruptError(f"{self.where} has wrong bytes on {', '.join(nodes) or 'the disk'}")

    def _named(self, error: BootseerError) -> BootseerError:
        return reworded(error, f"{self.where}: {error}")

    def _own_ended(self, error: BootseerError | None, *, keep: bool = True) -> None:
        if self._own_is_over:
            return
        self._own_is_over = True
        if error is not None:
            self.problem = error
        self._own_read_ended(error, keep=keep)


class ParityRead(ChunkRead):
    """The parity of a row, requested as the row's first chunk, which has its length. It has no digest: the chunk
    that is rebuilt from it verifies it."""

    _is_chunk = False

    def is_right(self, data: memoryview) -> bool:
        return True

    def _place(self) -> tuple[LazyPart, int]:
        return self.segment.parity_of(self.chunk)

    def _own_read_ended(self, error: BootseerError | None, *, keep: bool) -> None:
        self.finish(error, keep=False)

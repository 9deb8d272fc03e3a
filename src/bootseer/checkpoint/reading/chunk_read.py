"""One chunk of a striped file: from another process of this node, from another node, from its part, from its part
again, or from parity.

The bytes are compared with the chunk's digest before any reader gets them. Wrong ones are asked for again where other
nodes have them; a chunk that does not come right at all ends with an error that names file, chunk, part and nodes, or
is rebuilt where its row has parity: `row` derives from `ChunkRead` for that, and reads the parity by `ParityRead`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

from bootseer.blocks.codec import digest_of
from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.checkpoint.reading.context import LazyPart, OpenSegment, ReadContext, alike
from bootseer.checkpoint.reading.peer_chunks import PeerRead, Unit
from bootseer.checkpoint.reading.source import Done, Want, failure
from bootseer.errors import BootseerError, CorruptError, TransientError
from bootseer.hdfs.requests import ReadOutcome
from bootseer.io.executor import report_exception
from bootseer.logs import logger
from bootseer.places.place import OpenFile, Ticket

_LOG = logger(__name__)

_POLL_S = 0.01
_MAX_WRONG = 4
"""Wrong bytes may be a fault of the way or of one disk; so many times in a row they are the part's."""


class ChunkRead:
    """A `Job`. While its own read is in flight no other thread writes into `into`."""

    _is_chunk = True

    def __init__(self, context: ReadContext, want: Want, stripe: int, *, shared: bool = True) -> None:
        """`shared`: leave it to another process that fetches it already."""
        self.lane: Hashable = stripe
        self.num_bytes = len(want.into)
        self.chunk = want.start // CHUNK_BYTES
        self.into = want.into
        self.started_s: float | None = None
        """When its own part was asked for; None: it was not."""
        self.expected_s = 0.0
        """How long that would take, by estimate."""
        self.problem: BootseerError = TransientError("it was not read")
        """What its own part came to at last."""
        self.urgent = False
        """Whether a reader waits for it."""
        self.abandoned = False
        """Whether it is not wanted any more."""
        self.unit: Unit | None = None
        """Where other nodes of the job may have it: the chunks that are wanted together."""
        self._context = context
        self._want = want
        self._shared = shared
        self._stopped = self._own_is_over = self._is_over = False
        self._opened: OpenSegment | None = None
        self._claimed = False
        self._waits_until: float | None = None
        self._wrong: list[str] = []
        self._ticket: Ticket | None = None

    @property
    def segment(self) -> OpenSegment:
        """Open from `start` on."""
        if self._opened is None:
            raise RuntimeError("this read was not started")
        return self._opened

    def _place(self) -> tuple[LazyPart, int]:
        """The part that it is read from, and its offset there."""
        return self.segment.place_of(self.chunk)

    @property
    def where(self) -> str:
        """What is read, in an error's words."""
        start = self._want.start
        part, _ = self._place()
        return f"{self._context.path}: bytes {start} to {start + self.num_bytes} (chunk {self.chunk}, part {part.path})"

    def start(self, *, urgent: bool) -> None:
        self.urgent = self.urgent or urgent
        self._guard(self._begin)

    def hurry(self) -> None:
        self.urgent = True
        if (ticket := self._ticket) is not None:
            ticket.hurry()

    def cancel(self) -> None:
        self.abandoned = True
        self.stop()

    def stop(self) -> None:
        """Have its own read end soon, because its row has rebuilt it or it is not wanted any more."""
        self._stopped = True
        if (ticket := self._ticket) is not None:
            ticket.cancel()

    def left_s(self) -> float:
        """Seconds until its own part will have come, by estimate; 0 where that is not known."""
        ticket = self._ticket
        return 0.0 if ticket is None else ticket.left_s()

    def read_own(self) -> None:
        self._guard(self._read_own)

    def _ready(self) -> None:
        """The chunk is to be read now: its segment is open, and no other process fetches it."""
        self.read_own()

    def _own_read_ended(self, error: BootseerError | None, *, keep: bool) -> None:
        """Its own part has given the chunk or an error. Called once."""
        self.finish(error, keep=keep)

    def is_right(self, data: memoryview) -> bool:
        return digest_of(data) == self.segment.index.digest(self.chunk - self.segment.first_chunk)

    def finish(self, error: BootseerError | None, *, keep: bool = True) -> None:
        """The end; the second time, nothing happens. Without an error, `into` holds the verified bytes."""
        if self._is_over:
            return
        self._is_over = True
        segment = self._opened
        try:
            if segment is not None:
                self._let_go(segment, keep=error is None and keep)
        except Exception:  # the cache saves time, and nothing depends on it
            report_exception()
        finally:
            self._want.done(error)

    def _let_go(self, segment: OpenSegment, *, keep: bool) -> None:
        try:
            if keep:
                self._context.keep(segment, self.chunk, self.into, self._want.hold)
            elif self._claimed:
                self._context.release_claim(segment, self.chunk)
        finally:
            self._context.segments.release(segment)

    def _guard(self, step: Callable[[], None]) -> None:
        """Take a step; if that goes wrong, whatever it is, its own read has ended: its readers wait for that."""
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
        self._opened = self._context.segments.acquire(self.chunk)
        self._claim()

    def _read_own(self) -> None:
        part, offset = self._place()
        self.expected_s = part.delay_s(offset, self.num_bytes)
        self.started_s = self._context.timer.now_s()
        part.then(self._part_opened)

    def _claim(self) -> None:
        """Leave the chunk to another process that fetches it already, if it does so soon."""
        context, segment = self._context, self.segment
        self._claimed = self._shared and context.claim(segment, self.chunk)
        if segment.cached is not None and self._shared and not self._claimed and not self._stopped:
            if context.is_cached(segment, self.chunk):
                if context.read_cached(segment, self.chunk, 0, self.into):
                    self._own_ended(None, keep=False)
                    return
            else:
                now = context.timer.now_s()
                if self._waits_until is None:
                    self._waits_until = now + context.settings.claim_s
                    context.facts.add("claims_waited")
                if now < self._waits_until:
                    context.timer.after(_POLL_S, partial(self._guard, self._claim))
                    return
        self._ask_peers()

    def _ask_peers(self) -> None:
        unit, segment = self.unit, self.segment
        if unit is None or self._stopped:
            self._ready()
            return
        read = PeerRead(
            self.chunk - segment.first_chunk, self.into, self.is_right, lambda: self._stopped, self._peers_answered
        )
        unit.read(read, keeps=segment.cached is not None and self._context.keeps(self.num_bytes))

    def _peers_answered(self, is_here: bool) -> None:
        self._guard(partial(self._own_ended, None) if is_here else self._ready)

    def _part_opened(self, file: OpenFile | None, error: BootseerError | None) -> None:
        if file is not None:
            self._guard(partial(self._ask, file, frozenset(), check=False))
        elif error is not None:
            self._own_ended(self._named(error))

    def _ask(self, file: OpenFile, avoid: frozenset[str], *, check: bool) -> None:
        """`check`: HDFS's own checksums are left out as long as the digest does the same, at less cost."""
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
            facts.add("retries")
            # The same node gets a second chance, under the place's own checksums: when these fail, too, the place
            # turns to the others by itself, and knows that this copy is damaged.
            again = len(self._wrong) == 1
            self._ask(file, frozenset(others) if again else bad, check=again)
        else:
            self._own_ended(self._wrong_error())

    def _wrong_error(self) -> CorruptError:
        nodes = sorted({node for node in self._wrong if node})
        return CorruptError(f"{self.where} has wrong bytes on {', '.join(nodes) or 'the disk'}")

    def _named(self, error: BootseerError) -> BootseerError:
        """The place's error, in words of the file."""
        return alike(error, f"{self.where}: {error}")

    def _own_ended(self, error: BootseerError | None, *, keep: bool = True) -> None:
        if self._own_is_over:
            return
        self._own_is_over = True
        if error is not None:
            self.problem = error
        self._own_read_ended(error, keep=keep)


class ParityRead(ChunkRead):
    """The parity of a row. Only its use tells whether it is right: what is rebuilt from it has a digest."""

    _is_chunk = False

    def __init__(self, context: ReadContext, segment: OpenSegment, first_chunk: int, done: Done) -> None:
        """`first_chunk`: of the row; none is longer. `segment`: held by the row."""
        data = memoryview(bytearray(segment.index.length(first_chunk - segment.first_chunk)))
        super().__init__(context, Want(first_chunk * CHUNK_BYTES, data, done), 0, shared=False)
        self._held = segment

    def _begin(self) -> None:
        self._context.segments.hold(self._held)
        self._opened = self._held
        self._ready()

    def is_right(self, data: memoryview) -> bool:
        return True

    def _place(self) -> tuple[LazyPart, int]:
        return self.segment.parity_of(self.chunk)

    def _own_read_ended(self, error: BootseerError | None, *, keep: bool) -> None:
        self.finish(error, keep=False)
